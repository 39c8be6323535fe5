"""A model in one's own code: load it, capture while it generates, plot and save what was captured.

    pipe = load("wan_mini")
    with capture(pipe, layers=[1, 5]) as seen:
        run = pipe.generate("a red circle moving right over a dark blue background", seed=42)
    atlas = seen.atlas()

The scripts go the same way: experiments/extraction/causal.py loads and generates for both.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from experiments.caches import load_cache, save_cache
from experiments.caches.files import CacheError, RunError
from experiments.caches.formats import AtlasCache
from experiments.caches.view import Profiles, open_profiles
from experiments.extraction import causal, project_files
from experiments.extraction import memory as memory_estimate
from experiments.extraction.cache_builders import Extraction, atlas_cache, atlas_requests
from experiments.extraction.prompt_embeds import with_given_prompt
from experiments.extraction.video import decode, save_video
from experiments.running.cli import FOLDER, policy_settings
from experiments.running.progress import Progress
from wan.capture import CapturedCall, CaptureRequest
from wan.checkpoint import read_model_config
from wan.config import RunConfig
from wan.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# others name themselves
AXES = {"N": "layers", "P": "passes", "H": "heads", "F": "frames", "L": "key tokens"}
UNITS = {
    "frame_logits": "mean q·k/√D over the token pairs of a query and a key frame",
    "frame_mass": "softmax summed over a key frame's tokens, mean over the query frame's; rows sum to 1",
    "key_curve": "q·k/√D of every key token, mean over the last block's queries",
    "cross_mass": "softmax of cross-attention on every prompt token, mean over a frame's queries",
    "frame_logits_by_band": "frame_logits by RoPE band, in logits; the bands sum to them",
    "last_block_frame_logits": "mean q·k/√D, mean over the last block's queries",
}


def load(
    source: str | Path = "wan_mini",
    *,
    device: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
    cache_policy: Any = None,
    **settings: Any,
) -> "Pipe":
    """A pipeline that generates videos, from a config's name, its path, or a directory of weights.

    device is auto, cpu, cuda or cuda:N; offload streams the layers' weights from the host. cache_policy takes
    the place of the config's: settings, a file, one of configs/policies or a policy by its name. settings are
    further fields of RunConfig, such as num_frames. Weights are read by the first video, after its prompt is
    encoded. Raises ConfigError for what is not there or does not fit.
    """
    known = [field.name for field in fields(RunConfig)]
    if unknown := next((name for name in settings if name not in known), None):
        nearest = get_close_matches(unknown, known, 1)
        said = f"did you mean {nearest[0]}?" if nearest else f"known ones: {', '.join(sorted(known))}"
        raise ConfigError(f"{unknown} is no setting of a run; {said}")
    given = {"device": device, "dtype": dtype, "offload": offload, **settings}
    if cache_policy is not None:
        if isinstance(cache_policy, str | Path):
            cache_policy = policy_settings(str(cache_policy), project_files.HOME / FOLDER)
        given = {"cache_policy": cache_policy, "local_attn_size": -1, "sink_size": 0} | given
    config = project_files.find_config(source, {k: v for k, v in given.items() if v is not None})
    return Pipe(config)


class Pipe:
    """A loaded model and its settings. One pipe makes any number of videos."""

    def __init__(self, config: RunConfig):
        self.config, self.model_config = config, read_model_config(config.ckpt_dir)
        self._session: causal.LoadedModel | None = None
        self._seen: Seen | None = None

    def generate(self, prompt: str | None = None, seed: int | None = None, quiet: bool = True) -> "Run":
        """Generate one video; prompt and seed are the config's where not given. Equal seeds give equal bits.

        Raises ConfigError where the model does not fit in memory, RunError where a number cannot be right.
        """
        if self.config.prompt_embeds:
            prompt = with_given_prompt(self.config, prompt)
        prompt = self.config.prompt if prompt is None else prompt
        config = replace(self.config, prompt=prompt, seed=self.config.seed if seed is None else seed)
        requests = self._seen.requests if self._seen else []
        with Progress(quiet) as observer:
            if self._session is None:
                self._session = causal.prepare(config, requests, observer=observer)
            run = Run(causal.extract_next(self._session, config, requests, observer))
        if self._seen:
            self._seen.runs.append(run)
        return run

    @contextmanager
    def _capturing(self, seen: "Seen") -> Iterator["Seen"]:
        if self._seen:
            raise ConfigError("this pipe is captured already; ask one capture for all layers: layers=[0, 1]")
        self._seen = seen
        try:
            yield seen
        finally:
            self._seen = None

    def __repr__(self) -> str:
        c, m = self.config, self.model_config
        weights = Path(c.checkpoint_path).name if c.checkpoint_path else "base weights"
        where = f"on {self._session.device}" if self._session else "read by the first video"
        return (
            f"Pipe: {c.model} ({weights}, {where}), {m.num_layers} layers of {m.num_heads} heads, "
            f"{c.num_frames} latent frames in {len(c.block_sizes)} blocks"
        )


class Run:
    """One generated video."""

    def __init__(self, extraction: Extraction):
        self.extraction = extraction

    @property
    def latents(self) -> Tensor:
        """[1, F, C, h, w]"""
        return self.extraction.latents

    @cached_property
    def video(self) -> Tensor:
        """uint8 [frames, height, width, 3], decoded when it is first asked for."""
        return decode(self.extraction)

    def save_video(self, path: str | Path) -> None:
        """Write an mp4 of 16 frames a second. ConfigError for a name that does not end in .mp4."""
        if Path(path).suffix != ".mp4":
            raise ConfigError(f"save_video writes an mp4, and {path} does not end in .mp4")
        save_video(self.extraction, path)

    def __repr__(self) -> str:
        c, shape = self.extraction.config, list(self.latents.shape)
        calls = len(self.extraction.records)
        return f"Run: {c.prompt!r}, seed {c.seed}, latents {shape}, {calls} captured calls"


@contextmanager
def capture(
    pipe: Pipe,
    layers: int | Collection[int] | None = None,
    *,
    mass: bool = True,
    key_curve: bool = False,
    cross: bool = False,
    rope_bands: bool = False,
    query_key_means: bool = False,
) -> Iterator["Seen"]:
    """Capture the attention of every video that a pipe generates in the context; None is every layer.

    mass keeps the softmax mass beside the mean logits, key_curve the last block's curve over key tokens,
    cross the mass on every prompt token, rope_bands the mean logits by RoPE band,
    query_key_means the means of q and k before RoPE. Raises ConfigError for a
    layer that the model does not have, and inside another capture of the same pipe.
    """
    chosen = None if layers is None else sorted({layers} if isinstance(layers, int) else set(layers))
    if chosen == []:
        raise ConfigError("layers is empty; name the layers to capture, or leave it out for every layer")
    requests = atlas_requests(pipe.config, mass, key_curve, cross, rope_bands, query_key_means, chosen)
    memory_estimate.check_requests(pipe.config, pipe.model_config, requests)
    with pipe._capturing(Seen(requests)) as seen:
        yield seen


class Seen:
    """What was captured: the runs made in the context, and the calls and atlas of the last one."""

    def __init__(self, requests: Sequence[CaptureRequest]):
        self.requests = list(requests)
        self.runs: list[Run] = []

    @property
    def calls(self) -> list[CapturedCall]:
        """The captured calls of the last run: call.site.layer, call.at.step, call.values["frame_logits"]."""
        return self._last().extraction.records

    def atlas(self, run: Run | None = None) -> "Atlas":
        """A run's attention (None: the last one's): what experiments/run_extraction_all.py writes."""
        return Atlas(atlas_cache((run or self._last()).extraction))

    def _last(self) -> Run:
        if not self.runs:
            raise RunError("nothing was generated while capturing; call pipe.generate(...) inside")
        return self.runs[-1]

    def __repr__(self) -> str:
        calls = len(self.runs[-1].extraction.records) if self.runs else 0
        runs = f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        return f"Seen: {runs}, {calls} captured calls in the last"


class Atlas(dict[str, Any]):
    """Attention of one rollout at frame level: atlas["frame_logits"] is a tensor, and so on."""

    def __init__(self, cache: Mapping[str, Any]):
        super().__init__(cache)
        self.cache = AtlasCache.from_dict(cache)

    def __missing__(self, name: str) -> NoReturn:
        raise CacheError(f"{name} is not in this atlas; it has {', '.join(self.units)}")

    @classmethod
    def open(cls, path: str | Path) -> "Atlas":
        """An atlas from its file. Raises CacheError for any other file."""
        return cls(load_cache(path, expect=("atlas",)))

    @property
    def units(self) -> dict[str, str]:
        """What each quantity is, by its name."""
        return {name: unit for name, unit in UNITS.items() if name in self}

    @property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The names of each quantity's axes: ("layers", "passes", "heads", "frames", "frames")."""
        table = AtlasCache.table().items()
        letters = {name.rstrip("?"): text for name, text in table if isinstance(text, str)}
        lengths = {name: letters[name].partition("[")[2].partition("]")[0].split(", ") for name in self.units}
        return {name: tuple(AXES.get(letter, letter) for letter in found) for name, found in lengths.items()}

    def view(self, step: int | None = None, quantity: str | None = None) -> Profiles:
        """One pass (None: the first) in mean_logit, mass or mean_prob, as the notebooks see it."""
        return open_profiles(self, step, quantity)

    def plot(self, layer: int, step: int | None = None, quantity: str | None = None) -> "Figure":
        """The profile of every head of a layer over the key frames, seen by the last block's queries."""
        from experiments.analysis.measures import head_statistics
        from experiments.figures.heads import head_grid, head_titles

        view = self.view(step, quantity)
        titles = head_titles(head_statistics(view.frame_profile(layer)).delta)
        return head_grid(
            view.key_profile(layer), titles, view.caption, layer=layer, note="Δ = first − middle"
        )

    def save(self, path: str | Path) -> Path:
        """Write the cache that the notebooks open, and the folders above it. CacheError where it cannot."""
        save_cache(path, self.cache)
        return Path(path)

    def __repr__(self) -> str:
        lines = [f"Atlas: {self.view().source}"]
        for name, names in self.axes.items():
            shape = ", ".join(f"{axis} {n}" for axis, n in zip(names, self[name].shape, strict=True))
            lines.append(f"  {name} [{shape}]: {UNITS[name]}")
        return "\n".join(lines)
