"""Every command of the README runs as it stands, in a fresh clone and in order, and dirties no git tree."""

import ast
import re
import subprocess
import sys
from os import environ
from urllib.parse import unquote

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^    ((?:bash|python|source|mkdir|papermill) [^#\n]*?)(?: {2,}#.*)?$", re.MULTILINE)
COMMANDS = COMMAND.findall(README)

NEED_WEIGHTS = [
    "bash experiments/download_weights.sh",
    "python experiments/check_model.py",
    "python experiments/run_extraction_figure4.py --layer_indices 1 5",
    "mkdir -p outputs && papermill --cwd notebooks notebooks/plt_fig4.ipynb outputs/plt_fig4.ipynb",
]
THESE_TESTS = "bash tests/run.sh"
SHORTER = {  # thirty layers are drawn as one is
    "bash experiments/run_notebooks.sh extract_all_attention.ipynb "
    "cache/published/self_forcing_dmd_eagle_21f.pt all": (" all", " 20")
}


def test_every_command_is_run_or_needs_weights_and_comes_after_the_activation():
    assert len(COMMANDS) > 6 and {*NEED_WEIGHTS, THESE_TESTS, *SHORTER} <= set(COMMANDS)
    assert all(re.search(r"\.(sh|py)\b|activate|papermill", command) for command in COMMANDS)
    assert len(README.splitlines()) <= 120
    activated = README.index("source .venv/bin/activate")
    bare = [m.start() for m in re.finditer(r"^    (python|papermill|mkdir)", README, re.MULTILINE)]
    assert bare and min(bare) > activated


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_links_and_scripts_of_a_document_lead_somewhere(path):
    text = path.read_text()
    links = [
        link for link in re.findall(r"\]\((?!http|#)([^)#]+)", text) if not (path.parent / link).exists()
    ]
    scripts = re.findall(r"(?:bash|python) ((?:experiments|tests)/\S+\.(?:sh|py))", text)
    assert not links and not [script for script in scripts if not (ROOT / script).exists()]


def test_errors_of_the_document_are_those_of_the_code():
    """In the code a message is an f-string; both are compared by what stands between the names."""
    paths = [path for room in ("wan", "experiments") for path in (ROOT / room).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    texts = [
        getattr(node, "values", [node]) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    said = "\n".join("".join(str(getattr(part, "value", "…")) for part in parts) for parts in texts)
    page = (ROOT / "docs/errors.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    patterns = [".*".join(map(re.escape, row.split("…"))) for row in rows]
    assert len(rows) > 8 and not [pattern for pattern in patterns if not re.search(pattern, said)]


@pytest.mark.beside
def test_the_site_is_built_without_a_warning_and_asks_no_network(tmp_path):
    pytest.importorskip("mkdocs", reason='pip install -e ".[docs]"')
    command = ["mkdocs", "build", "-q", "--strict", "-f", str(ROOT / "docs/mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]
    pages = sorted(tmp_path.rglob("[!4]*.html"))
    lost, fetched = [], []
    elsewhere = r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="?(?:https?:)?//[^">]*'
    for page in pages:
        text = page.read_text()
        fetched += re.findall(elsewhere, text)
        links = re.findall(r'<(?:a|img)[^>]* (?:href|src)="?([^"#?> ]+)', text)
        lost += [link for link in links if ":" not in link and not (page.parent / unquote(link)).exists()]
    assert len(pages) > 40 and not lost and not fetched
    assert "Knockout" in (tmp_path / "search/search_index.js").read_text()


@pytest.mark.beside
def test_the_readme_from_top_to_bottom(clone):
    (clone / "MY.csv").write_text("key_frame,mine\n0,5.1\n3,-3.8\n9,0.4\n")
    (clone / ".git/info/exclude").write_text("MY.csv\n")  # the user's own
    quiet = environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        if command in NEED_WEIGHTS or command == THESE_TESTS:
            continue
        short = command.replace(*SHORTER.get(command, ("", "")))
        shell = ["bash", "-ec", f"source .venv/bin/activate; {short}"]
        done = subprocess.run(shell, cwd=clone, env=quiet, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stderr[-500:])
    status = subprocess.run(["git", "status", "--porcelain"], cwd=clone, capture_output=True, text=True)
    assert status.stdout == ""
    assert (clone / "outputs/wan-mini.mp4").is_file() and (clone / "outputs/atlas.html").is_file()
