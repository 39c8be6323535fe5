"""Identify a user's functions and classes by the name that the user gives them, and by their source text.

    from experiments import named
    halve = named("half of z", lambda z: z / 2)  # for a reduce, or a function at a site

Bytecode, closures, globals and environment variables are not looked at: who changes a value that a function
reads gives it another name.
"""

import functools
import hashlib
import inspect
import random
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wan import compiled, errors

# Raise it when numbers of a rollout change on purpose: runs of before then count as others.
NUMBERS = 1

UNNAMED = "unnamed"  # a key of what identifies a function that has no name
MOST_VALUES = 10_000  # that state_of looks at
OURS = ("wan", "experiments")  # packages whose classes NUMBERS identifies


class Named:
    """A function and the name that identifies it.

    >>> halve = named("half of z", lambda z: z / 2)
    >>> halve(torch.ones(2)), halve.name
    (tensor([0.5000, 0.5000]), 'half of z')
    """

    def __init__(self, name: str, function: Callable[..., Any], text_sha256: str):
        functools.update_wrapper(self, function)
        self.name, self.function, self.text_sha256 = name, function, text_sha256

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"named({self.name!r}, {errors.short_repr(self.function)})"


def named(name: str, function: Any) -> Named:
    """Return a function under a name that identifies it in files.

    Args:
        name: of your choice; give the function another one when you change what it does.
        function: a function, or an object with a method apply.

    Raises:
        ConfigError: where Python finds no source text, as of a builtin: files keep a hash of it, by which
            another function of the same name is refused.

    Examples:
        >>> import torch
        >>> unit_length = named("unit length", torch.nn.functional.normalize)
        >>> with intervene(at("z", layers=[5]), unit_length):
        ...     edited = session.generate("a red circle moving right", seed=42)
    """
    if not isinstance(name, str) or not name.strip():
        raise errors.ConfigError(f"named: {errors.short_repr(name)} is no name")
    errors.require_text(name, "named: the name", limit=200)
    called = function
    if not callable(function):
        called = getattr(function, "apply", None)
    if not callable(called):
        raise errors.ConfigError(
            f"named {name!r}: {errors.short_repr(function)} is no function, and has no method apply"
        )
    text_sha256 = text_of(called)
    if text_sha256 is None:
        raise errors.ConfigError(
            f"named {name!r}: Python finds no source text of {errors.short_repr(function)}; "
            "call it in a function "
            "of your own, in a file or a notebook's cell"
        )
    return Named(name, called, text_sha256)


def text_of(value: Any) -> str | None:
    """Return 16 hex digits of the SHA-256 of the source of a function, class or object; None without one."""
    value = getattr(value, "function", value) if isinstance(value, Named) else value
    if isinstance(value, functools.partial):
        value = value.func
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        value = type(value)  # an object that is called
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError):
        if not inspect.isclass(value):
            return None
        # Of a class in a notebook's cell Python knows the source of its methods alone
        methods = [member for member in vars(value).values() if inspect.isfunction(member)]
        try:
            text = "\n".join(inspect.getsource(method) for method in methods)
        except (OSError, TypeError):
            return None
    if not text:
        return None
    return hashlib.sha256(textwrap.dedent(text).encode()).hexdigest()[:16]


def identity_of(function: Any) -> dict[str, Any]:
    """Return what identifies a user's function, as plain values: its name and a hash of its text.

    Without a name, where it is defined, and that no other run counts as equal.
    """
    if isinstance(function, Named):
        return {"function": function.name, "text_sha256": function.text_sha256}
    code = function
    if not hasattr(function, "__qualname__"):
        code = type(function)
    place = f"{code.__module__}.{code.__qualname__}"
    return {"function": place, "text_sha256": text_of(function), UNNAMED: True}


# --- What functions keep between calls: videos of a batch take turns at them
def generators() -> str:
    """Return where the random generators stand that all code shares: torch's, numpy's and Python's."""
    states = [torch.get_rng_state().numpy().tobytes(), np.random.get_state(), random.getstate()]
    if torch.cuda.is_initialized():
        states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def state_of(function: Any) -> list[Any]:
    """Return what a function or an object keeps: the variables that it reads, to be compared later."""
    while isinstance(function, Named | functools.partial):
        function = function.func if isinstance(function, functools.partial) else function.function
    home = getattr(function, "__module__", None)  # functions of other modules are a library's
    # What changes where a value is changed in place, breadth first
    waiting, state, visited = deque([function]), list[Any](), set[int]()
    while waiting and len(state) < MOST_VALUES:
        value = waiting.popleft()
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            state.append(value)
        elif id(value) not in visited:
            visited.add(id(value))
            state += [id(value), _version(value)]
            waiting += _parts(value, home)
    return state


def _version(value: Any) -> Any:
    """Return what changes with the numbers of an array, or with the place of a generator."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return hashlib.sha256(value.tobytes()).hexdigest()
    if hasattr(value, "__next__"):  # an iterator says where it stands, if anything does
        with suppress(AttributeError, TypeError):
            return repr(value.__reduce__())
    return None


def _parts(value: Any, home: str | None) -> list[Any]:
    """Return the values of a container or of a user's object, and the variables of a function of home."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if inspect.isfunction(value) and value.__module__ == home:
        read = inspect.getclosurevars(value)
        parts = [*read.nonlocals.values(), *read.globals.values(), *vars(value).values()]
        return [*parts, value.__defaults__, value.__kwdefaults__]
    if inspect.ismethod(value):
        return [value.__self__, value.__func__]
    if inspect.isgenerator(value) and value.gi_frame is not None:
        return [*value.gi_frame.f_locals.values()]
    is_code = inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    if is_code or type(value).__module__.partition(".")[0] in OURS:
        return []
    parts = [*getattr(value, "__dict__", {}).values()]
    if type(value).__module__ == home:
        parts += [*vars(type(value)).values()]  # of a user's class: its methods, and what it keeps itself
    return parts


def identity_of_class(kind: type) -> dict[str, Any]:
    """Return what identifies a user's class, which has a `name`; nothing for a class of this project."""
    if kind.__module__.partition(".")[0] in OURS:
        return {}
    name, text_sha256 = getattr(kind, "name", None), text_of(kind)
    if isinstance(name, str) and text_sha256 is not None:
        return {"class": name, "text_sha256": text_sha256}
    return {"class": kind.__qualname__, "text_sha256": text_sha256, UNNAMED: True}


# --- Weights as they are now
SAMPLED = 1 << 15  # elements of a tensor that are summed everywhere, or a few more; of all on a GPU alone
PLACES = 65521  # the largest prime below 2^16: an element's weight in the sum tells where it stands
OFFLOADS_AND_CACHES = ("accelerate", "diffusers", "torch")  # packages whose hooks leave the weights the same
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


@dataclass(frozen=True)
class LiveWeights:
    """What weights in memory are: hashes of their bits, and their dtypes.

    sampled is of every n-th element, names, shapes, dtypes and hooks, and equal on all devices; whole is of
    all elements, and None on a CPU.
    """

    sampled: str
    whole: str | None
    dtypes: tuple[str, ...]  # of the parameters, the most frequent first
    hooks: tuple[str, ...] = ()  # of others than this project, offload and caches

    def differs(self, other: "LiveWeights") -> bool:
        """Return whether weights are others; those of two devices are compared by their samples."""
        is_whole_other = None not in (self.whole, other.whole) and self.whole != other.whole
        return self.sampled != other.sampled or is_whole_other

    @property
    def quantised(self) -> str | None:
        """Names of dtypes that hold quantised numbers; None where there are none."""
        floats = {str(dtype).removeprefix("torch.") for dtype in FLOATS}
        names = [name for name in self.dtypes if name.split(" ")[0] not in floats]
        return ", ".join(names) or None


def live_weights(models: Mapping[Any, nn.Module]) -> LiveWeights:
    """Return the fingerprint of the parameters, buffers and hooks of some models, as they are now.

    Sums are of integers, so that no order of summing changes them, and come from the device at once.
    """
    names, samples, sums = list[str](), list[Tensor](), list[Tensor]()
    dtypes, hooks = Counter[str](), list[str]()
    for model_name, model in models.items():
        for path, module in compiled.plain_modules(model):
            place = f"{model_name}.{path}"
            hooks += [f"{place}: {hook}" for hook in hooks_of(module)]
            names += [f"{place}: {setting}" for setting in _adapter_settings(module)]
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, x in tensors:
                if isinstance(x, nn.Parameter):
                    dtypes[dtype_name(x)] += x.numel()
                for part_name, part in _plain_tensors(f"{place}.{name}", _at_home(module, name, x)):
                    names.append(f"{part_name} {part.dtype} {list(part.shape)}")
                    sample, total = _sums_of_bits(part)
                    samples.append(sample)
                    sums += total
    digest = hashlib.sha256("\n".join([*names, *hooks]).encode())
    digest.update(_numbers(samples))
    whole = None
    if sums:
        whole = hashlib.sha256(digest.digest() + _numbers(sums)).hexdigest()[:16]
    found = tuple(name for name, count in dtypes.most_common() if count)
    return LiveWeights(digest.hexdigest()[:16], whole, found, tuple(hooks))


def hooks_of(module: nn.Module) -> list[str]:
    """List the functions that change or see what a module computes, by name, but for those that do not count.

    Those of this project, of offload and of diffusers' caches do not. A forward in place of the class's own
    is one, too.
    """
    functions = []
    for registry in ("_forward_hooks", "_forward_pre_hooks"):
        functions += [*getattr(module, registry).values()]
    functions += [vars(module)[name] for name in ("forward", "__call__") if name in vars(module)]
    listed = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        package = (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
        if package not in (*OURS, *OFFLOADS_AND_CACHES):
            listed.append(getattr(function, "__qualname__", type(function).__qualname__))
    return listed


def dtype_name(x: Tensor) -> str:
    """Return a tensor's dtype; of a tensor of another library's class with the name of that class.

    A class whose numbers consist of integers and scales, as torchao's, has the dtype of the integers.
    """
    dtype, kind = x.dtype, type(x)
    for _, part in _plain_tensors("", x):
        if part.dtype not in FLOATS:
            dtype = part.dtype
            break
    name = str(dtype).removeprefix("torch.")
    if kind in (Tensor, nn.Parameter, nn.Buffer):
        return name
    return f"{name} ({kind.__name__})"


def _adapter_settings(module: nn.Module) -> list[str]:
    """Return the numbers of a LoRA layer of PEFT that are no parameters: its scale, and whether it is on."""
    names = ("scaling", "_active_adapter", "_disable_adapters", "merged_adapters")
    if not hasattr(module, "base_layer"):
        return []
    return [f"{name} {getattr(module, name, None)}" for name in names]


def _at_home(module: nn.Module, name: str, x: Tensor) -> Tensor:
    """Return a tensor's numbers from where accelerate's sequential offload keeps them."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):  # a module may have several, as one
        weights = getattr(part, "weights_map", None)
        if x.is_meta and weights is not None and name in weights:
            return weights[name]
    return x


def _plain_tensors(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a tensor consists of: a quantised one of several, by name."""
    flatten = getattr(x, "__tensor_flatten__", None)
    if flatten is None:
        yield name, x.detach().as_subclass(Tensor)
        return
    for part in flatten()[0]:
        yield from _plain_tensors(f"{name}.{part}", getattr(x, part))


def _sums_of_bits(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the bits of every n-th element, weighted by place, and on a GPU the sum of all."""
    if x.is_meta or not x.numel():
        return torch.zeros((), dtype=torch.int64), []
    if x.is_complex():
        x = torch.view_as_real(x)
    bits = x.contiguous().view(-1)
    if bits.dtype != torch.bool:
        bits = bits.view(BITS[bits.element_size()])
    sample = bits[:: max(1, bits.numel() // SAMPLED)]
    place = _places(x.device)[: len(sample)]
    totals = []
    if x.is_cuda:
        totals.append(bits.sum(dtype=torch.int64))
    return (sample * place).sum(), totals


@functools.cache
def _places(device: torch.device) -> Tensor:
    """Return the weights of the elements of a sample, by place."""
    return torch.arange(2 * SAMPLED, device=device) % PLACES + 1


def _numbers(sums: Sequence[Tensor]) -> bytes:
    """Return integer sums of several devices as bytes, in order."""
    return b"".join(int(x).to_bytes(8, "little", signed=True) for x in _on_host(sums))


def _on_host(sums: Sequence[Tensor]) -> list[int]:
    """Copy sums to the host, those of a device together."""
    devices = dict.fromkeys(x.device for x in sums)
    rows = {device: iter(torch.stack([x for x in sums if x.device == device]).tolist()) for device in devices}
    return [next(rows[x.device]) for x in sums]
