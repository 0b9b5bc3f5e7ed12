"""A PyTorch parameter's places in the flat space, and whether its gradient can lie in one of them.

A gradient can move only if nothing else refers to it, by PyTorch's reference counts; in releases without these
gradients are copied.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from itertools import chain
from weakref import ref

import numpy as np
import torch

from clcomm.base.flat_space.layout import FlatLayout
from clcomm.comm.tensors import private_torch
from clcomm.sync.adapters.adapter import FlatArrays

_COUNTS = private_torch.is_there("tensor_use_count") and private_torch.is_there("storage_use_count")


class Slot:
    """A trainable parameter, and its places in the flat space.

    Attributes:
        value: the tensor on `params`. own: on `grads`. averaged: on `reduced`; `own` where these are one memory.
    """

    __slots__ = ("_fits", "_idle", "_kept", "_pushed", "averaged", "own", "parameter", "value")

    def __init__(self, parameter: torch.nn.Parameter):
        self.parameter = parameter
        self._fits = (
            _COUNTS
            and parameter.device.type == "cpu"
            and parameter.dtype in (torch.float32, torch.float64)
            and parameter.is_contiguous()
        )

    def attach(self, name: str, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Switch to this flat space; a gradient in the former one becomes the program's own."""
        self.value = torch.from_numpy(layout.view(arrays.params, name))
        self.own = torch.from_numpy(layout.view(arrays.grads, name))
        self.averaged = self.own if arrays.reduced is arrays.grads else tensor_on(layout.view(arrays.reduced, name))
        self._pushed: ref[torch.Tensor] | None = None  # the gradient that got the last mean
        self._kept: torch.Tensor | None = None  # what the program still sees in `own`
        self._idle = self._references_to_own() if self._fits else ()

    def pull(self) -> bool:
        """Copy the gradient to `own`; return whether the program kept the tensor since the last `push`."""
        gradient = self.parameter.grad
        if gradient is self.own:
            return False
        if self._fits and self._references_to_own() != self._idle:
            self._kept = self.own.clone()  # of a gradient that the program has dropped from the parameter alone
        if gradient is None:
            return False
        self.own.copy_(values(gradient))
        return self._fits and self._kept is None and self._pushed is not None and self._pushed() is gradient

    def move_in(self) -> None:
        """Replace the gradient by `own`, which has its values, unless something else refers to it."""
        if _references_to_gradient(self.parameter) == _SOLE and _is_plain(self.parameter.grad):
            self.parameter.grad = self.own

    def push(self, is_missing: bool) -> None:
        """Copy the mean into the gradient, a new one where there is none or it cannot be written to.

        is_missing: no rank has a gradient, and none is left here.
        """
        if is_missing:
            self.parameter.grad = None
        gradient = self.parameter.grad
        if gradient is self.own:
            if self.averaged is not self.own:
                self.own.copy_(self.averaged)
            return
        if not is_missing:
            if gradient is None or not _is_writable(gradient):
                gradient = self.parameter.grad = torch.empty_like(self.parameter)
            values(gradient).copy_(self.averaged)
            self._pushed = ref(gradient)
        if self._kept is not None:
            self.own.copy_(self._kept)
            self._kept = None

    def _references_to_own(self) -> tuple[int, int, int]:
        return sys.getrefcount(self.own), private_torch.tensor_use_count(self.own), _references_to_memory(self.own)


def _references_to_gradient(parameter: torch.Tensor) -> tuple[int, int, int]:
    """Return how many references a gradient has from Python and from PyTorch, and its memory from tensors."""
    gradient = parameter.grad
    assert gradient is not None
    return sys.getrefcount(gradient), private_torch.tensor_use_count(gradient), _references_to_memory(gradient)


def _references_to_memory(tensor: torch.Tensor) -> int:
    return private_torch.storage_use_count(private_torch.storage_address(tensor.untyped_storage()))


def _sole() -> tuple[int, int, int]:
    """Return the references to a gradient that nothing but its parameter refers to."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    return _references_to_gradient(parameter)


_SOLE = _sole() if _COUNTS else ()


def _is_plain(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is a tensor in memory allocated by PyTorch, without a graph or hooks of its own."""
    return (
        gradient is not None
        and type(gradient) is torch.Tensor
        and gradient.layout == torch.strided
        and gradient.is_contiguous()
        and gradient.untyped_storage().resizable()  # an array's memory is not
        and not gradient.requires_grad
    )


def _is_writable(gradient: torch.Tensor) -> bool:
    """Return whether each element has memory of its own: the tensor is no sparse, expanded or conjugate one."""
    if gradient.layout != torch.strided or gradient.is_conj():
        return False
    if gradient.is_contiguous():
        return True
    return not any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape, strict=True))


def values(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, dense and without a graph; complex numbers as pairs of reals."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    return real(gradient.to_dense() if gradient.layout != torch.strided else gradient)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, complex numbers as pairs of reals, on the same memory unless they are a lazy conjugate."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def tensor_on(array: np.ndarray) -> torch.Tensor:
    """Return a tensor on an array, or on a copy of a read-only one: PyTorch warns about these even for reads."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


class ModuleTree:
    """A snapshot of a model's modules and parameters, compared within microseconds."""

    def __init__(self, model: torch.nn.Module):
        modules = list(model.modules())
        self._registries = [registry for each in modules for registry in (each._parameters, each._modules)]
        self._members = list(self._now())
        self._parameters = [member for member in self._members if isinstance(member, torch.nn.Parameter)]
        self._need_gradients = [parameter.requires_grad for parameter in self._parameters]

    def is_unchanged(self) -> bool:
        """Return whether all are the same objects as before, and the same parameters need gradients."""
        members = list(self._now())
        return (
            len(members) == len(self._members)
            and all(map(operator.is_, members, self._members))
            and [parameter.requires_grad for parameter in self._parameters] == self._need_gradients
        )

    def _now(self) -> Iterator[torch.nn.Module | torch.nn.Parameter | None]:
        return chain.from_iterable(registry.values() for registry in self._registries)
