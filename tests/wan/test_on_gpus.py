"""On a GPU: policies, sites and captures as on the CPU, the same bits from graphs, several GPUs as one."""

import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT
from helpers import policies
from helpers.parallel_rollouts import HEADS, LAYERS, REQUESTS, SIZES, roll_out, small_model, together
from helpers.video_transformers import wan
from test_attention import on_hopper
from test_context_parallel import REQUESTS as ULYSSES_REQUESTS
from test_context_parallel import assert_same_calls, captured, shared
from test_cuda_graphs import WIDE
from test_parallel import policy_of, stripped

from experiments.caches import load_cache
from wan import backends
from wan.activations import SiteCapture
from wan.capture import CaptureRequest
from wan.keys import to_host, wait_for_host
from wan.model import CausalWanModel
from wan.policies import POLICIES, make_policy
from wan.sites import BESIDE_GRAPHS, SITES, watched
from wan.wings.graphs import ReplayedPass, apply_cuda_graphs
from wan.wings.parallel import apply_head_parallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
ATOL = 1e-4  # between devices, in float32; the smallest wrong policy moves the latents by 5e-3
HALF = 2**-10  # relative, of what a capture rounds to float16
FRAMES = CaptureRequest(granularity="frame")
ROWS = {row["name"]: row for row in policies.POLICIES}


@pytest.fixture(autouse=True)
def all_bits_of_float32():
    """PyTorch lets cuDNN's convolutions, which embed patches, round to TF32."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def make(name, folder):
    """Every policy: of a row, of test_parallel's by heads, and a window for every head."""
    if name in ROWS:
        return make_policy(**ROWS[name])
    if name != "head_budget":
        return policy_of(name, folder)
    budgets = [(layer, head, 6 + 3 * (head % 2), 1) for layer in range(LAYERS) for head in range(HEADS)]
    lines = ["layer,head,window,sink", *(",".join(map(str, row)) for row in budgets)]
    (folder / "budgets.csv").write_text("\n".join(lines))
    return make_policy("head_budget", file=str(folder / "budgets.csv"))


def models(dtype=torch.float32):
    """The small model on the GPU, without graphs and with them."""
    eager, replayed = (small_model().to("cuda", dtype) for _ in range(2))
    apply_cuda_graphs(replayed)
    return eager, replayed


def values_of(calls) -> list[torch.Tensor]:
    return [value for call in calls for _, value in sorted(call.values.items())]


def assert_close(found, expected, atol=ATOL):
    """Latents and calls."""
    torch.testing.assert_close(found[0].cpu(), expected[0].cpu(), atol=atol, rtol=0)
    ours, theirs = values_of(found[1]), values_of(expected[1])
    assert len(ours) == len(theirs)
    for value, like in zip(ours, theirs, strict=True):
        rtol = HALF if atol and value.dtype == torch.float16 else 0
        torch.testing.assert_close(value.cpu(), like.cpu(), atol=atol, rtol=rtol, equal_nan=True)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy(name, tmp_path):
    expected = roll_out(small_model(), make(name, tmp_path), FRAMES)
    eager, replayed = models()
    assert_close(roll_out(eager, make(name, tmp_path), FRAMES), expected)
    for dtype in (torch.float32, torch.bfloat16):
        eager, replayed = models(dtype)
        for seed in (1, 2):
            two = (roll_out(model, make(name, tmp_path), FRAMES, seed=seed) for model in (replayed, eager))
            assert_close(*two, atol=0)


@pytest.mark.parametrize(
    "requests", [REQUESTS, (REQUESTS[1], REQUESTS[2], REQUESTS[4])], ids=["all", "of self"]
)
def test_every_granularity(requests):
    """Those of self-attention while graphs are replayed."""
    expected = roll_out(small_model(), None, *requests)
    eager, replayed = models()
    assert_close(roll_out(eager, None, *requests), expected)
    for seed in (1, 2):
        assert_close(*(roll_out(model, None, *requests, seed=seed) for model in (replayed, eager)), atol=0)


@pytest.mark.parametrize(
    "sites", [tuple(SITES), tuple(sorted(BESIDE_GRAPHS & {*SITES}))], ids=["all", "beside graphs"]
)
def test_every_site(sites):
    """In one denoising step and the clean pass of the second block."""
    found = []
    for model in (small_model(), *models()):
        for seed in (1, 2):  # graphs are recorded in the first
            capture = SiteCapture(sites, blocks=[1], steps=[1, 2])
            with warnings.catch_warnings(), watched(capture):
                warnings.filterwarnings("ignore", message=".*without their CUDA graphs")
                roll_out(model, seed=seed)
        torch.cuda.synchronize()
        found.append(capture.kept)
    host, eager, replayed = found
    assert {one.where.site for one in host} == {*sites} and len(host) == len(eager) == len(replayed)
    for on_cpu, one, again in zip(*found, strict=True):
        place = on_cpu.where.site, on_cpu.where.layer, on_cpu.where.step
        assert place == (one.where.site, one.where.layer, one.where.step)
        assert torch.equal(one.value, again.value), place
        torch.testing.assert_close(
            one.value, on_cpu.value, atol=ATOL, rtol=ATOL, msg=lambda m, p=place: f"{p}: {m}"
        )


@on_hopper
def test_a_rollout_by_flash_attention(monkeypatch):
    """Close to cuDNN's in bfloat16; looking changes no bit, and graphs change none."""
    torch.manual_seed(0)
    model = CausalWanModel(**WIDE).eval().requires_grad_(False).to("cuda", torch.bfloat16)
    size = {"size": (60, 104), "frames": 6}
    plain, (latents, calls) = roll_out(model, **size), roll_out(model, None, FRAMES, **size)
    assert torch.equal(plain[0], latents)
    apply_cuda_graphs(model)
    for _ in range(2):
        assert_close(roll_out(model, None, FRAMES, **size), (latents, calls), atol=0)
    monkeypatch.setattr(backends, "takes", lambda q, k, v: False)
    assert_close(roll_out(model, None, FRAMES, **size), (latents, calls), atol=0.05)


# --- Several GPUs
def require_gpus(count: int) -> None:
    if (here := torch.cuda.device_count()) < count:
        pytest.skip(f"{count} GPUs are needed, and there {'is' if here == 1 else 'are'} {here}")


def test_what_sets_off_from_another_gpu_than_the_current_one_is_waited_for():
    """A pipeline of one's own may be anywhere."""
    require_gpus(2)
    with torch.cuda.device(1):
        x = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(1 << 29)
        moved = to_host(x.add_(1))
    assert torch.cuda.current_device() == 0
    wait_for_host()
    assert moved.is_pinned() and moved.eq(1).all()


def test_kernels_run_where_their_tensors_are():
    """Triton alone would launch them on the current GPU."""
    require_gpus(2)
    from wan.kernels.mass import query_frame_mass  # Triton is there only beside CUDA

    torch.manual_seed(0)
    q, k = (torch.randn(1, length, 2, 64, dtype=torch.bfloat16) for length in (64, 128))
    lse = (q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1) / 8).logsumexp(-1)
    found = []
    for device in ("cuda:1", "cuda:0"):
        given = [x.to(device) for x in (q, k, lse)]
        found.append(query_frame_mass(*given, 4).cpu())
        assert torch.cuda.current_device() == 0
    assert torch.equal(*found)


@torch.backends.cudnn.flags(allow_tf32=False)  # new processes know nothing of the fixture
def of_a_group(group, device="cuda"):
    """Latents and calls without graphs and with them, of one process or of all of a group."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_heads": 12, "dim": 96}
    model = CausalWanModel(**sizes).eval().requires_grad_(False).to(device)
    if group is not None:
        apply_head_parallel(model, group)
    found, recorded = [], set()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(ReplayedPass, "AFTER", 1)
    for _ in range(2):
        runs = [
            (None, REQUESTS[0]),
            (make_policy(**ROWS["relative"]), REQUESTS[0]),
            (None, FRAMES),
            (None, FRAMES),
        ]
        for policy, request in runs:
            latents, calls = stripped(roll_out(model, policy, request, size=(4, 8)))
            found.append((latents.cpu(), calls))
        recorded |= getattr(vars(model).get("run_layers"), "passes", {}).keys()
        apply_cuda_graphs(model)
    monkeypatch.undo()
    by_peers = group is not None and model.head_shard.peer_memory is not None
    return found, not by_peers or len(recorded) >= 4


@pytest.mark.parametrize("count", [2, 4])
def test_several_gpus_compute_what_one_does(count):
    require_gpus(count)
    (expected, _), found = of_a_group(None), together(count, of_a_group, 120, on_gpus=True)
    (first, *others), recorded = zip(*found, strict=True)
    for run, like in zip(first, expected, strict=True):
        assert_close(run, like)
    for eager, replayed in zip(first[:4], first[4:], strict=True):
        assert_close(replayed, eager, atol=0)
    assert all(recorded)  # whole passes, where the GPUs have each other's memory
    for other in others:
        assert all(torch.equal(latents, mine) for (latents, _), (mine, _) in zip(other, first, strict=True))


@torch.backends.cudnn.flags(allow_tf32=False)
def of_ulysses(group):
    """What comes out of a transformer of diffusers without a capture and with it, and its calls, by dtype."""
    outputs = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model, arguments = wan(num_attention_heads=4, attention_head_dim=64, num_layers=2)
        for name, x in arguments.items():
            arguments[name] = x.cuda()
            if name != "timestep":
                arguments[name] = x.to("cuda", dtype)
        shared(model.to("cuda", dtype), group)
        plain, out, calls = captured(model, arguments, *ULYSSES_REQUESTS)
        outputs[dtype] = plain.cpu(), out.cpu(), calls
    return outputs


def test_ulysses_captures_what_one_gpu_does():
    """On two GPUs, or in two processes on one."""
    alone = of_ulysses(None)
    first, second = together(2, of_ulysses, 120, on_gpus=True)
    for dtype, (plain, out, calls) in first.items():
        _, wanted, like = alone[dtype]
        error = ATOL
        if dtype == torch.bfloat16:  # products of other numbers of rows are rounded otherwise
            exact = alone[torch.float32][1]
            error = 2 * (wanted.float() - exact).abs().max().item() + ATOL
        for other in (plain, wanted, second[dtype][1]):
            torch.testing.assert_close(out, other, atol=error, rtol=0)
        assert not second[dtype][2]
        print(f"{dtype}: {(out != plain).sum()} of {out.numel()} elements differ where calls are captured")
        assert_same_calls(calls, like, atol=max(error, ATOL))


@pytest.mark.parametrize("count", [2, 4])
def test_a_command_on_several_gpus(count, tmp_path):
    require_gpus(count)
    command = [sys.executable, "experiments/run_extraction_all.py", "--config_path", "configs/wan_mini.yaml"]
    command += ["--num_frames", "6", "--dtype", "float32", "--quiet", "--device", "cuda", "--output_path"]
    if has_ffmpeg := find_spec("imageio_ffmpeg"):
        command.insert(-1, "--save_video")  # on the next GPU, where there is one
    for gpus in (1, count):
        path = str(tmp_path / f"{gpus}.pt")
        done = subprocess.run([*command, path, "--gpus", str(gpus)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    one, several = (load_cache(tmp_path / f"{gpus}.pt") for gpus in (1, count))
    assert several["gpus"] == count
    assert not has_ffmpeg or all((tmp_path / f"{gpus}.mp4").stat().st_size > 1000 for gpus in (1, count))
    for name in ("frame_logits", "frame_mass"):
        torch.testing.assert_close(several[name], one[name], atol=1e-3, rtol=0, equal_nan=True)
