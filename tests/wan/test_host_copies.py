"""Large captured values are copied to the host beside the rollout: all, once, and no error is lost."""

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from wan.modules import host_copies
from wan.modules.attention import ATTENTION_WEIGHT_CAPTURE
from wan.modules.captured_call import CapturedCall, Site, move_to_cpu

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: copies need its streams")
LARGE = host_copies.SMALL + 1


@pytest.fixture
def streams(monkeypatch):
    """Events and streams that a machine without a GPU does not have."""
    event = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=lambda: event)
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def on_gpu(value: torch.Tensor, copied: list[str], name: str = "") -> SimpleNamespace:
    def cpu():
        copied.append(name)
        return value

    here = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), numel=value.numel, cpu=cpu)
    here.contiguous = lambda: here
    return here


def test_large_values_are_replaced_and_small_ones_wait(streams):
    copied: list[str] = []
    large, small = torch.rand(LARGE), torch.rand(host_copies.SMALL)
    values = {"large": on_gpu(large, copied, "large"), "small": on_gpu(small, copied, "small"), "host": large}
    host_copies.start(values)
    host_copies.wait()
    assert values["large"] is large and values["small"] is not small and values["host"] is large
    assert copied == ["large"]


def test_an_error_is_raised_where_values_are_asked_for_and_not_again(streams):
    def cpu():
        raise MemoryError("no host memory")

    value = on_gpu(torch.rand(LARGE), [])
    value.cpu = cpu
    host_copies.start({"large": value})
    with pytest.raises(MemoryError, match="no host memory"):
        move_to_cpu([])
    move_to_cpu([])


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
