"""Work that waits for numbers of a GPU: in order, all by the end of a pass, none after an error."""

from functools import partial

import pytest

from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.captured_call import Pass
from wan.keys import KeyLayout
from wan.late_logits import BEHIND, LateWork


def test_work_is_done_in_order_and_no_later_than_said():
    late, done = LateWork(), []
    for n in range(BEHIND + 2):
        late.add(partial(done.append, n))
    assert done == [0, 1] and late.is_for(KeyLayout((), 1)) and late.is_for(None)
    late.finish()
    assert done == list(range(BEHIND + 2)) and not late.is_for(None)


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_ends_with_all_done_or_forgotten(fails):
    done, at = [], Pass(query_frames=(0,))
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[]):
        late = ATTENTION_WEIGHT_CAPTURE._sessions[-1].late
        try:
            with ATTENTION_WEIGHT_CAPTURE.during(at):
                late.add(lambda: done.append(ATTENTION_WEIGHT_CAPTURE.now))
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        assert done == ([] if fails else [at]) and not late.is_for(None)
