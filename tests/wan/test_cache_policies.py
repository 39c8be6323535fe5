"""The clean rules of cache policies, of any window, sink and budget, against lists of frames in float64."""

import pytest
import torch
from helpers.cache_simulation import BATCH, LAYERS, S, Simulation, close
from hypothesis import given, settings
from hypothesis import strategies as st

from wan.errors import ConfigError
from wan.keys import AVERAGE, CHOSEN
from wan.policies import POLICIES, make_policy
from wan.rope import rotate


@st.composite
def cases(draw):
    """A policy with fields of any size that fit, and the sizes of the blocks."""
    size = draw(st.integers(1, 3))
    sizes = [size] * draw(st.integers(4, 12))
    if draw(st.booleans()):
        sizes[0] = 1
    name = draw(st.sampled_from([name for name in POLICIES if name != "per_head"]))
    if name == "full":
        return make_policy(name), sizes
    sink = draw(st.integers(1 if name == "ema_sink" else 0, 4))
    extra = draw(st.integers(0, 4))
    if name == "rolling_sink":
        return make_policy(name, window=2 * size + extra), sizes
    fields = {"sink": sink, "window": sink + size + extra + 2 * (name == "two_memories")}
    if name == "participative":
        recent = size + draw(st.integers(0, 2))
        budget = sink + recent + draw(st.integers(0, 2))
        fields |= {"recent": recent, "budget": budget, "window": budget + extra}
    if name == "memory_bank":
        fields |= {"bank": draw(st.integers(1, 3)), "interval": draw(st.integers(1, 3))}
    return make_policy(name, **fields), sizes


@given(case=cases())
@settings(max_examples=40, deadline=None)
def test_every_slot_holds_what_it_says(case):
    policy, sizes = case
    policy.check(sizes)
    run = Simulation(policy, sizes)
    for size in sizes:
        for frames, _, seen in run.block(size):
            run.check(seen)
            layout = run.cache.layouts[0]
            assert [layout.frames[i] for i in layout.own] == list(frames)  # a block sees itself, last
            assert layout.own.stop == len(layout.slots)
            limit = policy.num_frames
            assert limit is None or len(layout.slots) <= limit
            assert list(layout.query_positions) == [layout.positions[i] for i in layout.own]
            check_positions(policy, layout, frames)


def check_positions(policy, layout, frames):
    own, n = layout.own, len(layout.slots)
    if policy.positions_follow_slots:
        assert list(layout.positions) == list(range(n))
        return
    assert [layout.positions[i] for i in own] == list(frames)
    if policy.name in ("full", "window"):
        assert layout.positions == layout.frames
    if policy.name in ("full", "window", "relative", "deep_sink"):
        assert list(layout.frames) == windowed(frames.stop, policy.num_frames, getattr(policy, "sink", 0))
    if policy.name in ("deep_sink", "participative"):  # nothing jumps, nothing overlaps
        assert list(layout.positions) == list(range(frames.stop - n, frames.stop))


def windowed(seen, window, sink):
    frames = list(range(seen))
    return frames if window is None or seen <= window else frames[:sink] + frames[seen - (window - sink) :]


@pytest.mark.parametrize(("recent", "reuse_limit"), [(3, None), (4, None), (7, None), (3, 2)])
def test_chosen_tokens_are_those_of_a_float64_ranking(recent, reuse_limit):
    sink, places = 2, 2
    budget = sink + places + recent
    policy = make_policy(
        "participative", window=budget + 2, sink=sink, budget=budget, recent=recent, reuse_limit=reuse_limit
    )
    run = Simulation(policy, [3] * 9)
    uses, compressed = {}, 0
    for _ in range(9):
        before = [run.cache.layouts[layer] for layer in range(LAYERS)]
        for frames, step, _ in run.block(3):
            after = [run.cache.layouts[layer] for layer in range(LAYERS)]
            if step or after[0].chosen is None or after[0].chosen is before[0].chosen:
                continue
            compressed += 1
            for layer in range(LAYERS):
                newest = sorted(run.queries[layer])[-recent:]
                total = sum(run.queries[layer][frame].sum(1) for frame in newest)  # [B, H, D]
                for item in range(BATCH):
                    old = candidates(before[layer], item, frames, sink, recent)
                    scores = []
                    for frame, index, position in old:
                        tables = [x[index : index + 1] for x in run.rope([position])]
                        key = rotate(run.raw[layer][frame][item, index][None, None], *tables)[0, 0]
                        spent = reuse_limit and uses.get((layer, item, frame, index), 0) >= reuse_limit
                        scores.append(-torch.inf if spent else (total[item] * key).sum().item())
                    ranked = sorted(range(len(old)), key=lambda i: (-scores[i], i))[: places * S]
                    expected = [old[i][:2] for i in sorted(ranked)]
                    chosen = after[layer].chosen
                    pairs = zip(chosen.frames[item].tolist(), chosen.indices[item].tolist(), strict=True)
                    assert list(pairs) == expected
                    for token in expected:
                        uses[(layer, item, *token)] = uses.get((layer, item, *token), 0) + 1
    assert compressed > 2


def candidates(layout, item, frames, sink, recent):
    """(frame, index, position) of the tokens between the sink and the recent frames,
    the new block appended.
    """
    tokens = []
    for index, slot in enumerate(layout.slots):
        for place in range(S):
            if slot.frame == CHOSEN:
                at = (index - layout.chosen.slots.start) * S + place
                tokens.append(
                    (
                        layout.chosen.frames[item, at].item(),
                        layout.chosen.indices[item, at].item(),
                        slot.position,
                    )
                )
            else:
                tokens.append((slot.frame, place, slot.position))
    tokens += [(frame, place, frame) for frame in frames for place in range(S)]
    return tokens[sink * S : len(tokens) - recent * S]


@pytest.mark.parametrize(("sink", "size"), [(3, 3), (2, 3), (3, 1), (1, 2)])
def test_an_ema_sink_is_the_recurrence(sink, size):
    """The i-th frame that leaves in a roll goes to sink slot i modulo S."""
    policy = make_policy("ema_sink", window=sink + 2 * size, sink=sink, alpha=0.7)
    run = Simulation(policy, [size] * 8)
    tail: list[int] = []  # frames after the sink
    expected: dict[int, torch.Tensor] = {}
    for _ in range(8):
        excess = max(0, len(run.cache.slots) + size - policy.window)
        leaving, tail = tail[:excess], tail[excess:]
        for order, frame in enumerate(leaving):
            before = expected.get(order % sink, run.values[1][order % sink])
            expected[order % sink] = 0.7 * before + 0.3 * run.values[1][frame]
        *_, (frames, _, seen) = run.block(size)
        tail += [frame for frame in frames if frame >= sink]
        for index, value in expected.items():
            assert run.cache.frames[index] == AVERAGE
            close(seen[1][1][:, index * S : (index + 1) * S], value, 1e-5)
    assert expected


def test_two_memories_are_the_recurrence():
    policy = make_policy("two_memories", window=8, sink=2, alpha_long=0.05, alpha_short=0.4)
    run = Simulation(policy, [2] * 8)
    memories = None
    for block in range(8):
        *_, (frames, _, seen) = run.block(2)
        if frames.stop > 8:
            leaving = [2 * block - 4 + i for i in range(2)]  # slots 4 and 5 before the block came
            mean = torch.cat([run.values[0][f] for f in leaving], 1).mean(1, keepdim=True)
            memories = memories and [
                (1 - a) * m + a * mean for m, a in zip(memories, (0.05, 0.4), strict=True)
            ]
            memories = memories or [mean, mean]
            for slot, memory in enumerate(memories, 2):
                close(seen[0][1][:, slot * S : (slot + 1) * S], memory.expand(-1, S, -1, -1), 1e-5)
            assert run.cache.frames[:4] == [0, 1, AVERAGE, AVERAGE]
    assert memories


def test_a_rolling_sink_goes_forwards_and_backwards():
    run = Simulation(make_policy("rolling_sink", window=9), [3] * 10)
    late = []
    for _ in range(10):
        for _ in run.block(3):
            pass
        late.append(run.cache.frames[:3])
    assert late[4:] == [[5, 4, 3], [2, 1, 0], [0, 1, 2], [3, 4, 5], [5, 4, 3], [2, 1, 0]]


def test_a_bank_keeps_the_best_under_the_prompt():
    policy = make_policy("memory_bank", window=5, sink=1, bank=3, interval=1)
    run = Simulation(policy, [2] * 9)
    banks = {(layer, item): [] for layer in range(LAYERS) for item in range(BATCH)}
    for block in range(9):
        for _, _, _seen in run.block(2):
            pass
        for (layer, item), bank in banks.items():
            if block == 0:
                continue
            if len(bank) == 3:
                text = run.text[layer][0][item].mean(0)
                keys = {
                    f: rotate(run.raw[layer][f][item : item + 1], *run.rope([f]))[0].mean(0) for f in bank
                }
                bank[:] = sorted(bank, key=lambda f: -(text * keys[f]).sum())[:2]
            bank.append(2 * block - 2)
            slots = run.cache.layouts[layer].slots
            assert [slot.items[item] for slot in slots if slot.items] == bank
    assert len({tuple(bank) for bank in banks.values()}) > 1  # layers and items choose for themselves


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "magic"}, "'magic' is not one of full, window"),
        ({"name": "window", "windw": 3}, "has no field 'windw'; it has"),
        ({"name": "window", "window": 3, "sink": 3}, "must be at least 4"),
        ({"name": "window", "window": "9"}, "window must be int, not '9'"),
        ({"name": "window", "released": "rolex"}, "'rolex' is not one of self_forcing, longlive"),
        ({"name": "full", "released": True}, "released True is not one of none"),
        ({"name": "participative", "sink": 4, "recent": 4, "budget": 7}, "it must be at least 8"),
        ({"name": "participative", "window": 12}, "it may be at most 12"),
        ({"name": "ema_sink", "alpha": 1.5}, "alpha must be in 0..1, not 1.5"),
        ({"name": "two_memories", "window": 5}, "must be at least 6"),
        ({"name": "rolling_sink", "sink": 1}, "has no sink"),
        ({"name": "memory_bank", "bank": 0}, "bank must be at least 1"),
    ],
)
def test_fields_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(**settings)


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ({"name": "window", "window": 5, "sink": 3}, [3], "must be at least 6"),
        ({"name": "participative", "recent": 2, "budget": 14}, [3], "recent 2 cannot hold a block of 3"),
        ({"name": "rolling_sink", "window": 5}, [3], "cannot hold two blocks of 3"),
        ({"name": "deep_sink", "released": True}, [1, 3], "has blocks of 3 frames"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(settings, sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(**settings).check(sizes)
