"""Execute the committed notebooks and store each with small outputs, so that the forge shows its figures.

    python experiments/dev/notebook_outputs.py [NAME ...]
    python experiments/dev/notebook_outputs.py --check

A notebook runs in a folder of its own, beside links to what the repository ships; caches that it does not
ship are made there with the miniature. metadata.outputs keeps a SHA-256 of the cells and of the input files:
--check compares it, executes nothing, and ends with exit code 2 where one is old.
"""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.caches.files import RunError, replacing
from experiments.running.cli import Parser, main

ROOT = Path(__file__).parents[2]
FOLDER = Path("notebooks")
LIMIT = 300_000  # bytes of a stored notebook
SIZES = ((1200, 128), (1000, 96), (850, 64), (720, 48), (600, 32))  # widest picture in pixels, its colours
TOO_LARGE = "This figure is too large to be stored here: run the notebook."
LINKS = ("configs", "checkpoints", "cache/published", "cache/wan-mini-training", "docs")
EAGLE = "cache/published/self_forcing_dmd_eagle_21f.pt"
PUBLISHED = ("cache/published/*",)
MINI = ("configs/wan_mini.yaml", "checkpoints/wan-mini/**/*.safetensors", "checkpoints/wan-mini/*.pt")
MINI_CONFIG = ("--config_path", "configs/wan_mini.yaml")
ON_THE_VIDEO = (
    *("--layer_indices", *map(str, range(8)), "--query_patch", "18,1,1", "--words", "--save_video"),
    *("--prompt", "a blue circle moving right over a light yellow background", "--steps", "0", "4"),
)
HIDING = "a purple square moving right behind a white wall over a dark green background"
EDITS = {
    "edits.yaml": "interventions: [{edit: knockout, frames: past, layers: [3, 4], passes: denoise}]\n",
    "first.yaml": "interventions: [{edit: knockout, frames: first, passes: denoise}]\n",
    "prompts.txt": f"{HIDING}\na red circle moving right over a dark blue background\n",
}
ATLAS_OF_EDITS = ("--edit", "first.yaml", "--prompts", "prompts.txt", "--seeds", "0")

Cells = list[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """What a notebook is executed with: files that it depends on, scripts run before, parameters changed."""

    inputs: tuple[str, ...]
    scripts: tuple[tuple[str, ...], ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    limit: int = LIMIT
    files: Mapping[str, str] = field(default_factory=dict)  # that its scripts read


RECIPES = {
    "extract_all_attention": Recipe(
        (EAGLE,), (("layers_from_atlas.py", EAGLE, "--layers", "20", "--output_dir", "cache"),)
    ),
    "interventions": Recipe(
        MINI,
        (
            ("run_intervention.py", *MINI_CONFIG, "--interventions", "edits.yaml", "--prompt", HIDING),
            ("run_extraction_all.py", *MINI_CONFIG, "--output_path", "cache/atlas.pt"),
            ("run_causal_atlas.py", *MINI_CONFIG, *ATLAS_OF_EDITS),
        ),
        limit=150_000,
        files=EDITS,
    ),
    "layer_atlas": Recipe(PUBLISHED, parameters={"CACHE_PATH": f"../{EAGLE}"}),
    "models": Recipe((*MINI, "configs/wan_mini_*.yaml", "cache/wan-mini-training/*.pt"), limit=150_000),
    "on_the_video": Recipe(
        MINI,
        (("run_extraction_maps.py", *MINI_CONFIG, *ON_THE_VIDEO),),
        {"HEADS": [[5, 4], [7, 9], [6, 6], [3, 9]], "WORDS": ["blue", "circle", "yellow"], "STEP": 4},
        limit=150_000,
    ),
    "long_rollouts": Recipe(
        ("docs/long_rollouts*.json", "docs/benchmarks/long_first_frame.json"), limit=150_000
    ),
    "plot_figure4": Recipe(MINI, (("run_extraction.py", *MINI_CONFIG),)),
    "plt_fig4": Recipe(PUBLISHED),
    "policies": Recipe((*MINI, "configs/policies/*.yaml")),
    "sweep": Recipe(PUBLISHED),
}


def run(argv=None):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; all where none is named")
    parser.add_argument("--check", action="store_true", help="say which are current; execute nothing")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - set(RECIPES)):
        parser.error(f"{unknown[0]!r} is not one of {', '.join(RECIPES)}")
    names = args.names or [name for name in RECIPES if (FOLDER / f"{name}.ipynb").is_file()]
    if not args.check:
        for name in names:
            print(store(FOLDER / f"{name}.ipynb"), flush=True)
        return
    states = {name: state(FOLDER / f"{name}.ipynb") for name in names}
    print(*(f"{name}: {said}" for name, said in states.items()), sep="\n")
    if old := [name for name, said in states.items() if said == "old"]:
        raise RunError(f"old outputs; run: python experiments/dev/notebook_outputs.py {' '.join(old)}")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def state(path: Path) -> str:
    """One of "current", "old" and "no outputs": by the hash of cells and inputs."""
    notebook = read(path)
    if "outputs" not in notebook["metadata"]:
        return "no outputs"
    return "current" if notebook["metadata"]["outputs"]["sha256"] == mark(notebook, path.stem) else "old"


def mark(notebook: Mapping[str, Any], name: str) -> str:
    """SHA-256 of a notebook's cells without their outputs, of its recipe, and of every input file."""
    recipe = RECIPES[name]
    cells = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    files = sorted({path for pattern in recipe.inputs for path in ROOT.glob(pattern) if path.is_file()})
    inputs = [
        [path.relative_to(ROOT).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files
    ]
    made_with = [cells, inputs, recipe.scripts, dict(recipe.parameters)]
    said = json.dumps([*made_with, *([dict(recipe.files)] if recipe.files else [])], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def store(path: Path) -> str:
    """Execute a notebook and write it with its outputs, made small; returns a line on it. Raises RunError."""
    notebook = read(path)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        outputs = executed(path.stem, code, folder)
        if any(str(place) in json.dumps(outputs) for place in (folder, ROOT)):
            raise RunError(f"{path.name} prints a path of this machine")
    for count, (cell, shown) in enumerate(zip(code, outputs, strict=True), 1):
        cell["execution_count"], cell["outputs"] = count, shown
    notebook["metadata"]["outputs"] = {"sha256": mark(notebook, path.stem)}
    text, note = shrunk(notebook, code, RECIPES[path.stem].limit)
    with replacing(path) as file:
        file.write(text.encode())
    return f"{path}: {len(text.encode()) / 1000:.0f} kB{note}"


def executed(name: str, code: Cells, folder: Path) -> list[Cells]:
    """Outputs of every code cell; the notebook works in folder/notebooks."""
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell, new_notebook

    from experiments.running.notebooks import WarmKernel

    prepare(folder, RECIPES[name])
    os.environ["PYTHONPATH"] = str(ROOT)  # the kernel's, and that of the scripts before it
    changed = "\n".join(f"{key} = {value!r}" for key, value in RECIPES[name].parameters.items())
    cells = []
    for cell in code:
        source = "".join(cell["source"])
        if changed and "parameters" in cell["metadata"].get("tags", []):
            source += f"\n{changed}\nprint({f'The outputs below are of: {changed}'!r})"
        cells.append(new_code_cell(source))
    filled = new_notebook(cells=cells)
    try:
        with WarmKernel(folder / FOLDER) as kernel:
            kernel.execute(filled)
    except CellExecutionError as error:
        raise RunError(f"{name}: {error.ename}: {error.evalue.splitlines()[0]}") from None
    return [[plain(one) for one in cell["outputs"] if one.get("name") != "stderr"] for cell in filled.cells]


def prepare(folder: Path, recipe: Recipe) -> None:
    """Links to what the repository ships, and the caches that the recipe's scripts make."""
    for name in (*LINKS, FOLDER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name != FOLDER:
            (folder / name).symlink_to(ROOT / name)
    (folder / FOLDER).mkdir()
    for name, text in recipe.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for script, *arguments in recipe.scripts:
        command = [sys.executable, str(ROOT / "experiments" / script), *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{script}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")


def plain(output: Mapping[str, Any]) -> dict[str, Any]:
    """An output as JSON; of a figure the PNG alone."""
    kept = json.loads(json.dumps(output))
    if "image/png" in kept.get("data", {}):
        kept["data"] = {"image/png": kept["data"]["image/png"]}
    if "execution_count" in kept:
        kept["execution_count"] = None
    return kept


def shrunk(notebook: dict[str, Any], code: Cells, limit: int | None = None) -> tuple[str, str]:
    """The notebook's text of at most limit bytes, and a note: pictures shrink together, the largest go."""
    limit = LIMIT if limit is None else limit
    pictures = [one["data"] for cell in code for one in cell["outputs"] if "image/png" in one.get("data", {})]
    whole = [data["image/png"] for data in pictures]
    for width, colours in SIZES:
        for data, png in zip(pictures, whole, strict=True):
            data["image/png"] = smaller(png, width, colours)
        text = as_text(notebook)
        if len(text.encode()) <= limit:
            return text, f", pictures at most {width} pixels wide" if pictures else ""
    dropped = 0
    for data in sorted(pictures, key=lambda data: len(data["image/png"]), reverse=True):
        del data["image/png"]
        data["text/plain"], dropped = TOO_LARGE, dropped + 1
        text = as_text(notebook)
        if len(text.encode()) <= limit:
            break
    else:
        raise RunError(f"its text alone is above {limit} bytes")
    return text, f", {dropped} of {len(pictures)} pictures left out"


def as_text(notebook: Mapping[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def smaller(png: str, width: int, colours: int) -> str:
    """A PNG in base64, at most so wide and of so many colours."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(png))) as opened:
        image = opened.convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.quantize(colours, Image.Quantize.MAXCOVERAGE).save(file, format="png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main(run)
