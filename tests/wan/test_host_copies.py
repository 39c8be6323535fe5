"""Large captured values are copied to the host beside the rollout: all, once, and no error is lost."""

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from wan import keys as host_copies
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.captured_call import CapturedCall, Site, move_to_cpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: copies need its streams")
LARGE = host_copies.SMALL + 1


class OnGPU(torch.Tensor):
    """Says that it is there."""

    is_cuda = True


@pytest.fixture
def streams(monkeypatch):
    """Events, streams and pinned memory that a machine without a GPU does not have -> what was waited for."""
    waits: list[str] = []
    event = SimpleNamespace(wait=lambda: waits.append("event"))
    stream = SimpleNamespace(record_event=lambda: event, synchronize=lambda: waits.append("copy"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(host_copies, "STAGED", 4096)
    monkeypatch.setattr(host_copies, "_pinned", lambda: torch.empty(4096, dtype=torch.uint8))
    return waits


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bool])
def test_large_values_are_replaced_and_small_ones_wait(streams, dtype):
    large, small = torch.randn(3, LARGE), torch.randn(host_copies.SMALL)
    there = (large > 0).to(dtype) if dtype == torch.bool else large.to(dtype)
    values = {"large": there.as_subclass(OnGPU).mT, "small": small.as_subclass(OnGPU), "host": large}
    host_copies.start(values)
    host_copies.wait()
    found = values["large"]
    assert type(found) is torch.Tensor and found.dtype == dtype and torch.equal(found, there.mT)
    assert found.is_contiguous() and found.untyped_storage().nbytes() == there.nbytes
    assert type(values["small"]) is OnGPU and values["host"] is large
    assert streams == ["event", *["copy"] * -(-there.nbytes // 4096)]


def test_an_error_is_raised_where_values_are_asked_for_and_not_again(streams, monkeypatch):
    def fail():
        raise MemoryError("no host memory")

    monkeypatch.setattr(host_copies, "_pinned", fail)
    host_copies.start({"large": torch.randn(LARGE).as_subclass(OnGPU)})
    with pytest.raises(MemoryError, match="no host memory"):
        move_to_cpu([])
    move_to_cpu([])


def test_a_thread_has_one_pinned_place(monkeypatch):
    made = []

    def empty(size, dtype, pin_memory):
        assert pin_memory and dtype == torch.uint8
        made.append(torch.zeros(size, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(host_copies, "_of_thread", SimpleNamespace())
    monkeypatch.setattr(torch, "empty", empty)
    assert host_copies._pinned() is host_copies._pinned() is made[0]
    assert len(made) == 1 and len(made[0]) == host_copies.STAGED


def test_a_capture_that_failed_leaves_nothing_to_wait_for():
    with pytest.raises(RuntimeError, match="in the middle"), ATTENTION_WEIGHT_CAPTURE.capture():
        failed: Future[None] = Future()
        failed.set_exception(MemoryError("no host memory"))
        host_copies._under_way.append(failed)
        raise RuntimeError("in the middle")
    move_to_cpu([])


@needs_gpu
def test_copies_on_a_gpu_have_what_was_computed_before_them_and_wait_for_nothing_else():
    gpu = torch.device("cuda")
    x = torch.rand(4096, 4096, device=gpu)
    calls = []
    for n in range(20):
        value = torch.full((LARGE,), float(n), device=gpu) * 2
        calls.append(CapturedCall(Site(n, "self"), None, {"map": value, "few": value[:3]}, (), ()))
        host_copies.start(calls[-1].values)
        x = (x @ x).clamp(0, 1)
    move_to_cpu(calls)
    for n, call in enumerate(calls):
        assert call.values["map"].device.type == call.values["few"].device.type == "cpu"
        assert (call.values["map"] == 2 * n).all() and (call.values["few"] == 2 * n).all()
