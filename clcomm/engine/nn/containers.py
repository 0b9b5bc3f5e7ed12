"""Modules and parameters in lists and dicts, which `named_parameters` finds, with PyTorch's names."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from functools import partial
from typing import Any, ClassVar, Generic, TypeGuard, TypeVar, overload

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.nn.activations import ReLU
from clcomm.engine.nn.convolutions import Conv2d
from clcomm.engine.nn.layers import Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.pools import MaxPool2d
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor

Member = TypeVar("Member", Module, Parameter)


class _List(Module, Generic[Member]):
    """Members whose names are their positions; it is no layer, and has no forward."""

    _kind: ClassVar[type]

    def _all(self) -> list[Any]:
        return list((self._modules if self._kind is Module else self._parameters).values())

    def _replace(self, members: list[Any]) -> None:
        for member in members:
            if not isinstance(member, self._kind):
                raise ArgumentError(
                    f"{type(self).__name__}: expected a {self._kind.__name__} in each place, got "
                    f"{type(member).__name__}"
                )
        for position in range(len(self)):
            delattr(self, str(position))
        for position, member in enumerate(members):
            setattr(self, str(position), member)

    def append(self, member: Member) -> _List[Member]:
        """Add a member at the end; return the list."""
        return self.extend([member])

    def extend(self, members: Iterable[Member]) -> _List[Member]:
        """Add members at the end; return the list."""
        self._replace([*self._all(), *members])
        return self

    def insert(self, index: int, member: Member) -> None:
        """Add a member before the one at `index`."""
        members = self._all()
        members.insert(index, member)
        self._replace(members)

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[Member]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> _List[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | _List[Member]:
        if isinstance(index, slice):
            return type(self)().extend(self._all()[index])
        member: Member = self._all()[index]
        return member

    def __setitem__(self, index: int, member: Member) -> None:
        members = self._all()
        members[index] = member
        self._replace(members)


class ModuleList(_List[Module]):
    """Modules in a list, such as the blocks of a model; `forward` calls them as it likes."""

    _kind = Module

    def __init__(self, modules: Iterable[Module] = ()):
        self.extend(modules)


class ParameterList(_List[Parameter]):
    """Parameters in a list."""

    _kind = Parameter

    def __init__(self, values: Iterable[Parameter] = ()):
        self.extend(values)


class ModuleDict(Module):
    """Modules by names, which are those of `named_parameters`; it is no layer, and has no forward."""

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()):
        self.update(modules)

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add modules, or replace those of the same names."""
        for name, module in dict(modules).items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        if not isinstance(name, str) or not name or "." in name or not isinstance(module, Module):
            raise ArgumentError(
                f"ModuleDict: expected a name without a dot and a Module, got {name!r} and {type(module).__name__}"
            )
        if name not in self._modules and hasattr(self, name):
            raise ArgumentError(f"ModuleDict: expected the name of no attribute of a Module, got {name!r}")
        setattr(self, name, module)

    def __getitem__(self, name: str) -> Module:
        return self._modules[name]

    def __delitem__(self, name: str) -> None:
        if name not in self._modules:
            raise KeyError(name)
        delattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._modules.keys()

    def values(self) -> ValuesView[Module]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> ItemsView[str, Module]:
        """Return pairs of name and module."""
        return self._modules.items()


# --- Sequential, which runs consecutive layers as one kernel where there is such a kernel. ---

M = TypeVar("M", bound=Module)


class Sequential(Module):
    """Modules one after another; their names are their positions, or those of a single dict of modules.

    Linear followed by ReLU, and Conv2d of stride 1 followed by ReLU and 2 x 2 MaxPool2d, run as one kernel. Results and
    gradients have the same bits as separate kernels', except for the convolution's bias gradient, which is summed in
    another order. Subclasses, and objects with a `forward` attribute, are not fused.
    """

    def __init__(self, *modules: Module | Mapping[str, Module]):
        alone = modules[0] if len(modules) == 1 else None
        named = alone if isinstance(alone, Mapping) else {str(index): each for index, each in enumerate(modules)}
        for name, module in named.items():
            if not isinstance(module, Module):
                raise ArgumentError(f"Sequential: expected modules, got {type(module).__name__} at position {name}")
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        for run in fused(list(self._modules.values())):
            x = run(x)
        return x

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]


def fused(modules: Sequence[Module]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the functions to call one after another to run the modules."""
    position = 0
    while position < len(modules):
        first, second, third = (*modules[position : position + 3], None, None)[:3]
        if _is(second, ReLU) and _is(first, Linear):
            yield partial(F.linear, weight=first.weight, bias=first.bias, relu=True)
            position += 2
        elif _is(second, ReLU) and _is_plain(first) and _halves(third):
            around: Any = first.padding
            yield partial(F.conv_relu_pool, weight=first.weight, bias=first.bias, padding=around)
            position += 3
        else:
            yield modules[position] if modules[position].call_hooks else modules[position].forward
            position += 1


def _is(module: Module | None, kind: type[M]) -> TypeGuard[M]:
    return type(module) is kind and "forward" not in module.__dict__ and not module.call_hooks


def _is_plain(module: Module | None) -> TypeGuard[Conv2d]:
    """Return whether a module is a convolution that a fused kernel can run."""
    if not _is(module, Conv2d):
        return False
    is_whole = not isinstance(module.padding, str)
    return is_whole and (module.stride, module.groups) == (1, 1) and module.dilation in (1, (1, 1))


def _halves(module: Module | None) -> bool:
    """Return whether a module is max-pooling of adjacent 2 x 2 windows."""
    if not _is(module, MaxPool2d) or module.ceil_mode or module.dilation != 1:
        return False
    stride = module.kernel_size if module.stride is None else module.stride
    return module.kernel_size in (2, (2, 2)) and stride in (2, (2, 2)) and module.padding in (0, (0, 0))
