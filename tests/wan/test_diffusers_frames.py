"""Where frames lie in diffusers' attention: verified, told or refused, against a softmax in float64."""

import weakref

import diffusers
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers import transformer_wan
from helpers import video_pipelines
from helpers.video_transformers import HEADS, MODELS, F, H, W, made, noise

from wan import diffusers_frames
from wan.capture import CaptureRequest
from wan.diffusers_capture import capture_diffusers, watching
from wan.diffusers_frames import compare_norms, norms_of, of_coordinates
from wan.errors import ConfigError
from wan.interventions import Knockout, intervene
from wan.keys import RotaryTable
from wan.reductions import frame_logits_by_band

S = 6  # tokens a frame in tiny models


def run(model, given) -> torch.Tensor:
    with torch.no_grad():
        return model(**given)[0]


@pytest.fixture
def seen(monkeypatch):
    """The q, k [B, H, L, D] in float64 and masks of calls over a video with heads of 16 dims."""
    calls, original = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **more):
        if query.shape[2] >= F * S and query.shape[2] == key.shape[2] and query.shape[3] == 16:
            mask = torch.zeros(())
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                mask = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
            calls.append((query.double(), key.double(), mask.double()))
        return original(query, key, value, attn_mask=attn_mask, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return calls


def require_softmax(call, seen, first: int, tokens: int) -> None:
    """Compare a call with the softmax of the q and k that attention was given: frames begin at a token."""
    q, k, mask = seen
    frames = len(call["query_frames"])
    video = slice(first, first + frames * tokens)
    logits = (q @ k.mT / 4 + mask)[:, :, video]
    mass = logits.softmax(-1).unflatten(2, (frames, tokens)).mean(3)
    expected = mass[..., video].unflatten(-1, (frames, tokens)).sum(-1)
    torch.testing.assert_close(call.values["frame_mass"].double(), expected, atol=1e-6, rtol=0)
    beside = torch.cat([mass[..., : video.start], mass[..., video.stop :]], -1)
    if beside.shape[-1]:
        torch.testing.assert_close(call.values["condition_mass"].double(), beside, atol=1e-6, rtol=0)
    assert sum(count for _, count in call.beside) == beside.shape[-1]


@pytest.mark.parametrize("name", MODELS)
def test_frames_of_every_family_are_found_by_an_experiment(name):
    model, given = made(name)
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    expected = "told" if name.startswith("ltx") else "verified"
    assert {call.frames for call in calls} == {call["frames"] for call in calls} == {expected}


# --- Packed tokens
def ltx2_with_conditions(count: int):
    """Tokens of keyframes or references behind the video, at coordinates that it has, too."""
    model, given = made("ltx2")
    x = torch.cat([given["hidden_states"], noise(2, count, 4, seed=9)], 1)
    coords = model.rope.prepare_video_coords(2, F, 2, 3, x.device, fps=24.0)
    coords = torch.cat([coords, coords.repeat(1, 1, 3, 1)[:, :, :count]], 2)
    times = torch.full((2, F * S + count), 700.0)
    times[:, F * S :] = 0
    return model, given | {"hidden_states": x, "video_coords": coords, "timestep": times}


@pytest.mark.parametrize("count", [S, F * S, 2 * F * S, 7])
def test_conditions_of_ltx2_are_no_frames(count, seen):
    """A reference of as many frames doubled each frame's tokens."""
    model, given = ltx2_with_conditions(count)
    plain = run(model, given)
    seen.clear()
    with capture_diffusers(model, granularity="frame") as calls:
        assert torch.equal(run(model, given), plain)
    for call, of_call in zip(calls, seen, strict=True):
        assert call["query_frames"] == [0, 1, 2] and call.layout.tokens_per_slot == S
        assert call.beside == (("condition", count),) and call.frames == "told"
        assert call["frame_timesteps"] == dict.fromkeys(range(F), 700.0)
        require_softmax(call, of_call, 0, S)


class LTXLike:
    """A pipeline whose method says what LTXConditionPipeline's does."""

    def __init__(self, transformer):
        self.transformer = transformer

    def __call__(self, given, extra_conditioning_num_latents):
        latent_num_frames, latent_height, latent_width = F, 2, 3
        return run(self.transformer, given), (latent_num_frames, latent_height, latent_width)


@pytest.mark.parametrize("count", [S, F * S, 5])
def test_conditions_of_ltx_lie_where_its_pipeline_says(count, seen):
    model, given = made("ltx")
    x = torch.cat([noise(2, count, 4, seed=9), given["hidden_states"]], 1)
    given |= {"hidden_states": x, "video_coords": noise(2, 3, x.shape[1]).abs()}
    with (
        pytest.raises(ConfigError, match=f"{x.shape[1]} tokens are more than 3 frames of 6"),
        capture_diffusers(model, granularity="frame"),
    ):
        run(model, given)  # nobody says on which side
    for name in ("num_frames", "height", "width"):
        del given[name]
    seen.clear()
    pipe = LTXLike(model)
    with capture_diffusers(pipe, granularity="frame") as calls:
        pipe(given, count)
    for call, of_call in zip(calls, seen, strict=True):
        assert call.beside == (("condition", count),)
        require_softmax(call, of_call, count, S)


def test_coordinates_decide_where_nobody_tells_sizes(seen):
    """LTX's long videos: a window, and a frame before time 0 behind it."""
    model, given = made("ltx")
    t, y, x = torch.meshgrid(torch.arange(F), torch.arange(2), torch.arange(3), indexing="ij")
    coords = torch.stack([t, y, x]).flatten(1).float()
    before = coords[:, :S] - torch.tensor([[8.0], [0], [0]])
    ones = {"num_frames": 1, "height": 1, "width": 1}
    tokens = torch.cat([given["hidden_states"], noise(2, S, 4)], 1)
    given |= ones | {
        "hidden_states": tokens,
        "video_coords": torch.cat([coords, before], 1).expand(2, -1, -1),
    }
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    for call, of_call in zip(calls, seen, strict=True):
        require_softmax(call, of_call, 0, S)
    # Tails of an earlier window have the coordinates of frames.
    twice = given | {"video_coords": torch.cat([coords, coords[:, :S]], 1).expand(2, -1, -1)}
    refused = pytest.raises(ConfigError, match="several have the same time, row and column")
    with refused, capture_diffusers(model, granularity="frame"):
        run(model, twice)
    with pytest.raises(ConfigError, match="say where frames lie"):
        of_coordinates(coords[None, :, torch.randperm(F * S)], None)


# --- References and histories
@pytest.mark.parametrize("count", [0, 1, 2])
def test_references_of_vace_are_no_frames_of_the_video(count, seen):
    """With a reference image the atlas had a frame more, and all were shifted."""
    pipe, given = video_pipelines.vace(count)
    with capture_diffusers(pipe, granularity="frame") as calls:
        latents = video_pipelines.call(pipe, given)
    of_layers = [one for one in seen if one[0].shape[2] == (3 + count) * 16]
    of_layers = [one for n, one in enumerate(of_layers) if n % 3]  # the first block is of the control branch
    assert len(latents[0, 0]) == 3 + count and len(calls) == len(of_layers)
    for call, of_call in zip(calls, of_layers, strict=True):
        assert call["query_frames"] == call["key_frames"] == [0, 1, 2] and call.frames == "verified"
        assert call["beside"] == [[f"ref {n}", 16] for n in range(count)]
        if count:
            require_softmax(call, of_call, 16 * count, 16)
    # Frame 0 of an edit is the video's first.
    edit = Knockout(frames=0, layers=[0], heads=[1], passes="all")
    with intervene(edit), capture_diffusers(pipe, granularity="frame", layers=[0]) as edited:
        video_pipelines.call(pipe, given)
    mass = edited[0].values["frame_mass"][0, 1]
    assert (mass[:, 0] == 0).all() and (mass[:, 1:] > 0).all()
    if count:
        assert (edited[0].values["condition_mass"][0, 1] > 0).all()


def framepack():
    model = diffusers.HunyuanVideoFramepackTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1,
        in_channels=4, out_channels=4, text_embed_dim=8, pooled_projection_dim=6, rope_axes_dim=(4, 6, 6),
        guidance_embeds=False, has_image_proj=True, image_proj_dim=10, has_clean_x_embedder=True,
    )  # fmt: skip
    given = {"hidden_states": noise(1, 4, F, H, W), "timestep": torch.tensor([700.0])}
    given |= {"encoder_hidden_states": noise(1, 7, 8), "encoder_attention_mask": torch.ones(1, 7)}
    given |= {"pooled_projections": noise(1, 6), "image_embeds": noise(1, 2, 10)}
    given |= {"indices_latents": torch.arange(7, 10)}
    for name, frames in (("clean", 2), ("history_2x", 2), ("history_4x", 4)):
        given[f"latents_{name}"] = noise(1, 4, frames, 8, 12)[..., :H, :W]
        given[f"indices_latents_{name}"] = torch.arange(frames)
    return model.eval(), given | {"return_dict": False}


def test_framepack_is_captured_behind_its_history(seen):
    torch.manual_seed(0)
    model, given = framepack()
    run(model, given)
    before = seen[-1][0].shape[2] - F * S - 9  # all but the video and 9 tokens of image and text
    seen.clear()
    assert before > 2 * S
    with capture_diffusers(model, layout=(F, S, before), granularity="frame") as calls:
        run(model, given)
    for call, of_call in zip(calls, seen[-2:], strict=True):
        assert call.frames == "verified" and call.beside[0] == ("before", before)
        require_softmax(call, of_call, before, S)
    with capture_diffusers(model, layout=(2 * F, S // 2, before), granularity="frame") as calls:
        run(model, given)  # half frames are believed
    assert {call.frames for call in calls} == {"told"}
    with capture_diffusers(model, layout=(F - 1, S, before + S), granularity="frame") as calls:
        run(model, given)  # the user's first frame is a condition
    assert {call.frames for call in calls} == {"verified"}
    for layout in ((F, S, before - 1), (F, S), (F - 1, S, before + 1), (2 * F, S // 2, before + 1)):
        with pytest.raises(ConfigError, match="layout="), capture_diffusers(model, layout=layout):
            run(model, given)


# --- Tokens in another order
class Permuting(transformer_wan.WanAttnProcessor):
    """Hand tokens to attention column by column, as sparse attention does, and put them back."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        if encoder_hidden_states is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        q, k, v = (x(hidden_states).unflatten(2, (attn.heads, -1)) for x in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q.flatten(2)).view_as(q), attn.norm_k(k.flatten(2)).view_as(k)
        order = torch.arange(q.shape[1]).view(F, -1).T.flatten()
        q, k, v = (x[:, order] for x in (q, k, v))
        out = dispatch_attention_fn(q * self.scale, k, v)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)[:, order.argsort()]))

    scale = 1.0


class Scaling(Permuting):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        if encoder_hidden_states is not None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        q, k, v = (x(hidden_states).unflatten(2, (attn.heads, -1)) for x in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q.flatten(2)).view_as(q), attn.norm_k(k.flatten(2)).view_as(k)
        out = dispatch_attention_fn(q * 0.5, k, v)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_processor_that_permutes_tokens_is_refused(layer, scale):
    model, given = made("wan")
    processor = Permuting()
    processor.scale = scale
    model.blocks[layer].attn1.processor = processor
    with watching(model):
        run(model, given)  # nobody looks
    with pytest.raises(ConfigError, match="frames"), capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    assert not calls
    if layer == 1:  # nobody asks for it; of layer 0 the experiment takes its queries
        with capture_diffusers(model, layers=[0], granularity="frame") as calls:
            run(model, given)
        assert {call.frames for call in calls} == {"verified"}


@pytest.mark.parametrize("rows", [4, 11])
def test_a_permutation_shows_in_a_sample_of_the_tokens(rows, monkeypatch):
    model, given = made("wan")
    monkeypatch.setattr(diffusers_frames, "SAMPLED_ROWS", rows)
    monkeypatch.setattr(diffusers_frames, "sampled_rows", diffusers_frames.sampled_rows.__wrapped__)
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    assert {call.frames for call in calls} == {"verified"}
    model.blocks[1].attn1.processor = Permuting()
    with pytest.raises(ConfigError, match="frames"), capture_diffusers(model, granularity="frame"):
        run(model, given)


def test_the_experiment_holds_nothing_of_a_forward_that_has_ended():
    """A forward's mask may take GiB."""
    model, given = made("wan")
    refs, alive = [], []

    def note(module, args, out):
        alive.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(out[0]))

    model.condition_embedder.register_forward_hook(note)
    with capture_diffusers(model, granularity="frame"):
        run(model, given)
    assert len(alive) > 2 and not any(alive)


class Early(transformer_wan.WanAttnProcessor):
    """Put tokens in another order before they are projected."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        order = torch.arange(hidden_states.shape[1]).view(F, -1).T.flatten()
        if encoder_hidden_states is None:
            rotary_emb = tuple(x[:, order] for x in rotary_emb)
        out = super().__call__(
            attn, hidden_states[:, order], encoder_hidden_states, attention_mask, rotary_emb
        )
        return out[:, order.argsort()]


@pytest.mark.parametrize("layer, name", [(0, "attn1"), (1, "attn1"), (1, "attn2")])
def test_tokens_that_are_permuted_before_their_projection_are_refused(layer, name):
    model, given = made("wan")
    plain = run(model, given)
    getattr(model.blocks[layer], name).processor = Early()
    torch.testing.assert_close(run(model, given), plain, atol=1e-5, rtol=1e-5)
    refused = pytest.raises(ConfigError, match="frame")
    with refused, capture_diffusers(model, granularity="frame", kinds=("self", "cross")):
        run(model, given)


def test_layers_whose_order_nobody_can_tell_are_unverified():
    model, given = made("wan")
    model.blocks[0].attn1.processor = Scaling()
    del model.blocks[1].attn1.norm_q
    model.blocks[1].attn1.norm_q = lambda x: x
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    assert [call.frames for call in calls] == ["unverified", "unverified"]


@pytest.mark.parametrize("axis", ["heads", "tokens"])
@pytest.mark.parametrize("pairs", ["neighbours", "halves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_tell_orders_even_where_a_norm_made_them_equal(axis, pairs, dtype):
    """With a norm per head of weight 1 all queries have one length; their pairs of dims do not."""
    normed = torch.nn.functional.rms_norm(noise(2, 24, 3, 16), (16,)).to(dtype)
    angle = torch.rand(24, 1, 8) * 6
    x = normed.float().unflatten(-1, (8, 2)).movedim(-1, 0)
    if pairs == "halves":
        x = normed.float().unflatten(-1, (2, 8)).movedim(-2, 0)
    turned = torch.stack([x[0] * angle.cos() - x[1] * angle.sin(), x[0] * angle.sin() + x[1] * angle.cos()])
    rotated = turned.movedim(0, -2 if pairs == "halves" else -1).flatten(-2).to(dtype)
    norms = norms_of(normed)
    assert compare_norms(norms, norms_of(rotated), dtype).tolist() == [True, True]
    assert compare_norms(norms, norms_of(rotated * 0.7), dtype).tolist() == [False, True]
    order = torch.arange(24).view(4, 6).T.flatten()
    permuted = rotated[:, order]
    if axis == "heads":  # of one head alone
        permuted = rotated.clone()
        permuted[:, :, 1] = rotated[:, order, 1]
    assert compare_norms(norms, norms_of(permuted), dtype).tolist() == [False, False]


def test_the_experiment_finds_frames_where_a_model_puts_them_elsewhere():
    model, given = made("wan")
    order = torch.arange(F * S).view(F, S).T.flatten()
    handle = model.blocks[0].register_forward_pre_hook(lambda module, args: (args[0][:, order], *args[1:]))
    with (
        pytest.raises(ConfigError, match="token 1 is not of the frame"),
        capture_diffusers(model, granularity="frame"),
    ):
        run(model, given)
    handle.remove()
    # Patches of two frames.
    torch.manual_seed(0)
    sizes = {"ffn_dim": 32, "freq_dim": 16, "text_dim": 8, "in_channels": 4, "out_channels": 4}
    model = diffusers.WanTransformer3DModel(**HEADS, **sizes, patch_size=(2, 2, 2)).eval()
    given["hidden_states"] = noise(2, 4, 2 * F, H, W)
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    assert {call.frames for call in calls} == {"verified"} and len(calls[0]["query_frames"]) == F


def test_the_experiment_is_made_once_for_a_shape_and_takes_no_random_numbers(monkeypatch):
    model, given = made("hunyuan")
    model.train()
    runs = []
    original = type(model).forward

    def forward(self, *args, **kwargs):
        runs.append(1)
        return original(self, *args, **kwargs)

    torch.manual_seed(1)
    run(model, given)
    expected = torch.rand(3)
    monkeypatch.setattr(type(model), "forward", forward)
    with capture_diffusers(model, granularity="frame"):
        torch.manual_seed(1)
        run(model, given)
        assert torch.equal(torch.rand(3), expected)
        assert len(runs) == 1 + 1 + 2  # as it is, two digits of frames 1 to 3, and the forward
        run(model, given)
        assert len(runs) == 5
        run(model, given | {"hidden_states": noise(2, 4, F + 1, H, W)})
        assert len(runs) == 5 + 1 + 3 + 1


class Loading(ModelHook):
    """Loads weights when a forward begins, as offload does."""

    def pre_forward(self, module, *args, **kwargs):
        module.scale_shift_table.data.nan_to_num_(0.5)
        return args, kwargs


class Counting(ModelHook):
    """Keeps a state, as caches do."""

    _is_stateful = True
    count = 0

    def pre_forward(self, module, *args, **kwargs):
        self.count += 1
        return args, kwargs

    def reset_state(self, module):
        self.count = 0


def test_the_experiment_loads_what_is_offloaded_and_no_cache_sees_it():
    model, given = made("wan")
    counting = Counting()
    for module, hook, name in (
        (model, Loading(), "loading"),
        (model.blocks[0], counting, "counting"),
        (model, Counting(), "counting"),
    ):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, name)
    model.scale_shift_table.data.fill_(torch.nan)
    with capture_diffusers(model, granularity="frame") as calls:
        run(model, given)
    assert {call.frames for call in calls} == {"verified"} and counting.count == 1
    run(model, given)
    assert counting.count == 2


# --- Bands of RoPE
@pytest.mark.parametrize("name", ["cosmos", "ltx", "ltx2", "hunyuan", "helios"])
def test_bands_of_another_rope_are_refused(name):
    """Cosmos pairs dims d and d + 8: turning a pair moved its bands."""
    model, given = made(name)
    for field in ("rope_bands", "query_key_means"):
        request = CaptureRequest(granularity="frame", **{field: True})
        refused = pytest.raises(ConfigError, match=f"{field}: .* does not have Wan's RoPE")
        with refused, capture_diffusers(model, request):
            run(model, given)


def test_bands_of_wans_kin_do_not_move_where_a_pair_is_turned(seen):
    model, given = made("wan")
    with capture_diffusers(model, granularity="frame", rope_bands=True) as calls:
        run(model, given)
    q, k = (x[:, :, : F * S].transpose(1, 2).float().clone() for x in seen[0][:2])
    for x in (q, k):
        a, b = x[..., 0].clone(), x[..., 1].clone()
        x[..., 0], x[..., 1] = a * 0.6 - b * 0.8, a * 0.8 + b * 0.6
    keys = k.unflatten(1, (F, S)).mean(2)
    turned = frame_logits_by_band(q, keys, F, list(RotaryTable(16).bands.values()))
    bands = calls[0].values["frame_logits_by_band"]
    torch.testing.assert_close(bands, turned, atol=1e-5, rtol=1e-4)


def chronoedit():
    sizes = {"ffn_dim": 32, "freq_dim": 16, "text_dim": 8, "in_channels": 4, "out_channels": 4}
    given = {"hidden_states": noise(1, 4, F, H, W), "timestep": torch.tensor([700.0])}
    return diffusers.ChronoEditTransformer3DModel(**HEADS, **sizes), given, (F, S)


def motif():
    model = diffusers.MotifVideoTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, num_layers=1, num_single_layers=1, in_channels=4,
        out_channels=4, text_embed_dim=8, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    return model, {"hidden_states": noise(1, 4, F, H, W), "timestep": torch.tensor([700.0])}, (F, S)


def qwen_image():
    """Pictures as frames, behind the text; norms are of the pictures' queries alone."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=8, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    given = {"hidden_states": noise(1, F * S, 4), "encoder_hidden_states_mask": torch.ones(1, 7)}
    return model, given | {"timestep": torch.tensor([0.7]), "img_shapes": [[(F, 2, 3)]]}, (F, S, 7)


@pytest.mark.parametrize("make", [chronoedit, motif, qwen_image])
def test_other_classes_are_seen_by_their_layout(make, seen):
    torch.manual_seed(0)
    model, given, layout = make()
    given |= {"encoder_hidden_states": noise(1, 7, 8), "return_dict": False}
    with capture_diffusers(model.eval(), layout=layout, granularity="frame") as calls:
        run(model, given)
    assert {call.frames for call in calls} == {"told" if make is qwen_image else "verified"}
    for call, of_call in zip(calls, seen, strict=True):
        require_softmax(call, of_call, sum(layout[2:]), S)
    wrong = {(F, S, 2): "(is token 0, layout=)|(are not 3 frames of 6 tokens)"}
    if make is qwen_image:
        wrong = {(F, S): "is token 7, layout=", (4, 5): "given 18 tokens, not 4 frames of 5: say where"}
    for other, problem in wrong.items():
        with pytest.raises(ConfigError, match=problem), capture_diffusers(model, layout=other):
            run(model, given)


def test_a_class_without_dispatch_is_refused_whatever_its_layout():
    model = diffusers.CogVideoXTransformer3DModel(
        **HEADS, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=8, sample_width=6,
        sample_height=4, sample_frames=9, max_text_seq_length=7,
    )  # fmt: skip
    refused = pytest.raises(ConfigError, match=r"own processor of CogVideoX.* no layout helps")
    with refused, capture_diffusers(model, layout=(3, 6)):
        pass


def test_a_function_as_layout_may_name_what_lies_before():
    model, given = made("helios")
    with capture_diffusers(model, layout=lambda config, arguments: (F, S, 15), granularity="frame") as calls:
        run(model, given)
    assert {call.frames for call in calls} == {"verified"} and calls[0].beside == (("before", 15),)
