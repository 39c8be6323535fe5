"""The x0 lens of a transformer of diffusers: what it would denoise to if its layers ended at a chosen one.

captured.py has x0_lens(), which reads the causal model by its own head, and any pipeline by this watcher.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wan import diffusers_attention, diffusers_capture, sites
from wan.diffusers_latents import Window, coefficients
from wan.diffusers_passes import told_of
from wan.errors import ConfigError


@dataclass(eq=False)
class PipelineLens(sites.Watcher):
    """Read x0 after chosen layers: a forward again, in which every layer returns what the chosen one did."""

    model: nn.Module
    layers: Sequence[int] | None
    x0: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # by layer, block, step
    sees: frozenset[str] | None = frozenset({"x_t", "x0"})
    outputs: list[object] = field(default_factory=list)  # of each layer, in this forward
    args: Sequence[object] = ()  # the forward's arguments
    kwargs: Mapping[str, object] = field(default_factory=dict)
    noisy: Tensor | None = None

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Note arguments and outputs of forwards while the context lasts."""
        modules = diffusers_capture.layers_of(self.model)
        if not modules:
            raise ConfigError(f"x0_lens does not know the layers of {type(self.model).__name__}")
        with ExitStack() as stack:
            begin = self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(begin.remove)
            for module in modules:
                stack.callback(module.register_forward_hook(self._note).remove)
            yield

    def _begin(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.args, self.kwargs = args, kwargs
        self.outputs.clear()

    def _note(self, module: nn.Module, args: Sequence[object], output: object) -> None:
        self.outputs.append(output)

    def on_activation(self, x: Tensor, where: sites.ActivationSite) -> None:
        """Note the noisy latents; at the end of the forward run it again for each chosen layer."""
        if where.site == "x_t":
            self.noisy = x
            return
        if where.branch == "uncond":
            return
        forward = diffusers_attention.FORWARD.get()
        assert forward is not None and self.noisy is not None
        # 1. The rows of this pass in the forward, which may hold both branches of guidance.
        [items] = [items for at, items in forward.parts if at == where.at]
        told = told_of(self.model, None)
        arguments = diffusers_capture.arguments_of(self.model, self.args, self.kwargs)
        layers = self.layers
        if layers is None:
            layers = range(len(self.outputs))
        # 2. The flow that the model's own head makes of each layer's output, and x0 at this noise level.
        for layer in layers:
            output = Context().run(self._again, self.outputs[layer])
            flow = Window(self.model, output[0], forward.video, arguments).frames[items]
            a, b = coefficients(self.model, told, where.at, flow)
            x0 = a * self.noisy[:, :, : flow.shape[2]] + b * flow
            self.x0[layer, where.block, where.step or 0] = x0.detach().cpu()

    @torch.no_grad()
    def _again(self, output: object) -> tuple[Tensor, ...]:
        """Run the forward again, whose layers all return this output."""
        modules, outputs = diffusers_capture.layers_of(self.model), list(self.outputs)
        before = [vars(module).get("forward") for module in modules]

        def replacement(*args: object, **kwargs: object) -> object:
            return output

        for module in modules:
            module.forward = replacement
        try:
            forward: Callable[..., tuple[Tensor, ...]] = type(self.model).forward
            return forward(self.model, *self.args, **self.kwargs)
        finally:
            for module, users_forward in zip(modules, before, strict=True):
                del module.forward
                if users_forward is not None:
                    module.forward = users_forward
            self.outputs[:] = outputs
