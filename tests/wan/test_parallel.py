"""One rollout in several processes, by heads: the latents and the captured numbers of one process."""

import pytest
import torch
from helpers import parallel_rollouts
from helpers.parallel_rollouts import REQUESTS, edited_runs, every_policy, roll_out, small_model, together

from wan.errors import ConfigError
from wan.parallel import apply_head_parallel, check_size, legal_sizes
from wan.policies import PromptSwitch, make_policy

ATOL = 1e-5


def parallel_model(group):
    model = small_model()
    if group is not None:
        apply_head_parallel(model, group)
    return model


def assert_same(found, expected):
    (latents, calls), (wanted, wanted_calls) = found, expected
    torch.testing.assert_close(latents, wanted, rtol=0, atol=ATOL)
    assert len(calls) == len(wanted_calls)
    for call, other in zip(calls, wanted_calls, strict=True):
        assert (call.site, call.at, call.q_shape, call.k_shape) == (
            other.site, other.at, other.q_shape, other.k_shape)  # fmt: skip
        assert call.values.keys() == other.values.keys() and call["key_frames"] == other["key_frames"]
        for name, values in call.values.items():
            half = 2**-10 if values.dtype == torch.float16 else 0.0  # two roundings of nearly one number
            torch.testing.assert_close(values, other.values[name], rtol=half, atol=ATOL, equal_nan=True)


def test_every_policy(tmp_path):
    expected = every_policy(small_model(), tmp_path)
    first, *others = together(2, lambda group: every_policy(parallel_model(group), tmp_path))
    for name in parallel_rollouts.POLICIES:
        assert_same(first[name], expected[name])
        for other in others:
            assert torch.equal(other[name][0], first[name][0]) and not other[name][1]


def test_edits_of_some_heads(tmp_path):
    expected, norms = edited_runs(small_model(), tmp_path)
    (first, first_norms), *_ = together(2, lambda group: edited_runs(parallel_model(group), tmp_path))
    for name, run in expected.items():
        assert_same(first[name], run)
    torch.testing.assert_close(first_norms, norms, rtol=0, atol=ATOL)


def looked_at_and_switched(group):
    model, window = parallel_model(group), make_policy("window", window=9, sink=3)
    text = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(9))
    switch = {"prompt_schedule": [PromptSwitch(9, how="recache", prompt_embeds=text)]}
    return *(roll_out(model, None, *seen)[0] for seen in ((), REQUESTS)), roll_out(model, window, **switch)[0]


def test_looking_changes_no_bit_and_a_recache_is_that_of_one_process():
    *_, expected = looked_at_and_switched(None)
    for plain, seen, switched in together(3, looked_at_and_switched):
        assert torch.equal(plain, seen)
        torch.testing.assert_close(switched, expected, rtol=0, atol=ATOL)


def test_sizes_that_split():
    assert legal_sizes(12) == [1, 2, 3, 4, 6, 12] and legal_sizes(12, [16, 48]) == [1, 2, 4]
    check_size(4, "m", 12, [48])
    said = "--gpus 8 does not split m: its 12 heads and blocks of 16 or 48 tokens go on 1 or 2 or 4 GPUs"
    with pytest.raises(ConfigError, match=said):
        check_size(8, "m", 12, [48, 16])


def wrong_calls(group):
    model = small_model()
    if group.size() == 5:
        return [refused(lambda: apply_head_parallel(model, group))]
    apply_head_parallel(model, group)
    text = model.text_keys_values(torch.zeros(1, 3, 16))
    calls = ((torch.zeros(1, 1, 16, 2, 2), torch.zeros(1)), (torch.zeros(1, 2, 16, 4, 6), torch.zeros(1, 2)))
    return [refused(lambda x=x, t=t: model(x, t, text)) for x, t in calls]


def refused(function) -> str:
    with pytest.raises(ConfigError) as raised:
        function()
    return str(raised.value)


def test_calls_that_do_not_split():
    (heads,), *_ = together(5, wrong_calls)
    assert heads == "6 heads do not split over 5 GPUs; try one of [1, 2, 3, 6]"
    (tokens, training), *_ = together(2, wrong_calls)
    assert tokens == "a call of 1 tokens does not split over 2 GPUs"
    assert training == "several GPUs make rollouts: no mask, and one timestep for all frames of a call"
