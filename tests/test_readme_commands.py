"""Every command of the README runs as it stands, in a fresh clone and in order, and dirties no git tree."""

import ast
import json
import re
import runpy
import subprocess
import sys
from os import environ
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from conftest import ROOT
from test_layout import tracked

README = (ROOT / "README.md").read_text()
COMMAND = re.compile(r"^    ((?:bash|python|source|mkdir|papermill) [^#\n]*?)(?: {2,}#.*)?$", re.MULTILINE)
COMMANDS = COMMAND.findall(README)

NEED_WEIGHTS = [
    "bash experiments/download_weights.sh",
    "python experiments/check_model.py",
    "python experiments/run_extraction_figure4.py --layer_indices 1 5 --output_path cache/figure4.pt",
    "mkdir -p outputs && papermill --cwd notebooks notebooks/plt_fig4.ipynb outputs/plt_fig4.ipynb "
    "-p CACHE_PATH ../cache/figure4.pt",
]
THESE_TESTS = "bash tests/run.sh"
SHORTER = {  # thirty layers are drawn as two are
    "bash experiments/run_notebooks.sh extract_all_attention.ipynb "
    "cache/published/self_forcing_dmd_eagle_21f.pt all": (" all", " 5 20")
}


def test_every_command_is_run_or_needs_weights_and_comes_after_the_activation():
    assert len(COMMANDS) > 6 and {*NEED_WEIGHTS, THESE_TESTS, *SHORTER} <= set(COMMANDS)
    assert all(re.search(r"\.(sh|py)\b|activate|papermill", command) for command in COMMANDS)
    assert len(README.splitlines()) <= 120
    activated = README.index("source .venv/bin/activate")
    bare = [m.start() for m in re.finditer(r"^    (python|papermill|mkdir)", README, re.MULTILINE)]
    assert bare and min(bare) > activated


DOCUMENTS = [ROOT / name for name in tracked() if name.endswith((".md", ".ipynb"))]
SOURCES = [ROOT / name for name in tracked() if name.endswith((".py", ".sh", ".yaml", ".yml", ".toml"))]
MADE_BY_THE_SITE = "notebooks/gallery.md"


def text_of(document: Path) -> str:
    """Return a document's Markdown: the whole file, or a notebook's cells of text."""
    text = document.read_text(encoding="utf-8")
    if document.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors_of(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    text = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(document: Path, link: str) -> bool:
    """Say whether a relative link names a file, and one of its headings if it has an anchor."""
    name, _, anchor = link.partition("#")
    target = document.parent / unquote(name) if name else document
    if anchor and target.suffix == ".md":
        return target.is_file() and anchor in anchors_of(target)
    return target.exists()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_scripts_of_a_document_lead_somewhere(document):
    text = text_of(document)
    links = re.findall(r"\]\((?!https?:|data:|attachment:)([^)\s]+)", text)
    scripts = re.findall(r"(?:bash|python) ((?:experiments|tests)/\S+\.(?:sh|py))", text)
    lost = [link for link in links if not leads_somewhere(document, link)]
    assert not lost and not [script for script in scripts if not (ROOT / script).exists()]


def test_documents_that_code_and_notebooks_name_are_there():
    """Those of older commits, COMMIT:PATH, need not be."""
    named = re.compile(r"(?<![:\w])((?:docs|experiments|notebooks|cache)/[\w/]+\.md(?:#[\w-]+)?)")
    lost = [
        (path.relative_to(ROOT), link)
        for path in [*DOCUMENTS, *SOURCES]
        for link in named.findall(path.read_text(encoding="utf-8"))
        if link != MADE_BY_THE_SITE and not leads_somewhere(ROOT / "README.md", link)
    ]
    assert not lost


def test_errors_of_the_document_are_those_of_the_code():
    """In the code a message is an f-string; both are compared by what stands between the names."""
    paths = [path for room in ("wan", "experiments") for path in (ROOT / room).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    texts = [
        getattr(node, "values", [node]) for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
    said = "\n".join("".join(str(getattr(part, "value", "…")) for part in parts) for parts in texts)
    page = (ROOT / "docs/reference.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    patterns = [".*".join(map(re.escape, row.split("…"))) for row in rows]
    assert len(rows) == 4 and not [pattern for pattern in patterns if not re.search(pattern, said)]


def pages_of_the_site() -> list[str]:
    """Return the pages that docs/mkdocs.yml lists, in order."""
    text = (ROOT / "docs/mkdocs.yml").read_text()
    nav = text.partition("\nnav:\n")[2].partition("\n\n")[0]
    return re.findall(r"(\S+\.(?:md|ipynb))$", nav, re.MULTILINE)


def test_the_site_lists_every_document_and_page_of_the_reference():
    """What mkdocs warns of, without mkdocs: a page that is not there, or in no list."""
    listed, made = pages_of_the_site(), {MADE_BY_THE_SITE}
    made |= {f"reference/{page}.md" for page in runpy.run_path(str(ROOT / "docs/site/reference.py"))["PAGES"]}
    assert len(listed) == len({*listed}) and not [
        page for page in listed if page not in made and not (ROOT / page).is_file()
    ]
    folders = (".", "docs", "notebooks", "experiments", "experiments/findings/*", "cache/published")
    documents = {path for folder in folders for path in ROOT.glob(f"{folder}/*.md")}
    documents -= {path for path in ROOT.glob("experiments/findings/*/*.md") if path.name != "README.md"}
    documents |= {*(ROOT / "notebooks").glob("*.ipynb")}
    names = {str(path.relative_to(ROOT)) for path in documents if path in DOCUMENTS}
    assert made | names <= {*listed}


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
    built = [page.removesuffix(".md").removesuffix(".ipynb") for page in pages_of_the_site()]
    built = [re.sub(r"\bREADME$", "index", page) for page in built]
    assert not [page for page in built if not (tmp_path / f"{page}.html").is_file()]
    assert len(pages) >= len(built) and not lost and not fetched
    assert "Knockout" in (tmp_path / "search/search_index.js").read_text()


@pytest.mark.beside
def test_the_readme_from_top_to_bottom(clone):
    """No module is first imported off the main thread, where Ctrl-C once hung for ever."""
    (clone / "MY.csv").write_text("key_frame,mine\n0,5.1\n3,-3.8\n9,0.4\n")
    (clone / ".git/info/exclude").write_text("MY.csv\n")  # the user's own
    options = {"cwd": clone, "capture_output": True, "text": True}
    options["env"] = environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        if command in NEED_WEIGHTS or command == THESE_TESTS:
            continue
        short = command.replace(*SHORTER.get(command, ("", "")))
        done = subprocess.run(["bash", "-ec", f"source .venv/bin/activate; {short}"], **options)
        assert done.returncode == 0, (command, done.stderr[-500:])
    status = subprocess.run(["git", "status", "--porcelain"], **options)
    assert status.stdout == "" and not (clone / "late_imports").exists()
    assert (clone / "outputs/wan-mini.mp4").is_file() and (clone / "outputs/atlas.html").is_file()
    drawn = clone / "outputs/extract_all_attention/self_forcing_dmd_eagle_21f"
    for N in (5, 20):
        cells = nbformat.read(drawn / f"notebooks/layer{N}.ipynb", 4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
        assert f"Layer {N}, mean_logit, pass 0" in printed
        figures = {f"layer{N}_{name}.svg" for name in ("2d_heatmap_all_heads", "perhead_grid")}
        assert {path.name for path in (drawn / f"layer{N}").iterdir()} == figures
    sheet, page = ((drawn / name).read_text() for name in ("contact_sheet.svg", "index.html"))
    assert re.findall(r">Layer (\d+)</text>", sheet) == ["5", "20"]
    assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["layers"] == [5, 20]
