"""Values at the border: a wrong one is refused in one line that names it and what fits."""

import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from hypothesis import given, strategies

import experiments
from experiments import Atlas, at, capture, intervene, load, run_extraction_all, run_notebooks, x0_lens
from experiments.caches import load_cache
from experiments.running.cli import Parser, main
from wan.config import load_config
from wan.errors import ConfigError, UserError, checked
from wan.files import read_yaml
from wan.interventions import Ablate, Band, Bias, Knockout, Patch, Source, Steer, read_edits

NAN = float("nan")


@pytest.fixture(scope="module")
def here(tiny):
    """A session, a run that was not captured, and one that was with its atlas and activations."""
    session = load(tiny.config, num_frames=3)
    plain = session.generate("a", seed=1)
    with capture(session, "z", layers=1) as sites:
        session.generate("a", seed=1)
    with capture(session, layers=[1]) as seen:
        session.generate("a", seed=1)
    return session, plain, sites, seen, seen.atlas()


def captured(session, *sites, **chosen):
    with capture(session, *sites, **chosen):
        session.generate("a", seed=1)


def edited(session, *edits, **chosen):
    with intervene(*edits, **chosen):
        session.generate("a", seed=1)


# What is called with a session, a run, captured sites, captured attention and its atlas; and what is said
CALLS = {
    **{f"load({value!r})": (lambda *_, v=value: load(v), "source .* is not text or a Path or a RunConfig")
       for value in (5, 1.5, None, b"x", ["wan_mini"], True)},
    **{f"generate({value!r})": (lambda s, *_, v=value: s.generate(v), "is not text or a list of text or null")
       for value in (5, 1.5, Path("x"), True, b"x", [5], [None], {"a": 1}, [["a"]])},
    "generate(seeds=5)": (lambda s, *_: s.generate("a", seeds=5), "seeds 5 is not a list of int or null"),
    "generate(seeds='12')": (lambda s, *_: s.generate("a", seeds="12"), "seeds '12' is not a list of int"),
    "generate(seed=True)": (lambda s, *_: s.generate("a", seed=True), "seed True is not int"),
    "generate(sed=1)": (lambda s, *_: s.generate("a", sed=1), "knows no sed; did you mean seed"),
    "generate(config=5)": (lambda s, *_: s.generate("a", config=5), "config 5 is not a RunConfig or null"),
    "generate(quiet='no')": (lambda s, *_: s.generate("a", quiet="no"), "quiet 'no' is not bool"),
    "load(num_frames='3')": (lambda *_: load("wan_mini", num_frames="3"), "num_frames '3' is not int in"),
    "load(preview=5)": (lambda *_: load("wan_mini", preview=5), "preview 5 is not text or a Path or null"),
    "load(wan_minni)": (lambda *_: load("wan_minni"), "did you mean wan_mini"),
    "mass='no'": (lambda s, *_: captured(s, mass="no"), "mass 'no' is not bool"),
    "mas=True": (lambda s, *_: captured(s, mas=True), "knows no mas; did you mean mass"),
    "layers='a'": (lambda s, *_: captured(s, "z", layers="a"), "layers must be a number or several"),
    "layers=1.0": (lambda s, *_: captured(s, "z", layers=1.0), "layers must be a number or several"),
    "laers=1": (lambda s, *_: captured(s, "z", laers=1), "knows no 'laers'; did you mean layers"),
    "dtype='nope'": (lambda s, *_: captured(s, "z", dtype="nope"), "dtype 'nope' is none of floating point"),
    "dtype='bool'": (lambda s, *_: captured(s, "z", dtype="bool"), "dtype torch.bool is none of"),
    "dtype=int8": (lambda s, *_: captured(s, "z", dtype=torch.int8), "dtype torch.int8 is none of floating"),
    "to='meta'": (lambda s, *_: captured(s, "z", to="meta"), "to 'meta' is not cpu, cuda or cuda:N"),
    "to='gpu'": (lambda s, *_: captured(s, "z", to="gpu"), "to 'gpu' is not cpu"),
    "reduce=5": (lambda s, *_: captured(s, "z", reduce=5), "reduce 5 is no function of x and where"),
    "reduce=0": (lambda s, *_: captured(s, "z", reduce=0), "reduce 0 is no function of x and where"),
    "stream_to=5": (lambda s, *_: captured(s, "z", stream_to=5), "stream_to 5 is not text or a Path"),
    "plot(layer=True)": (lambda *x: x[4].plot(layer=True), "layer True is not int"),
    "plot(heads=3)": (lambda *x: x[4].plot(layer=1, heads=3), "plot knows no heads; did you mean head"),
    "view(layer=1)": (lambda *x: x[4].view(layer=1), "view knows no layer"),
    "view(step=1.0)": (lambda *x: x[4].view(step=1.0), "step 1.0 is not int or null"),
    "compare(prompt)": (lambda *x: x[4].compare(x[4], "prompt"), "'prompt' is no matrix of both; known"),
    "compare(5)": (lambda *x: x[4].compare(5), "other 5 is not a Atlas"),
    "mean": (lambda *x: Atlas.mean([5, 5]), "a mean takes a list of atlases"),
    "open(None)": (lambda *_: Atlas.open(None), "path None is not text or a Path"),
    "load_cache(5)": (lambda *_: load_cache(5), "path 5 is not text or a Path"),
    "run.save(None)": (lambda *x: x[1].save(None), "path None is not text or a Path"),
    "atlas.save(None)": (lambda *x: x[4].save(None), "path None is not text or a Path"),
    "seen.save(True)": (lambda *x: x[2].save(True), "path True is not text or a Path"),
    "atlas of another run": (lambda *x: x[3].atlas(x[1]), "has no attention: make it inside capture"),
    "site": (lambda *x: x[2]["q"], "'q' was not captured"),
    "at(layr=1)": (lambda *x: x[2]["z"].at(layr=1), "at knows no 'layr'; did you mean layer"),
    "compare runs": (lambda *x: experiments.compare(x[1], 5), "run_b 5 is not a Run"),
    "x0_lens": (lambda s, *_: x0_lens(s, 5), "prompt 5 is not text or null"),
    "at()": (lambda *_: at(), "at takes a site or several"),
    "at(laers)": (lambda *_: at("z", laers=1), "knows no laers; did you mean layers"),
    "x0 clean": (lambda *_: at("x0", passes="clean"), "x0 is of denoising passes"),
    **{f"edit {type(value).__name__}":
       (lambda s, *_, v=value: edited(s, at("z"), v), "is no function of x and where")
       for value in (5, "f", object())},
    "of none": (lambda s, *_: edited(s, at("z"), lambda: 1), "takes no argument: give it x, or x and where"),
    "sparse": (lambda s, *_: edited(s, at("z"), lambda x, w: x.to_sparse()), "a tensor of torch.sparse"),
    "meta": (lambda s, *_: edited(s, at("z"), lambda x, w: x.to("meta")), "on meta, not"),
    "data": (lambda s, *_: edited(s, at("z"), lambda x, w: x, data=5), "data 5 is no mapping of edits"),
    "no passes": (lambda *_: Knockout(frames=0), "Knockout needs passes, one of denoise, clean, all"),
    "no b": (lambda *_: Bias(frames=0, passes="all"), "Bias needs b, float in"),
    "no how": (lambda *_: Ablate(passes="all"), "Ablate needs how, one of zero"),
    "no source": (lambda *_: Patch("z", passes="all"), "Patch needs source"),
    "positional": (lambda *_: Knockout(1, 2), "Knockout: too many positional arguments"),
    "unknown": (lambda *_: Knockout(frame=0, passes="all"), "knows no frame; did you mean frames"),
    "own:03": (lambda *_: Knockout(frames="own:03", passes="all"), "frames 'own:03' is not"),
    "b: yes": (lambda *_: Bias(True, frames=0, passes="all"), "b True is not float"),
    "phase": (lambda *_: Band(bands=0, phase=NAN, passes="all"), "phase nan is not float"),
    "scale": (lambda *_: Steer("z", [1.0], scale=NAN, passes="all"), "scale nan is not float"),
    "direction": (lambda *_: Steer("z", torch.tensor([NAN]), passes="all"), r"direction \[nan\] is not"),
    "Source": (lambda *_: Source(seed="1"), "seed '1' is not int"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_in_one_line(name, here):
    call, said = CALLS[name]
    with pytest.raises(UserError, match=said) as error, warnings.catch_warnings(action="ignore"):
        call(*here)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


@given(strategies.integers(0, 10**6).map(str) | strategies.from_regex(r"\A[-+]?[0-9]{1,3}(:[0-5]?[0-9])?\Z"))
def test_a_number_in_yaml_is_the_one_that_is_read_by_people(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(f"seed: {text}\n")
    try:
        found = read_yaml(path)["seed"]
    except ConfigError as error:
        assert f"{text} is unclear" in str(error) and "line 1" in str(error)
    else:
        assert found == (int(text) if isinstance(found, int) else text)


def test_words_of_yaml_that_are_no_text_and_names_that_are_no_file(tmp_path):
    for line, said in (("prompt: yes", "prompt True is not text"), ("seed: 010", "010 is unclear"),
                       ("seed: '3'", "seed '3' is not int"), ("seed: 1:30", "1:30 is unclear"),
                       ("timestep_shift: 5:30.5", "5:30.5 is unclear")):  # fmt: skip
        (tmp_path / "own.yaml").write_text(line)
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / "own.yaml")
    with pytest.raises(ConfigError, match=r"own\.yml cannot be read.*"):
        load_config(tmp_path / "own.yml")
    with pytest.raises(ConfigError, match=r"did you mean own\.yaml"):
        load_config(tmp_path / "ovn.yaml")


def test_a_flag_that_is_none_names_the_nearest(capsys):
    parser = Parser()
    parser.add_argument("--layer_indices")
    for words in (["--layers", "3"], ["a.pt", "--layers"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert "did you mean --layer_indices?" in capsys.readouterr().err


@pytest.mark.parametrize("flags, said", [
    (["--config_path", "wan_minni"], "none of configs/; did you mean wan_mini?"),
    (["--seed", "1_0"], "'1_0' is not a whole number"),
    (["--prompts", "", "--output_dir", "x"], "a word behind --prompts is empty; leave it out"),
    (["--interventions="], "a word behind --interventions is empty; leave it out"),
    (["--seed", "\uff11"], "is not a whole number"),
    (["--cache_policy", "window,window=9,window=6"], "has window twice"),
    (["--prompt_schedule", "none.yaml"], "is no YAML file of one list `prompts`, each with frame"),
    (["--prompts", "none.txt", "--output_dir", "x"], "No such file or directory; write a prompt a line"),
    (["--interventions", "none.yaml"], "No such file or directory; write - {edit: knockout, frames: first"),
    (["--ckpt_dir", "none"], "download_weights.sh; or --config_path configs/wan_mini.yaml, whose weights"),
])  # fmt: skip
def test_a_wrong_flag_says_what_would_fit(flags, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main(run_extraction_all.run, ["--config_path", "configs/wan_mini.yaml", "--quiet", *flags])
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and said in lines[0], lines


@pytest.mark.parametrize("flags, said", [
    (["5-2"], "'5-2' goes backwards: write 2-5"),
    (["0-"], "'' is not a whole number"),
    (["0", "--parameter", "STEP=0", "STEP=4"], "--parameter has STEP twice"),
])  # fmt: skip
def test_layers_and_parameters_of_a_notebook(flags, said, capsys):
    with pytest.raises(SystemExit) as ended:
        run_notebooks.run(["layer_atlas.ipynb", "none.pt", *flags])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_what_is_no_list_of_edits(tmp_path):
    for text in ("- knockout", "interventions: 5", "edit: knockout", "- null"):
        (tmp_path / "edits.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"write (- )?\{edit: knockout, frames: first, passes: denoise"):
            read_edits(tmp_path / "edits.yaml")


def test_checked_functions_stay_what_they_are():
    @checked
    def double(x: float, *rest: int, deep: bool = False, **more: int) -> float:
        """Double a number."""
        return 2 * x

    assert double(3) == 6.0 and isinstance(double(3), float) and double(1.5, 1, deep=True, other="x") == 3
    assert double.__doc__ == "Double a number." and "deep" in str(__import__("inspect").signature(double))
    with pytest.raises(ConfigError, match="double needs x, float"):
        double()
