"""What the documents say of policies: the example that is added, the table, the measured distances."""

import re

from conftest import ROOT, golden_model

from experiments.benchmarks.reproduce.policies import PICTURES
from wan.attention import ATTENTION_WEIGHT_CAPTURE
from wan.pipeline import CausalInferencePipeline
from wan.policies import POLICIES


def test_the_policy_of_the_contributors_page_runs():
    import torch

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(@dataclass\nclass EveryOther.*?)```", text, re.S)[1]
    names: dict = {}
    header = "from dataclasses import dataclass\nfrom wan.policies import *\n"
    exec(header + source, names)
    policy = names["EveryOther"](window=8, sink=1)
    policy.check([3])
    pipeline = CausalInferencePipeline(golden_model(), cache_policy=policy)
    with ATTENTION_WEIGHT_CAPTURE.capture(layers=[0], steps=[0], granularity="frame") as calls:
        pipeline.inference(torch.randn(1, 15, 16, 2, 4), prompt_embeds=torch.randn(1, 32, 64))
    assert calls[-1]["key_frames"] == [0, 4, 6, 8, 10, 12, 13, 14]


def test_the_page_has_every_policy_and_the_measured_distances():
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in POLICIES)
    shown = re.findall(r"\]\(policies/(\w+)\.svg\)", page)
    files = {path.stem: path.stat().st_size for path in (ROOT / "docs/policies").glob("*.svg")}
    assert sorted(shown) == sorted(files) == sorted(PICTURES) and max(files.values()) < 100_000
