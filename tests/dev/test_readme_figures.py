"""The README's figures are those that its script makes from the published data today."""

import re

from conftest import ROOT

from experiments.dev import readme_figures


def words(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_committed_figures_are_up_to_date(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    readme_figures.run(["--output_dir", str(tmp_path)])
    made = sorted(tmp_path.glob("*.svg"))
    assert len(made) == 2
    for file in made:
        committed = readme_figures.FOLDER / file.name
        assert words(committed) == words(file), (
            f"{file.name} is old; run: python experiments/dev/readme_figures.py"
        )
        assert len(words(file)) > 20
        assert committed.stat().st_size < 300_000
    text = " ".join(words(tmp_path / "figure4_published.svg"))
    agreement = [float(r) for r in re.findall(r"r = (\d\.\d{3})", text)]
    assert len(agreement) == 2 and min(agreement) >= 0.98
    kinds = " ".join(words(tmp_path / "kinds_of_heads_published.svg"))
    assert "90.0% agree" in kinds and "all query frames" in kinds and "query frames 18" not in kinds
