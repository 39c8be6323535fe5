"""Models under torch.compile: the module inside, and running it as it was before.

    plain(torch.compile(model)) is model
    with ExitStack() as stack:
        set_aside(model, stack)  # True where anything in it was compiled
        model(...)               # runs uncompiled, so that its layers can be seen

torch.compile(model) returns a wrapper, model.compile() keeps a compiled call in the module, and
model.forward = torch.compile(model.forward) replaces its forward. Nothing here imports the compiler, which
takes seconds.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

INSIDE = "_orig_mod"  # a wrapper's name for the module that it wraps
CALL = "_compiled_call_impl"  # of nn.Module.compile()
ORIGINAL = "_torchdynamo_orig_callable"  # of a compiled function


def is_wrapper(module: Any) -> bool:
    """Return whether a module is what torch.compile(module) returned."""
    return isinstance(module, nn.Module) and INSIDE in vars(module).get("_modules", ())


def plain(module: Any) -> Any:
    """Return the module that torch.compile wrapped; anything else as it is."""
    while is_wrapper(module):
        module = vars(module)["_modules"][INSIDE]
    return module


def modules_of(model: nn.Module, without: Collection[nn.Module] = ()) -> list[nn.Module]:
    """Return a model's modules, wrappers among them, in any order; not those of some parts of it.

    Every forward that is watched asks for them, and nn.Module.modules() takes twice as long.
    """
    modules, waiting = list[nn.Module](), [model]
    seen: set[nn.Module | None] = {None, *without}  # a part that a model does without is None
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            modules.append(module)
            waiting += vars(module)["_modules"].values()
    return modules


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, as if nothing in it were compiled."""
    for path, module in model.named_modules():
        if not is_wrapper(module):
            yield ".".join(name for name in path.split(".") if name != INSIDE), module


def compiled_parts(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield where a model is compiled: a module in it, the attribute, and what it was before."""
    for module in modules_of(model):
        attributes = vars(module)
        if attributes.get(CALL) is not None:
            yield module, CALL, None
        inside = attributes["_modules"].get(INSIDE)
        forward = attributes.get("forward")
        if inside is not None and forward is not inside:
            yield module, "forward", inside
        elif inside is None and forward is not None and hasattr(forward, ORIGINAL):
            yield module, "forward", getattr(forward, ORIGINAL)


def set_aside(model: nn.Module, stack: ExitStack) -> bool:
    """Run a model uncompiled until the stack closes -> whether anything in it was compiled.

    What was compiled is kept as it is, with all that its compiler remembers.
    """
    parts = list(compiled_parts(model))
    for module, name, before in parts:
        stack.callback(vars(module).__setitem__, name, vars(module)[name])
        vars(module)[name] = before
    return bool(parts)
