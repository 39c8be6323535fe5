"""Classes of heads by published rules, and the mean queries that a policy takes."""

import numpy as np
import pytest
import torch
from helpers import synthetic_caches

from experiments import make_head_classes
from experiments.caches import save_cache
from experiments.caches.files import CacheError
from experiments.captured import policy_atlas
from experiments.studies import head_classes
from wan.policies import make_policy

RULES = {"dummy": {0, 1, 2}, "pyramid": {1, -1, 2}, "mass": {0, 1}, "forcing_kv": {0, 1}}


def test_every_head_has_a_class_and_dummy_heads_have_the_least_mass_on_the_past():
    atlas = policy_atlas("configs/wan_mini.yaml", {"name": "full"}, 12)
    for rule, labels in RULES.items():
        found = head_classes.classes_of(rule, atlas, num=40)
        assert found.shape == (8, 12) and set(found.flat) <= labels
        if rule in ("dummy", "mass"):  # 40 dummy heads, or 40 of the most mass
            assert (found == max(labels)).sum() == 40
    mass = np.array([[[0.5, 0.1, 0.4], [0.1, 0.5, 0.4], [0.01, 0.02, 0.97]]])
    assert head_classes.dummy(mass, [2], 1).tolist() == [[0, 1, 2]]
    for more, said in (({"block": 0}, "--block 0 is not in the blocks .* 1, 2, 3"),
                       ({"block": 4}, "--block 4 is not"),
                       ({"num": 97}, "--num 97 heads were asked for, and this atlas has 96")):  # fmt: skip
        with pytest.raises(CacheError, match=said):
            head_classes.classes_of("dummy", atlas, **more)


def test_heads_of_the_largest_effect_are_those_of_a_causal_atlas(tmp_path, capsys):
    effects = torch.arange(12.0).view(1, 3, 4, 1).repeat(2, 1, 1, 6)
    effects[..., :3] = torch.nan  # block 0 has no past
    cache = synthetic_caches.causal_atlas(6, range(3), 4) | {"effects": effects}
    cache |= {
        "prompts": ["a", "b"],
        "seeds": [0, 0],
        "floor": torch.zeros(2, 6),
        "between_seeds": torch.ones(2, 6),
    }
    cache |= {"head_norms": torch.ones(2, 3, 4)}
    path, output = tmp_path / "causal.pt", tmp_path / "classes.csv"
    save_cache(path, cache, overwrite=True)
    make_head_classes.run([str(path), "--rule", "effect", "--num", "3", "--output_path", str(output)])
    assert output.read_text() == "0,0,0,0\n0,0,0,0\n0,1,1,1\n"
    assert "9 of class 0 (other), 3 of class 1 (largest effect)" in capsys.readouterr().out
    assert make_policy("per_head", file=str(output), policies={"0": {"name": "full"}, "1": {"name": "full"}})
    with pytest.raises(CacheError, match="a causal atlas of every head: make it by"):
        head_classes.classes_of("effect", cache | {"each": "layer"})


def test_mean_queries_are_those_that_a_policy_takes(tiny):
    policy = make_policy("triattention", statistics=head_classes.query_means(tiny.config))
    assert policy.q_mean.shape == (2, 2, 8)
    assert (policy.q_mean.abs() <= policy.q_abs_mean + 1e-5).all() and policy.q_mean.abs().max() > 0.1
