"""Record the bits of every command, and compare another tree with the recording.

    cd TREE; PYTHONPATH=TREE OMP_NUM_THREADS=1 python .../tests/same_bits.py record base.json
    cd TREE; PYTHONPATH=TREE OMP_NUM_THREADS=1 python .../tests/same_bits.py compare base.json --quick

The tree is the working folder, wherever this file is: what is recorded before a change is compared after it.
It takes the scripts of experiments/ by their flags, `experiments.load` and its kin, and files on disk. A case
is a command alone, under a policy (atlas@memflow) or under an edit (atlas+bias). --notebooks are the arrays
of the notebooks' figures, --flags what every script takes. --numbers compares numbers alone, across changes
of the format of files: without fingerprints and hashes, pixels of mp4s, manifests, and the layout of stores
and of a long rollout's latents, whose values are compared. Nothing is written into the tree.
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import re
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

TREE = Path.cwd()
sys.path.insert(0, str(TREE))
import wan  # noqa: E402
from experiments import at, capture, compare, intervene, load, x0_lens  # noqa: E402
from experiments.caches.activations import ActivationStore  # noqa: E402

Values = dict[str, Any]  # by path: a number or a list as JSON; type, shape and hash of an array
OUT = Path("out")  # what a case writes
PROMPTS = ["a red circle moving right over a dark blue background"]
PROMPTS += ["a green square moving down over a gray background"]
# What differs between two trees, or two runs: hashes of the code, times, and places
SKIPPED = {"fingerprint", "made_of", "versions", "environment", "date", "command", "git", "code", "made"}
SKIPPED |= {"seconds", "made_seconds", "first_block_seconds", "last_block_seconds", "logs", "items"}
FINGERPRINT = re.compile("[0-9a-f]{32}")  # under names of their own
# What --numbers leaves out, by path: identities, mp4s, manifests, and files whose layout may change
LAYOUT = re.compile(
    r"/(sha256|weights_sha256|hash|read_by|seal|files|config)(/|$)|/interventions/|/_?video_frames"
    r"|\.mp4|manifest|\.latents|^/+stream/|\.lock"
)
FRAMES = {False: 21, True: 30}  # latent ones; under a policy more than the largest window

# --- The cases: scripts with flags, policies, edits
COMMANDS = {
    "figure4_frame": "run_extraction_figure4 --granularity frame",
    "figure4_token": "run_extraction_figure4 --granularity token",
    "inference": "run_extraction --steps 0 4 --blocks 2 -1",
    "each": "run_extraction_each --output_dir out",
    "atlas": "run_extraction_all --mass --key_curve --rope_bands --cross",
    "atlas_heads": "run_extraction_all --query_key_means",
    "maps": "run_extraction_maps --query_patch {last},2,1 --query_frame {last} --words",
    "rollout": "run_rollout --capture all --output_path out/long.mp4",
    "sweep": "run_extraction_all --prompts prompts.txt --seeds 0 1 --output_dir out",
    "effects": "run_intervention --no_video --interventions knockout.yaml --save_base out/base.pt",
}
MORE = {  # under no policy and no edit
    "figure4_key": "run_extraction_figure4 --granularity key --save_video",
    "figure4_probabilities": "run_extraction_figure4 --capture probabilities",
    "inference_logits": "run_extraction --capture logits",
    "each_token": "run_extraction_each --layer_index 3 --granularity token",
    "atlas_means": "run_extraction_all --no-mass --query_key_means",
    "atlas_bfloat16": "run_extraction_all --dtype bfloat16",
    "atlas_base_weights": "run_extraction_all --no_checkpoint",
    "atlas_rolling": "run_extraction_all --config_path rolling.yaml",
    "atlas_framewise": "run_extraction_all --config_path configs/wan_mini_framewise.yaml",
    "atlas_lora": "run_extraction_all --config_path configs/wan_mini_lora.yaml",
    "atlas_window": "run_extraction_all --config_path configs/wan_mini_window.yaml",
    "atlas_first_frame": "run_extraction_all --independent_first_frame --num_frames 22",
    "maps_grid": "run_extraction_maps --query_grid 18,2,2 --heads 0 3 --steps 0 4 --layer_indices 2",
    "rollout_band": "run_rollout --capture band:6 --step 4 --output_path out/long.mp4",
    "rollout_rolling": "run_rollout --config_path rolling.yaml --output_path out/long.mp4",
    "effects_video": "run_intervention --interventions knockout.yaml --num_frames 12",
    "base": "extract_attention_wan --config_path configs/wan_mini.yaml --num_steps 6 --output_dir out",
    "base_atlas": "extract_attention_wan --config_path configs/wan_mini.yaml --num_steps 4 --output_dir out "
    "--all_layers --step all",
    "base_edited": "extract_attention_wan --config_path edited.yaml --num_steps 6 --output_dir out",
    "causal_atlas": "run_causal_atlas --each layer --edit every.yaml --num_frames 9 --output_dir out "
    "--prompts prompts.txt --seeds 0",
    "compare_policies": "compare_policies --policies full mini_mass_heads --num_frames 12 --output_dir out "
    "--held_out 2 --seeds 0 --videos 1",
    "query_means": "make_head_classes --rule triattention --num_frames 12 --output_path out/means.npz",
}
POLICIES = [  # beside configs/policies: some that forget within 8 frames, and releases with their quirks
    *("full", "window,window=7,sink=2", "relative,window=7,sink=1", "deep_sink,window=7,sink=3"),
    *("rolling_sink,window=6", "ema_sink,window=7,sink=2,alpha=0.5"),
    *("participative,window=7,sink=1,budget=6,recent=4", "memory_bank,window=7,sink=2,bank=2,interval=1"),
    *("two_memories,window=7,sink=1,alpha_long=0.1,alpha_short=0.6", "deep_forcing,released=true"),
    *("longlive,sink=6,released=longlive", "infinity_rope,sink=0,released=infinity_rope"),
    *("deep_sink,released=true", "reward_forcing,sink=2,released=true"),
]
FAMILIES = ["longlive", "deep_forcing", "mini_forcing_kv", "memflow", "infinity_rope", "memrope"]
FAMILIES += ["head_budget", "mini_dummy_forcing", "mini_triattention_small", "mini_pyramid_heads"]
SWITCHES = {"keep": "full", "recache": "longlive", "flush": "infinity_rope", "cut": "infinity_rope"}
SOME: dict[str, Any] = {"layers": [1, 5], "heads": [0, 3], "passes": "denoise"}
ABLATE, SOURCE = SOME | {"edit": "ablate"}, {"source": {"prompt": PROMPTS[1], "seed": 7}}
PATCH = SOME | SOURCE | {"edit": "patch"}
EDITS: dict[str, dict[str, Any]] = {
    "knockout": SOME | {"edit": "knockout", "frames": "first"},
    "knockout_words": SOME | {"edit": "knockout", "tokens": [1, 2]},
    "bias": SOME | {"edit": "bias", "b": -2.0, "frames": "past", "passes": "all"},
    "zero": ABLATE | {"how": "zero"},
    "zero_mlp": {"edit": "ablate", "how": "zero", "site": "mlp_out", "layers": [2], "passes": "clean"},
    "mean": ABLATE | {"how": "mean"},
    "frame_mean": ABLATE | {"how": "frame_mean"},
    "resample": ABLATE | {"how": "resample"} | SOURCE,
    "patch_z": PATCH | {"what": "z"},
    "patch_cross": PATCH | {"what": "z", "attention": "cross"},
    "patch_qk": PATCH | {"what": "qk"},
    "patch_kv": PATCH | {"what": "kv"},
    "move": SOME | {"edit": "move", "frames": "first", "offset": 2},
    "jitter": {"edit": "jitter", "scale": 0.5, "seed": 3},
    "band": SOME | {"edit": "band", "bands": [0, 1], "phase": 1.0, "scale": 0.5},
    "steer": {"edit": "steer", "site": "resid_post", "direction": [(-1) ** n / 10 for n in range(192)]}
    | {"layers": [5], "passes": "denoise"},
}
QUICK = ["figure4_frame", "atlas+knockout", "maps", "rollout", "sites"]
QUICK += ["latents@longlive", "latents@deep_forcing", "latents@mini_forcing_kv"]


def cases() -> dict[str, Callable[[], Mapping[str, Any] | None]]:
    """Every case by its name: a function that writes files to OUT, and returns what no file has."""
    files = sorted(path.stem for path in (TREE / "configs/policies").glob("*.yaml"))
    found: dict[str, Any] = {name: partial(script, line) for name, line in (COMMANDS | MORE).items()}
    own_keys = [name for name in files if name.startswith(("mini_", "head_"))]  # which have no key curves
    few = {"sweep": FAMILIES[:4], "effects": FAMILIES[:4], "rollout": FAMILIES, "atlas_heads": own_keys}
    for name, line in COMMANDS.items():
        for policy in few.get(name, files) + POLICIES * (name == "atlas"):
            found[f"{name}@{policy}"] = partial(script, line, "--cache_policy", policy, many_frames=True)
        for edit in EDITS if name == "atlas" else ["knockout", "mean", "patch_kv", "jitter"]:
            found[f"{name}+{edit}"] = partial(script, line, "--interventions", f"{edit}.yaml")
    for how, policy in SWITCHES.items():
        flags = "--cache_policy", policy, "--prompt_schedule", f"{how}.yaml"
        found[f"atlas_{how}"] = partial(script, COMMANDS["atlas"], *flags, many_frames=True)
    for name, case in {"latents": latents, "batch": batch, "sites": sites}.items():
        found[name] = case
        for policy in files + POLICIES if name == "latents" else FAMILIES:
            found[f"{name}@{policy}"] = partial(case, cache_policy=policy, num_frames=FRAMES[True])
        for edit in EDITS if name != "sites" else ["knockout", "zero"]:
            found[f"{name}+{edit}"] = partial(case, interventions=[EDITS[edit]])
    found |= {"calls": calls, "own_edit": own_edit, "lens": lens}
    for path in sorted(TREE.glob("notebooks/*.ipynb")):
        found[f"notebook {path.stem}"] = partial(notebook, path)
    for path in sorted(TREE.glob("experiments/*.py")):
        if "__main__" in path.read_text(encoding="utf-8"):
            found[f"flags {path.stem}"] = partial(flags_of, path.stem)
    return found


# --- Scripts
def command(name: str) -> Callable[[list[str]], None]:
    return importlib.import_module(f"experiments.{name}").run


def script(line: str, *flags: str, many_frames: bool = False) -> dict[str, Any]:
    """Run a script in this process; a long rollout twice, the second time from what a kill would leave."""
    name, *words = line.format(last=FRAMES[many_frames] - 1).split()
    words += [*flags, "--quiet"]
    if name != "extract_attention_wan":
        given = {"--output_path": "out/cache.pt", "--num_frames": str(FRAMES[many_frames])}
        given |= {"--config_path": "configs/wan_mini.yaml"}
        if "--output_dir" in words:
            del given["--output_path"]
        words += [word for pair in given.items() if pair[0] not in words for word in pair]
    command(name)(words)
    if name == "run_rollout":
        kill()
        command(name)(words)
    return long_latents()


def kill() -> None:
    """Give a whole long video other names, and leave what a kill within a frame would have left."""
    for path in OUT.glob("long.*"):
        path.rename(path.with_name(path.name.replace("long", "whole")))
    whole = OUT / "whole.latents.safetensors"
    if whole.is_file():  # all blocks in one file, as before 2.0
        content = whole.read_bytes()
        start = 8 + struct.unpack("<Q", content[:8])[0]  # of the numbers, behind the header
        (OUT / "long.latents.safetensors").write_bytes(content[: start + (len(content) - start) * 45 // 100])
        return
    blocks = sorted((OUT / "whole.latents").iterdir())
    (OUT / "long.latents").mkdir()
    for path in blocks[: len(blocks) * 45 // 100]:
        shutil.copy(path, OUT / "long.latents")


def long_latents() -> dict[str, Any]:
    """Return the latents [F, C, h, w] of the long videos in OUT, whatever files they are in."""
    found = dict[str, Any]()
    for name in ("whole", "long"):
        paths = sorted(OUT.glob(f"{name}.latents*/*.safetensors")) or [
            *OUT.glob(f"{name}.latents.safetensors")
        ]
        parts = [read(path)["latents"] for path in paths]
        if parts:
            found[f"frames of {name}"] = torch.cat(parts)
    return found


# --- load, capture, intervene
def latents(**settings: Any) -> dict[str, Any]:
    return {"latents": load("wan_mini", **settings).generate().latents}


def batch(**settings: Any) -> dict[str, Any]:
    runs = load("wan_mini", **({"num_frames": 12} | settings)).generate(PROMPTS, seeds=[1, 2])
    return {f"latents {n}": run.latents for n, run in enumerate(runs)}


def sites(**settings: Any) -> dict[str, Any]:
    pipe = load("wan_mini", **({"num_frames": 12} | settings))
    names = "z", "resid_post", "q", "k", "v", "cross_z"
    with capture(pipe, *names, layers=[1, 5]) as seen:
        run = pipe.generate(seed=3)
    with capture(pipe, "pattern", layers=[2], steps=[0], stream_to=OUT / "stream"):
        pipe.generate(seed=3)
    found = {name: dict(enumerate(seen[name])) for name in names}
    for number, stored in enumerate(ActivationStore(OUT / "stream").runs):
        found[f"stored {number}"] = {name: dict(enumerate(x)) for name, x in stored.tables.items()}
    return found | {"latents": run.latents, "axes": [" ".join(seen[name].axes) for name in names]}


def calls() -> dict[str, Any]:
    pipe, found = load("wan_mini", num_frames=12), dict[str, Any]()
    for size in ("key", "token"):
        with capture(pipe, granularity=size, layers=[1, 5], blocks=[2], steps=[0, 4], cross=True) as seen:
            pipe.generate(seed=3)
        found[size] = {n: dict(call.values) for n, call in enumerate(seen.calls)}
    with capture(pipe, layers=[1], key_curve=True, query_key_means=True) as seen:
        pipe.generate(seed=3)
    return found | {"atlas": dict(seen.atlas())}


def own_edit() -> dict[str, Any]:
    pipe = load("wan_mini", num_frames=12)
    run = pipe.generate(seed=3)
    with intervene(at("z", layers=[3]), lambda z, where: 2 * z):
        edited = pipe.generate(seed=3)
    both = compare(run, edited)
    return {"latents": edited.latents, "psnr": both.psnr, "video": both.video}


def lens() -> dict[str, Any]:
    found = x0_lens(load("wan_mini", num_frames=12), seed=3, layers=[0, 4, 7])
    return {"latents": {str(key): x0 for key, x0 in found.latents.items()}, "distance": found.distance}


# --- Notebooks and flags
@cache
def make_caches() -> None:
    """Make what the notebooks open by default, where they look for it."""
    for line in (
        "run_extraction_figure4 --save_video",
        "run_extraction",
        "run_extraction_all --key_curve --cross --rope_bands",
        "run_extraction_all --prompts prompts.txt --seeds 0 1 --output_dir cache/sweep",
        "run_extraction_maps --query_patch 18,2,1 --words --save_video",
        "run_intervention --interventions mean.yaml",
        "run_causal_atlas --edit every.yaml --prompts prompts.txt --seeds 0 --num_frames 6",
    ):
        name, *words = line.split()
        command(name)([*words, "--config_path", "configs/wan_mini.yaml", "--quiet"])
    command("layers_from_atlas")(["cache/published/self_forcing_dmd_eagle_21f.pt", "--layers", "20"])


def notebook(path: Path) -> dict[str, Any]:
    """Run a notebook's cells; return the arrays of the figures that it saves or shows, and what it prints."""
    from IPython.display import display
    from matplotlib.figure import Figure

    make_caches()
    figures, printed, save = list[Figure](), io.StringIO(), Figure.savefig

    def keep(figure: Figure, target: Any, *args: Any, **kwargs: Any) -> None:
        if all(figure is not one for one in figures):  # most are saved and shown
            figures.append(figure)
        if hasattr(target, "write"):  # drawing takes most of the time
            target.write(b'<svg xmlns="http://www.w3.org/2000/svg"/>')

    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    try:
        Figure.savefig = keep  # type: ignore[method-assign]
        with contextlib.chdir("notebooks"), contextlib.redirect_stdout(printed):
            exec(compile(code, path.name, "exec"), {"__name__": "notebook", "display": display})
    finally:
        Figure.savefig = save  # type: ignore[method-assign]
    axes = {f"figure {n}": dict(enumerate(map(drawn, one.axes))) for n, one in enumerate(figures)}
    return axes | {"printed": re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])", printed.getvalue())}


def drawn(axis: Any) -> dict[str, Any]:
    """Return the numbers of an axis by kind: lines, images, bars and other patches, dots and areas."""
    of = axis.collections
    colored = [one.get_array() for one in (*axis.images, *of)]
    found: dict[str, list[Any]] = {
        "lines": [line.get_xydata() for line in axis.lines],
        "patches": [one.get_patch_transform().transform(one.get_path().vertices) for one in axis.patches],
        "dots": [one.get_offsets() for one in of],
        "areas": [area.vertices for one in of for area in one.get_paths()],
        "colors": [np.ma.filled(np.ma.asarray(one, float), np.nan) for one in colored if one is not None],
    }
    return {name: np.concatenate([np.ravel(one) for one in some]) for name, some in found.items() if some}


def flags_of(name: str) -> dict[str, str]:
    """Return the flags of a script, with what they allow and their defaults, without running it."""
    found, parse = dict[str, str](), argparse.ArgumentParser.parse_known_args

    def keep(parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            some = f" of {[str(one) for one in action.choices]}" if action.choices else ""
            said = f"default {action.default}, nargs {action.nargs}, required {action.required}{some}"
            found.update(dict.fromkeys(action.option_strings or [action.dest], said))
        raise KeyboardInterrupt

    argparse.ArgumentParser.parse_known_args = keep  # type: ignore[assignment,method-assign]
    try:
        with contextlib.suppress(KeyboardInterrupt):
            command(name)([])
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    return found


# --- Values by path
def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, word, plain list, and array's hash of a nested value, by its path."""
    if isinstance(value, Mapping):
        for key in sorted(value.keys() - SKIPPED, key=str):
            yield from walk(value[key], f"{path}/{key}")
    elif isinstance(value, torch.Tensor | np.ndarray):
        x = torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value).detach().contiguous()
        content = x.flatten().view(torch.uint8).numpy().tobytes()
        yield path, f"{x.dtype} {list(x.shape)} {hashlib.sha256(content).hexdigest()}".removeprefix("torch.")
    elif isinstance(value, list | tuple) and not all(isinstance(x, str | int | float | None) for x in value):
        yield from walk(dict(enumerate(value)), path)
    elif not FINGERPRINT.fullmatch(str(value)):
        said = json.dumps(value)  # where NaN equals NaN
        yield path, said if len(said) < 400 else hashlib.sha256(said.encode()).hexdigest()


def read(path: Path) -> Any:
    """Return what a file holds."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            about = {k: json.loads(v) if v[:1] in "[{" else v for k, v in (file.metadata() or {}).items()}
            return {"about": about} | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if path.suffix == ".mp4":  # its frames: the file names a fingerprint
        import imageio.v3 as iio

        return iio.imread(path)
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    return np.frombuffer(path.read_bytes(), np.uint8)


def recorded(name: str, case: Callable[[], Mapping[str, Any] | None]) -> Values:
    """Run a case -> its values by path. That it is refused is a value too; for what reason, is printed."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = dict(case() or {})
    except Exception as error:
        if "Stopped" in type(error).__name__:  # by Ctrl-C or SIGTERM
            raise
        print(f"    {name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return {"refused": type(error).__name__}
    for path in sorted(path.relative_to(OUT) for path in OUT.rglob("*") if path.is_file()):
        if not SKIPPED & {*path.parts} and not FINGERPRINT.fullmatch(path.stem):
            found[str(path)] = read(OUT / path)
    return dict(walk(found))


# --- Record, compare
def settle() -> None:
    """Make the working folder look like the tree, with files of edits and prompts, and a cache of its own."""
    for name in ("configs", "checkpoints", "docs", "experiments"):
        Path(name).symlink_to(TREE / name)
    for name in ("cache", "outputs", "notebooks"):
        Path(name).mkdir()
    for name in ("published", "wan-mini-training"):
        Path("cache", name).symlink_to(TREE / "cache" / name)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    mini = yaml.safe_load(Path("configs/wan_mini.yaml").read_text(encoding="utf-8"))
    rolling = {"sampler": "rolling_forcing", "denoising_step_list": [1000, 800, 600, 400, 200]}
    every = {"edit": "ablate", "how": "zero", "passes": "denoise"}
    files = {name: {"interventions": [values]} for name, values in (EDITS | {"every": every}).items()}
    for how in SWITCHES:
        files[how] = {"prompts": [{"frame": 18, "prompt": PROMPTS[1], "how": how}]}
    files["rolling"] = mini | rolling | {"local_attn_size": 21}
    for name, values in (files | {"edited": mini | files["zero"]}).items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(values))


def report(name: str, before: Values, now: Values, numbers: bool) -> bool:
    """Print what differs in a case, and say whether something does. What is new does not count."""
    if numbers:
        before = {path: value for path, value in before.items() if not LAYOUT.search(path)}
    lines = [f"{path}: missing" for path in before if path not in now]
    both = [(path, before[path], now[path]) for path in before if path in now]
    lines += [f"{path}: {was[:90]} -> {is_now[:90]}" for path, was, is_now in both if was != is_now]
    lines[12:] = [f"and {len(lines) - 12} more"] * (len(lines) > 12)
    for line in lines:
        print(f"DIFFERENT {name}: {line}", flush=True)
    return bool(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("record", "compare"))
    parser.add_argument("file", type=Path, help="the recording, a JSON: {case: {path: value}}")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="names, or patterns such as 'atlas@*'")
    parser.add_argument("--quick", action="store_true", help="a few cases, in a minute")
    parser.add_argument("--notebooks", action="store_true", help="the figures of the notebooks")
    parser.add_argument("--numbers", action="store_true", help="compare numbers, not the layout of files")
    parser.add_argument("--flags", action="store_true", help="the flags of the scripts")
    args = parser.parse_args()
    if not Path(wan.__file__).is_relative_to(TREE):
        parser.error(f"{wan.__file__} is not of {TREE}; set PYTHONPATH")
    torch.set_num_threads(1)
    about = {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability()}
    file, known, is_new = args.file.resolve(), cases(), args.do == "record"
    is_there = file.is_file() or not is_new  # then the chosen cases are recorded anew in it
    recording = json.loads(file.read_text(encoding="utf-8")) if is_there else {"about": about}
    if recording["about"] != about:
        print(f"bits may differ: recorded by {recording['about']}, this is {about}")
    names = [name for name in (known if is_new else recording) if name != "about"]
    kind = "notebook" if args.notebooks else "flags" if args.flags else ""
    if args.only or args.quick:
        names = [name for name in names if any(fnmatch(name, one) for one in args.only or QUICK)]
    elif is_new or kind:
        names = [name for name in names if name.rpartition(" ")[0] == kind]
    start, differing, count = time.monotonic(), list[str](), 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        settle()
        for name in names:
            found = recorded(name, known[name]) if name in known else {}
            count += len(found)
            seconds = time.monotonic() - start
            print(f"{seconds:5.0f} s  {name}: {len(found)} values", file=sys.stderr, flush=True)
            if is_new:
                recording[name] = found
                part = file.with_suffix(".part")
                part.write_text(json.dumps(recording, indent=0, sort_keys=True), encoding="utf-8")
                part.replace(file)
            elif report(name, recording[name], found, args.numbers):
                differing.append(name)
    said = f"recorded in {file}" if is_new else f"{len(differing)} differ: {', '.join(differing)}"
    print(f"{len(names)} cases, {count} values, {time.monotonic() - start:.0f} s: {said}")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
