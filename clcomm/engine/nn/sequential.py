"""Sequential, which runs consecutive layers as one kernel where there is such a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.nn.activations import ReLU
from clcomm.engine.nn.convolutions import Conv2d
from clcomm.engine.nn.layers import Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.pools import MaxPool2d
from clcomm.engine.tensor import Tensor

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
