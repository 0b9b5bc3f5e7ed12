"""Modules: parameters and sub-modules found by the attributes they are assigned to, as in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from clcomm.engine.flat import FlatSpace
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor
from clcomm.errors import ArgumentError


class Module:
    """Base of all layers and models: a subclass assigns parameters and modules to attributes and defines `forward`."""

    _parameters: dict[str, Parameter]
    _modules: dict[str, Module]
    _flat_space: FlatSpace | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Module:
        module = super().__new__(cls)
        for name, value in (("_parameters", {}), ("_modules", {}), ("_flat_space", None), ("training", True)):
            object.__setattr__(module, name, value)
        return module

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (Parameter, Module)):
            self._refuse_after_flattening(name)
        self._note_change(value, self._parameters.get(name), self._modules.get(name))
        registries: list[tuple[type, dict[str, Any]]] = [(Parameter, self._parameters), (Module, self._modules)]
        for kind, registry in registries:
            if isinstance(value, kind):
                registry[name] = value
            else:
                registry.pop(name, None)
        object.__setattr__(self, name, value)

    @staticmethod
    def _note_change(*members: Any) -> None:
        """Void recordings and cached checks that depend on these parameters and modules."""
        for member in members:
            for parameter in member.parameters() if isinstance(member, Module) else (member,):
                if isinstance(parameter, Parameter):
                    parameter.device.revision += 1

    def _refuse_after_flattening(self, name: str) -> None:
        if self._flat_space is not None:
            raise ArgumentError(f"{name}: the module already has its flat space; assign parameters before that")

    def __delattr__(self, name: str) -> None:
        self._note_change(self._parameters.get(name), self._modules.get(name))
        self._parameters.pop(name, None)
        self._modules.pop(name, None)
        object.__delattr__(self, name)

    # -- copies

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the flat space, so that a copy has memory of its own."""
        return {**self.__dict__, "_flat_space": None}

    def __copy__(self) -> Module:
        """Return a new module with the same parameters and sub-modules."""
        copied = type(self).__new__(type(self))
        registries = {"_parameters": dict(self._parameters), "_modules": dict(self._modules)}
        copied.__dict__.update(self.__getstate__(), **registries)
        return copied

    def forward(self, x: Tensor) -> Tensor:
        """Compute the module's result; subclasses define it."""
        raise TypeError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # -- contents

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) of this module, named `prefix`, and of all inside it, each once."""
        seen: set[int] = set()
        waiting: list[tuple[str, Module]] = [(prefix, self)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
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
        """Yield the parameters in the order of named_parameters."""
        for _, parameter in self.named_parameters():
            yield parameter

    def parameter_count(self) -> int:
        """Return the number of trainable values."""
        return sum(p.size for p in self.parameters() if p.requires_grad)

    def train(self, mode: bool = True) -> Module:
        """Set `training` on this module and all inside it; return the module."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Module:
        """Set `training` to False on this module and all inside it; return the module."""
        return self.train(False)

    # -- gradients

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def flat_space(self) -> FlatSpace:
        """Return the flat space of the trainable parameters, which move into it at the first call.

        Parameters that are frozen later keep their place. The flat space is built again after parameters became
        trainable or layers were replaced.
        """
        named = list(self.named_parameters())
        space = FlatSpace.holding(named, self._flat_space)
        members = [(name, p) for name, p in named if p.slot is not None]
        if len(members) == len(space.parameters):  # else it is the space of a larger model
            if [place.name for place in space.layout.ranges] != [name for name, _ in reversed(members)]:
                space.rename(members)
            object.__setattr__(self, "_flat_space", space)
        return space

    # -- values

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of every parameter on the host, by dotted name."""
        return {name: parameter.numpy() for name, parameter in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Overwrite all parameters; raises ArgumentError, changing nothing, unless names fit, and shapes of numbers."""
        own = dict(self.named_parameters())
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unknown:
            raise ArgumentError(
                f"state_dict: expected the names {list(own)}; missing {missing or 'none'}, unknown {unknown or 'none'}"
            )
        for name, parameter in own.items():
            if np.shape(state[name]) != parameter.shape:
                raise ArgumentError(f"state_dict[{name!r}]: expected {parameter.shape}, got {np.shape(state[name])}")
            if (dtype := np.asarray(state[name]).dtype).kind not in "fiub":
                raise ArgumentError(f"state_dict[{name!r}]: expected numbers, got {dtype}")
        for name, parameter in own.items():
            parameter.copy_from(np.asarray(state[name], np.float32))
