"""Give mkdocs the documents under their paths in the repository, so that a link holds in both places."""

import base64
import json
import re
from pathlib import Path

import griffe
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
# The public API: page -> title, objects and the members of each; none is named: without members
REFERENCE = {
    "session": (
        "Load, generate, capture",
        """experiments.session.load
        experiments.session.Session: generate model vae
        experiments.runs.Run: video save show
        experiments.captured.capture
        experiments.captured.Captured: calls tables save atlas
        experiments.captured.compare
        experiments.captured.Comparison: psnr video save show
        experiments.captured.x0_lens
        experiments.captured.Lens: distance frames plot
        experiments.attribution.gradients
        experiments.attribution.SiteGradients: backward tables save
        experiments.attribution.attribute
        experiments.attribution.Scores: open table plot save""",
    ),
    "caches": (
        "Atlases, profiles, stores",
        """experiments.captured.Atlas: open units axes view plot mean compare save
        experiments.captured.MeanAtlas: interval std plot
        experiments.caches.store.load_cache
        experiments.caches.view.open_profiles
        experiments.caches.view.Profiles: values
        experiments.caches.activations.ActivationStore: runs check rows
        experiments.caches.activations.StoredRun: read tables latents""",
    ),
    "miniature": (
        "The miniature: scenes and tracker",
        """experiments.miniature.moving_shapes.Scene: caption kind
        experiments.miniature.moving_shapes.held_out_scenes
        experiments.miniature.moving_shapes.sample_scenes
        experiments.miniature.moving_shapes.scene_of
        experiments.miniature.moving_shapes.render_videos
        experiments.miniature.tracking.judge
        experiments.miniature.tracking.judge_by_caption
        experiments.miniature.tracking.judge_seconds
        experiments.miniature.tracking.in_sight
        experiments.miniature.tracking.track
        experiments.miniature.tracking.Track: seen color_name shape_name direction""",
    ),
    "edits": (
        "Edits",
        """experiments.captured.intervene
        wan.interventions.at
        wan.interventions.Source
        wan.interventions.Edit
        wan.interventions.Knockout
        wan.interventions.Bias
        wan.interventions.Ablate
        wan.interventions.Patch
        wan.interventions.Steer
        wan.interventions.Move
        wan.interventions.Band
        wan.interventions.Jitter""",
    ),
    "policies": (
        "Cache policies",
        """wan.cache.CachePolicy: capacity start admit positions query_positions written layout flush
        wan.cache.WindowedPolicy: admit evict
        wan.cache.KVCache: append keep drop view tokens
        wan.cache.Window
        wan.policies.frames.Relative
        wan.policies.frames.DeepSink
        wan.policies.frames.Participative
        wan.policies.frames.EmaSink
        wan.policies.frames.TwoMemories
        wan.policies.frames.RollingSink
        wan.policies.frames.MemoryBank
        wan.policies.frames.PerHead
        wan.policies.headwise.DummyForcing
        wan.policies.headwise.ForcingKV
        wan.policies.headwise.TriAttention
        wan.policies.frames.HeadBudget""",
    ),
}
TESTED = ("docs/own_code.md", "docs/recipes.md", "docs/interventions.md", "README.md")  # examples of these
BLOCK = re.compile(r"^```python\n(.+?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    "Comparison": 'compare(run, edited).save("outputs/edited.mp4")',
    "Lens": "x0_lens(session, prompt, layers=[4], blocks=[0]).distance",
    "open_profiles": 'open_profiles(load_cache("cache/atlas.pt"), step=4).values(layer=5)',
    "Profiles": "atlas.view(step=4).values(layer=5).profile",
    "Edit": 'Knockout(frames="first", layers=[5], heads=[10], blocks=[1], passes="denoise")',
    "Move": 'intervene(Move("sink", position=18, heads=[3], layers=[5], passes="denoise"))',
    "Band": 'intervene(Band(bands=[0], scale=0.0, heads=[3], layers=[5], passes="denoise"))',
    "Jitter": "intervene(Jitter(scale=0.8, seed=0))",
    "Scene": '[scene.caption for scene in held_out_scenes(["wall"], 2)]',
    "held_out_scenes": '[scene.caption for scene in held_out_scenes(["wall"], 2)]',
    "scene_of": "scene_of(prompt).movers[0].color",
    "render_videos": 'render_videos(held_out_scenes(["crossing"], 1), 81)',
    "judge": "judge(edited.video.permute(0, 3, 1, 2) / 255, scene_of(prompt))",
    "judge_by_caption": "judge_by_caption(edited.video.permute(0, 3, 1, 2) / 255, prompt)",
    "judge_seconds": "judge_seconds(edited.video.permute(0, 3, 1, 2) / 255, scene_of(prompt)).right",
    "track": "track(edited.video.permute(0, 3, 1, 2) / 255, in_sight(scene_of(prompt), 64)).direction",
    "Track": "track(edited.video.permute(0, 3, 1, 2) / 255, in_sight(scene_of(prompt), 64)).color_name()",
} | {
    name: f'load("wan_mini", num_frames=6, cache_policy="{settings}")'
    for name, settings in {
        "Window": "window,window=9,sink=3",
        "Relative": "relative,window=12,sink=3",
        "DeepSink": "deep_sink,window=21,sink=10",
        "Participative": "deep_forcing",
        "EmaSink": "ema_sink,window=9,sink=3",
        "TwoMemories": "memrope",
        "RollingSink": "rolling_sink,window=21",
        "MemoryBank": "memflow",
        "PerHead": "mini_pyramid_heads",
        "DummyForcing": "mini_dummy_forcing",
        "ForcingKV": "mini_forcing_kv",
        "TriAttention": "mini_triattention",
        "HeadBudget": "head_budget",
    }.items()
}


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
    blocks = [block for path in TESTED for block in BLOCK.findall((ROOT / path).read_text())]
    for name, (title, objects) in REFERENCE.items():
        text = "\n\n".join([f"# {title}", *(entry(line, blocks) for line in objects.splitlines())])
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    shown = next(part["Notebooks"] for part in config.nav if "Notebooks" in part)
    cards = [card(ROOT / name, files, config) for name in shown if name.endswith(".ipynb")]
    text = "\n\n".join(
        ["---\nhide: [toc]\n---", "# Gallery", "<div class='gallery' markdown>", *cards, "</div>"]
    )
    files.append(File.generated(config, "notebooks/gallery.md", content=text))
    return files


def entry(line, blocks):
    """Return an object's directive and an example: ours, its docstring's, or the shortest tested block."""
    path, _, members = line.strip().partition(":")
    module, _, name = path.rpartition(".")
    text = f"::: {path}\n    options:\n      members: [{', '.join(members.split())}]\n"
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    own = re.search(rf"^(?:class|def) {name}\b.*?(?=^(?:class|def|@)|\Z)", source, re.MULTILINE | re.DOTALL)
    calls = [block for block in blocks if re.search(rf"(?<!\.)\b{name}\(", block)]
    found = min(calls or [block for block in blocks if name in block], key=len, default="")
    example = EXAMPLES.get(name) or ("" if ">>>" in own[0] else found)
    return f"{text}\n```python\n{example.strip()}\n```\n" if example else text


class Doctests(griffe.Extension):
    """Fence the examples of docstrings: their >>> are quotes in Markdown."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = re.sub(
                r"^>>> .*(?:\n.+)*", r"```pycon\n\g<0>\n```", obj.docstring.value, flags=re.MULTILINE
            )


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
