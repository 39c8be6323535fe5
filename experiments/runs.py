"""One rollout as `Run`: what was generated and captured; and what every kind of session shares.

    run = load("wan_mini", num_frames=6).generate("a red circle moving right", seed=42)
    run.latents, run.video, run.save("circle.mp4")

session.py makes runs of the causal model, base_session.py of the base model, and pipeline_session.py of
somebody's pipeline.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor

from experiments.caches import files, frames
from experiments.caches.formats import PassTag
from experiments.caches.mp4 import write_mp4
from experiments.caches.titles import conditions_of, prompt_in_words, seed_in_words
from experiments.extraction.video import decode, load_vae, require_free, save_video
from experiments.provenance import model_title
from wan.blocks import block_frames
from wan.capture import Capture, CapturedCall, CaptureRequest
from wan.config import RunConfig
from wan.errors import ConfigError
from wan.interventions import Edit, config_edits
from wan.sites import Watcher, watchers
from wan.vae import VAE, Preview

if TYPE_CHECKING:
    from experiments.caches.activations import Activations
    from experiments.captured import Captured

ROLLING: ContextVar[bool] = ContextVar("rolling", default=False)  # a video is being made in this context

# Who captures the videos of a session (captured.py), behind the session's id. It has `requests` for
# attention, and roll_out(session, configs, make, ...), whose make(watching) gives the runs, made under watch.
CAPTURES: ContextVar[tuple[tuple[int, "Captured"], ...]] = ContextVar("captures", default=())


def require_no_run() -> None:
    """Raise ConfigError inside a function that a run calls: another run would mix up captures and edits."""
    if ROLLING.get():
        raise ConfigError(
            "another video was asked for by a function that a running one calls (reduce, an edit, a hook): "
            "keep what it needs, and generate when the first has ended"
        )


def capturing(
    requests: Sequence[CaptureRequest], models: Container[int] | None = None
) -> AbstractContextManager[list[CapturedCall]]:
    """Capture what is requested, of the models of these ids alone; nothing where there is no request."""
    if not requests:
        return nullcontext([])
    return Capture(tuple(requests), models=models)


def all_edits(edits: Sequence[Edit], touched: Mapping[Edit, int]) -> list[Edit]:
    """Return the edits of a run: those around it, and those that changed calls of it from later on."""
    return [*edits, *(edit for edit in touched if edit not in edits)]


def note_calls(common: dict[str, Any], edits: Sequence[Edit], touched: Mapping[Edit, int]) -> None:
    """Add to what caches say of edits how many calls of the run each has changed."""
    if edits:
        common["interventions"]["calls"] = [touched.get(edit, 0) for edit in edits]


class AnySession(ABC):
    """What captures, edits, gradients and studies know of a session, whatever its model is.

    session.py has that of the causal model, base_session.py of the base model, and pipeline_session.py of a
    pipeline of somebody else's. Each has config, the settings of its next run; model_config, with num_layers,
    num_heads and head_dim; generate(), rollout(), common() and identity().
    """

    bidirectional = False  # all frames at once, with branches of guidance
    config: Any
    model_config: Any

    kind = "session"  # how messages name it
    can_nest = False  # several captures of activations at once

    @property
    def models_watched(self) -> frozenset[int] | None:
        """The ids of its transformers; None: edits of it are of any model."""
        return None

    def opened(self, layout: Any = None) -> AbstractContextManager[None]:
        """Let captures and edits see this session's model while the context lasts."""
        return nullcontext()

    def beside_calls(self, capture: Any) -> AbstractContextManager[None]:
        """Let a capture see forwards that are in no run of generate(): of somebody's pipeline alone."""
        return nullcontext()

    def text_kind(self) -> str | None:
        """Return which attention reads the prompt: "cross", "self" of joint attention; None: not known."""
        return "cross"

    def items_of(self, configs: Sequence[Any]) -> int:
        """Return how many videos are made together; 0 where the first forward tells it."""
        return len(configs)

    def facts_of(self, configs: Sequence[Any], *_: Any) -> list[dict[str, Any]]:
        """Return the fields that caches of each run share, before it is made."""
        return [self.common(config, [*self.active_edits(), *config_edits(config)]) for config in configs]

    @abstractmethod
    def common(self, config: Any, edits: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
        """Return the fields that caches of a config's run share."""

    def watchers(self) -> Sequence[Watcher]:
        """Return who watches this session's forwards in this context, outermost first."""
        return watchers()

    def active_edits(self) -> list[Any]:
        """Return the edits that apply to this session's forwards in this context."""
        return [edit for watcher in self.watchers() for edit in watcher.edits]

    def captures(self) -> list["Captured"]:
        """Return who captures this session in this context (captured.py), outermost first."""
        return [capture for session, capture in CAPTURES.get() if session == id(self)]

    def edited(self, config: Any, batch: int = 1) -> AbstractContextManager[Any]:
        """Apply a config's edits while the context lasts, and give a user's intervene() the data it lacks."""
        if not (config_edits(config) or self.active_edits()):
            return nullcontext()
        from experiments.edits import edited  # which rolls out by a session

        return edited(self, config, config_edits(config), batch)


@dataclass(frozen=True, repr=False)
class Run:
    """One rollout, finished or stopped: what was generated and captured, and the fields that caches share.

    Attributes:
        config: the settings of the rollout.
        latents: [1, F, C, h, w]; fewer frames where the run was stopped.
        records: the captured calls of attention, in the order of the rollout.
        activations: what was captured at sites, by site.
        pass_timesteps: of a block's passes, the clean pass last.
        prompt_tokens: the text of each token of the prompt, without padding.
        common: the fields that all caches of the run share: prompt, seed, fingerprint, edits and so on.
        stopped: where, of a run that was stopped: "3 of 7 blocks".
        bidirectional: True where all frames are made at once, with branches of guidance.

    Examples:
        >>> run = load("wan_mini", num_frames=6).generate("a red circle moving right", seed=42)
        >>> run.latents.shape, run.video.shape
        ([1, 6, 16, 8, 8], [21, 64, 64, 3])
        >>> run.save("circle.mp4")
    """

    config: RunConfig
    num_layers: int
    records: list[CapturedCall]
    latents: Tensor  # [1, F, C, h, w]; fewer frames where the run was stopped
    pass_timesteps: list[float]  # of a block's passes, the clean pass last
    prompt_tokens: list[str]  # text of each prompt token, without padding
    common: files.Record
    stopped: str = ""  # where, of a run that was stopped: "3 of 7 blocks"
    bidirectional: bool = False  # all frames at once, with branches of guidance
    returned: Tensor | None = None  # the video that a pipeline returned, uint8 [frames, height, width, 3]
    decoder: Callable[[Tensor], Tensor] | None = None  # a pipeline's: of latents [1, F, C, h, w] -> as video
    preview: VAE | Preview | None = None  # a small decoder, for show()
    activations: dict[str, "Activations"] = field(default_factory=dict)  # by site

    # --- The video
    @cached_property
    def video(self) -> Tensor:
        """uint8 [frames, height, width, 3], decoded when it is first asked for."""
        return self.decoded()

    def decoded(self, vae: Any = None) -> Tensor:
        """Decode the latents, by the VAE in float32 where no decoder is given -> as video.

        Of a pipeline's run it is the video that the pipeline returned, or what its VAE makes of the latents.
        """
        if self.returned is not None and vae is None:
            return self.returned
        if self.decoder is not None and vae is None:
            return self.decoder(self.latents)
        return decode(self.latents, vae or load_vae(self.config))

    @property
    def fps(self) -> int:
        return self.config.fps

    @property
    def edits(self) -> str:
        """The edits that were made, in words; "" for none."""
        return self.common.get("interventions", {}).get("words", "")

    @property
    def model_title(self) -> str:
        """What an mp4 of the run says of its model."""
        if self.decoder is not None:
            return f"{self.config.model}, {self.common['live_weights']}"
        return model_title(self.config)

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write an mp4.

        Args:
            path: its name, which ends in .mp4.
            overwrite: replace any file there.

        Raises:
            CacheError: where it cannot be written, and for a file there that must stay.
        """
        files.require_suffix(path, ".mp4")
        if self.returned is not None or self.decoder is not None:  # a pipeline's
            write_mp4(
                self.video.numpy(),
                path,
                tag=self.common["fingerprint"],
                model=self.model_title,
                overwrite=overwrite,
            )
            return
        require_free(path, self.config, overwrite, self.latents.shape[1])  # before it is decoded
        vae = load_vae(self.config, "auto")
        save_video(self.latents, path, vae, self.config, self.common["fingerprint"])

    save_video = save

    def show(self) -> Any:
        """Return the video for a notebook; the session's preview decodes it where there is one."""
        from IPython.display import Video

        pixels = self.decoded(self.preview) if self.preview else self.video
        with TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(pixels.numpy(), path, fps=self.fps)
            return Video(path.read_bytes(), embed=True, mimetype="video/mp4")

    def __repr__(self) -> str:
        prompt, seed = prompt_in_words(self.config.prompt), seed_in_words(self.config.seed)
        calls = f"{len(self.records)} captured calls"
        about = f"{self.config.model}, {prompt}, {seed}"
        return f"Run: {about}, latents {list(self.latents.shape)}, {calls}; {self.conditions}"

    @property
    def conditions(self) -> str:
        """Edits, cache policy and captured branches of guidance, in words."""
        branches = set()
        if self.bidirectional:  # causal rollouts have one alone
            branches = {call["branch"] for call in self.records}
        return conditions_of(self.common, branches)

    # --- What was captured
    @property
    def last_block(self) -> list[int]:
        """Frames of the last finished block."""
        sizes = self.config.block_sizes
        return block_frames(sizes, self.common.get("blocks_done", len(sizes)) - 1)

    def pass_tag(self, step: int) -> PassTag:
        """A pass of the causal rollout, whose last one is the clean pass."""
        return PassTag(step, self.pass_timesteps[step], step == len(self.pass_timesteps) - 1)

    @cached_property
    def _calls(self) -> dict[tuple[str, int, int | None], list[CapturedCall]]:
        """The calls of every quantity, layer and step, in block order."""
        calls = defaultdict(list)
        # Records come in the order of the rollout, so that calls of a pass are in block order.
        for call in self.records:
            for name in call.values:
                calls[name, call.site.layer, call["step"]].append(call)
        return dict(calls)

    @property
    def layers(self) -> list[int]:
        """Layers of which anything was captured."""
        return sorted({layer for _, layer, _ in self._calls})

    @property
    def quantities(self) -> set[str]:
        """Names of what was captured: frame_logits, key_curve, token_logits and so on."""
        return {name for name, _, _ in self._calls}

    def captured(self, name: str, layer: int, step: int | None) -> list[CapturedCall]:
        """Return the calls of one layer and pass that hold a quantity. RunError where there is none."""
        self.require_gathered()
        if (name, layer, step) not in self._calls:
            raise files.RunError(f"layer {layer}, step {step}: no {name} was captured")
        return self._calls[name, layer, step]

    def require_gathered(self) -> None:
        """Raise RunError in a process whose captured heads are gathered in another one."""
        if "rank" in self.common:
            raise files.RunError(
                f"this is rank {self.common['rank']} of {self.common['gpus']} GPUs, and rank 0 has what was "
                "captured: look at it there"
            )

    def frame_matrix(self, name: str, layer: int, step: int | None) -> Tensor:
        """Assemble frame_logits, also from token logits, or frame_mass of all blocks [H, F, F]."""
        S, num_frames, pieces = self.common["frame_seq_length"], self.config.num_frames, []
        from_tokens = name == "frame_logits" and "token_logits" in self.quantities
        for call in self.captured("token_logits" if from_tokens else name, layer, step):
            piece = call.values["token_logits" if from_tokens else name][0]
            # [H, Lq, Lk] of tokens -> [H, Fq, Fk] of frames
            if from_tokens:
                piece = frames.query_frame_curves(piece, S)
                if "key_frame" in call.values:
                    keys = call.values["key_frame"][0]
                    piece = frames.by_key_frame(piece, keys, num_frames, mean=True)[..., call["key_frames"]]
                else:
                    piece = frames.curves_to_frames(piece, S)
            pieces.append((call["query_frames"], call["key_frames"], piece))
        return frames.assemble(pieces, num_frames)

    def of_branch(self, branch: str | None) -> "Run":
        """Return the run as if only one branch of guidance had been captured."""
        return replace(self, records=[call for call in self.records if call["branch"] == branch])

    def query_rows(self, name: str, layer: int, step: int | None) -> Tensor:
        """Put a quantity per query frame of all blocks together [H, F, ...], NaN for unreached frames."""
        calls = self.captured(name, layer, step)
        return frames.rows_of(((c["query_frames"], c.values[name][0]) for c in calls), self.config.num_frames)

    def frame_matrices(self, name: str, layers: Sequence[int], steps: Sequence[int | None]) -> Tensor:
        """Stack frame_matrix of some layers and steps -> [layers, steps, H, F, F]."""
        return frames.stack(lambda layer, step: self.frame_matrix(name, layer, step), layers, steps)
