"""Muon against PyTorch's own, ranks against one process, attention that knows its mask."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from experiments.miniature import stages
from experiments.miniature import training as optimizer
from experiments.miniature.ranks import Ranks
from experiments.miniature.recipe import RECIPES, StageRun
from experiments.miniature.training import Muon, Schedule, Trainer, orthogonal
from wan.blocks import block_ranges, block_sizes
from wan.errors import ConfigError

LR = 1e-3


def test_muon_is_pytorchs_muon_matrix_by_matrix(monkeypatch):
    monkeypatch.setattr(optimizer, "fast_dtype", lambda device: torch.bfloat16)  # as PyTorch's, everywhere
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 24), (24, 8), (8, 8)]
    ours = [torch.randn(shape) for shape in shapes]
    theirs = [torch.nn.Parameter(m.clone()) for m in ours]
    muon = Muon(ours, torch.tensor(LR))
    reference = torch.optim.Muon(theirs, lr=LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.data, atol=2e-5, rtol=0)  # products of bf16 in another order


def test_a_kernel_is_a_matrix_of_its_outputs():
    torch.manual_seed(0)
    kernel, gradient = torch.randn(6, 2, 3, 3), torch.randn(6, 2, 3, 3)
    matrix = kernel.flatten(1).clone()
    kernel.grad, matrix.grad = gradient, gradient.flatten(1).clone()
    for x in (kernel, matrix):
        Muon([x], torch.tensor(LR)).step()
    assert torch.equal(kernel.flatten(1), matrix)


def test_singular_values_come_near_one():
    torch.manual_seed(0)
    x = torch.randn(3, 16, 40)
    found = orthogonal(x)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):  # the same polynomial of singular values alone
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(found.double(), u * s[:, None] @ v, atol=1e-4, rtol=0)


def test_ranks_share_clips_and_say_what_cannot_be_shared():
    assert Ranks(1, 4).share(64) == 16 and Ranks().share(7) == 7
    assert Ranks(1, 2).seed(5) != Ranks(0, 2).seed(5) == 5
    with pytest.raises(ConfigError, match="65 clips cannot be shared evenly by 2"):
        Ranks(0, 2).share(65)


def two_ranks_worth(rank: int, count: int, init_file: str) -> list[torch.Tensor]:
    """Weights after four steps, each on the rows of a fixed batch that are this rank's."""
    if count > 1:
        torch.distributed.init_process_group("gloo", f"file://{init_file}", rank=rank, world_size=count)
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4)
    rows, ranks = torch.randn(8, 6), Ranks(rank, count)
    trainer = Trainer([layer], 1e-2, Schedule(4, ranks=ranks), torch.float32, lambda _, p: p.ndim == 2)
    for _ in range(4):
        trainer.step("rows", lambda: layer(rows.chunk(count)[rank]).square().mean())
    ranks.leave()
    return [m.clone() for m in trainer.masters]


def _write(rank: int, count: int, init_file: str) -> None:
    torch.save(two_ranks_worth(rank, count, init_file), f"{init_file}.{rank}")


@pytest.mark.beside
def test_two_ranks_take_the_step_of_one_with_both_batches(tmp_path):
    init_file = str(tmp_path / "init")
    torch.multiprocessing.spawn(_write, (2, init_file), nprocs=2)
    one = two_ranks_worth(0, 1, init_file)
    for rank in range(2):
        for ours, alone in zip(torch.load(f"{init_file}.{rank}"), one, strict=True):
            torch.testing.assert_close(ours, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("queries", ["all", "clean", "noisy"])
def test_what_is_compiled_skips_what_the_mask_hides(queries):
    run = StageRun("causal", RECIPES["causal"], Path(), torch.device("cpu"), torch.float32, compile=True)
    blocks = block_ranges(block_sizes(21))
    attend = stages.masked_attention(blocks, 16, run, queries)
    dense = stages.masked_attention(blocks, 16, replace(run, compile=False), queries)
    assert dense.shape == {"all": (672, 672), "clean": (336, 336), "noisy": (336, 672)}[queries]
    rule = inspect.getclosurevars(attend).nonlocals["mask"].mask_mod
    assert torch.equal(create_mask(rule, None, None, *dense.shape, device="cpu")[0, 0], dense)


def test_start_from_is_of_three_stages_and_needs_weights(tmp_path):
    from experiments import train_mini

    for stage, folder in (
        ("few_step", "checkpoints/wan-mini"),
        ("causal", str(tmp_path)),
        ("base", str(tmp_path)),
        ("vae", str(tmp_path)),
    ):
        with pytest.raises(ConfigError, match="--start_from is of the stages vae, base, causal, and names"):
            train_mini.run(["--stage", stage, "--start_from", folder, "--output_dir", str(tmp_path)])


def test_several_processes_cannot_resume(monkeypatch, tmp_path):
    from experiments import train_mini
    from experiments.miniature import ranks

    monkeypatch.setattr(ranks, "start_ranks", lambda on_gpu: Ranks(0, 2))
    with pytest.raises(ConfigError, match="keeps no state"):
        train_mini.run(["--stage", "vae", "--resume", "--output_dir", str(tmp_path), "--device", "cpu"])
