"""What is recorded of heads' outputs, and means over runs, against sums by hand."""

from types import SimpleNamespace

import pytest
import torch
from helpers.rollouts import MODEL_LAYERS, rollout, tiny_pipeline

from wan.pipeline import CausalInferencePipeline
from wan.recorders import HeadOutputs, ReferenceMeans, record_head_outputs

FRAMES, TOKENS, HEADS = 3, 5, 4


def a_call(of_heads=None):
    at = SimpleNamespace(query_frames=range(FRAMES), block=1, step=0, branch="cond")
    site = SimpleNamespace(kind="self", layer=2)
    return SimpleNamespace(site=site, at=at, of_heads=of_heads, layer_heads=HEADS)


@pytest.mark.parametrize("groups", [None, [(1,), (3, 0), (2,)]], ids=["all heads", "heads by groups"])
def test_means_and_sizes_are_those_of_every_token(groups):
    z = torch.randn(2, FRAMES * TOKENS, HEADS, 6, generator=torch.Generator().manual_seed(0))
    outputs = HeadOutputs()
    for group in groups or [None]:
        part = z if group is None else z[:, :, list(group)]
        assert outputs._keep(a_call(group), part) is part
    where = (("self", 2, 0, "cond"), 1)
    assert set(outputs.means) == set(outputs.norms) == {where}
    for item in range(2):
        for frame in range(FRAMES):
            tokens = z[item, frame * TOKENS : (frame + 1) * TOKENS].double()  # [S, H, D]
            mean, size = tokens.mean(0), (tokens**2).sum(-1).sqrt().mean(0)
            torch.testing.assert_close(outputs.means[where][item, frame].double(), mean, atol=1e-6, rtol=0)
            torch.testing.assert_close(outputs.norms[where][item, frame].double(), size, atol=1e-6, rtol=0)


def test_a_place_that_few_blocks_have_is_a_mean_of_these():
    """Blocks of 1, 3 and 3 frames, twice: three have a first frame, two a second and a third."""
    pipeline = CausalInferencePipeline(tiny_pipeline().model, independent_first_frame=True)
    with record_head_outputs() as outputs:
        rollout(pipeline, 7)
    reference = ReferenceMeans.over([outputs, outputs])
    assert len(reference.values) == MODEL_LAYERS * 5 * len({key[0] for key in reference.values})
    for key, values in reference.values.items():
        blocks = [outputs.means[key, number][0] for number in range(3)]
        assert [len(block) for block in blocks] == [1, 3, 3] and len(values) == 3
        first = (blocks[0][0] + blocks[1][0] + blocks[2][0]) / 3
        torch.testing.assert_close(values[0], first, atol=1e-6, rtol=0)
        torch.testing.assert_close(values[1:], (blocks[1][1:] + blocks[2][1:]) / 2, atol=1e-6, rtol=0)


def test_batch_items_of_runs_count_alike():
    key = ("self", 0, 0, "cond")
    one, two = (
        HeadOutputs(means={(key, 0): torch.tensor(rows).view(-1, 1, 1, 1)}) for rows in ([1.0, 2.0], [6.0])
    )
    assert ReferenceMeans.over([one, two]).values[key].item() == 3
