"""A user's function is identified by its name and its text; without a name no run counts as equal."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch

from experiments import named
from experiments.caches.files import ONLY, CacheError, require_same
from experiments.provenance import fingerprint, record_of, with_result
from wan.errors import ConfigError
from wan.identity import UNNAMED, identity_of, identity_of_class, live_weights, text_of
from wan.interventions import Knockout, at
from wan.policies import Window


def halve(x, where):
    return x / 2


def double(x, where):
    return 2 * x


class Halving:
    def apply(self, x, where):
        return x / 2

    def __call__(self, x, where):
        return x / 2


def run_of(function):
    return fingerprint({"edits": record_of([at("z")(function)])["edits"]})


@pytest.mark.parametrize(
    "function", [halve, Halving(), functools.partial(halve, where=None), Halving().apply]
)
def test_a_named_function_is_its_name_and_its_text(function):
    named_function = named("half", function)
    assert identity_of(named_function) == {"function": "half", "text_sha256": text_of(function)}
    assert run_of(named_function) == run_of(named("half", function))
    assert run_of(named_function) != run_of(named("another", function))
    assert run_of(named_function) != run_of(named("half", double))
    require_same("a.pt", run_of(named_function), run_of(named("half", function)), "remove it")
    assert torch.equal(named("half", halve)(torch.ones(1), None), torch.full((1,), 0.5))


@pytest.mark.parametrize(
    "name, function, message",
    [
        ("relu", torch.relu, "finds no source text"),
        ("nothing", 5, "is no function"),
        ("", halve, "is no name"),
        ("a\0b", halve, "NUL"),
    ],
)
def test_what_cannot_be_named_is_refused(name, function, message):
    with pytest.raises(ConfigError, match=message):
        named(name, function)


def test_a_run_of_an_unnamed_function_equals_no_other_and_says_settings_and_text():
    run = run_of(halve)
    assert run.startswith(ONLY) and len(run) == 32 and identity_of(halve)[UNNAMED]
    with pytest.raises(CacheError, match=r"named\(\.\.\.\).*remove it"):
        require_same("a.pt", run, run_of(halve), "remove it")
    # Digits 8 to 16 are of the settings and of where the function is, the next of its text
    values = [{"edits": [{"function": "f", "text_sha256": text, UNNAMED: True}]} for text in ("a", "b", None)]
    runs = [fingerprint(value, seed=1) for value in values]
    assert len({run[:16] for run in runs}) == 1 and len({run[16:24] for run in runs}) == 3
    assert runs[2][16:24] == "f" * 8 and fingerprint(values[0], seed=2)[:16] != runs[0][:16]
    # The last ones are of what came of it
    results = [with_result(runs[0], torch.full((1,), value)) for value in (1.0, 1.0, 2.0)]
    assert results[0] == results[1] != results[2] and {run[:24] for run in results} == {runs[0][:24]}
    assert with_result(fingerprint({}), torch.ones(1)) == fingerprint({})
    with pytest.raises(CacheError) as error:
        require_same("a.pt", fingerprint({}), fingerprint({"a": 1}), "remove it")
    assert "name" not in str(error.value)


def test_classes_of_a_user_count_by_name_and_text():
    class Earliest(Window):
        name = "earliest"

        def evict(self, cache, count):
            cache.drop(0, count)

    class Cut(Knockout):
        def apply(self, call, where, data=None):
            return None

    assert identity_of_class(Window) == {}
    assert identity_of_class(Earliest) == {"class": "earliest", "text_sha256": text_of(Earliest)}
    assert identity_of_class(Cut)[UNNAMED]  # it has no name
    assert UNNAMED in Cut(frames=0, passes="all").identity_values()
    assert "text_sha256" not in Knockout(frames=0, passes="all").identity_values()


def test_a_class_of_a_notebook_is_known_by_its_methods(monkeypatch):
    text = text_of(Halving)

    getsource = inspect.getsource

    def source(value):
        if isinstance(value, type):
            raise TypeError("is a built-in class")  # what Python says of a class in a cell
        return getsource(value)

    monkeypatch.setattr("inspect.getsource", source)
    assert text_of(Halving) not in (None, text)
    assert text_of(type("Empty", (), {})) is None


@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_weights_that_accelerate_offloaded_are_those_that_they_were(is_one_of_several):
    model = torch.nn.Linear(3, 2)
    before, weights = live_weights({None: model}), dict(model.state_dict())
    hook = SimpleNamespace(weights_map=weights)
    if is_one_of_several:  # of a module with parameters of its own and others in it
        hook = SimpleNamespace(hooks=[SimpleNamespace(weights_map=None), hook])
    model.to("meta")._hf_hook = hook
    assert live_weights({None: model}) == before
    weights["bias"] = weights["bias"] + 1
    assert live_weights({None: model}).sampled != before.sampled


class Packed(torch.Tensor):
    """Numbers of a library that keeps integers: what it says of its dtype is that of the numbers."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16)

    def __init__(self, codes):
        self.codes, self.scale = codes, torch.ones(1)

    def __tensor_flatten__(self):
        return ["scale", "codes"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function == torch.ops.aten.detach.default
        return cls(args[0].codes)


def test_quantised_numbers_of_other_libraries_are_named_by_their_integers():
    model = torch.nn.Linear(3, 2, bias=False)
    assert live_weights({None: model}).quantised is None
    model.weight = torch.nn.Parameter(Packed(torch.ones(2, 3, dtype=torch.int8)))
    assert live_weights({None: model}).quantised == "int8 (Packed)"
    model.weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float8_e4m3fn), requires_grad=False)
    assert live_weights({None: model}).quantised == "float8_e4m3fn"
