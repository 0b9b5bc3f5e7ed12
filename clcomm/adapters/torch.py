"""PyTorch modules under the Synchronizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import numpy as np

from clcomm.adapters.trainable import require_same_parameters, require_same_trainable
from clcomm.errors import ArgumentError
from clcomm.flat_space.buckets import Bucket
from clcomm.flat_space.layout import FlatLayout
from clcomm.flat_space.parameters import ParameterSpec

try:
    import torch
except ImportError:
    raise ArgumentError("PyTorch is not installed; do: pip install 'clcomm[torch]'") from None

if TYPE_CHECKING:
    from clcomm.adapters.adapter import FlatArrays, Mark, OnComplete

# Half precision has no arithmetic in NumPy (bfloat16) or MPI (both), and too few bits for a sum over ranks.
_FLAT_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float32",
    torch.bfloat16: "float32",
}


class TorchAdapter:
    """A `torch.nn.Module` with parameters on any devices and of any floating dtypes.

    In the flat space float16 and bfloat16 are float32: widening is exact, so a broadcast keeps every bit, and
    gradients are averaged in float32 and rounded once. Complex parameters appear as pairs of reals (..., 2).
    Shared parameters count once. Sparse gradients become dense. Frozen parameters and buffers (BatchNorm's running
    statistics) are `extra_state`, sent as they are.
    Raises ArgumentError where nothing is trainable, for lazy and meta parameters, and, at a synchronisation, where
    parameters were replaced, frozen or unfrozen since the first one.
    """

    fold = codec = None

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._members = dict(model.named_parameters())
        self._parameters = dict(_trainable(model))
        if not self._parameters:
            raise ArgumentError("model: expected at least one parameter with requires_grad, got none")
        self.specs = tuple(_spec(name, parameter) for name, parameter in self._parameters.items())

    def require_unchanged(self) -> None:
        """Raise ArgumentError where parameters were replaced, frozen or unfrozen."""
        now = dict(self._model.named_parameters())
        require_same_parameters(now, self._members)
        trained = (name for name, parameter in now.items() if parameter.requires_grad)
        require_same_trainable(trained, self._parameters)

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Wrap each parameter's slices of the flat arrays in tensors."""
        names = list(self._parameters)
        self._params = {name: torch.from_numpy(layout.view(arrays.params, name)) for name in names}
        self._grads = {name: torch.from_numpy(layout.view(arrays.grads, name)) for name in names}
        self._reduced = {name: layout.view(arrays.reduced, name) for name in names}

    @torch.no_grad()
    def pull_parameters(self) -> None:
        """Copy the model's parameters into the flat space."""
        for name, parameter in self._parameters.items():
            self._params[name].copy_(_real(parameter))

    @torch.no_grad()
    def push_parameters(self) -> None:
        """Copy the flat space's parameters into the model."""
        for name, parameter in self._parameters.items():
            _real(parameter).copy_(self._params[name])

    @torch.no_grad()
    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients into the flat space; a missing one counts as zero."""
        for place in bucket.opening:
            gradient = self._parameters[place.name].grad
            if gradient is None:
                self._grads[place.name].zero_()
            else:
                self._grads[place.name].copy_(_real(gradient.to_dense() if gradient.is_sparse else gradient))

    def send_gradients(self, bucket: Bucket, mark: Mark | None) -> None:
        """Copy a bucket's gradients into the flat space."""
        self.pull_gradients(bucket)

    @torch.no_grad()
    def push_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's averaged gradients into the model, missing ones included.

        So every rank's optimizer has the same set of gradients, and applies momentum and weight decay to the same.
        """
        for place in bucket.closing:
            parameter = self._parameters[place.name]
            if parameter.grad is None or not _writable(parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            _real(parameter.grad).copy_(_tensor(self._reduced[place.name]))

    @torch.no_grad()
    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that differ from the averaged ones into the flat space; return their names."""
        written = []
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            gradient = _real(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            averaged = _tensor(self._reduced[name])
            if not torch.equal(gradient, averaged.to(gradient.device, gradient.dtype)):
                self._grads[name].copy_(gradient)
                written.append(name)
        return tuple(written)

    @torch.no_grad()
    def push_written(self, names: Sequence[str]) -> None:
        """Copy these gradients from the flat space into the model."""
        for name in names:
            _real(self._parameters[name].grad).copy_(self._grads[name])

    def moves_in_place(self) -> None:
        """Return None: gradients are copied."""

    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> Callable[[], None]:
        """Call `complete(name)` when backward has accumulated a parameter's gradient, then the returned action.

        complete: a bound method, of whose object only a weak reference is kept.
        """
        weak = WeakMethod(complete)  # the garbage collector does not see references from PyTorch's hooks

        def hook_of(name: str) -> Callable[[torch.Tensor], None]:
            def hook(_: torch.Tensor) -> None:
                method = weak()
                action = None if method is None else method(name)
                if action is not None:
                    action()

            return hook

        hooks = [
            parameter.register_post_accumulate_grad_hook(hook_of(name)) for name, parameter in self._parameters.items()
        ]

        def stop() -> None:
            for hook in hooks:
                hook.remove()

        return stop

    def mark(self) -> None:
        """Return None: on the CPU PyTorch computes before a call returns, and copying blocks for other devices."""

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return frozen parameters and buffers by name, bit by bit."""
        return {name: np.array(_bits(tensor).cpu().numpy(), order="C") for name, tensor in self._untrained()}

    @torch.no_grad()
    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Set frozen parameters and buffers to another rank's bits."""
        for name, tensor in self._untrained():
            _bits(tensor).copy_(_tensor(np.asarray(state[name])))

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if name not in self._parameters:
                yield name, parameter.detach()
        yield from self._model.named_buffers()


def _trainable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _spec(name: str, parameter: torch.nn.Parameter) -> ParameterSpec:
    if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
        raise ArgumentError(f"parameter {name!r}: expected a shape, got a lazy one; run one batch through the model")
    if parameter.is_meta:
        raise ArgumentError(f"parameter {name!r}: expected values, got one on the meta device; use model.to_empty()")
    real = _real(parameter.detach())
    if real.dtype not in _FLAT_DTYPES:
        raise ArgumentError(f"parameter {name!r}: expected a floating-point dtype, got {parameter.dtype}")
    return ParameterSpec(name, tuple(real.shape), _FLAT_DTYPES[real.dtype])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _writable(gradient: torch.Tensor) -> bool:
    """Return whether each element has memory of its own: the tensor is neither sparse nor expanded."""
    if gradient.layout != torch.strided:
        return False
    return not any(stride == 0 and length > 1 for stride, length in zip(gradient.stride(), gradient.shape, strict=True))


def _tensor(array: np.ndarray) -> torch.Tensor:
    # PyTorch warns about tensors on read-only memory, even where they are only read.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


_SAME_SIZE: dict[int, Any] = {1: torch.uint8, 2: torch.int16}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view as integers of the same size where NumPy lacks its dtype."""
    exotic = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize]) if exotic else tensor
