"""Moved and jittered keys of awkward slots: kept without RoPE, or at several positions; seeds of a jitter."""

from dataclasses import replace

import pytest
import torch

from wan.attention import ATTENTION_WEIGHT_CAPTURE, attention
from wan.capture import Pass, Site
from wan.interventions import InterventionError, Jitter, Move, intervene
from wan.keys import MIXED, KeyLayout, Slot

HEADS, DIM, S = 3, 12, 5
OWN = (6, 7)
SLOTS = tuple(Slot(frame, frame) for frame in (0, 1, 4, 5, *OWN))
LAYOUT = KeyLayout(SLOTS, S, range(4, 6), OWN, sink=range(2))


def with_slot(slot: Slot) -> KeyLayout:
    """The layout with another slot of frame 5."""
    return replace(LAYOUT, slots=(*SLOTS[:3], slot, *SLOTS[4:]))


def run(edit, layout=LAYOUT) -> torch.Tensor:
    """The output [B, Lq, H, D] of one call under edit."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n * S, HEADS, DIM, generator=generator) for n in (2, 6, 6))
    with intervene(edit), ATTENTION_WEIGHT_CAPTURE.during(Pass(query_frames=OWN, block=3, step=1)):
        return attention(q, k, v, Site(2, "self"), layout=layout)


@pytest.mark.parametrize("edit", [Move(5, position=9, passes="all"), Jitter(0.5)], ids=["move", "jitter"])
def test_keys_without_rope_stand_at_0_wherever_their_slot_is(edit):
    unturned, at_0, at_5 = (
        with_slot(slot) for slot in (Slot(5, 5, is_rotated=False), Slot(5, 0), Slot(5, 5))
    )
    assert torch.equal(run(edit, unturned), run(edit, at_0))
    assert not torch.allclose(run(edit, unturned), run(edit, at_5), atol=1e-3)


def test_keys_at_several_positions_move_by_an_offset_alone():
    mixed, by, to = (
        with_slot(Slot(5, MIXED)),
        Move(5, offset=2, passes="all"),
        Move(5, position=9, passes="all"),
    )
    assert torch.equal(run(by, mixed), run(by))
    with pytest.raises(
        InterventionError, match="these keys stand at several positions: move them by offset="
    ):
        run(to, mixed)
    with pytest.raises(InterventionError, match="Jitter needs the position of every key"):
        run(Jitter(0.5), mixed)


def test_a_jitter_is_of_its_seed_and_of_each_head_whichever_others_it_takes():
    bases = [Jitter(0.5, seed=seed).bases(layer, HEADS) for layer in (0, 1) for seed in (0, 1)]
    assert len({base for row in bases for base in row.tolist()}) == 4 * HEADS
    assert not torch.allclose(run(Jitter(0.5, seed=0)), run(Jitter(0.5, seed=1)), atol=1e-3)
    everything, one, none = run(Jitter(0.5)), run(Jitter(0.5, heads=[2])), run(Jitter(0.0))
    assert torch.equal(one[:, :, 2], everything[:, :, 2])
    torch.testing.assert_close(one[:, :, :2], none[:, :, :2], atol=1e-6, rtol=0)
