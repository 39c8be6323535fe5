"""Captures and edits in diffusers' video transformers: against a softmax of the same q and k in float64.

The oracle is what PyTorch's scaled_dot_product_attention was given. Passes are compared by value.
"""

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import diffusers
import pytest
import torch
import torch.nn.attention.flex_attention as flex_attention
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.models import attention_dispatch
from helpers.checkpoints import sample, small_wan_pipeline
from helpers.video_transformers import BEFORE, MODELS, made, noise

from wan import diffusers_frames
from wan.activations import SiteCapture
from wan.capture import ATTENTION_WEIGHT_CAPTURE, CaptureRequest, MapQuery
from wan.diffusers_capture import SITES_HERE, capture_diffusers, watching
from wan.errors import ConfigError
from wan.interventions import Ablate, Bias, Jitter, Knockout, Steer, at, intervene
from wan.sites import Pass, Site, watched

ALL_KINDS = ("self", "cross", "cross_image")
pipeline = pytest.fixture(scope="module")(small_wan_pipeline)


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch):
    """On a CPU flex_attention would be traced anew for every mask."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.fixture
def seen(monkeypatch):
    """What attention was given: q, k [B, H, L, D], and the mask as what is added to logits."""
    found, original = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **more):
        mask = torch.zeros(()) if attn_mask is None else attn_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        found.append((query.double(), key.double(), mask.double()))
        return original(query, key, value, attn_mask=attn_mask, **more)

    flex = flex_attention.flex_attention

    def record_flex(query, key, value, block_mask=None, **more):
        mask = torch.zeros(())
        if block_mask is not None:  # as its function says it, pair by pair
            rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
            mask = mask.masked_fill(~block_mask.mask_mod(0, 0, rows, columns), -torch.inf)
        found.append((query.double(), key.double(), mask.double()))
        return flex(query, key, value, block_mask=block_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    monkeypatch.setattr(flex_attention, "flex_attention", record_flex)
    return found


def run(model, given) -> torch.Tensor:
    with torch.no_grad():
        return model(**given)[0]


def logits_of(q, k, mask) -> torch.Tensor:
    return q @ k.mT / q.shape[-1] ** 0.5 + mask


def close(found, expected, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


# --- Values
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_a_softmax_in_float64_and_no_bit_changes(name, seen):
    model, given = made(name)
    plain = run(model, given)
    seen.clear()
    with capture_diffusers(model, granularity="frame", kinds=ALL_KINDS) as calls:
        captured = run(model, given)
    assert torch.equal(plain, captured) and torch.equal(plain, run(model, given))
    # Text is refined by attention in layers that are not the transformer's; sound has 8 dims a head.
    F, K = len(calls[0]["query_frames"]), len(calls[0]["key_frames"])
    video, before = F * 6, BEFORE.get(name, (0, 0))
    oracle = [one for one in seen[: len(seen) // 2] if one[0].shape[2] >= video and one[0].shape[3] == 16]
    oracle = oracle[2:] if name == "wan_vace" else oracle  # its first block is of the control branch
    assert len(calls) == len(oracle) == sum(len(c.values) > 0 for c in calls)
    for call, (q, k, mask) in zip(calls, oracle, strict=True):
        first = before[0] if q.shape[2] > video else 0
        logits = logits_of(q, k, mask)[:, :, first : first + video]
        mass = logits.softmax(-1).unflatten(2, (F, 6)).mean(3)
        if call["kind"] != "self":
            value = {"cross": "cross_mass", "cross_image": "image_mass"}[call["kind"]]
            close(call.values[value], mass, 1e-6)
            close(call.values[value].sum(-1), torch.ones_like(mass[..., 0]), 1e-5)
            continue
        keys = slice(before[1], before[1] + K * 6)
        pairs = logits[..., keys].unflatten(3, (K, 6)).unflatten(2, (F, 6))  # [B, H, Fq, S, Fk, S]
        pairs = pairs.transpose(3, 4).flatten(4)
        close(call.values["frame_logits"], pairs.masked_fill(pairs.isinf(), torch.nan).nanmean(-1), 1e-5)
        close(call.values["frame_mass"], mass[..., keys].unflatten(-1, (K, 6)).sum(-1), 1e-6)
        rest = call.values.get("condition_mass", torch.zeros(*mass.shape[:3], 0))
        close(rest, torch.cat([mass[..., : keys.start], mass[..., keys.stop :]], -1), 1e-6)


def test_the_image_call_is_told_from_the_text_and_each_sums_to_one():
    model, given = made("wan_i2v")
    with capture_diffusers(model, granularity="frame", kinds=ALL_KINDS) as calls:
        run(model, given)
    told = [(c["layer"], c["kind"], c.k_shape[1]) for c in calls]
    assert told == [(n, *each) for n in (0, 1) for each in (("self", 18), ("cross_image", 5), ("cross", 512))]


@pytest.mark.parametrize("name", ["skyreels", "hunyuan15"])
def test_tokens_keys_and_maps_under_a_mask(name, seen):
    model, given = made(name)
    queries = (MapQuery(), MapQuery(1), MapQuery(2, 4))
    requests = [CaptureRequest(layers=[1], granularity=each) for each in ("token", "key")]
    requests += [CaptureRequest(layers=[1], granularity="map", heads=(2, 0), queries=queries)]
    requests += [CaptureRequest(layers=[1], granularity="token", is_logits=False)]
    with capture_diffusers(model, *requests) as (calls):
        run(model, given)
    tokens, curve, maps, probabilities = calls
    video = 6 * len(tokens["query_frames"])
    q, k, mask = [each for each in seen if each[0].shape[2] >= video and each[1].shape[2] >= video][1]
    logits = logits_of(q, k, mask)
    visible = logits.masked_fill(logits.isinf(), torch.nan)
    close(tokens.values["token_logits"], visible, 1e-5)
    close(probabilities.values["token_probabilities"], logits.softmax(-1), 1e-6)
    own = visible[:, :, :video, :video]
    close(curve.values["key_curve"], own.nanmean(2), 1e-5)
    rows = [slice(0, video), slice(6, 12), slice(16, 17)]
    expected = torch.stack([own[:, [2, 0], some].nanmean(2) for some in rows], 2)
    close(maps.values["map_logits"], expected, 2e-3)  # float16
    mass = logits.softmax(-1)[:, [2, 0], :, :video]
    close(maps.values["map_mass"], 6 * torch.stack([mass[:, :, some].mean(2) for some in rows], 2), 2e-3)


# --- In a WanPipeline
def test_the_latents_are_those_of_diffusers_own_processors_and_calls_name_where_they_are(pipeline):
    processors = [block.attn1.processor for block in pipeline.transformer.blocks]
    plain = sample(pipeline)
    with capture_diffusers(pipeline.transformer, granularity="frame") as calls:
        captured = sample(pipeline)
        sample(pipeline, guidance_scale=1.0)  # another video, without the second branch
    assert torch.equal(plain, captured) and torch.equal(plain, sample(pipeline))
    assert [block.attn1.processor for block in pipeline.transformer.blocks] == processors
    assert ATTENTION_WEIGHT_CAPTURE.current_pass is None and not ATTENTION_WEIGHT_CAPTURE.active
    sites = [Site(0, "self"), Site(1, "self")]
    guided = [(site, step, branch) for step in range(3) for branch in ("cond", "uncond") for site in sites]
    told = [(call.site, call.at.step, call.at.branch) for call in calls]
    assert told == guided + [(site, step, "cond") for step in range(3) for site in sites]
    assert calls[0].at.timestep > calls[4].at.timestep > calls[8].at.timestep
    for call in calls:
        assert call["query_frames"] == call["key_frames"] == [0, 1, 2]
        assert call.values["frame_mass"].shape == (1, 3, 3, 3)
        torch.testing.assert_close(call.values["frame_mass"].sum(-1), torch.ones(1, 3, 3))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_video_after_another_begins_with_its_own_first_call(pipeline, steps):
    def fail(*_):
        raise RuntimeError("stopped in its first step")

    with capture_diffusers(pipeline.transformer, layers=[0], granularity="frame") as calls:
        sample(pipeline, num_inference_steps=steps)
        hook = pipeline.transformer.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stopped"):
            sample(pipeline, num_inference_steps=steps)
        hook.remove()
        sample(pipeline, num_inference_steps=steps)
    guided = [(step, branch) for step in range(steps) for branch in ("cond", "uncond")]
    assert [(call.at.step, call.at.branch) for call in calls] == [*guided, (0, "cond"), *guided]


# --- Which step, branch and model: of pipelines, by value
def told(calls) -> list:
    return [(c.at.model, c.at.step, c.at.branch, c.at.timestep) for c in calls]


def small(pipeline, **more) -> WanPipeline:
    names = ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")
    made = WanPipeline(**{name: getattr(pipeline, name) for name in names} | more)
    made.set_progress_bar_config(disable=True)
    return made


def test_ti2v_tells_the_largest_of_its_timesteps_and_those_of_frames(pipeline):
    """Image-to-video gave t = 0 for every call: the given frame comes first."""
    ours = small(pipeline, expand_timesteps=True)
    with capture_diffusers(ours, layers=[0], granularity="frame") as calls:
        plain = sample(ours, num_inference_steps=2)
    assert torch.equal(plain, sample(ours, num_inference_steps=2))
    times = ours.scheduler.timesteps.tolist()
    expected = [("transformer", n, branch, t) for n, t in enumerate(times) for branch in ("cond", "uncond")]
    assert told(calls) == expected
    assert calls[0]["frame_timesteps"] == dict.fromkeys(range(3), times[0])
    model, given = made("wan_ti2v")  # as WanImageToVideoPipeline calls it
    with capture_diffusers(model, layers=[0], granularity="frame") as calls:
        run(model, given)
    (call,) = calls
    assert call.at.timestep == 700 and call["frame_timesteps"] == {0: 0.0, 1: 700.0, 2: 700.0}
    assert (call.at.step, call.at.branch, call.at.model) == (None, None, None)


def test_two_experts_are_captured_together_and_tell_which_they_are(pipeline):
    torch.manual_seed(5)
    second = type(pipeline.transformer)(**pipeline.transformer.config).eval()
    ours = small(pipeline, transformer_2=second, boundary_ratio=0.95)
    plain = sample(ours)
    with capture_diffusers(ours, layers=[1], granularity="frame") as calls:
        assert torch.equal(plain, sample(ours))
    times = ours.scheduler.timesteps.tolist()
    names = ["transformer" if t >= 950 else "transformer_2" for t in times]
    assert {*names} == {"transformer", "transformer_2"}
    expected = [(name, n, branch, t) for n, (name, t) in enumerate(zip(names, times, strict=True))
                for branch in ("cond", "uncond")]  # fmt: skip
    assert told(calls) == expected and calls[0]["model"] == names[0]


@pytest.mark.parametrize("pipe_or_model", ["pipeline", "transformer"])
def test_one_step_and_heuns_second_calls_are_cond(pipeline, pipe_or_model):
    """Both were "uncond": the timestep had been there already."""
    heun = diffusers.FlowMatchHeunDiscreteScheduler()
    ours = small(pipeline, scheduler=heun)
    x = ours if pipe_or_model == "pipeline" else ours.transformer
    more = {"guidance_scale": 1.0}
    with capture_diffusers(x, layers=[0], granularity="frame") as calls:
        sample(ours, num_inference_steps=3, **more)
    times = heun.timesteps.tolist()
    assert len(times) == 5 > len({*times})
    assert [(c.at.step, c.at.branch, c.at.timestep) for c in calls] == [
        (n, "cond", t) for n, t in enumerate(times)
    ]
    ours = small(pipeline)
    x = ours if pipe_or_model == "pipeline" else ours.transformer
    with capture_diffusers(x, layers=[0], granularity="frame") as calls:
        for _ in range(2):
            sample(ours, num_inference_steps=1, **more)
    assert [(c.at.step, c.at.branch) for c in calls] == 2 * [(0, "cond")]


def test_a_joint_batch_is_two_branches_and_steps_are_the_schedulers(seen):
    """LTX: a batch of [uncond, cond] was "cond"; the pipeline names no step."""
    model, given = made("ltx")
    steps, t = diffusers.FlowMatchEulerDiscreteScheduler(), [800.0, 500.0]
    pipe = SimpleNamespace(
        transformer=model, scheduler=steps, do_classifier_free_guidance=True, _current_timestep=None
    )

    def loop() -> None:
        steps.set_timesteps(timesteps=t)
        for pipe._current_timestep in steps.timesteps:
            with model.cache_context("cond_uncond"):
                more = {"timestep": pipe._current_timestep.expand(2)}
                out = run(model, given | more)[:1]
            steps.step(out, pipe._current_timestep, out)
        pipe._current_timestep = None

    with capture_diffusers(pipe, layers=[0], granularity="frame") as calls:
        loop()
    halves = [(n, branch) for n in (0, 1) for branch in ("uncond", "cond")]
    assert [(c.at.step, c.at.branch) for c in calls] == halves
    q, k, mask = seen[0]
    mass = logits_of(q, k, mask).softmax(-1).unflatten(2, (3, 6)).mean(3).unflatten(-1, (3, 6)).sum(-1)
    for call, item in zip(calls, (0, 1), strict=False):
        assert call.q_shape[0] == 1
        close(call.values["frame_mass"], mass[item : item + 1], 1e-6)
    # Without guidance the same name is of one branch; the transformer alone does not know.
    pipe.do_classifier_free_guidance = False
    with capture_diffusers(pipe, layers=[0], granularity="frame") as calls:
        loop()
    assert [(c.at.step, c.at.branch, c.q_shape[0]) for c in calls] == [(0, "cond", 2), (1, "cond", 2)]
    with capture_diffusers(model, layers=[0], granularity="frame") as calls:
        loop()
    assert [(c.at.step, c.at.branch) for c in calls] == 2 * [(None, None)]


def test_who_announces_a_pass_comes_first():
    model, given = made("wan")
    mine = Pass(query_frames=(4, 5, 6), step=7, branch="uncond", timestep=3.0)
    with capture_diffusers(model, layers=[0], granularity="frame") as calls:
        with ATTENTION_WEIGHT_CAPTURE.during(mine):
            run(model, given)
        run(model, given)
    assert calls[0].at == mine and calls[0]["key_frames"] == [4, 5, 6]
    assert (calls[1].at.step, calls[1].at.branch, calls[1]["key_frames"]) == (None, None, [0, 1, 2])


def test_the_hooks_leave_nothing_and_pipelines_in_two_threads_do_not_meet(pipeline):
    names = attention_dispatch.dispatch_attention_fn
    module = diffusers.models.transformers.transformer_wan
    other = small_wan_pipeline()
    other.transformer.load_state_dict(pipeline.transformer.state_dict())
    alone = {}
    for steps, pipe in ((2, pipeline), (3, other)):
        with capture_diffusers(pipe, granularity="frame") as calls:
            sample(pipe, num_inference_steps=steps)
        alone[steps] = calls

    def one(steps: int, pipe):
        with capture_diffusers(pipe, granularity="frame") as calls:
            sample(pipe, num_inference_steps=steps)
        return calls

    with ThreadPoolExecutor(2) as pool:
        together = {n: pool.submit(one, n, pipe) for n, pipe in ((2, pipeline), (3, other))}
    for steps, calls in alone.items():
        found = together[steps].result()
        assert told(found) == told(calls)
        for mine, theirs in zip(found, calls, strict=True):
            assert torch.equal(mine.values["frame_mass"], theirs.values["frame_mass"])
    for transformer in (pipeline.transformer, other.transformer):
        assert "cache_context" not in vars(transformer)
        for part in transformer.modules():
            assert not part._forward_pre_hooks and not part._forward_hooks
    assert module.dispatch_attention_fn is names
    assert ATTENTION_WEIGHT_CAPTURE.current_pass is None and not ATTENTION_WEIGHT_CAPTURE.active


# --- Edits, and activations
@pytest.mark.parametrize("name", ["wan", "hunyuan15", "skyreels", "ltx", "helios"])
def test_knocked_out_and_biased_frames_are_seen_so(name):
    model, given = made(name)
    with capture_diffusers(model, layers=[0, 1], granularity="frame") as plain:
        before = run(model, given)
    edits = (
        Knockout(frames=1, layers=[0], heads=[2], passes="denoise"),
        Bias(b=1.5, frames="first", layers=[0], heads=[0], passes="all"),
    )
    capturing = capture_diffusers(model, layers=[0], granularity="frame")
    with watching(model), intervene(*edits) as active, capturing as calls:
        after = run(model, given)
    assert active.changed == [1, 1] and not torch.equal(before, after)
    whole, edited = plain[0].values["frame_mass"], calls[0].values["frame_mass"]
    assert torch.equal(whole[:, 1], edited[:, 1])  # the head that no edit names
    weights = torch.tensor([1.0, 0, *[1.0] * (whole.shape[-1] - 2)])
    factors = {2: weights, 0: torch.tensor([1.5, *[0.0] * (whole.shape[-1] - 1)]).exp()}
    if name == "wan":  # the rest is renormalised query by query: rows of one frame of tokens are not exact
        assert (edited[:, 2, :, 1] == 0).all() and (edited[:, 0, :, 0] > whole[:, 0, :, 0]).all()
    for head in factors:
        total = edited[:, head].sum(-1)
        rest = calls[0].values.get("condition_mass")
        close(total + (0 if rest is None else rest[:, head].sum(-1)), torch.ones_like(total).double(), 1e-5)
    assert calls[0].values["frame_logits"][:, 2, :, 1].isnan().all()


def test_a_rollout_chunk_by_chunk_names_its_past():
    model, given = made("anyflow_cached")
    edit = Knockout(frames="past", layers=[0], heads=[1], passes="all")
    capturing = capture_diffusers(model, layers=[0], granularity="frame")
    with intervene(edit), capturing as (calls):
        run(model, given)
    mass = calls[0].values["frame_mass"]  # of frames 4 and 5 on frames 1 to 5
    assert (mass[:, 1, :, :3] == 0).all() and (mass[:, 1, :, 3:] > 0).all() and (mass[:, [0, 2]] > 0).all()
    whole = mass.sum(-1) + calls[0].values["condition_mass"].sum(-1)
    close(whole, torch.ones_like(whole).double(), 1e-5)


@pytest.mark.parametrize("name", ["wan", "hunyuan", "ltx"])
@pytest.mark.parametrize("frames", ["past", "own", "sink", ["first", "past"], "own:2"])
def test_a_model_that_makes_all_frames_at_once_has_no_past(name, frames):
    """In joint attention keys of text would remain, and the edit would remove the whole video in silence."""
    model, given = made(name)
    with (
        pytest.raises(ConfigError, match="all frames at once"),
        watching(model),
        intervene(Knockout(frames=frames)),
    ):
        run(model, given)


@pytest.mark.parametrize("name", ["wan", "hunyuan15", "skyreels"])
def test_an_edited_call_is_a_softmax_in_float64(name, seen):
    """z of a head without frame 1 and with a bias on frame 0."""
    model, given = made(name)
    keep = SiteCapture(("q", "k", "v", "z"), layers=[0])
    edits = [Knockout(frames=1, layers=[0], heads=[2], passes="all")]
    edits += [Bias(b=-0.75, frames=0, layers=[0], heads=[0, 2], passes="all")]
    with watching(model), intervene(*edits), watched(keep):
        run(model, given)
    kept = {one.where.site: one.value for one in keep.kept}
    F = kept["q"].shape[1] // 6
    q, k, v, z = (kept[each].double().transpose(1, 2) for each in ("q", "k", "v", "z"))
    bias = torch.zeros(3, F * 6).double()
    bias[2, 6:12] = -torch.inf
    bias[[0, 2], :6] += -0.75
    if name == "hunyuan15":  # text is seen too, and edits leave it as it is
        (whole_q, whole_k, mask), *_ = [each for each in seen if each[0].shape[2] > F * 6]
        assert torch.equal(whole_k[:, :, : F * 6], k) and whole_q.shape[2] > F * 6
        assert mask.shape[1] == 3 and torch.equal(mask[0, 1].isinf(), mask[0, 0].isinf())
        hidden = mask[0, 2].isinf() & ~mask[0, 1].isinf()
        assert hidden[: F * 6].any(0).nonzero().flatten().tolist() == list(range(6, 12))
        return
    logits = q @ k.mT / 4 + bias[:, None]
    if name == "skyreels":
        block = torch.arange(F * 6) // 12
        logits = logits.masked_fill(block[None] > block[:, None], -torch.inf)
    close(z, logits.softmax(-1) @ v, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_site_is_shown_for_the_tokens_of_frames_and_looking_changes_no_bit(name):
    model, given = made(name)
    plain, look, shapes = run(model, given), SiteCapture(SITES_HERE), {}
    with watching(model), watched(look):
        assert torch.equal(plain, run(model, given))
    for one in look.kept:
        shapes.setdefault(one.where.site, set()).add(tuple(one.value.shape[1:]))
    video = {"skyreels": 24, "anyflow": 30, "anyflow_cached": 12}.get(name, 18)
    keys = 30 if name == "anyflow_cached" else video
    assert all(shapes[each] == {(video, 3, 16)} for each in ("q", "q_rot", "z"))
    assert all(shapes[each] == {(keys, 3, 16)} for each in ("k", "k_rot", "v"))
    assert shapes["attn_out"] == shapes["mlp_out"] == shapes["resid_post"] == {(video, 48)}
    assert ("cross_out" in shapes) == ("cross_k" in shapes) == ("hunyuan" not in name)
    for site in shapes:  # and an edit of each changes the video
        with watching(model), intervene(at(site, layers=[0]), lambda x, where: 2 * x):
            assert not torch.equal(plain, run(model, given))


@pytest.mark.parametrize("name", MODELS)
def test_latents_are_shown_by_frame_and_x0_is_where_the_flow_points(name):
    model, given = made(name)
    plain, look = run(model, given), SiteCapture(("x_t", "flow", "x0"))
    with watching(model), watched(look):
        assert torch.equal(plain, run(model, given))
    x_t, flow, x0 = (item.value for item in look.kept)
    frames = {"skyreels": 4, "anyflow": 5, "anyflow_cached": 2}.get(name, 3)
    channels = flow.shape[2]
    assert x_t.shape[:2] == flow.shape[:2] == (2, frames) and channels == 4
    assert x_t[:, :, 0].numel() == flow[:, :, 0].numel() and flow.numel() <= plain.numel()
    sigma = torch.tensor(0.7)
    if name == "skyreels":
        sigma = torch.tensor([0.1, 0.4, 0.7, 0.9]).view(1, 4, 1, 1, 1)
    if name == "wan_ti2v":
        sigma = torch.tensor([0.0, 0.7, 0.7]).view(1, 3, 1, 1, 1)
    close(x0, (x_t[:, :, :channels] - sigma * flow).double(), 1e-6)
    # Twice the flow is twice the output, and a frame of it that frame.
    with watching(model), intervene(at("flow"), lambda x, where: 2 * x):
        doubled = run(model, given)
    assert torch.equal(doubled, 2 * plain) or name in ("anyflow", "ltx2")
    with watching(model), intervene(at("x_t"), lambda x, where: 0 * x):
        assert not torch.equal(run(model, given), plain)
    with watching(model), intervene(at("x0"), lambda x, where: x + 1):
        moved = run(model, given)
    assert moved.isfinite().all() and not torch.equal(moved, plain)


def test_heads_and_directions_are_edited_as_in_our_own_models():
    model, given = made("hunyuan15")
    plain = run(model, given)
    for edit in (Ablate("zero", heads=[1], passes="all"), Steer("resid_post", [0.5] * 48, passes="all")):
        with watching(model), intervene(edit) as active:
            assert not torch.equal(plain, run(model, given))
        assert active.changed == [2]


# --- What is refused
def test_what_cannot_be_captured_is_refused(pipeline, monkeypatch):
    with pytest.raises(ValueError, match=r"layer 2 is not in 0..1"), capture_diffusers(pipeline, layers=[2]):
        pass
    with pytest.raises(ConfigError, match="AutoencoderKLWan is no transformer"), watching(pipeline.vae):
        pass
    with pytest.raises(ConfigError, match="SimpleNamespace is no pipeline"), watching(SimpleNamespace()):
        pass
    attn = pipeline.transformer.blocks[1].attn2
    with monkeypatch.context() as patch:
        patch.setattr(attn, "processor", AutoencoderKLWan)
        with pytest.raises(ConfigError, match=r"layer 1: .* does not call"), watching(pipeline):
            pass
    assert not pipeline.transformer.blocks[0].attn1._forward_pre_hooks
    model, given = made("ltx")
    for edit, message in (
        (Knockout(frames=0, layers=[2], passes="all"), "layer 2 is not in 0..1"),
        (Knockout(frames=0, heads=[3], passes="all"), "head 3 is not in 0..2"),
        (Steer("mod_gate", [0.0] * 48, passes="all"), "'mod_gate' cannot be seen"),
        (Jitter(), "Jitter turns q and k by Wan's RoPE"),
    ):
        with pytest.raises(ConfigError, match=message), watching(model), intervene(edit):
            run(model, given)
    for layout in (2, (2, "6"), "ab"):
        with pytest.raises(ConfigError, match="is no layout"), watching(model, layout):
            pass
    ours, wan_given = made("wan")
    short = pytest.raises(ConfigError, match=r"layout \(2, 6\) is of 12 tokens, not of 18")
    with short, capture_diffusers(ours, layout=(2, 6), granularity="frame"):
        run(ours, wan_given)
    with watching(ours):
        with pytest.raises(ConfigError, match="watched already with another layout"), watching(ours, (9, 2)):
            pass
        with pytest.raises(ConfigError, match="copy outside of their contexts"):
            copy.deepcopy(ours)
    for chosen, message in (
        ({"frames": 9}, "frame 9 is not in 0..2"),
        ({"frames": 0, "blocks": [1]}, "block 1 is not in 0..0"),
    ):
        edit = Knockout(**chosen, layers=[0], passes="all")
        with pytest.raises(ConfigError, match=message), watching(ours), intervene(edit):
            run(ours, wan_given)

    class Own:  # a processor in names that have dispatch_attention_fn, which it does not call
        def __call__(self, attn, hidden_states, *_):
            return hidden_states

    monkeypatch.setitem(globals(), "dispatch_attention_fn", attention_dispatch.dispatch_attention_fn)
    theirs = ours.blocks[0].attn1.processor
    with capture_diffusers(ours, granularity="frame"):
        ours.blocks[0].attn1.processor = Own()
        with pytest.raises(ConfigError, match="layer 0: its processor is Own, which was set while"):
            run(ours, wan_given)
        ours.blocks[0].attn1.processor = theirs
    ours.blocks[0].attn1.processor = Own()
    refused = pytest.raises(ConfigError, match="layer 0: Own does not call")
    with refused, capture_diffusers(ours, granularity="frame"):
        run(ours, wan_given)
    given.pop("num_frames")
    refused = pytest.raises(ConfigError, match="num_frames is None for 18 tokens")
    with refused, capture_diffusers(model, granularity="frame"):
        run(model, given | {"video_coords": noise(2, 3, 18)})


def test_another_family_is_captured_where_its_frames_are_told(monkeypatch):
    model, given = made("wan")
    monkeypatch.delitem(diffusers_frames.FAMILIES, "WanTransformer3DModel")
    with capture_diffusers(model, layout=(3, 6), granularity="frame", kinds=("self", "cross")) as calls:
        run(model, given)
    assert [(c.site.layer, c.site.kind) for c in calls] == [
        (n, kind) for n in (0, 1) for kind in ("self", "cross")
    ]
    assert calls[0].values["frame_mass"].shape == (2, 3, 3, 3)
    refused = pytest.raises(ConfigError, match="not 4 frames of 6 tokens")
    with refused, capture_diffusers(model, layout=(4, 6), granularity="frame"):
        run(model, given)


# --- Words of joint attention
@pytest.mark.parametrize("name, item", [("hunyuan", 0), ("hunyuan", 1), ("hunyuan15", 0)])
def test_words_of_joint_attention_are_found_in_the_text(name, item, seen):
    """Word 0 is tokens 1 and 3 of the prompt that the transformer got, word 1 is token 2."""
    model, given = made(name)
    given = {key: x[item : item + 1] if isinstance(x, torch.Tensor) else x for key, x in given.items()}
    request = CaptureRequest(layers=[1], granularity="words", words=(((1, 3), (2,)),))
    with capture_diffusers(model, request) as calls:
        run(model, given)
    q, k, mask = [each for each in seen if each[0].shape[2] > 18][1]
    softmax = logits_of(q, k, mask).softmax(-1).mean(1)[0]
    first = 18
    if name == "hunyuan15":  # two image tokens and three of ByT5 come first
        first += 5
    (call,) = calls
    for number, tokens in enumerate(([first + 1, first + 3], [first + 2])):
        close(call.values["word_share"][0, 0, :, number], softmax[:18, tokens].sum(-1), 1e-6)
        close(call.values["text_share"][0, 0, :, number], softmax[tokens, :18].sum(0), 1e-6)


# --- On a GPU: run by tests/run.sh --gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("backend", ["native", "_native_flash", "_native_cudnn", "_native_efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_bit_changes_whatever_the_backend(backend, dtype, device):
    if device.type != "cuda" or (dtype == torch.float32 and backend not in ("native", "_native_efficient")):
        pytest.skip("needs a GPU, and half precision for flash and cuDNN")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 3, "attention_head_dim": 64, "num_layers": 2, "ffn_dim": 64}
    model = diffusers.WanTransformer3DModel(**sizes, freq_dim=16, text_dim=8, in_channels=4, out_channels=4)
    model = model.to(device, dtype).eval()
    given = {"hidden_states": noise(1, 4, 5, 16, 16), "encoder_hidden_states": noise(1, 7, 8)}
    given = {name: x.to(device, dtype) for name, x in given.items()} | {"return_dict": False}
    given["timestep"] = torch.tensor([700.0], device=device)
    model.set_attention_backend(backend)
    plain = run(model, given)
    requests = [CaptureRequest(granularity=each) for each in ("frame", "token")]
    for _ in range(2):  # the first one proves the kernel, the second takes its log-sum-exp
        with capture_diffusers(model, *requests) as calls:
            assert torch.equal(plain, run(model, given))
        frames, tokens = calls[:2]
        mass = tokens.values["token_logits"].double().softmax(-1).unflatten(2, (5, 64)).mean(3)
        mass = mass.unflatten(-1, (5, 64)).sum(-1)
        close(frames.values["frame_mass"], mass, 2e-3 if dtype == torch.bfloat16 else 1e-5)
