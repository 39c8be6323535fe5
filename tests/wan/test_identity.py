"""What a function of one's own is: two of one text are told apart by all that they compute with."""

import os
import random
import threading
import types
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from experiments.caches.files import CacheError, require_same
from experiments.extraction.provenance import fingerprint, record_of
from wan.identity import UNHASHABLE, code_of, code_of_class, digest_of
from wan.interventions import Knockout, at
from wan.policies import Window

SCALE, SETTINGS = 1.0, types.ModuleType("settings_of_a_user")
LOCK = threading.Lock()


def times(scale):
    return lambda x, where: scale * x


def default(scale):
    def edit(x, where, s=scale, *, t=scale):
        return s * t * x

    return edit


def by_global(scale):
    def edit(x, where):
        return [SCALE * part for part in x]  # in a nested scope, too

    names = {"SCALE": scale}
    return types.FunctionType(edit.__code__, names)


def by_helper(scale):
    helper = types.FunctionType((lambda x: x).__code__.replace(co_consts=(None, scale)), {})
    cell = (types.CellType(helper),)
    return types.FunctionType((lambda x, where: helper(x)).__code__, {}, None, None, cell)


def by_module(scale):
    module = types.ModuleType("settings_of_a_user")
    module.scale = scale
    return types.FunctionType((lambda x, where: SETTINGS.scale * x).__code__, {"SETTINGS": module})


def by_attribute(scale):
    def edit(x, where):
        return edit.scale * x

    edit.scale = scale
    return edit


def by_module_in_a_cell(scale):
    module = types.ModuleType("settings_of_a_user")
    module.scale = scale
    return lambda x, where: module.scale * x


class Times:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x, where):
        return self.scale * x


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, where):
        return self.scale * x


def of_class(scale):
    return type("OfClass", (), {"scale": scale, "apply": lambda self, x, where: x})


# Ways in which one text means several functions
MAKERS = [times, default, by_global, by_helper, by_module, Times, Slotted, of_class]
MAKERS += [by_attribute, by_module_in_a_cell]
MAKERS += [lambda scale: partial(torch.mul, other=scale), lambda scale: Times(scale).apply]
MAKERS += [lambda scale: lru_cache(times(scale)), lambda scale: times([{"a": (scale, {scale})}])]
MAKERS += [lambda scale: times(torch.tensor([scale])), lambda scale: times(np.array([scale]))]
MAKERS += [lambda scale: times(times(scale)), lambda scale: times(random.Random(scale))]


@pytest.mark.parametrize("make", MAKERS)
@given(strategies.lists(strategies.integers(0, 99).map(lambda n: n / 8), min_size=2, max_size=2, unique=True))
def test_functions_are_told_apart_by_all_that_they_refer_to(make, scales):
    one, other = scales
    same, same_again, differs = (digest_of(make(scale)) for scale in (one, one, other))
    assert same == same_again != differs and len(same) == 16


def test_lambdas_of_a_line_and_functions_that_refer_to_themselves():
    one, other = lambda x, where: x, lambda x, where: 2 * x
    assert digest_of(one) != digest_of(other)

    def recursive(x, where):
        return x if where else recursive(x, 1)

    cycle = []
    cycle.append(cycle)
    assert digest_of(recursive) == digest_of(recursive) and digest_of(times(cycle))
    for library in (torch.add, torch.nn.functional.softmax, np.tanh, torch.float32, torch.nn.Linear, len):
        assert digest_of(times(library)) == digest_of(times(library))


NONE = [LOCK, (n for n in range(3)), torch.zeros(1).to_sparse(), lambda: LOCK]
NONE += [os.environ, lambda: os.environ["SCALE"], lambda: os.getenv("SCALE")]


@pytest.mark.parametrize("value", NONE)
def test_what_has_no_identity_makes_a_run_of_its_own_that_says_why(value):
    edit = at("z")(times(value))
    runs = [fingerprint({"edits": record_of([edit])["edits"]}) for _ in range(2)]
    assert runs[0] != runs[1] and len(runs[0]) == 32
    fixed = edit.fixed()  # while a rollout lasts it is one
    assert fixed == edit and fixed.to_dict() == fixed.to_dict() != edit.to_dict()
    assert fixed.to_dict()[UNHASHABLE] and UNHASHABLE not in repr(fixed)
    with pytest.raises(CacheError, match="has no identity, so that no run equals another"):
        require_same("a.pt", *runs, "remove it")
    with pytest.raises(CacheError) as error:
        require_same("a.pt", fingerprint({}), fingerprint({"a": 1}), "remove it")
    assert "identity" not in str(error.value)


def test_classes_of_ones_own_count_by_their_code():
    def own(base, **members):
        return type("Own", (base,), {"__module__": "__main__", **members})

    one, other = (own(Window, evict=function) for function in (times(1.0), times(2.0)))
    assert code_of_class(one) != code_of_class(other) and not code_of_class(Window)
    edits = [own(Knockout, apply=f)(frames=0, passes="all") for f in (times(1.0), times(2.0))]
    assert len({str(edit.identity_values()) for edit in edits}) == 2
    assert code_of(one) == code_of(one) and "code_sha256" not in Knockout(frames=0, passes="all").to_dict()
