"""Values at the border: a wrong one is refused in one line that names it and what fits."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from conftest import ROOT
from hypothesis import given, strategies

from experiments import Atlas, at, capture, intervene, load, run_extraction_all, run_notebooks
from experiments.running.cli import Parser, main
from wan.config import load_config
from wan.errors import ConfigError, UserError
from wan.files import read_yaml
from wan.interventions import Ablate, Band, Bias, Knockout, Move, Patch, Steer, read_edits


@pytest.fixture(scope="module")
def session(tiny):
    return load(tiny.config, num_frames=3)


def check_message(error, text):
    assert text in str(error.value)
    assert str(error.value).isprintable() and len(str(error.value)) < 400


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"num_frames": "3"}, "num_frames '3' should be a valid integer"),
        ({"num_frames": 0}, "num_frames 0 should be greater than or equal to 1"),
        ({"seed": True}, "seed True should be a valid integer"),
        ({"layer_indices": [1, "a"]}, "(item 1) should be a valid integer"),
        ({"device": "mps"}, "device 'mps' should be one of auto, cpu, cuda, cuda:N"),
        ({"seed": -1}, "seed -1 should be greater than or equal to 0"),
        ({"prompt": " "}, "prompt ' ' should be a text; without one, prompt_embeds takes a file of states"),
        ({"prompt": "a\0b"}, "it has a NUL character at 1"),
        ({"num_frame": 3}, "'num_frame' is no setting of a run; did you mean num_frames?"),
        ({"base": {"shft": 1}}, "base: unknown key 'shft'; did you mean shift?"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings, text):
    with pytest.raises(ConfigError) as error:
        load("wan_mini", **settings)
    check_message(error, text)


@pytest.mark.parametrize("layers", [np.int64(1), np.arange(1, 2), range(1, 2), (1,), torch.tensor([1]), [1]])
def test_numbers_of_other_libraries_are_numbers(layers, session):
    with capture(session, "z", layers=layers) as captured:
        session.generate("a", seed=1)
    assert {place.layer for place in captured["z"].places} == {1}
    edit = Knockout(frames=0, layers=layers, passes="all")
    assert edit.layers == (1,) and type(edit.layers[0]) is int


def test_seeds_of_numpy_are_seeds(session):
    runs = session.generate("a", seeds=np.arange(1, 3))
    assert [run.common["seed"] for run in runs] == [1, 2]
    assert type(runs[0].config.seed) is int
    (run,) = session.generate("a", seeds=3)
    assert run.config.seed == 3


@pytest.mark.parametrize("edit", ["knockout", Knockout, [Knockout(frames=0)], at("z")])
def test_what_is_no_edit_is_named(edit):
    with pytest.raises(ConfigError) as error, intervene(edit):
        pass
    check_message(error, " is no edit")
    assert "intervene takes edits, at least one: Knockout, Bias" in str(error.value)


def test_an_edit_names_its_fields_where_it_is_given_too_many():
    with pytest.raises(ConfigError) as error:
        Knockout("past")
    check_message(error, "Knockout: too many positional arguments; it takes layers, heads")
    edit = Bias(-1.0, frames=0)
    assert pickle.loads(pickle.dumps(edit)) == edit


@pytest.mark.parametrize("opened", [load, lambda x: capture(x, layers=[0]).__enter__()])
def test_a_module_that_is_no_transformer_is_refused_at_once(opened):
    with pytest.raises(ConfigError) as error:
        opened(torch.nn.Linear(3, 3))
    check_message(error, "Linear is no transformer of diffusers: give a pipeline, such as WanPipeline")


@pytest.mark.parametrize(
    "chosen, text",
    [
        ({"layers": "a"}, "layers must be a number or several"),
        ({"layers": 1.0}, "layers must be a number or several"),
        ({"laers": 1}, "knows no 'laers'; did you mean layers"),
        ({"dtype": torch.int8}, "dtype torch.int8 is none of floating point"),
        ({"to": "gpu"}, "to 'gpu' is not cpu"),
        ({"reduce": 5}, "reduce 5 is no function of x and where"),
    ],
)
def test_a_wrong_choice_of_a_capture_is_named(chosen, text, session):
    with pytest.raises(UserError) as error, capture(session, "z", **chosen):
        session.generate("a", seed=1)
    check_message(error, text)


@pytest.mark.parametrize(
    "kind, fields, text",
    [
        (Knockout, {"frames": "own:03"}, "frames 'own:03'"),
        (Knockout, {"frames": "frist"}, "a valid integer or a name of frames; did you mean first?"),
        (Move, {"frames": "qqq", "offset": 1}, "a name of frames; known ones: first, own, own:N, past, sink"),
        (Knockout, {"frames": 0, "passes": "some"}, "should be 'denoise', 'clean' or 'all'"),
        (Bias, {"frames": 0}, "Bias: missing a required argument: 'b'; it takes b, layers"),
        (Bias, {"b": True, "frames": 0}, "b True should be a valid number"),
        (Band, {"bands": 0, "phase": float("nan")}, "phase nan should be"),
        (Steer, {"site": "z", "direction": torch.tensor([float("nan")])}, "(item 0) should be"),
        (Ablate, {"how": "nothing"}, "how 'nothing' should be 'zero', 'mean'"),
        (Patch, {"what": "z", "source": {"seed": "1"}}, "source: seed '1' should be a valid integer"),
    ],
)
def test_a_wrong_field_of_an_edit_is_named(kind, fields, text):
    with pytest.raises(ConfigError) as error:
        kind(**{"passes": "all"} | fields)
    check_message(error, text)


@pytest.mark.parametrize(
    "function, text",
    [
        (5, "is no function of x and where"),
        (lambda: 1, "takes no argument: give it x, or x and where"),
        (lambda x, where: x.to_sparse(), "a tensor of torch.sparse"),
        (lambda x, where: x.to("meta"), "on meta, not"),
    ],
)
def test_what_is_no_edit_of_an_activation_is_named(function, text, session):
    with (
        pytest.raises(ConfigError) as error,
        warnings.catch_warnings(action="ignore"),
        intervene(at("z"), function),
    ):
        session.generate("a", seed=1)
    check_message(error, text)


def test_what_an_atlas_lacks_is_named(session):
    with capture(session, layers=[1]) as captured:
        run = session.generate("a", seed=1)
    atlas, plain = captured.atlas(), session.generate("a", seed=1)
    with pytest.raises(ConfigError, match="'prompt' is no matrix of both; known"):
        atlas.compare(atlas, "prompt")
    with pytest.raises(ConfigError, match="has no attention: make it inside capture"):
        captured.atlas(plain)
    with pytest.raises(ConfigError, match="a mean takes a list of atlases"):
        Atlas.mean([run, run])
    with pytest.raises(ConfigError, match="at takes a site or several"):
        at()
    with pytest.raises(ConfigError, match="did you mean wan_mini"):
        load("wan_minni")


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
    messages = {
        "prompt: yes": "prompt True should be a valid string",
        "seed: 010": "010 is unclear",
        "seed: '3'": "seed '3' should be a valid integer",
        "seed: 1:30": "1:30 is unclear",
        "timestep_shift: 5:30.5": "5:30.5 is unclear",
    }
    for line, message in messages.items():
        (tmp_path / "own.yaml").write_text(line)
        with pytest.raises(ConfigError, match=message):
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
    (["--seeds", "1", "2", "--output_path", "a.pt"], "a sweep needs --output_dir, a folder, in place of"),
    (["--seeds", "1", "2", "--output_dir", "x", "--save_video", "a.mp4"], "give --save_video without a PATH"),
    (["--interventions", "none.yaml"], "No such file or directory; write - {edit: knockout, frames: first"),
    (["--ckpt_dir", "none"], "download_weights.sh; or --config_path configs/wan_mini.yaml, whose weights"),
    (["--config_path", "longlive", "--ckpt_dir", "none"],
     "run: bash experiments/download_weights.sh longlive; or"),
    (["--config_path", "longlive", "--ckpt_dir", "/none/wan_models/a"],
     "download_weights.sh longlive /none;"),
    (["--config_path", "wan_14b", "--ckpt_dir", "none/Wan2.1-T2V-14B-Diffusers"],
     "run: hf download Wan-AI/Wan2.1-T2V-14B-Diffusers --local-dir none/Wan2.1-T2V-14B-Diffusers;"),
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
