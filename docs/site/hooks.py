"""Give mkdocs the documents under their paths in the repository, so that a link holds in both places."""

import base64
import json
import re
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "*/README.md",
    "cache/published/*.md",
    "tests/golden/*.md",
    "notebooks/*.ipynb",
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
MEASURES = "measures first_frame rope_waves taxonomy video_maps effects drift"
REFERENCE = {  # page -> title, modules
    "session": ("Load, capture, plot", "experiments.session experiments.caches.store"),
    "edits": ("Edits", "wan.interventions wan.sites"),
    "policies": ("Policies", "wan.policies wan.policies.frames wan.policies.headwise wan.cache"),
    "model": (
        "Model and capture",
        "wan.config wan.pipeline wan.attention wan.keys wan.capture wan.diffusers_capture",
    ),
    "measures": ("Measures", " ".join(f"experiments.analysis.{name}" for name in MEASURES.split())),
    "figures": (
        "Figures",
        " ".join(f"experiments.figures.{name}" for name in ("heads", "atlas", "video_maps")),
    ),
}


@event_priority(100)  # before mkdocs-jupyter, which takes the notebooks over
def on_files(files, config):
    """Add documents and what they link to, notebooks, their gallery, and pages of docstrings."""
    found = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}
    for path in [path for path in found if path.suffix == ".md"]:
        found |= {(path.parent / link).resolve() for link in LINK.findall(path.read_text())}
    for path in sorted(found):
        if path.is_file():
            files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, False))
    for name, (title, modules) in REFERENCE.items():
        text = "\n\n".join([f"# {title}", *(f"::: {module}" for module in modules.split())])
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    shown = next(part["Notebooks"] for part in config.nav if "Notebooks" in part)
    cards = [card(ROOT / name, files, config) for name in shown if name.endswith(".ipynb")]
    text = "\n\n".join(
        ["---\nhide: [toc]\n---", "# Gallery", "<div class='gallery' markdown>", *cards, "</div>"]
    )
    files.append(File.generated(config, "notebooks/gallery.md", content=text))
    return files


def card(path, files, config):
    """Copy a notebook's first figure into the site; return it and the title as a link to the notebook."""
    cells = json.loads(path.read_text())["cells"]
    title = "".join(cells[0]["source"]).split("\n")[0].lstrip("# ")
    drawn = [out.get("data", {}) for cell in cells for out in cell.get("outputs", [])]
    for data in drawn:
        if "image/svg+xml" in data:
            name, content = f"{path.stem}.svg", "".join(data["image/svg+xml"])
        elif "image/png" in data:
            name, content = f"{path.stem}.png", base64.b64decode("".join(data["image/png"]))
        else:
            continue
        files.append(File.generated(config, f"notebooks/gallery/{name}", content=content))
        return f"[![](gallery/{name}) {title}]({path.name})"
    return f"[{title}]({path.name})"


def on_page_content(html, page, config, files):
    """Let the links of notebooks, which mkdocs does not read, lead to pages."""
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'href="([^":]*)README\.md', r'href="\1index.html', html)
        html = re.sub(r'href="([^":]*)\.(?:md|ipynb)(?=["#])', r'href="\1.html', html)
    return html
