"""softmax(q kᵀ) v: plain, masked and by groups of keys against float64, and who gets which GPU kernel.

A module of flash-attn's signature stands in for it; CUDA tensors are pretended, or torch's fake ones.
"""

import math
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from helpers.pretended_gpu import OnGPU
from helpers.rollouts import rollout, tiny_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from wan import backends, reductions
from wan.attention import attend_by_groups, attention, attention_with_lse, readable
from wan.capture import ATTENTION_WEIGHT_CAPTURE
from wan.errors import ConfigError
from wan.interventions import at, intervene
from wan.keys import KeyBias
from wan.policies import make_policy
from wan.sites import SITES

HALF, FLOAT = torch.bfloat16, torch.float32
GPU, LONG, SHORT = torch.device("cuda:0"), backends.FEWEST_KEYS_OF_FUNCTION, backends.FEWEST_KEYS - 1
INSTALLED = backends.LAUNCHED


def drawn(seed, *shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_formula(q, k, v, added):
    """Output and log-sum-exp in float64, of logits plus added."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5 + added.double()
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


# --- Numbers
@pytest.mark.parametrize("head_dim", [6, 12, 128])
@pytest.mark.parametrize("dtype", [HALF, torch.float16, FLOAT])
def test_calls_are_those_of_the_formula(dtype, head_dim, device):
    q, k, v = (drawn(n, 2, 3, n, head_dim).to(device, dtype) for n in (5, 9, 9))
    out, lse = attention_with_lse(q[:, :, :5], k, v)
    expected, expected_lse = by_formula(q[:, :, :5], k, v, torch.zeros(5, 9))
    rounding = 2 * torch.finfo(dtype).eps * v.abs().max().item() + 1e-5
    assert out.dtype == dtype and lse.shape == expected_lse.shape
    if isinstance(out, OnGPU):  # its kernels lay out like this, and take the rows that they can
        assert out.transpose(1, 2).is_contiguous() == (head_dim * dtype.itemsize % 16 == 0)
    torch.testing.assert_close(out.cpu().double(), expected, atol=rounding, rtol=0)
    of_lse = 1e-5 if dtype == FLOAT else 1e-3
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=of_lse, rtol=0)


# Where the numbers of a tensor may be in memory; each keeps its values, or repeats some of them.
def plain(x):
    return x


def last_axis_first(x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def every_other_number(x):
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def transposed(x):
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def offset(x):
    return torch.cat([x.new_ones(1), x.flatten()])[1:].view(x.shape)


def a_part(x):
    return F.pad(x, (1, 2) * 2)[..., 1:-2, 1:-2]


def expanded(x):
    return x[..., :1].expand(x.shape)


def expanded_rows(x):
    return x[..., :1, :].expand(x.shape)


def expanded_batch(x):
    return x[:1].expand(x.shape)


KEEPING_VALUES = [last_axis_first, every_other_number, transposed, offset, a_part]
LAYOUTS = [plain, *KEEPING_VALUES, expanded, expanded_rows, expanded_batch]


@cache
def unedited():
    return (pipeline := tiny_pipeline()), rollout(pipeline, 6)


layouts = st.sampled_from(LAYOUTS)


@given(
    sizes=st.tuples(*[st.integers(0, 3)] * 2, *[st.integers(0, 6)] * 2, st.integers(1, 9)),
    how=st.tuples(layouts, layouts, layouts),
    alone=st.tuples(*[st.booleans()] * 3),
    dtype=st.sampled_from([FLOAT, HALF, torch.float64]),
    seed=st.integers(0, 2**30),
)
@settings(max_examples=300, deadline=None)
def test_attention_of_any_layout_is_that_of_the_formula(sizes, how, alone, dtype, seed):
    """Strided, expanded, transposed, offset and empty inputs; k and v may be one for the batch."""
    batch, heads, queries, keys, head_dim = sizes
    q, k, v = (
        layout(drawn(seed + n, batch, length, heads, head_dim).to(dtype))
        for n, (layout, length) in enumerate(zip(how, (queries, keys, keys), strict=True))
    )
    if batch:
        k, v = (x[:1] if one else x for x, one in zip((k, v), alone[1:], strict=True))
    expected, _ = by_formula(*(x.transpose(1, 2) for x in (q, k, v)), torch.zeros(keys))
    out = attention(q, k, v)
    assert out.dtype == dtype and out.shape == q.shape
    rounding = 4 * torch.finfo(dtype).eps * (v.abs().max().item() if v.numel() else 0) + 1e-6
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=rounding, rtol=0)


def test_what_kernels_can_read_is_not_copied():
    q = drawn(0, 2, 5, 3, 8).transpose(1, 2)
    k, v = drawn(1, 2, 20, 3, 8)[:, 4:15].transpose(1, 2), drawn(2, 2, 3, 11, 8)
    assert all(new is old for new, old in zip(readable(q, k, v), (q, k, v), strict=True))
    with pytest.raises(ConfigError, match=r"does not fit: \[2, 5, 3, 8\], \[2, 11, 3, 8\], \[2, 10, 3, 8\]"):
        attention_with_lse(q, k, v[:, :, :10])
    for wrong, said in (
        ((q, k, v.bfloat16()), "one floating dtype"),
        ((q.int(), k.int(), v.int()), "one floating dtype"),
        ((q[0], k[0], v[0]), r"tensors q, k, v \[B, L, H, D\]"),
        (3 * (q.numpy(),), "tensors q, k, v"),
    ):
        with pytest.raises(ConfigError, match=said):
            attention(*wrong)


def test_kernels_of_a_gpu_get_rows_at_multiples_of_16_bytes(device):
    whole = drawn(0, 2, 9, 4, 16).to(device, HALF)
    shifted = drawn(0, 2, 9, 4, 17).to(device, HALF)
    fits = whole, whole[:, 2:], whole[:, :, 1:3], whole.transpose(1, 2), drawn(0, 2, 9, 4, 6).to(device, HALF)
    assert all(map(backends.can_read, fits))
    unfit = [whole.mT.contiguous().mT]
    if device.type == "cuda":
        unfit += [shifted[..., 1:], shifted[..., :16], whole[:1].expand(2, -1, -1, -1)]
    for x in unfit:
        assert not backends.can_read(x)
        read = readable(x, x, x)[1]
        assert backends.can_read(read) and torch.equal(read.cpu(), x.cpu())


@pytest.mark.parametrize("site", SITES)
@settings(max_examples=2, deadline=None)
@given(layout=st.sampled_from(KEEPING_VALUES))
def test_an_edit_may_return_any_layout_at_any_site(site, layout):
    """The same numbers elsewhere in memory are the same video."""
    pipeline, plain = unedited()
    with intervene(at(site), lambda x, where: layout(x)):
        found = rollout(pipeline, 6)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 7), st.integers(1, 11), st.integers(0, 2**30))
@settings(max_examples=80, deadline=None)
def test_groups_of_keys_agree_with_a_biased_softmax(heads, slots, S, queries, seed):
    """Any pattern of left-out and biased slots in which every head keeps a slot; logits may be far apart."""
    dice = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, heads, n, 12, generator=dice) for n in (queries, slots * S, slots * S))
    values = torch.randn(heads, slots, generator=dice) * (torch.rand(heads, slots, generator=dice) < 0.5)
    out = torch.rand(heads, slots, generator=dice) < 0.5
    out[torch.arange(heads), torch.randint(slots, (heads,), generator=dice)] = False
    k[:, out[:, 0], :S] *= 200  # what is left out has by far the largest logits
    bias = KeyBias(values.masked_fill(out, -torch.inf), S)
    unseen = bias.per_token().isinf().all(0)
    k[:, :, unseen] = v[:, :, unseen] = torch.nan  # keys that no head sees are not read
    added = bias.per_token()[:, None].expand(-1, queries, -1)
    expected, expected_lse = by_formula(q, k.nan_to_num(), v.nan_to_num(), added)
    found, lse = attend_by_groups(q, k, v, bias)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
    blind = KeyBias(values.masked_fill(torch.arange(heads)[:, None] == heads - 1, -torch.inf), S)
    with pytest.raises(ValueError, match=f"head {heads - 1} would see no key"):
        attend_by_groups(q, k, v, blind)


# --- Which kernel
def flash_attn_func(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
    """flash_attn.cute's, of fake tensors [B, L, H, D] -> output in that layout, log-sum-exp [B, H, Lq]."""
    assert softmax_scale is None and not causal and return_lse and k.shape == v.shape
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=FLOAT)


def launched(q, k, v, frame_size=0):
    """kernels/fa4.attention(): the same, and tails of frames where they are asked for."""
    return *flash_attn_func(q, k, v, return_lse=True), None


@pytest.fixture
def machine(monkeypatch):
    """A function that says which GPU is there, and which version of flash-attn-4 -> calls by their way."""
    calls = []

    def counted(way, function):
        return lambda *args, **more: calls.append(way) or function(*args, **more)

    def prepare(installed=INSTALLED, capability=(9, 0), wanted="") -> list[str]:
        package, module, of_hopper = map(ModuleType, ("flash_attn", "flash_attn.cute", "wan.wings.fa4"))
        package.__spec__ = ModuleSpec("flash_attn", None)  # transformers looks at it
        module.flash_attn_func = counted("function", flash_attn_func)
        of_hopper.attention = counted("launched", launched)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module if installed else None)
        monkeypatch.setitem(sys.modules, "wan.wings.fa4", of_hopper if installed else None)
        versions = {backends.FA4: installed}
        monkeypatch.setattr(backends, "installed_version", versions.get)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setenv(backends.VARIABLE, wanted)
        forget()
        return calls

    def forget():
        for function in (backends.has_fa4, backends.is_launched):
            function.cache_clear()

    yield prepare
    monkeypatch.undo()
    forget()


RULE = [
    (INSTALLED, (9, 0), "", "launched"),
    (INSTALLED, (9, 0), "fa4", "launched"),
    ("4.0.0b99", (9, 0), "", "function"),  # whose inside may be another one
    (INSTALLED, (10, 0), "auto", "function"),
    (INSTALLED, (9, 0), "cudnn", None),
    (INSTALLED, (8, 0), "", None),  # A100
    (None, (9, 0), "", None),
]


@pytest.mark.parametrize(("found", "capability", "wanted", "expected"), RULE)
def test_the_rule(machine, found, capability, wanted, expected):
    calls, short = machine(found, capability, wanted), expected if expected == "launched" else None
    for keys, way in ((LONG, expected), (LONG - 1, short), (SHORT, None)):  # cuDNN wins at few keys
        with FakeTensorMode():
            q, k = (torch.empty(1, 2, n, 128, dtype=HALF, device=GPU) for n in (48, keys))
            out, lse = attention_with_lse(q, k, k)
        assert out.shape == q.shape and out.dtype == q.dtype and lse.shape == q.shape[:3]
        assert calls == ([way] if way else [])
        calls.clear()
    below = SHORT + 1 if expected == "launched" else LONG
    name = f"fa4 {found}, cudnn below {below} keys" if expected else "cudnn"
    assert backends.kernel_name(GPU, HALF) == name and backends.kernel_name(GPU, FLOAT) == "efficient"
    assert backends.kernel_name(torch.device("cpu"), FLOAT) is None


def test_a_captured_mass_follows_from_the_kernels_own_sums(monkeypatch):
    """The same numbers as from q, k and the log-sum-exp, and the same latents; asked for mass alone."""
    pipeline = tiny_pipeline(local_attn_size=6)
    pipeline.cache_policy = make_policy("ema_sink")
    asked = []

    def captured(**request):
        with ATTENTION_WEIGHT_CAPTURE.capture(**request) as calls:
            return rollout(pipeline, 6), calls

    def tails(q, k, v, frames):
        """Of 2^logits: sums and maxima [2, B, H, Fk, Lq] behind the beginning of each frame."""
        asked.append(frames)
        logits = q.double() @ k.double().mT * q.shape[-1] ** -0.5 / math.log(2)
        behind = [logits[..., begin:] for begin in range(0, k.shape[2], k.shape[2] // frames)]
        maxima = [x.amax(-1) for x in behind]
        sums = [(x - top[..., None]).exp2().sum(-1) for x, top in zip(behind, maxima, strict=True)]
        return *attention_with_lse(q, k, v), torch.stack([torch.stack(x, 2) for x in (sums, maxima)]).float()

    latents, expected = captured(granularity="frame")
    monkeypatch.setattr(backends, "gives_tails", lambda *call: True)
    monkeypatch.setattr(backends, "fa4_attention", tails)
    captured(granularity="frame")
    assert not asked  # a tile could hold the beginnings of two of these frames
    monkeypatch.setattr(backends, "TILE", 5)
    with ATTENTION_WEIGHT_CAPTURE.capture(granularity="key"):  # the inner one is served
        again, found = captured(granularity="frame")
    by_slot = [call.layout for call in found if call.layout.chosen is None]
    assert torch.equal(latents, again) and len(found) == len(expected) > 0
    assert asked == [len(layout.slots) for layout in by_slot]
    for one, other in zip(found, expected, strict=True):
        assert one.values.keys() == other.values.keys()
        for name in {"frame_logits", "frame_mass", "slot_mass"} & one.values.keys():
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=0)
    asked.clear()
    for other in ({"granularity": "frame", "mass": False}, {"granularity": "key"}, {"granularity": "token"}):
        assert torch.equal(captured(**other)[0], latents) and not asked


def test_it_is_refused_where_it_cannot_be(machine):
    for found, capability, said in ((None, (9, 0), "is not installed; run: pip"), ("4.0", (8, 6), "has 8")):
        machine(found, capability, "fa4")
        with pytest.raises(ConfigError, match=said):
            backends.has_fa4(GPU)


# --- FlashAttention-4's kernel as launched here, with sums at key frames
HAS_FA4 = torch.cuda.is_available() and backends.installed_version(backends.FA4) == backends.LAUNCHED
IS_HERE = HAS_FA4 and torch.cuda.get_device_capability()[0] == backends.HOPPER
on_hopper = pytest.mark.skipif(not IS_HERE, reason="no Hopper GPU with flash-attn-4 as launched here")
factors = pytest.mark.parametrize("factor", [1.0, 5.0], ids=["flat", "peaked"])
CALLS = {  # batch, heads, queries, key frames, keys of a frame
    "a block of 1.3B": (1, 12, 4680, 21, 1560),
    "whole tiles": (1, 2, 256, 4, 128),
    "a frame ends in each tile": (2, 3, 130, 9, 131),
    "one frame": (2, 2, 77, 1, 600),
    "two items": (2, 5, 390, 7, 390),
}


def call_of(sizes, factor: float = 1.0):
    """Queries, keys and values [B, H, L, D], which lie in larger buffers as a cache's do."""
    batch, heads, queries, frames, size = sizes
    generator = torch.Generator(GPU).manual_seed(0)

    def drawn(length):
        x = torch.randn(batch, length + 3, heads + 1, 128, generator=generator, device=GPU) * factor
        return x.bfloat16()[:, 2:-1, 1:].transpose(1, 2)

    return drawn(queries), drawn(frames * size), drawn(frames * size)


@on_hopper
@factors
@pytest.mark.parametrize("sizes", CALLS.values(), ids=CALLS)
def test_masses_are_those_of_the_softmax(sizes, factor):
    """Against float64, no worse than the kernel of their own; and the output is the same, bit for bit."""
    from wan.kernels.mass import query_frame_mass  # Triton is there only beside CUDA

    q, k, v = call_of(sizes, factor)
    frames = sizes[3]
    out, lse, _ = backends.fa4_attention(q, k, v)
    again, lse_again, tails = backends.fa4_attention(q, k, v, frames)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    found = reductions.mass_of_tails(tails, 1)[:, :, 0]
    rows = q.double() * 128**-0.5
    exact = torch.cat([(part @ k.double().mT).softmax(-1) for part in rows.split(390, 2)], 2)
    expected = exact.unflatten(-1, (frames, -1)).sum(-1).mean(2)
    own_kernel = query_frame_mass(q.transpose(1, 2), k.transpose(1, 2), lse, frames).mean(3)
    worst = max(2 * (own_kernel - expected).abs().max().item(), 2e-6)
    assert (found - expected).abs().max() <= worst
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]), atol=1e-5, rtol=0)


def test_kernels_read_rows_of_sixteen_bytes():
    rows = (HALF, 8, True), (HALF, 12, False), (FLOAT, 12, True), (FLOAT, 6, False)
    for dtype, head_dim, fits in rows:
        assert backends.kernels_can_read(torch.empty(1, 3, 5, head_dim, dtype=dtype)) is fits
