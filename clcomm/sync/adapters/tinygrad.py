"""tinygrad's models under the Synchronizer: kernels write gradients to the memory that the ranks reduce.

Nothing is computed before it is needed in tinygrad. So a gradient, until then an expression, is computed into the flat
space, and its mean is an expression on the flat space, which the optimizer's kernels read. Parameters lie there too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout, require_same_parameters, require_same_trainable
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.host.arrays import from_bfloat16, to_bfloat16
from clcomm.sync.adapters.adapter import FLAT_DTYPES, CopyingAdapter, FlatArrays
from clcomm.sync.adapters.tinygrad_runtime import (
    Place,
    in_backward,
    is_recording,
    lay,
    lies_on,
    own_buffer,
    read,
    record,
    run_now,
    shares_memory,
    waiting_for,
    write,
)

from tinygrad import Device, Tensor, dtypes, nn  # isort: skip

_FLAT_DTYPES = {getattr(dtypes, name): kind for name, kind in FLAT_DTYPES.items()}


class TinygradAdapter(CopyingAdapter):
    """A tinygrad model: any object in which `nn.state.get_state_dict` finds tensors.

    Trained are the tensors of floating-point numbers with `is_param`; the others are `extra_state`. In the flat space
    float16 and bfloat16 are float32: widening is exact, and gradients are averaged in float32 and rounded once. Shared
    tensors count once. Where the device computes in the host's memory nothing is copied.
    Raises ArgumentError where nothing is trainable, for tensors that lie on several devices or on another than
    `Device.DEFAULT`, for other dtypes, for models with tensors of other libraries, and, at a synchronisation, where
    parameters were replaced, frozen or unfrozen since the first one.
    """

    def __init__(self, model: object):
        self._model = model
        self._members = tensors_of(model)
        self._parameters = {name: tensor for name, tensor in self._members.items() if _is_trained(tensor)}
        self._others = {name: each for name, each in self._members.items() if name not in self._parameters}
        if not self._parameters:
            raise ArgumentError("model: expected at least one tensor of floating-point numbers with is_param, got none")
        for name, tensor in self._members.items():
            if tensor.device != Device.DEFAULT:
                raise ArgumentError(
                    f"tensor {name!r}: expected on device {Device.DEFAULT}, which is this rank's, got {tensor.device}"
                )
        self.specs = tuple(_spec(name, tensor) for name, tensor in self._parameters.items())
        self._device = Device.DEFAULT
        self._shares = shares_memory(self._device)
        self._is_computed = False  # whether a TinyJit has computed the gradients into the flat space

    def decides_bits(self) -> list[str]:
        return [f"device {self._device}"]

    def require_unchanged(self) -> None:
        now = tensors_of(self._model)
        require_same_parameters(now, self._members)
        require_same_trainable((name for name, tensor in now.items() if _is_trained(tensor)), self._parameters)

    def require_all_in(self, optimizer: Any) -> None:
        """Raise ArgumentError where an optimizer lacks a trained tensor, which another one might step by itself."""
        known = {id(tensor) for tensor in optimizer.params}
        for name, tensor in self._parameters.items():
            if id(tensor) not in known:
                raise ArgumentError(
                    f"optimizer: expected all trained tensors, got none for {name!r}; give an nn.optim.OptimizerGroup "
                    "of all optimizers, or exclude it by is_param_(False)"
                )

    def has_local_gradients(self) -> bool:
        """Return whether a trained tensor has no gradient, or another one than the ranks' mean."""
        return any(slot.parameter.grad is None or slot.is_written for slot in self._slots.values())

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        self._slots = {
            name: _Slot(tensor, layout.view(arrays.params, name), self._shares)
            for name, tensor in self._parameters.items()
        }
        alone = arrays.reduced is arrays.grads
        for name, slot in self._slots.items():
            own = Place(layout.view(arrays.grads, name), self._device, self._shares)
            slot.attach(own, own if alone else Place(layout.view(arrays.reduced, name), self._device, self._shares))
        self.pull_parameters()

    def pull_parameters(self) -> None:
        self._refuse_recording("parameters")
        for slot in self._slots.values():
            slot.pull()
        Device[self._device].synchronize()

    def push_parameters(self) -> None:
        for slot in self._slots.values():
            slot.push()

    # --- gradients ---

    def pull_gradients(self, bucket: Bucket) -> None:
        """Compute all gradients into the flat space, before the first bucket; a missing one counts as zero."""
        if bucket.index == 0:
            self._pull()

    def push_gradients(self, bucket: Bucket) -> None:
        for place in bucket.closing:
            self._slots[place.name].push_mean()

    def moves_in_place(self) -> tuple[Callable[[], None], Callable[[], None]] | None:  # type: ignore[override]
        return (self._pull, self._push) if self._shares else None

    def _pull(self) -> None:
        if not self._is_computed:
            self._refuse_recording("gradients")
            self._compute()
        self._is_computed = False
        Device[self._device].synchronize()
        for slot in self._slots.values():
            slot.own.to_host()

    def _push(self) -> None:
        for slot in self._slots.values():
            slot.push_mean()

    def _compute(self) -> None:
        """Compute the gradients into the flat space, and what the same backward leaves to be computed."""
        means = [slot.averaged.buffer for slot in self._slots.values()]
        mine = {id(tensor.grad) for tensor in self._parameters.values()}
        # What the program has made of the last mean has to be computed before the next one takes its place.
        run_now(*(tensor for tensor in waiting_for(means) if id(tensor) not in mine))
        stores = [slot.store() for slot in self._slots.values()]
        gradients = {id(each.grad) for each in self._members.values()}
        # Without the loss and running statistics, which share forward with the gradients, it would run for them again.
        Tensor.realize(*stores, *(each for each in in_backward() if id(each) not in gradients), *self._others.values())

    def record(self, synchronise: Callable[[], None]) -> bool:
        """See ModelAdapter; what a TinyJit records is run for the first time when it has been recorded."""
        if not is_recording():
            return False
        self._compute()

        def run() -> None:
            self._is_computed = True
            synchronise()

        record(run, (slot.own.buffer for slot in self._slots.values()))
        self._push()
        return True

    def _refuse_recording(self, what: str) -> None:
        if is_recording():
            raise ArgumentError(
                f"{what}: expected to be moved outside of a TinyJit, got one that records; within it only "
                "sync_gradients can be called"
            )

    def pull_written(self) -> tuple[str, ...]:
        """Compute gradients that are others than the averaged ones into the flat space; return their names."""
        self._refuse_recording("gradients")
        written = {name: slot for name, slot in self._slots.items() if slot.is_written}
        run_now(*(slot.store() for slot in written.values()))
        Device[self._device].synchronize()
        for slot in written.values():
            slot.own.to_host()
        return tuple(written)

    def push_written(self, names: Sequence[str]) -> None:
        for name in names:
            slot = self._slots[name]
            slot.own.to_device()
            slot.parameter.grad = slot.from_flat(slot.own)

    # --- what is not trained ---

    def extra_state(self) -> dict[str, np.ndarray]:
        return {name: read(tensor) for name, tensor in self._others.items()}

    def load_extra_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, tensor in self._others.items():
            write(tensor, state[name])

    buffers, load_buffers = extra_state, load_extra_state


class _Slot:
    """A trained tensor, and its places in the flat space: `value`, `own` and `averaged`."""

    def __init__(self, parameter: Tensor, value: np.ndarray, shares: bool):
        self.parameter, self.value = parameter, value
        self._fits = shares and str(value.dtype) == _name(parameter)

    def attach(self, own: Place, averaged: Place) -> None:
        self.own, self.averaged = own, averaged
        self._mean = self.from_flat(averaged).uop

    def from_flat(self, place: Place) -> Tensor:
        """Return a gradient that is read where it lies in the flat space, and copied where a program writes to it."""
        return (place.tensor * 1).cast(self.parameter.dtype)

    def pull(self) -> None:
        """Copy the values to the flat space; from then on they lie there if they can."""
        if lies_on(own_buffer(self.parameter), self.value):
            return
        values = read(self.parameter)
        self.value[...] = from_bfloat16(values) if values.dtype == np.uint16 else values
        buffer = own_buffer(self.parameter)
        if self._fits and buffer is not None:
            lay(buffer, self.value)

    def push(self) -> None:
        if not lies_on(own_buffer(self.parameter), self.value):
            kind = self.parameter.dtype
            values = self.value.astype(np.float16) if kind == dtypes.float16 else self.value
            write(self.parameter, to_bfloat16(values).view(np.uint16) if kind == dtypes.bfloat16 else values)

    def store(self) -> Tensor:
        """Return the gradient, zero where there is none, as to be computed into the flat space."""
        gradient, own = self.parameter.grad, self.own.tensor
        if gradient is None:
            return own.assign(Tensor.zeros(*own.shape, dtype=own.dtype, device=own.device))
        if gradient.shape != own.shape:
            raise ArgumentError(f"gradient: expected the parameter's shape {own.shape}, got {gradient.shape}")
        return own.assign(gradient.to(own.device).cast(own.dtype))

    def push_mean(self) -> None:
        self.averaged.to_device()
        self.parameter.grad = Tensor(self._mean)

    @property
    def is_written(self) -> bool:
        return self.parameter.grad is not None and self.parameter.grad.uop is not self._mean


def tensors_of(model: object) -> dict[str, Tensor]:
    """Return a model's tensors by name, each once; ArgumentError where some are another library's."""
    found: dict[int, tuple[str, Any]] = {}
    try:
        for name, tensor in nn.state.get_state_dict(model, tensor_type=(Tensor, *_others_tensors())).items():
            found.setdefault(id(tensor), (name, tensor))
    except RecursionError:  # in an object of another library, with references in a circle
        return {}
    tensors = dict(found.values())
    if any(isinstance(each, Tensor) for each in tensors.values()):
        for name, each in tensors.items():
            if not isinstance(each, Tensor):
                kind = f"{type(each).__module__.split('.')[0]}'s {type(each).__name__}"
                raise ArgumentError(f"tensor {name!r}: expected tinygrad's, as the model has others of it, got {kind}")
        return tensors
    return {}


def _others_tensors() -> Iterator[type]:
    for module, name in (("torch", "Tensor"), ("clcomm.engine.tensor", "Tensor"), ("netcl.core.tensor", "Tensor")):
        if module in sys.modules:
            yield getattr(sys.modules[module], name)


def _is_trained(tensor: Tensor) -> bool:
    return bool(tensor.is_param and tensor.is_floating_point())


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    if tensor.dtype not in _FLAT_DTYPES:
        raise ArgumentError(f"tensor {name!r}: expected float16, bfloat16, float32 or float64, got {_name(tensor)}")
    if not tensor.numel():
        raise ArgumentError(f"tensor {name!r}: expected at least one element, got shape {tensor.shape}")
    return ParameterSpec(name, tuple(tensor.shape), _FLAT_DTYPES[tensor.dtype])


def _name(tensor: Tensor) -> str:
    return str({"float": "float32", "double": "float64"}.get(tensor.dtype.name, tensor.dtype.name))
