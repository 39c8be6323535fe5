"""Gradients at sites against central differences in float64, and rollouts that stay as they are."""

from functools import cache

import pytest
import torch
from helpers.refusals import refused
from helpers.rollouts import TWO_STEPS, drawn, rollout, tiny_pipeline

from wan.activations import SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest
from wan.errors import ConfigError
from wan.gradients import Gradients
from wan.interventions import Knockout, Patch, RunInStep, Source, at, intervene
from wan.pipeline import CausalInferencePipeline
from wan.policies import make_policy
from wan.sites import OF_FORWARD, SITES, watched

BLOCK, LAYER, FRAMES, STEP = 1, 2, 9, 1e-4
RELATIVE = 1e-4
MATRICES = ("scores", "pattern", "cross_scores", "cross_pattern")


@cache
def pipeline(dtype=torch.float64, policy: str | None = None) -> CausalInferencePipeline:
    how = {} if policy is None else {"cache_policy": make_policy(policy, window=6)}
    made = CausalInferencePipeline(tiny_pipeline(dtype).model, **TWO_STEPS, **how)
    torch.nn.init.normal_(made.model.head.head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return made


def metric(x0):
    weights = drawn(1, FRAMES, 16, 2, 10).to(x0)[:, -x0.shape[1] :]
    return (x0 * weights).sum() + 0.3 * (x0**3).mean()


def where(site, step) -> dict:
    layers = {} if site in OF_FORWARD else {"layers": [LAYER]}
    return {"blocks": [BLOCK], "steps": [step], **layers}


def recorded(site, step, through="pass", run=rollout, policy=None, **more) -> tuple[Gradients, torch.Tensor]:
    """Gradients of the metric, and the latents of the rollout."""
    recorder = Gradients((site,), through=through, **where(site, step), **more)
    with watched(recorder):
        latents = run(pipeline(policy=policy), FRAMES)
    if recorder.metric is None:
        recorder.backward(metric)
    return recorder, latents


def differences(site, step, gradient, through, policy=None, edits=()) -> tuple[float, float]:
    """Change of the metric between two shifted activations, and the one that the gradient predicts."""
    direction, values, shifted = drawn(*gradient.shape).double(), [], []
    for sign in (1, -1):
        x0s = []

        def shift(x, at_site, sign=sign):
            new = (x.double() + sign * STEP * direction).to(x.dtype)
            shifted.append(new.double())
            return new

        def see(x, at_site, x0s=x0s):
            x0s.append(x)

        own = at(site, passes="denoise", **where(site, step))
        seen = intervene(at("x0", blocks=[BLOCK], steps=[1]), see)
        with intervene(own, shift), seen, intervene(*edits) if edits else watched():
            latents = rollout(pipeline(policy=policy), FRAMES)
        values.append(metric(latents if through == "rollout" else x0s[0]).item())
    moved = (gradient.double() * (shifted[0] - shifted[1])).sum().item()
    return values[0] - values[1], moved


CASES = [("pass", 1, site) for site in SITES]
CASES += [(through, 0, site) for through in ("block", "rollout") for site in ("q", "k", "z", "pattern", "x0")]


@pytest.mark.filterwarnings("ignore:no call was edited")  # a function that only reads
@pytest.mark.parametrize(("through", "step", "site"), CASES)
def test_gradients_are_those_of_central_differences(through, step, site):
    recorder, latents = recorded(site, step, through)
    [found] = recorder.found
    changed, predicted = differences(site, step, found.value, through)
    assert (found.where.site, found.where.block, found.where.step) == (site, BLOCK, step)
    assert found.value.shape[0] == 1 and changed != 0
    assert predicted == pytest.approx(changed, rel=RELATIVE)
    assert torch.equal(latents, plain())


@cache
def plain(policy=None) -> torch.Tensor:
    return rollout(pipeline(policy=policy), FRAMES)


@pytest.mark.filterwarnings("ignore:no call was edited")
def test_gradients_go_through_edits_and_windows():
    """A knockout between kept keys joins two groups of keys by their LSE, which has no gradient."""
    edit = Knockout(frames=1, passes="denoise")
    with intervene(edit):
        recorder, _ = recorded("q_rot", 0, "block", policy="window")
    changed, predicted = differences("q_rot", 0, recorder.found[0].value, "block", "window", [edit])
    assert predicted == pytest.approx(changed, rel=RELATIVE)


@pytest.mark.parametrize("through", ["pass", "block", "rollout"])
def test_recomputed_layers_give_the_same_gradients(through):
    sites = ("resid_post", "z", "k", "mlp_pre")
    found = []
    for recompute in (False, True):
        recorder = Gradients(sites, blocks=[BLOCK], through=through)
        with watched(recorder), intervene(at("mlp_out", layers=[1]), lambda x, where: 1.5 * x):
            if recompute:
                with recorder.recomputed(pipeline().model):
                    rollout(pipeline(), FRAMES)
                    recorder.backward(metric)
            else:
                rollout(pipeline(), FRAMES)
                recorder.backward(metric)
        found.append(recorder.found)
    plain_ones, again = found
    assert [one.where for one in plain_ones] == [one.where for one in again] and len(again) >= 16
    for one, other in zip(plain_ones, again, strict=True):
        torch.testing.assert_close(one.value, other.value, rtol=1e-9, atol=1e-15)
    assert "feed" not in vars(pipeline().model.blocks[0])


def test_a_metric_given_before_frees_each_graph_and_gives_the_same():
    before, _ = recorded("z", 1, metric=metric)
    after, _ = recorded("z", 1)
    assert torch.equal(before.found[0].value, after.found[0].value)
    assert before.values == after.values and not before.graphs


def test_a_metric_may_be_of_activations():
    recorder = Gradients(("resid_post", "z"), layers=[1, 2], blocks=[BLOCK], steps=[0])
    with watched(recorder):
        rollout(pipeline(), FRAMES)
    recorder.backward(lambda x0, seen: seen["z"][1].square().sum(), retain_graph=True)
    by_place = {(one.where.site, one.where.layer): one.value for one in recorder.found}
    assert by_place["resid_post", 1].any() and not by_place["resid_post", 2].any()  # behind that z
    recorder.backward(lambda x0: x0.sum())
    assert {one.where.layer for one in recorder.found} == {1, 2}


def test_captures_beside_gradients_see_the_same():
    def captured():
        sites = SiteCapture(("z",), layers=[LAYER])
        request = CaptureRequest(layers=[LAYER], granularity="frame")
        with ATTENTION_WEIGHT_CAPTURE.capture(request) as calls, watched(sites):
            rollout(pipeline(torch.float32), FRAMES)
        return [*(one.value for one in sites.kept), *(call.values["frame_logits"] for call in calls)]

    expected = captured()
    with watched(Gradients(("k",), blocks=[BLOCK], steps=[1])):
        found = captured()
    assert all(map(torch.equal, found, expected)) and not any(x.requires_grad for x in found)


def test_autograd_works_on_the_model_with_a_cache_of_ones_own():
    """Two passes over a block: the second writes where the first one's graph has its keys."""
    model = pipeline().model
    text = model.text_keys_values(drawn(1, 4, 24).double())
    kv_cache = model.new_kv_cache(1, 6, 2, 10, make_policy("full"))
    kv_cache.advance(range(3))
    leaves = [drawn(1, 3, 16, 2, 10).double().requires_grad_() for _ in range(2)]
    flows = [model(x, torch.tensor(500.0), text, kv_cache) for x in leaves]
    sum(flow.square().sum() for flow in flows).backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in leaves)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"through": "video"}, "through is 'video'; known ones: block, pass", id="through"),
        pytest.param({"steps": [2]}, "step 2 is the clean pass, which has no x0", id="clean pass"),
        pytest.param({"layers": [4]}, r"layer 4 is not in 0\.\.3", id="layer"),
        pytest.param({"to": "nowhere"}, "to 'nowhere' is not cpu, cuda", id="device"),
    ],
)
def test_gradients_are_of_what_the_rollout_has(settings, message):
    with refused(message), watched(Gradients(("z",), **settings)):
        rollout(pipeline(), FRAMES)
    assert torch.is_grad_enabled()


def is_no_number(x0):
    return x0


def is_detached(x0):
    return x0.detach().sum()


def is_nan(x0):
    return x0.sum() * torch.nan


def is_complex(x0):
    return (1j * x0).sum()


def takes_nothing():
    return 0


def takes_three(x0, activations, run):
    return 0


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (is_no_number, "must return one number that depends on x0"),
        (is_detached, "depends on no x0"),
        (is_nan, "it returned nan"),
        (is_complex, "it returned a tensor of torch.complex128 and shape"),
        (takes_nothing, "is no function of x0"),
        (takes_three, "is no function of x0"),
        (3, "metric 3 is no function"),
    ],
)
def test_a_metric_is_one_finite_number_that_depends_on_x0(metric, message):
    with refused(message), watched(Gradients(("z",), metric=metric)):
        rollout(pipeline(), FRAMES)
    assert torch.is_grad_enabled()


def test_one_recorder_at_a_time_and_no_metric_changes_the_video():
    with watched(Gradients(("z",)), Gradients(("k",))), pytest.raises(ConfigError, match="recorded already"):
        rollout(pipeline(), FRAMES)
    with watched(Gradients(("z",), blocks=[BLOCK], metric=lambda x0: x0.mul_(2).sum())):
        assert torch.equal(rollout(pipeline(), FRAMES), plain())


def test_a_function_that_gives_something_else_when_it_is_called_again_is_refused():
    recorder, calls = Gradients(("k",), metric=torch.sum, **where("k", 1)), []
    counted = at("mlp_pre", **where("k", 1))(lambda x: x * (1 + (calls.append(0) or len(calls))))
    refused = pytest.raises(ConfigError, match="calls functions of one's own twice")
    with watched(recorder), intervene(counted), recorder.recomputed(pipeline().model), refused:
        rollout(pipeline(), FRAMES)


def test_backward_without_a_graph_is_refused():
    recorder, _ = recorded("z", 1)
    with pytest.raises(ConfigError, match="retain_graph=True"):
        recorder.backward(metric)


def test_a_run_in_step_cannot_be_repeated():
    source = Patch("z", Source(seed=2), passes="denoise")
    recorder = Gradients(("resid_post",), blocks=[BLOCK])
    data = {source: RunInStep(lambda: rollout(pipeline(), FRAMES, seed=2))}
    edited = intervene(source, data=data)
    refused = pytest.raises(ConfigError, match="cannot repeat an edit")
    with data[source], watched(recorder), edited, recorder.recomputed(pipeline().model), refused:
        rollout(pipeline(), FRAMES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_in_half_precision_are_finite(recompute):
    """At every site, and close to those of float32 where rounding is small."""
    made = CausalInferencePipeline(tiny_pipeline(torch.bfloat16, "cuda").model, **TWO_STEPS)
    torch.nn.init.normal_(made.model.head.head.weight, std=0.1)
    recorder = Gradients(tuple(SITES), blocks=[BLOCK], metric=lambda x0: x0.float().square().mean())
    with watched(recorder):
        if recompute:
            with recorder.recomputed(made.model):
                rollout(made, FRAMES)
        else:
            rollout(made, FRAMES)
    assert {one.where.site for one in recorder.found} == {*SITES}
    assert all(one.value.isfinite().all() and one.value.any() for one in recorder.found)
