"""Every activation has a name: each seen and changed against the model written out by hand."""

import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from helpers.refusals import refused
from helpers.rollouts import TINY, TWO_STEPS, rollout, tiny_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from wan import interventions
from wan.activations import SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.interventions import Ablate, Patch, RunInStep, Source, Steer, at, intervene
from wan.keys import rotate
from wan.model import sinusoidal_embedding
from wan.pipeline import CausalInferencePipeline, flow_to_x0
from wan.policies import make_policy
from wan.sites import OF_FORWARD, SITES, active_edits, observed, observer, watched, watchers

LAYER, BLOCK, STEP = 2, 1, 1
ONE = {"layers": [LAYER], "blocks": [BLOCK], "steps": [STEP]}


def captured(*sites, run=rollout, pipeline=None, **chosen) -> dict[str, list]:
    """What a rollout had at some sites, by site, and where."""
    capture = SiteCapture(sites or tuple(SITES), **chosen)
    with watched(capture):
        run(pipeline or two_steps())
    found = {site: [one.value for one in capture.kept if one.where.site == site] for site in capture.sites}
    return found | {"where": [one.where for one in capture.kept]}


def two_steps(*args, **kwargs) -> CausalInferencePipeline:
    return CausalInferencePipeline(tiny_pipeline(*args, **kwargs).model, **TWO_STEPS)


@cache
def unedited() -> dict[str, list]:
    return captured(blocks=[BLOCK], steps=[STEP])


def here(site) -> dict:
    """Where an edit of one site stands: in one layer, of what has layers."""
    one = {name: value for name, value in ONE.items() if name != "layers" or site not in OF_FORWARD}
    return {"passes": "denoise", **one}


# --- What is seen
def test_every_site_follows_from_those_before_it():
    pipeline = two_steps()
    plain, model = rollout(pipeline), pipeline.model
    seen = {name: values[0] for name, values in captured(pipeline=pipeline, **ONE).items() if name != "where"}
    assert torch.equal(rollout(pipeline), plain) and seen.keys() == SITES.keys()
    sizes = TINY | dict(zip("BLKTHDFChw2", (1, 15, 30, 7, 3, 16, 3, 16, 2, 10, 2), strict=True))
    for name, x in seen.items():
        frames = {"F": 1} if name.startswith("mod_") else {}
        assert list(x.shape) == [(sizes | frames)[axis] for axis in SITES[name].split()], name
    layer, close = model.blocks[LAYER], torch.testing.assert_close
    t = torch.tensor([[pipeline.timesteps[STEP]]])
    time = model.time_embedding(sinusoidal_embedding(t, TINY["freq_dim"]).float())
    table = layer.modulation + model.time_projection(time).view(1, 1, 6, -1)
    rows = table.unflatten(2, (2, 3))
    for n, name in enumerate(("shift", "scale", "gate")):
        close(seen[f"mod_{name}"], rows[:, :, :, n], atol=1e-6, rtol=0)

    def modulated(x, part):
        shift, scale = seen["mod_shift"][:, :, part], seen["mod_scale"][:, :, part]
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift

    attn, normed = layer.self_attn, modulated(seen["resid_pre"], 0)
    heads = {name: getattr(attn, f"norm_{name}")(getattr(attn, name)(normed)) for name in "qk"}
    rope = model.rotary([3, 4, 5], 1, 5, x.device)
    expected = heads | {f"{name}_rot": rotate(y, *rope) for name, y in heads.items()}
    expected["v"] = attn.v(normed).unflatten(-1, (3, -1))
    expected["attn_out"] = attn.o(seen["z"].flatten(2))
    expected["resid_mid"] = seen["resid_pre"] + seen["mod_gate"][:, :, 0] * seen["attn_out"]
    cross = layer.cross_attn
    expected["cross_q"] = cross.norm_q(cross.q(layer.norm3(seen["resid_mid"])))
    expected["cross_scores"] = torch.einsum("bqhd,bkhd->bhqk", seen["cross_q"], seen["cross_k"]) / 4
    expected["cross_z"] = torch.einsum("bhqk,bkhd->bqhd", seen["cross_pattern"], seen["cross_v"])
    expected |= {f"{kind}pattern": seen[f"{kind}scores"].softmax(-1) for kind in ("", "cross_")}
    own = torch.einsum("bqhd,bkhd->bhqk", seen["q_rot"], seen["k_rot"]) / 4
    close(seen["scores"][..., -15:], own, atol=1e-5, rtol=0)
    expected["cross_out"] = cross.o(seen["cross_z"].flatten(2))
    expected["resid_cross"] = seen["resid_mid"] + seen["cross_out"]
    expected["mlp_pre"] = layer.ffn[0](modulated(seen["resid_cross"], 1))
    expected["mlp_post"] = F.gelu(seen["mlp_pre"], approximate="tanh")
    expected["mlp_out"] = layer.ffn[2](seen["mlp_post"])
    expected["resid_post"] = seen["resid_cross"] + seen["mod_gate"][:, :, 1] * seen["mlp_out"]
    expected["x0"] = flow_to_x0(seen["flow"], seen["x_t"], pipeline.sigmas[STEP])
    for name, value in expected.items():
        close(seen[name], value, atol=2e-5, rtol=0)


def test_frames_heads_dtype_and_reductions_are_chosen():
    def mean(x, where):
        x += 1
        return x.mean(1) + where.block

    chosen = {"layers": [1], "steps": [0, 2]}
    whole = captured("q", "resid_post", "mod_gate", **chosen)
    some = captured("q", "resid_post", "mod_gate", **chosen, frames=[4, 9], heads=[2, 0], dtype=torch.float64)
    assert [len(values) for values in some.values()] == [2, 2, 2, 6]
    assert torch.equal(some["q"][1], whole["q"][3][:, 5:10, [2, 0]].double())
    assert torch.equal(some["resid_post"][0], whole["resid_post"][2][:, 5:10].double())
    assert torch.equal(some["mod_gate"][1], whole["mod_gate"][3].double())  # of all frames at once
    reduced = captured("resid_post", **chosen, reduce=mean)["resid_post"]
    expected = [(x + 1).mean(1) + n // 2 for n, x in enumerate(whole["resid_post"])]
    assert all(map(torch.equal, reduced, expected))
    where = some["where"][-1]
    assert where.frames == (3, 4, 5)
    assert where.is_clean_pass and str(where) == "resid_post: layer 1, block 1, step 2"


def test_blocks_are_handed_on_as_they_end():
    handed = []

    def hand(kept):
        handed.append([one.where.block for one in kept])

    capture = SiteCapture(("z",), layers=[0], on_block=hand)
    with watched(capture):
        rollout(two_steps(), 9)
    assert handed == [[0] * 3, [1] * 3]
    capture.flush()
    assert handed[2] == [2] * 3 and not capture.kept


# --- What is changed
def test_an_edit_that_returns_its_input_leaves_every_bit(device):
    pipeline = two_steps(torch.bfloat16, device)
    plain, seen = rollout(pipeline, 3), []
    with intervene(at(*SITES), lambda x, where: seen.append(where.site) or x) as active:
        assert torch.equal(rollout(pipeline, 3), plain)
    assert set(seen) == {*SITES} and active.changed == [len(seen)]
    with (
        pytest.warns(UserWarning, match="spoil changed its copy of .* returned None"),
        intervene(at(*SITES), spoil),
    ):
        assert torch.equal(rollout(pipeline, 3), plain)  # x is a copy


def spoil(x, where):
    x.add_(1)


@pytest.mark.parametrize("site", SITES)
def test_an_edit_reaches_what_follows_and_nothing_before(site):
    base = unedited()
    with intervene(at(site, **here(site)), lambda x, where: 1.5 * x + 0.1):
        found = captured(blocks=[BLOCK], steps=[STEP])
    if site not in OF_FORWARD:
        for name in set(SITES) - set(OF_FORWARD):
            assert all(map(torch.equal, found[name][:LAYER], base[name][:LAYER]))
        assert torch.equal(found["resid_pre"][LAYER], base["resid_pre"][LAYER]) == (site != "resid_pre")
        assert not torch.equal(found["resid_post"][LAYER], base["resid_post"][LAYER])
    assert not torch.equal(found["x0"][0], base["x0"][0])


def test_keys_that_are_edited_are_those_that_later_blocks_see():
    """Also where a policy keeps keys without RoPE."""
    policy = make_policy("relative", window=6)
    pipeline = CausalInferencePipeline(tiny_pipeline().model, cache_policy=policy, **TWO_STEPS)
    with intervene(at("k", layers=[1], passes="clean"), lambda x, where: torch.zeros_like(x)):
        scores = captured("scores", pipeline=pipeline, layers=[1], steps=[0])["scores"]
    assert (scores[1][..., :15] == 0).all() and (scores[1][..., 15:] != 0).all()


def test_scores_and_pattern_are_those_that_values_are_summed_by():
    pipeline, sharp, even = two_steps(), at("scores", **here("scores")), at("cross_pattern", **here("z"))
    with intervene(sharp, lambda x, where: 2 * x, even, lambda x, where: torch.full_like(x, 1 / x.shape[-1])):
        seen = captured(pipeline=pipeline, **ONE)
    base = captured(pipeline=pipeline, **ONE)
    pattern = (2 * base["scores"][0]).softmax(-1)
    with ATTENTION_WEIGHT_CAPTURE.capture(**ONE, is_logits=False) as calls:
        rollout(pipeline)
    torch.testing.assert_close(base["pattern"][0], calls[0]["token_probabilities"], atol=1e-6, rtol=0)
    torch.testing.assert_close(seen["pattern"][0], pattern, atol=1e-6, rtol=0)
    mean = seen["cross_v"][0].mean(1, keepdim=True).expand_as(seen["cross_z"][0])
    torch.testing.assert_close(seen["cross_z"][0], mean, atol=1e-5, rtol=0)


def test_a_function_at_z_is_ablation_and_a_class_or_decorator_is_a_function():
    pipeline, found, where = two_steps(), [], {"layers": [1], "passes": "denoise"}

    @at("z", **where)
    def drop_head_2(z, where):
        z[:, :, 2] = 0
        return z

    class Drop:
        def apply(self, z, where):
            return torch.where(torch.arange(3)[:, None] == 2, 0, z)

    for edit in (Ablate("zero", heads=[2], **where), drop_head_2, at("z", **where)(Drop())):
        with intervene(edit) as active:
            found.append(rollout(pipeline))
        assert active.changed == [4]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    said = drop_head_2.to_dict()
    assert said["function"].endswith("<locals>.drop_head_2") and len(said["text_sha256"]) == 16
    assert "drop_head_2" in repr(drop_head_2)


@pytest.mark.parametrize("site", ["resid_mid", "v", "z", "cross_z"])
def test_ablation_and_steering_of_every_site_with_tokens(site):
    pipeline, where = two_steps(), here(site)
    base = captured(pipeline=pipeline, **ONE)[site][0]
    edits = {"zero": Ablate("zero", site=site, **where)}
    with interventions.record_head_outputs(site) as outputs:
        rollout(pipeline)
    edits["frame_mean"], edits["mean"] = (Ablate(how, site=site, **where) for how in ("frame_mean", "mean"))
    edits["steer"] = Steer(site, torch.ones(base.shape[-1]), 0.5, **where)
    data = {edits["frame_mean"]: outputs, edits["mean"]: interventions.ReferenceMeans.over([outputs])}
    frames = base.unflatten(1, (3, 5)).mean(2).repeat_interleave(5, 1)
    expected = {"zero": 0 * base, "frame_mean": frames, "steer": base + 0.5}
    for how, edit in edits.items():
        with intervene(edit, data=data) as active:
            found = captured(site, pipeline=pipeline, **ONE)[site][0]
        assert active.changed == [1]
        if how == "mean":
            assert not torch.equal(found, base) and torch.equal(found[:, 0], found[:, 4])
        else:
            torch.testing.assert_close(found, expected[how], atol=1e-6, rtol=0)


@pytest.mark.parametrize("site", ["resid_post", "x0", "mod_gate", "pattern"])
def test_a_site_is_patched_from_another_run(site):
    mine, theirs = two_steps(), two_steps(seed=5)
    edit = Patch(site, Source(seed=2), **here(site))
    with RunInStep(lambda: rollout(theirs, seed=2)) as other, intervene(edit, data={edit: other}):
        found = captured(site, pipeline=mine, **ONE)[site]
    expected = captured(site, pipeline=theirs, run=lambda run: rollout(run, seed=2), **ONE)[site]
    assert torch.equal(found[0], expected[0])


# --- Refusals
def wrong_shape(x, where):
    return x[:, :1]


def wrong_dtype(x, where):
    return x.double()


def not_a_number(x, where):
    return x / 0 * 0


def no_tensor(x, where):
    return 3


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wrong_shape, r"wrong_shape at v: layer 2, block 1, step 1: it returned \[1, 1, 3, 16\].*, not"),
        (wrong_dtype, "returned .*torch.float64 .*, not .*float32"),
        (not_a_number, "it returned NaN"),
        (no_tensor, "it returned 3, not a tensor"),
    ],
)
def test_an_edit_returns_a_tensor_like_the_one_it_got(function, message):
    edit = at("v", **here("v"))(function)
    with refused(message), intervene(edit):
        rollout(two_steps())


def test_a_site_is_known_and_has_what_is_asked_of_it():
    with refused("'residpost' is no site; did you mean resid_post"):
        at("residpost")
    with refused("resid_post has no heads"):
        Ablate("zero", site="resid_post", heads=[1], passes="all")
    with refused("x0 has no tokens"):
        Ablate("mean", site="x0", passes="all")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(at("z", layers=[9])(wrong_shape), "layer 9 is not in 0..3", id="layer"),
        pytest.param(at("z"), "or at.* and a function", id="no function"),
        pytest.param(
            Steer("v", [1.0, 2, 3], passes="all"), "the direction has 3 numbers, not 16", id="direction"
        ),
    ],
)
def test_an_edit_fits_the_model(edit, message):
    with refused(message), intervene(edit):
        rollout(two_steps())


def test_tokens_that_several_gpus_share_are_not_edited():
    sizes = replace(two_steps().sizes(6), splits_tokens=True)
    with refused("several GPUs share the tokens of resid_post"):
        at("resid_post")(wrong_shape).check(sizes)


def test_a_watched_call_has_a_pass():
    model = tiny_pipeline().model
    with refused("need the pass of each call"), watched(SiteCapture(("z", "mlp_pre"))):
        model.blocks[0].ffn(torch.zeros(1, 2, 48))


# --- Contexts
@given(st.lists(st.tuples(st.sampled_from(["enter", "leave"]), st.integers(0, 3)), max_size=20))
@settings(max_examples=150, deadline=None)
def test_contexts_close_in_any_order_without_loss(actions):
    """Those that are open, in the order in which they came, watch and edit; the last observer observes."""
    edits = [at("z", layers=[n])(lambda z: z) for n in range(4)]
    open_now: list[tuple[int, object]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no call was edited
        try:
            for action, number in actions:
                if action == "enter":
                    stack = ExitStack()
                    stack.enter_context(intervene(edits[number]))
                    stack.enter_context(observed(number))
                    open_now.append((number, stack))
                elif number < len(open_now):
                    open_now.pop(number)[1].close()
                assert active_edits() == [edits[n] for n, _ in open_now]
                assert observer() == (open_now[-1][0] if open_now else None)
        finally:
            for _, stack in reversed(open_now):
                stack.close()
    assert not watchers() and observer() is None


def test_a_context_may_be_used_again_and_while_it_is_open():
    pipeline, context = two_steps(), intervene(at("z", layers=[0]), lambda z: 2 * z)
    plain = rollout(pipeline, 3)
    with context:
        once = rollout(pipeline, 3)
    with context as first, context as second:
        rollout(pipeline, 3)
    assert first is not second and first.changed == second.changed == [3]
    with context:
        assert torch.equal(rollout(pipeline, 3), once) and not torch.equal(once, plain)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0]) as calls:
        assert torch.equal(rollout(pipeline, 3), plain) and len(calls) == 3


def test_a_generator_edits_its_own_runs_alone():
    pipeline = two_steps()
    plain = rollout(pipeline, 3)

    def runs():
        with intervene(at("z"), lambda z: 2 * z):
            yield rollout(pipeline, 3)
            yield rollout(pipeline, 3)

    @contextmanager
    def doubled():  # contextlib drives it: it is a context, of who enters it
        with intervene(at("z"), lambda z: 2 * z):
            yield

    made = runs()
    first = next(made)
    with pytest.raises(ConfigError, match=r"generator .*runs is suspended inside intervene.*close\(\) it"):
        rollout(pipeline, 3)
    assert torch.equal(next(made), first)
    made.close()
    assert torch.equal(rollout(pipeline, 3), plain)
    with doubled():
        assert torch.equal(rollout(pipeline, 3), first)
    with ExitStack() as stack:
        stack.enter_context(doubled())
        assert torch.equal(rollout(pipeline, 3), first)
    assert torch.equal(rollout(pipeline, 3), plain)
