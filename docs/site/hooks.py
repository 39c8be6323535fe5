"""Give mkdocs the documents under their paths in the repository, so that a link holds in both places."""

import base64
import json
import re
from pathlib import Path

import reference
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "*.md",
    "docs/*.md",
    "*/README.md",
    "experiments/findings/*/README.md",
    "cache/published/*.md",
    "tests/golden/*.md",
    "notebooks/*.ipynb",
    "notebooks/figures/*.mp4",
)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@event_priority(100)  # before mkdocs-jupyter, which takes the notebooks over
def on_files(files, config):
    """Add documents and what they link to, notebooks, their gallery, and pages of docstrings."""
    waiting, found = {path for pattern in DOCUMENTS for path in ROOT.glob(pattern)}, set()
    while waiting - found:  # documents that documents link to have links, too
        found |= waiting
        texts = [(path, path.read_text()) for path in waiting if path.suffix == ".md" and path.is_file()]
        waiting = {(path.parent / link).resolve() for path, text in texts for link in LINK.findall(text)}
    for path in sorted(found):
        if path.is_file():
            files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, False))
    for page, (title, _) in reference.PAGES.items():
        entries = [entry(path, members) for path, members in reference.objects_of(page).items()]
        text = "\n\n".join([f"# {title}", *entries])
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    shown = next(part["Notebooks"] for part in config.nav if "Notebooks" in part)
    cards = [card(ROOT / name, files, config) for name in shown if name.endswith(".ipynb")]
    text = "\n\n".join(
        ["---\nhide: [toc]\n---", "# Gallery", "<div class='gallery' markdown>", *cards, "</div>"]
    )
    files.append(File.generated(config, "notebooks/gallery.md", content=text))
    return files


def entry(path, members):
    """Return an object's directive, and the example that its docstring lacks."""
    text = f"::: {path}\n    options:\n      members: [{', '.join(members)}]\n"
    example = reference.EXAMPLES.get(path.rpartition(".")[2])
    if example is None:
        return text
    return f"{text}\n```python\n{example.strip()}\n```\n"


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
    """Let the links of notebooks, which mkdocs does not read, lead to pages; show README's picture moving."""
    if page.file.src_uri == "README.md":
        moving = r'\g<0><video src="\1.mp4" width="100%" autoplay loop muted playsinline></video>'
        html = re.sub(r'<img[^>]*src="([^"]*/where_heads_look)\.svg"[^>]*>', moving, html)
    if page.file.src_uri.endswith(".ipynb"):
        html = re.sub(r'href="([^":]*)README\.md', r'href="\1index.html', html)
        html = re.sub(r'href="([^":]*)\.(?:md|ipynb)(?=["#])', r'href="\1.html', html)
    return html
