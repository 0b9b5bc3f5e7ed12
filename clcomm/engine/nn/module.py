"""Modules: parameters, buffers and sub-modules found by the attributes they are assigned to, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.flat import FlatSpace
from clcomm.engine.nn.module_parts import AFTER, BACKWARD, BEFORE, HookHandle, ModuleParts, call_with_hooks
from clcomm.engine.parameter import Parameter, ParameterPart
from clcomm.engine.tensor import Tensor

#: Where a module keeps what its attributes are.
_REGISTRIES = ("_parameters", "_buffers", "_modules", "_transient", "_flat_space", "call_hooks")


class Names(NamedTuple):
    """The names in which a state and a module differ."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module(ModuleParts["Module"]):
    """Base of all layers and models: a subclass assigns parameters and modules to attributes and defines `forward`.

    Attributes:
        training: set by `train()` and `eval()`; batch norm and dropout compute otherwise where it is False.
    """

    _parameters: dict[str, Parameter]
    _buffers: dict[str, Tensor | None]
    _transient: frozenset[str]  # the names of the buffers that are not part of the state
    _modules: dict[str, Module]
    _flat_space: FlatSpace | None
    training: bool
    #: The functions that are called before and after `forward`, in the order of their registration.
    call_hooks: tuple[HookHandle, ...] = ()

    def __new__(cls, *args: object, **kwargs: object) -> Module:
        module = super().__new__(cls)
        registries: dict[str, object] = {"_parameters": {}, "_buffers": {}, "_modules": {}, "_transient": frozenset()}
        for name, value in {**registries, "_flat_space": None, "training": True}.items():
            object.__setattr__(module, name, value)
        return module

    def __init__(self) -> None:
        """Take no arguments, so that a subclass without its own refuses what it would not use."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._buffers:
            if isinstance(value, Parameter) or not (value is None or isinstance(value, Tensor)):
                raise ArgumentError(f"{name}: expected a Tensor or None for a buffer, got {type(value).__name__}")
            self._note_change(value, self._buffers[name])
            self._buffers[name] = value
        self._note_change(self._parameters.get(name), self._modules.get(name))
        if isinstance(value, (Parameter, Module)):
            self._note_change(value)
        registries: list[tuple[type, dict[str, Any]]] = [(Parameter, self._parameters), (Module, self._modules)]
        for kind, registry in registries:
            if isinstance(value, kind):
                registry[name] = value
            else:
                registry.pop(name, None)
        object.__setattr__(self, name, value)

    @staticmethod
    def _note_change(*members: object) -> None:
        """Void recordings and cached checks that depend on these parameters, buffers and modules."""
        for member in members:
            parts = (*member.named_parameters(), *member.named_buffers()) if isinstance(member, Module) else ()
            for tensor in (member, *(each for _, each in parts)):
                if isinstance(tensor, Tensor):
                    tensor.device.revision += 1

    def __delattr__(self, name: str) -> None:
        self._note_change(self._parameters.get(name), self._buffers.get(name), self._modules.get(name))
        for registry in (self._parameters, self._buffers, self._modules):
            registry.pop(name, None)
        object.__delattr__(self, name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a tensor that belongs to the module's state and is not trained, as the attribute `name`.

        Args:
            name: without a dot, and not that of another attribute.
            tensor: on the module's device; None: no tensor, left out of `state_dict`.
            persistent: part of `state_dict`.

        Raises ArgumentError for another name or value.
        """
        if not isinstance(name, str) or not name or "." in name:
            raise ArgumentError(f"name: expected a buffer's name without a dot, got {name!r}")
        if hasattr(self, name) and name not in self._buffers:
            raise ArgumentError(f"name: expected that of no other attribute, got {name!r}")
        before = self._buffers.setdefault(name, None)
        try:
            setattr(self, name, tensor)
        except ArgumentError:
            if before is None:
                self._buffers.pop(name)
            raise
        transient = self._transient - {name} if persistent else self._transient | {name}
        object.__setattr__(self, "_transient", transient)

    # -- copies

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes without the flat space, so that a copy has memory of its own."""
        return {**self.__dict__, "_flat_space": None}

    def __copy__(self) -> Module:
        """Return a new module with the same parameters and sub-modules."""
        copied = type(self).__new__(type(self))
        registries = {name: dict(self.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")}
        copied.__dict__.update(self.__getstate__(), **registries)
        return copied

    def forward(self, x: Tensor) -> Tensor:
        """Compute the module's result; subclasses define it."""
        raise TypeError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return call_with_hooks(self, args, kwargs) if self.call_hooks else self.forward(*args, **kwargs)

    def register_full_backward_hook(self, hook: Callable[[Any, tuple[Any, ...], tuple[Any, ...]], Any]) -> HookHandle:
        """Call `hook(module, gradients of the arguments, gradients of the result)` in each backward through a call.

        There is None for an argument that needs no gradient; a result of the hook's stands for these gradients. A
        replayed step calls no hooks, as no Python. Returns a handle, whose `remove()` ends it. The call raises
        ArgumentError for more than one argument that needs a gradient, and for a result that is no Tensor.
        """
        return HookHandle(self, hook, BACKWARD)

    def register_forward_pre_hook(self, hook: Callable[[Any, tuple[Any, ...]], Any]) -> HookHandle:
        """Call `hook(module, arguments)` before each call of the module; a result stands for the arguments.

        A replayed step calls no hooks, as no Python. Returns a handle, whose `remove()` ends it.
        """
        return HookHandle(self, hook, BEFORE)

    def register_forward_hook(self, hook: Callable[[Any, tuple[Any, ...], Any], Any]) -> HookHandle:
        """Call `hook(module, arguments, result)` after each call of the module; a result of the hook's stands for it.

        A replayed step calls no hooks, as no Python. Returns a handle, whose `remove()` ends it.
        """
        return HookHandle(self, hook, AFTER)

    # -- contents

    def named_modules(self, prefix: str = "", *, remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) of this module, named `prefix`, and all inside it, each once or by all names."""
        seen: set[int] = set()
        waiting: list[tuple[str, Module]] = [(prefix, self)]
        while waiting:
            name, module = waiting.pop()
            if remove_duplicate and id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            children = [(f"{name}.{key}" if name else key, child) for key, child in module._modules.items()]
            waiting.extend(reversed(children))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (dotted name, parameter), each once: a module's own parameters, then those of its sub-modules."""
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for key, parameter in module._parameters.items():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield (f"{prefix}.{key}" if prefix else key), parameter

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters in the order of named_parameters.

        Raises ArgumentError for modules or parameters in a plain list, tuple or dict, which would not be trained.
        """
        self.require_registered()
        for _, parameter in self.named_parameters():
            yield parameter

    def require_registered(self) -> None:
        """Raise ArgumentError for modules and parameters that an attribute has only in a plain list, tuple or dict."""
        modules = list(self.named_modules())
        known = {id(module) for _, module in modules} | {id(each) for _, each in self.named_parameters()}
        for prefix, module in modules:
            for name, value in vars(module).items():
                if name in _REGISTRIES or not isinstance(value, (list, tuple, dict)):
                    continue
                lost = [each for each in _members(value) if id(each) not in known]
                if lost:
                    kind = "ParameterList" if isinstance(lost[0], Parameter) else "ModuleList"
                    raise ArgumentError(
                        f"{f'{prefix}.{name}' if prefix else name}: expected a {kind} or a Sequential, whose "
                        f"parameters are found, got a {type(value).__name__} with {len(lost)} others, the first a "
                        f"{type(lost[0]).__name__}"
                    )

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, buffer), each once: a module's own buffers, then those of its sub-modules."""
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield (f"{prefix}.{key}" if prefix else key), buffer

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers in the order of named_buffers."""
        for _, buffer in self.named_buffers():
            yield buffer

    def parameter_count(self) -> int:
        """Return the number of trainable values."""
        return sum(p.numel() for _, p in self.named_parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> Module:
        """Set `training` on this module and all inside it; return the module."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Set `training` to False on this module and all inside it; return the module."""
        return self.train(False)

    # -- gradients

    def to(self, *wanted: object) -> Module:
        """Return the module, which stays on its device; ArgumentError for another one, and for another type."""
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.detach().to(*wanted).device is not tensor.device:
                raise ArgumentError(f"to: expected {tensor.device}, where the module is; make it on another device")
            break
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters; set_to_none=False: fill them with zeros."""
        for _, parameter in self.named_parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def flat_space(self) -> FlatSpace:
        """Return the flat space of the trainable parameters, which move into it at the first call.

        Parameters that are frozen later keep their place. The flat space is built again after parameters became
        trainable or layers were replaced.
        """
        self.require_registered()
        named = list(self.named_parameters())
        space = FlatSpace.holding(named, self._flat_space)
        members = [(name, p) for name, p in named if p.slot is not None]
        if len(members) == len(space.parameters):  # else it is the space of a larger model
            names = dict(zip(map(id, space.parameters), (place.name for place in space.layout.ranges), strict=True))
            if any(names.get(id(p)) != name for name, p in members):
                space.rename(members)
            object.__setattr__(self, "_flat_space", space)
        return space

    # -- values

    def _state(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by dotted name: a module's own, then those of its sub-modules.

        One that several have, or that is in a module with several names, has all of its names, as in PyTorch.
        """
        state: dict[str, Tensor] = {}
        for prefix, module in self.named_modules(remove_duplicate=False):
            kept = {name: each for name, each in module._buffers.items() if name not in module._transient}
            for key, tensor in (*module._parameters.items(), *kept.items()):
                if tensor is not None:
                    state[f"{prefix}.{key}" if prefix else key] = tensor
        return state

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter and every persistent buffer on the host, by dotted name.

        Parameters that are parts of a whole are gathered from the ranks that hold it: then it is collective.
        """
        wholes: dict[int, np.ndarray] = {}
        for tensor in self._state().values():
            if id(tensor) not in wholes:
                wholes[id(tensor)] = _whole(tensor)
        return {name: wholes[id(tensor)] for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, object], strict: bool = True) -> Names:
        """Overwrite all parameters and persistent buffers, or without `strict` those that the state has.

        Returns the names that are missing in the state and those that only it has. Raises ArgumentError, changing
        nothing, unless names and shapes fit, and values are numbers, whole ones within int32 for a buffer of int32.
        """
        own = self._state()
        found = {id(each) for name, each in own.items() if name in state}  # by one of its names
        missing = [name for name, each in own.items() if name not in state and id(each) not in found]
        names = Names(sorted(missing), sorted(state.keys() - own.keys()))
        if strict and any(names):
            lacks, has = [each or "none" for each in names]
            raise ArgumentError(f"state_dict: expected the names {list(own)}; missing {lacks}, unknown {has}")
        values = {name: _values_for(name, each, state[name]) for name, each in own.items() if name in state}
        for name, array in values.items():
            own[name].copy_from(array)
        return names


def _members(value: object) -> Iterator[Module | Parameter]:
    """Yield the modules and parameters in a container, those in containers within it included."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        if isinstance(part, (Module, Parameter)):
            yield part
        else:
            yield from _members(part)


def _part_of(tensor: Tensor) -> ParameterPart | None:
    return tensor.part if isinstance(tensor, Parameter) else None


def _whole(tensor: Tensor) -> np.ndarray:
    part = _part_of(tensor)
    return tensor.numpy().copy() if part is None else part.gather(tensor.numpy())


def _values_for(name: str, tensor: Tensor, given: Any) -> np.ndarray:
    """Return values for a tensor of the state; raises ArgumentError where they do not fit."""
    part = _part_of(tensor)
    shape = tensor.shape if part is None else part.whole_shape(tensor.shape)
    if np.shape(given) != shape:
        raise ArgumentError(f"state_dict[{name!r}]: expected {shape}, got {np.shape(given)}")
    array = np.asarray(given)
    if array.dtype.kind not in "fiub":
        raise ArgumentError(f"state_dict[{name!r}]: expected numbers, got {array.dtype}")
    if tensor.dtype != np.int32:
        values = np.asarray(array, np.float32)
        return values if part is None else part.own(values)
    limits = np.iinfo(np.int32)
    if array.dtype.kind == "f" or array.min() < limits.min or array.max() > limits.max:
        raise ArgumentError(f"state_dict[{name!r}]: expected whole numbers within int32, got {array.dtype}")
    return array.astype(np.int32)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Switch a module and all modules inside it to `eval()` within a `with` block; each mode is restored."""
    modes = [(module, module.training) for _, module in model.named_modules()]
    changed = [module for module, training in modes if training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True
