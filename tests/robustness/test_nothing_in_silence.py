"""What was asked for is what comes: in its order, with its numbers, whole, or refused in one line."""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext, suppress
from io import BytesIO, StringIO
from unittest.mock import patch
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import ROOT
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from helpers.refusals import refused
from helpers.video_transformers import made
from matplotlib import font_manager
from safetensors import safe_open
from safetensors.torch import save_file

from experiments import (
    ActivationStore,
    Atlas,
    at,
    capture,
    compare,
    gradients,
    intervene,
    load,
    named,
    x0_lens,
)
from experiments.caches import activations, load_cache
from experiments.caches.activations import Activations, Place, save_activations
from experiments.caches.files import CacheError
from experiments.extraction import cache_builders
from experiments.extraction.sweep import dask_client
from experiments.figures import prompt_words, style
from experiments.figures.folder import save_contact_sheet
from experiments.progress import Progress
from wan.capture import CaptureRequest
from wan.config import RunConfig
from wan.interventions import Knockout, Patch, Steer

PROMPT = "a red circle"
SCALE = torch.full((1,), 0.5)


@pytest.fixture(scope="module")
def session(tiny):
    return load(tiny.path, num_frames=6)


def captured(session, *sites, **chosen):
    with capture(session, *sites, **chosen) as seen:
        session.generate(PROMPT, seed=1)
    return seen


# --- Order and names of what was asked for
CHOSEN = {"layers": [1, 0], "heads": [1, 0], "steps": [1, 0], "frames": [5, 3, 1]}


@pytest.mark.parametrize("streams", [False, True], ids=["in memory", "in a store"])
def test_activations_come_in_the_asked_order_and_say_their_numbers(session, tmp_path, streams):
    whole = captured(session, "z")["z"].at(block=1).stack()  # [layer, block, step, B, L, H, D]
    folder = {"stream_to": tmp_path / "store"} if streams else {}
    seen = captured(session, "z", **CHOSEN, **folder)
    table = seen["z"].at(block=1)
    by_frame = whole[[1, 0]][:, :, [1, 0]].unflatten(4, (3, -1))[:, :, :, :, [2, 0]]  # frames 5 and 3
    assert torch.equal(table.stack(), by_frame.flatten(4, 5)[..., [1, 0], :])
    assert table.coordinates == {"layer": [1, 0], "block": [1], "step": [1, 0]}
    assert table.heads == [1, 0] and table.frames == [5, 3]
    read = ActivationStore(tmp_path / "store").runs[0].read("z", block=1) if streams else table
    assert torch.equal(read.stack(), table.stack()) and read.heads == table.heads
    path = seen.save(tmp_path / "z.safetensors")
    opened = load_cache(path)["z"].at(block=1)
    assert torch.equal(opened.stack(), table.stack()) and opened.frames == table.frames


def test_an_atlas_a_lens_and_gradients_have_their_layers_in_the_asked_order(session):
    atlas = captured(session, layers=[1, 0]).atlas()
    ascending = captured(session, layers=[0, 1]).atlas()
    assert atlas["layers"] == [1, 0]
    torch.testing.assert_close(
        atlas["frame_mass"], ascending["frame_mass"][[1, 0]], rtol=0, atol=0, equal_nan=True
    )
    lens = x0_lens(session, PROMPT, 1, layers=[1, 0])
    ascending = x0_lens(session, PROMPT, 1, layers=[0, 1])
    assert lens.layers == [1, 0] and torch.equal(lens.distance, ascending.distance[[1, 0]])
    with gradients(session, "z", layers=[1, 0], blocks=[1], steps=[0]) as grads:
        session.generate(PROMPT, seed=1)
        grads.backward(lambda x0: x0.mean())
    table = grads["z"]
    assert table.coordinates["layer"] == [1, 0]
    assert torch.equal(table.stack()[0], table.at(layer=1).stack()[0])


@pytest.mark.parametrize("name", ["layers", "heads", "blocks", "steps", "frames"])
def test_a_number_that_comes_twice_is_refused(session, name):
    with refused(rf"{name} \[0, 1, 0\] name 0 twice"), capture(session, "z", **{name: [0, 1, 0]}):
        pass


@pytest.mark.parametrize("name", ["layers", "blocks", "steps"])
def test_attention_calls_in_another_order_than_the_rollouts_are_refused(session, name):
    with refused(rf"{name} \[1, 0\] must ascend"), capture(session, granularity="key", **{name: [1, 0]}):
        pass


def test_step_minus_one_beside_its_own_number_is_refused(session):
    with refused("name 1 twice"), capture(session, "z", steps=[1, -1]):
        pass


def layers_of_a_config(config):
    RunConfig(layer_indices=[5, 5])


def heads_of_a_request(config):
    CaptureRequest(granularity="map", heads=(5, 5))


def heads_of_maps(config):
    cache_builders.map_requests(config, (4, 4), heads=[1, 1])


def steps_of_maps(config):
    cache_builders.map_requests(config, (4, 4), steps=[1, 1])


def the_last_block_by_two_numbers(config):
    cache_builders.inference_requests(config, blocks=[-1, 1])


@pytest.mark.parametrize(
    "ask",
    [
        layers_of_a_config,
        heads_of_a_request,
        heads_of_maps,
        steps_of_maps,
        the_last_block_by_two_numbers,
    ],
)
def test_numbers_of_scripts_that_come_twice_are_refused(session, ask):
    with refused("twice|once"):
        ask(session.config)


def test_rows_of_a_store_come_once_and_in_order(session, tmp_path):
    captured(session, "z", stream_to=tmp_path)
    store = ActivationStore(tmp_path)
    for chosen in ({"frames": [3, 1]}, {"steps": [1, 0]}, {"steps": [-1, 0]}):
        with refused("must ascend: rows come in the order of the run"):
            store.rows("z", 0, **chosen)
    with refused("name 0 twice"):
        store.rows("z", 0, runs=[0, 0])


# --- Stores: a run is known by its identity, and complete or not
def facts_of(prompt, seed=0):
    fingerprint = hashlib.sha256(f"{prompt} {seed}".encode()).hexdigest()[:32]
    return {"model": "a", "prompt": prompt, "seed": seed, "fingerprint": fingerprint, "num_frames": 1}


def begin_run(store, prompt, seed=0):
    request = {"sites": ["z"], "dtype": None, "reduce": None}
    request |= dict.fromkeys(("layers", "blocks", "steps", "frames", "heads"))
    return store.begin(request, facts_of(prompt, seed), 1)


def add_run(store, prompt, values=(1.0,), seed=0):
    """Write a run, a block a value."""
    run = begin_run(store, prompt, seed)
    for block, value in enumerate(values):
        place = Place(0, block, 0, (0,), False, 0.0)
        run.write({"z": Activations("z", (place,), (torch.full((1, 1, 1, 1), value),))})
    run.finish(None)
    return run


def values_in(folder):
    return sorted(run.tables["z"].stack().flatten().tolist() for run in ActivationStore(folder).runs)


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_removed_run_and_a_new_one_of_its_prompt_share_no_files(tmp_path, removed):
    store = ActivationStore(tmp_path)
    runs = [add_run(store, "a", [value], seed=int(value)) for value in (1.0, 2.0, 3.0)]
    shutil.rmtree(runs.pop(removed).path)
    add_run(store, "a", [4.0], seed=4)
    others = [[value] for n, value in enumerate((1.0, 2.0, 3.0)) if n != removed]
    assert values_in(tmp_path) == [*others, [4.0]]


def test_a_run_that_is_filed_under_another_identity_at_its_end_is_read(tmp_path):
    run = begin_run(ActivationStore(tmp_path), "a")
    run.write({"z": Activations("z", (Place(0, 0, 0, (0,), False, 0.0),), (torch.ones(1, 1, 1, 1),))})
    run.finish(None, facts_of("an edit came while it ran"))
    assert values_in(tmp_path) == [[1.0]] and len(ActivationStore(tmp_path).rows("z", 0)) == 1


@pytest.mark.parametrize("name", ["{}_copy", "copy of {}", "{}0", "{}.new"])
def test_a_copied_run_counts_once(tmp_path, name):
    run = add_run(ActivationStore(tmp_path), "a", [1.0, 2.0])
    shutil.copytree(run.path, tmp_path / name.format(run.path.name))
    assert values_in(tmp_path) == [[1.0, 2.0]]
    assert len(ActivationStore(tmp_path).rows("z", 0)) == 2


def test_a_copy_under_another_runs_name_is_not_taken_for_it(session, tmp_path):
    captured(session, "z", stream_to=tmp_path / "first")
    captured(session, "z", stream_to=tmp_path / "second")
    with capture(session, "z", stream_to=tmp_path / "second"):
        session.generate(PROMPT, seed=2)
    one, two = ActivationStore(tmp_path / "second").runs
    shutil.rmtree(two.path)
    shutil.copytree(one.path, two.path)
    assert len(ActivationStore(tmp_path / "second").runs) == 1
    with refused("is a copy of the run", CacheError), capture(session, "z", stream_to=tmp_path / "second"):
        session.generate(PROMPT, seed=2)


def test_a_run_that_is_written_again_is_not_complete_before_its_end(session, tmp_path):
    class Stops(Progress):
        def advance(self, unit, index, *rest):
            if index == 1:  # the first block is written, the last one still of before
                raise KeyboardInterrupt

    captured(session, "z", stream_to=tmp_path)
    (run,) = ActivationStore(tmp_path).runs
    run.blocks[0].unlink()
    with suppress(KeyboardInterrupt), capture(session, "z", stream_to=tmp_path):
        session.generate(PROMPT, seed=1, observer=Stops(quiet=True))
    assert not any(run.is_complete for run in ActivationStore(tmp_path).all_runs)


def test_an_older_block_beside_a_complete_run_is_none_of_it(tmp_path):
    run = add_run(ActivationStore(tmp_path), "a", [1.0, 2.0])
    shutil.copy(run.block(0), run.block(2))
    assert values_in(tmp_path) == [[1.0, 2.0]]


def rows(store):
    return store.rows("z", 0)


def calls_of_a_layer(store):
    return store.runs[0].read("z", layer=0)


def tables(store):
    return [run.tables for run in store.runs]


def check(store):
    return store.check()


@pytest.mark.parametrize("read", [rows, calls_of_a_layer, tables, check])
def test_every_way_of_reading_notices_a_flipped_bit(tmp_path, read):
    store = ActivationStore(tmp_path)
    run = add_run(store, "a", [1.0, 2.0])
    content = bytearray(run.block(1).read_bytes())
    content[-1] ^= 1
    run.block(1).write_bytes(content)
    with refused("its content is not what was written; remove it and capture", CacheError):
        read(store)
    assert len(store.rows("z", 0, unchecked=True)) == 2


def test_files_of_version_2_0_still_open_and_are_checked(tmp_path):
    place = Place(0, 0, 0, (0,), False, 0.0)
    path = save_activations(
        tmp_path / "a.safetensors", {"z": Activations("z", (place,), (torch.ones(1, 1, 1, 1),))}, {}
    )
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {"z/000000": file.get_tensor("z/000000")}
    sites = json.loads(metadata["sites"])
    del sites["z"]["sha256"], sites["z"]["chosen"]
    metadata["sites"] = json.dumps(sites)
    metadata["sha256"] = activations.content_sha256(metadata, tensors)
    save_file(tensors, path, metadata)
    assert load_cache(path)["z"].stack().item() == 1.0
    save_file({"z/000000": torch.zeros(1, 1, 1, 1)}, path, metadata)
    with refused("its content is not what was written", CacheError):
        load_cache(path)


def test_a_new_run_that_a_kill_left_beside_the_earlier_one_takes_its_place(session, tmp_path):
    def mean(x, where):
        return x.mean()

    with warnings.catch_warnings(action="ignore"):
        captured(session, "z", reduce=mean, stream_to=tmp_path)
        (run,) = ActivationStore(tmp_path).runs
        shutil.copytree(run.path, run.path.with_name(run.path.name + ".new"))
        captured(session, "z", reduce=mean, stream_to=tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == [run.path.name]
    assert len(ActivationStore(tmp_path).runs) == 1


# --- Own functions: what is kept between calls, and random numbers
def noisy(z):
    return z + 0.1 * torch.randn_like(z)


class Counts:
    """Keep a count between calls."""

    def __init__(self):
        self.count = 0

    def apply(self, z):
        self.count += 1
        return z * self.count


def counting():
    calls = []
    return lambda z: z * (calls.append(1) or len(calls))


def iterating():
    numbers = itertools.count(1)
    return lambda z: z * next(numbers)


def keeping():
    def function(z, calls=[]):  # noqa: B006  a default that is changed
        calls.append(1)
        return z * len(calls)

    return function


def calling():
    inner = counting()
    return lambda z: inner(z)


def drawing():
    own = torch.Generator().manual_seed(0)
    return lambda z: z + torch.randn(z.shape, generator=own)


def test_an_unnamed_function_that_draws_gives_each_run_an_identity(session):
    def identities(function):
        with intervene(at("z"), function):
            runs = [session.generate(PROMPT, seed=1) for _ in range(2)]
        return [run.common["fingerprint"] for run in runs], [run.latents for run in runs]

    names, latents = identities(noisy)
    assert not torch.equal(*latents) and names[0] != names[1]
    names, latents = identities(lambda z: 2 * z)  # nothing but its own input
    assert torch.equal(*latents) and names[0] == names[1]


def random():
    return noisy


@pytest.mark.parametrize("make", [random, Counts, counting, drawing])
@pytest.mark.parametrize("is_reduce", [False, True], ids=["edit", "reduce"])
def test_videos_of_a_batch_that_take_turns_at_a_function_are_warned_of(session, make, is_reduce):
    function = make()
    if is_reduce:
        context = capture(session, "z", reduce=getattr(function, "apply", function))
    else:
        context = intervene(at("z"), function)
    with context:
        with warnings.catch_warnings(action="error"):
            session.generate(PROMPT, seed=1)
        with pytest.warns(UserWarning, match="take turns at it: generate them one by one"):
            session.generate(PROMPT, seeds=[1, 2])


def reads_a_tensor(z):
    return z * SCALE


def makes_a_tensor(z):
    return z * torch.ones(1)


@pytest.mark.parametrize("function", [reads_a_tensor, makes_a_tensor])
def test_functions_that_keep_nothing_are_not_warned_of(session, function):
    with warnings.catch_warnings(action="error"), intervene(at("z"), function):
        session.generate(PROMPT, seeds=[1, 2])


# --- Text in figures: prompts are text, of any script, and no markup
PROMPTS = {
    "dollars": "a $5 bill and a $10 bill",
    "a formula": r"cost $\frac{a} b$",
    "escaped dollars": r"a \$5 bill",
    "markup": "<script>alert(1)</script> </svg> & --> ]]>",
    "Chinese": "一个红色的圆圈",
    "Arabic": "دائرة حمراء",
    "an emoji": "a circle 🔴",
    "control characters": "a \x07\x1b[31m red \ufffe circle",
    "lines": "a red\ncircle\tmoving",
    "braces": "{0} {x:g} %s",
}


@pytest.fixture(scope="module")
def atlas(session):
    return captured(session, layers=[1], cross=True).atlas()


@pytest.mark.parametrize("prompt", [*PROMPTS.values()], ids=[*PROMPTS])
def test_a_prompt_is_drawn_as_its_letters(atlas, tmp_path, prompt):
    with warnings.catch_warnings(action="error"):
        figure = Atlas(atlas | {"prompt": prompt}).plot(layer=1)
        figure.savefig(tmp_path / "a.svg")
        words = prompt_words(np.ones((2, 3)) / 3, [prompt, "a $", "$ b"], layer=1, subtitle=prompt)
        words.savefig(tmp_path / "b.svg")
    for name in ("a.svg", "b.svg"):
        text = " ".join(ElementTree.parse(tmp_path / name).getroot().itertext())
        letters = [word for word in prompt.split() if word.isprintable()]
        assert all(word in text for word in letters), letters


def test_a_sheet_of_figures_holds_any_title(atlas, tmp_path):
    atlas.plot(layer=1).savefig(tmp_path / "a.svg")
    sheet = save_contact_sheet(tmp_path / "b.svg", {"a \x07 label": tmp_path / "a.svg"}, "a \x1b title <b>")
    assert "title <b>" in " ".join(ElementTree.parse(sheet).getroot().itertext())


@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_a_figure_is_saved_with_the_same_bytes(atlas, tmp_path, kind):
    files = [tmp_path / f"{n}.{kind}" for n in range(2)]
    for file in files:
        with patch("time.time", return_value=1e9 + file.stem.count("1")):
            atlas.plot(layer=1).savefig(file)
    assert files[0].read_bytes() == files[1].read_bytes()
    streams = [BytesIO(), BytesIO()]
    for stream in streams:
        atlas.plot(layer=1).savefig(stream, format=kind)
    assert streams[0].getvalue() == streams[1].getvalue()


def test_letters_of_another_script_come_from_a_font_that_is_installed(atlas, tmp_path, monkeypatch):
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "one"])
    builder.setupCharacterMap({ord("一"): "one"})
    pen = TTGlyphPen(None)
    pen.moveTo((0, 300))
    pen.lineTo((900, 300))
    pen.lineTo((900, 400))
    pen.closePath()
    builder.setupGlyf({".notdef": pen.glyph(), "one": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (1000, 0), "one": (1000, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": style.FALLBACKS[0], "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "own.ttf")
    monkeypatch.setattr(style, "MISSING_GLYPHS", "nothing")  # what is missing is told here

    def draw():
        Atlas(atlas | {"prompt": "一"}).plot(layer=1).savefig(tmp_path / "a.png")

    before = list(font_manager.fontManager.ttflist)
    with pytest.warns(UserWarning, match="missing"):
        draw()
    try:
        font_manager.fontManager.addfont(tmp_path / "own.ttf")
        style.theme.cache_clear()
        with warnings.catch_warnings(action="error"):
            draw()
    finally:
        font_manager.fontManager.ttflist[:] = before
        style.theme.cache_clear()


# --- Output that closes or breaks off: the work is done, whoever reads
SCRIPT = """
import sys
from pathlib import Path
from experiments.running.cli import main

def run(argv):
    for _ in range(3000):
        print("a line that may be lost, 圆" if len(sys.argv) < 3 else "", flush=True)
    print("on stderr", file=sys.stderr)
    Path(sys.argv[1]).write_text("written")
    if "fail" in sys.argv:
        raise RuntimeError("on purpose")

main(run)
"""


@pytest.mark.parametrize(
    "redirection",
    ["> /dev/full", "2> /dev/full", ">&-", "2>&-", ">&- 2>&- <&-", "| head -1", "| true", "2>&1 | head -1"],
)
def test_a_broken_output_decides_nothing(tmp_path, redirection):
    path = tmp_path / "a.txt"
    (tmp_path / "script.py").write_text(SCRIPT)
    command = f"{sys.executable} {tmp_path}/script.py {path} {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.read_text() == "written" and "Traceback" not in done.stderr + done.stdout
    failed = subprocess.run(
        ["bash", "-c", command.replace(str(path), f"{path} fail", 1)], env=environment, capture_output=True
    )
    assert failed.returncode == 1


def test_a_rollout_outlives_the_reader_of_its_lines(tiny, monkeypatch):
    class Gone(StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    session = load(tiny.path, num_frames=3)
    assert session.generate(PROMPT, seed=1, quiet=False).latents.shape[1] == 3


# --- Inputs: each refused in one line before anything is computed, or made right
LONG = "x" * 300


def sparse(x):
    return x.to_sparse()


def on_meta(x):
    return x.to("meta")


def nested(x):
    return torch.nested.as_nested_tensor(list(x), layout=torch.jagged)


def of_integers(x):
    return x.int()


@pytest.mark.parametrize("make", [sparse, on_meta, nested, of_integers])
def test_first_frames_that_are_no_latents_are_refused(session, make):
    with refused("first_frames holds .*no finite latents of floating point"):
        session.generate(PROMPT, first_frames=make(torch.ones(3, 16, 8, 8)))


@pytest.mark.parametrize(
    "value", [torch.tensor(1), np.int64(1), torch.tensor([1]), np.array([1]), range(1, 2)]
)
def test_numbers_of_arrays_are_numbers_of_an_edit(value):
    assert Knockout(frames=value, layers=value, passes="all") == Knockout(frames=1, layers=1, passes="all")


@pytest.mark.parametrize(
    "value", [torch.ones(2, 2).long(), torch.tensor(1, device="meta"), torch.tensor(1.5)]
)
def test_arrays_that_hold_no_numbers_are_refused(session, value):
    with refused("layers .*should be a valid integer"):
        Knockout(frames=0, layers=value, passes="all")
    with refused("layers must be a number or several"), capture(session, "z", layers=value):
        pass


@pytest.mark.parametrize("direction", [torch.ones(2, device="meta"), torch.ones(2, 2), np.ones((2, 2))])
def test_a_direction_without_numbers_is_refused(direction):
    with refused("direction an array .*should be a valid number"):
        Steer(site="z", direction=direction, passes="all")


def test_a_mean_takes_any_atlases_that_come_one_by_one(atlas):
    runs = [Atlas(atlas | {"fingerprint": name}) for name in "ab"]
    assert Atlas.mean(run for run in runs).count == 2
    for wrong in (None, 5, atlas, [atlas], (name for name in "ab")):
        with refused("a mean takes a list of atlases, two or more"):
            Atlas.mean(wrong)


def test_what_is_no_run_or_no_atlas_is_not_compared(session, atlas):
    run = session.generate(PROMPT, seed=1)
    for wrong in (atlas, None, "a.mp4", run.latents):
        with refused("compare takes two runs, as session.generate"):
            compare(run, wrong)
    for wrong in (run, None, {}):
        with refused("an atlas is compared with another atlas"):
            atlas.compare(wrong)


@pytest.mark.parametrize("name", [LONG, "a\0b"], ids=["too long", "with NUL"])
def test_a_name_that_no_disk_has_is_refused_before_anything_is_computed(session, atlas, tmp_path, name):
    run, path = session.generate(PROMPT, seed=1), tmp_path / name
    with refused("cannot be written", CacheError):
        capture(session, "z", stream_to=path).__enter__()
    with refused("cannot be written", CacheError):
        atlas.save(f"{path}.pt")
    with refused("cannot be written", CacheError):
        run.save(f"{path}.mp4")
    with refused("cannot be written", CacheError):
        compare(run, run).save(f"{path}.mp4")
    with refused("not found", CacheError):
        Atlas.open(f"{path}.pt")
    with refused("has no complete run", CacheError):
        _ = ActivationStore(path).runs


def test_what_is_no_config_and_no_folder_is_refused():
    with refused("is no config, its path, or a directory of weights"):
        load(LONG)
    for wrong in ("", " ", 5):
        with refused("a store of activations is a folder", CacheError):
            ActivationStore(wrong)


def test_a_preview_that_is_not_there_has_its_own_remedy(tiny):
    with refused("none.pth not found; give a file of TAEHV's decoder"):
        load(tiny.path, preview="none.pth")


# --- Messages: where, what, and what to do; no types of Python
@pytest.mark.parametrize("frames", ["own", ["own", "past"]], ids=["own", "own and past"])
def test_a_head_without_keys_is_named_with_its_layer_and_block(session, frames):
    edit = Knockout(frames=frames, layers=[1], heads=[1], passes="denoise")
    with refused("layer 1, block 0, step 0: head 1 would see no key at all; leave it"), intervene(edit):
        session.generate(PROMPT, seed=1)


@pytest.mark.parametrize(
    "value, words",
    [(None, "None"), ("a", "'a'"), (np.ones(2), r"an array \[2\] of float64"), ([1], r"\[1\]")],
)
def test_what_a_function_returns_is_named_without_types(session, value, words):
    with (
        refused(f"reduce at z: layer 1, block 0, step 0: it returned {words}, not a tensor"),
        capture(session, "z", layers=[1], reduce=lambda z: value),
    ):
        session.generate(PROMPT, seed=1)
    if value is not None:
        with refused(f"it returned {words}, not a tensor"), intervene(at("z"), lambda z: value):
            session.generate(PROMPT, seed=1)


def test_a_field_that_at_does_not_take_is_named(session):
    with refused("at takes no 'layer'; did you mean layers"):
        at("z", layer=5)
    with refused(r"source 'x' should be a Source\(...\)"):
        Patch(what="z", source="x", passes="all")


@pytest.mark.parametrize("prompt", [5, {"a": 1}, [5]])
def test_what_is_no_prompt_is_refused(session, prompt):
    with refused("a prompt is a text|prompt 5 should be a valid string"):
        session.generate(prompt)


def test_a_seed_of_a_list_is_a_number(session):
    with refused("seed None should be a valid integer"):
        session.generate(PROMPT, seeds=[1, None])


def test_a_changed_function_is_not_blamed_on_weights(session, tmp_path):
    scale = {"by": 1.0}
    for by in (1.0, 2.0):
        scale["by"] = by
        edit = intervene(at("v"), named("scaled", lambda v: scale["by"] * v))
        seen_by_another = intervene(at("z"), named("a look", lambda z: None))
        context = nullcontext() if by == 1.0 else refused("what a named function reads", CacheError)
        with context, edit, seen_by_another, capture(session, "z", stream_to=tmp_path):
            session.generate(PROMPT, seed=1)


def test_a_block_of_another_run_is_none_of_this_one(tmp_path):
    store = ActivationStore(tmp_path)
    first, second = add_run(store, "a", [1.0]), add_run(store, "b", [2.0])
    shutil.copy(second.block(0), first.block(0))
    for read in (rows, check, tables):
        with refused("it is of another run than its folder", CacheError):
            read(store)


@pytest.mark.parametrize("address", ["nonsense", "tcp://host", "http://host:1"])
def test_what_is_no_address_of_a_scheduler_is_refused(address):
    flags = Namespace(workers=None, scheduler=address, slurm=None, quiet=True)
    with refused("--scheduler .*write tcp://HOST:PORT"), dask_client(flags):
        pass


def returns_none(config, arguments):
    return None


def takes_nothing():
    return 3, 6


def returns_negative_numbers(config, arguments):
    return -3, -6


def returns_text(config, arguments):
    return "3", "6"


def returns_one_number(config, arguments):
    return (3,)


@pytest.mark.parametrize(
    "layout",
    [
        (-3, -6),
        np.array([3, 6]),
        returns_none,
        takes_nothing,
        returns_negative_numbers,
        returns_text,
        returns_one_number,
    ],
)
def test_what_is_no_layout_of_a_pipeline_is_refused(layout):
    model, inputs = made("cosmos")
    with refused("is no layout"), torch.no_grad(), capture(model, layout=layout):
        model(**inputs)
