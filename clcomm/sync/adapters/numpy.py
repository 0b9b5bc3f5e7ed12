"""Models of plain NumPy arrays under the Synchronizer: the smallest adapter, and the reference for the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import require_same_parameters
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.base.host.arrays import host_array
from clcomm.sync.adapters.adapter import CopyingAdapter

_REMEDY = "make a new Synchronizer after replacing parameters"


class NumpyParameter(Protocol):
    """A parameter: its array, and its gradient once backward has computed one; or other libraries' by `__dlpack__`."""

    data: np.ndarray
    grad: np.ndarray | None


class NumpyModel(Protocol):
    """The least interface of a model."""

    def named_parameters(self) -> Iterable[tuple[str, NumpyParameter]]:
        """Yield (name, parameter) in the same order on every rank."""


class NumpyAdapter(CopyingAdapter):
    """A model whose `named_parameters()` yields (name, p) with `p.data` and `p.grad` as NumPy arrays.

    Tensors of the host's memory with `__dlpack__` are as good: they are read and written where they lie. A gradient
    that was missing, or that nothing may write to, is replaced by an array.

    Arrays are updated in place, so that views of them stay valid. A parameter that is yielded under several names
    counts once. float16 is float32 in the flat space: MPI has no arithmetic for it, and a sum needs more bits.
    A model with `extra_state()` and `load_extra_state(dict)` has that state broadcast along with its parameters.
    Raises ArgumentError for parameters that are not floating-point arrays, or where there are none.
    """

    def __init__(self, model: Any):
        self._model = model
        self._parameters = _named(model)
        again = _named(model)
        self._are_kept = all(again.get(name) is parameter for name, parameter in self._parameters.items())
        self.specs = tuple(_spec(name, parameter) for name, parameter in self._parameters.items())
        if not self.specs:
            raise ArgumentError("model: expected at least one parameter, got none from named_parameters()")

    def require_unchanged(self) -> None:
        """Raise ArgumentError where a parameter was replaced or has another shape."""
        now = _named(self._model)
        if self._are_kept:  # the model does not create parameter objects at each call of named_parameters()
            require_same_parameters(now, self._parameters, remedy=_REMEDY)
        for spec in self.specs:
            shape = _data(spec.name, self._parameters[spec.name]).shape
            if shape != spec.shape:
                raise ArgumentError(f"parameter {spec.name!r}: expected shape {spec.shape}, got {shape}; {_REMEDY}")

    def pull_parameters(self) -> None:
        for name in self._parameters:
            np.copyto(self._layout.view(self._arrays.params, name), self._value(name))

    def push_parameters(self) -> None:
        for name in self._parameters:
            self._set_value(name, self._layout.view(self._arrays.params, name))

    def pull_gradients(self, bucket: Bucket) -> None:
        missing = []
        for place in bucket.opening:
            gradient = self._gradient(place.name)
            if gradient is None:
                missing.append(place.name)
                continue
            if np.shape(gradient) != place.shape:
                raise ArgumentError(
                    f"gradient of {place.name!r}: expected shape {place.shape}, got {np.shape(gradient)}"
                )
            np.copyto(self._layout.view(self._arrays.grads, place.name), gradient, casting="same_kind")
        self._mark(bucket, missing)

    def push_gradients(self, bucket: Bucket) -> None:
        missing = self._missing(bucket)
        for place in bucket.closing:
            averaged = None if place.name in missing else self._layout.view(self._arrays.reduced, place.name)
            self._set_gradient(place.name, averaged)

    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that differ from the averaged ones into the flat space; return their names."""
        written = []
        for name in self._parameters:
            averaged, gradient = self._layout.view(self._arrays.reduced, name), self._gradient(name)
            if gradient is not None and not np.array_equal(gradient, averaged.astype(gradient.dtype)):
                np.copyto(self._layout.view(self._arrays.grads, name), gradient, casting="same_kind")
                written.append(name)
        return tuple(written)

    def push_written(self, names: Sequence[str]) -> None:
        for name in names:
            self._set_gradient(name, self._layout.view(self._arrays.grads, name))

    # --- one parameter, which other libraries' adapters read and write in another way ---

    def _value(self, name: str) -> np.ndarray:
        return _data(name, self._parameters[name])

    def _set_value(self, name: str, values: np.ndarray) -> None:
        np.copyto(self._value(name), values, casting="same_kind")

    def _gradient(self, name: str) -> np.ndarray | None:
        gradient = self._parameters[name].grad
        return None if gradient is None else host_array(gradient, f"gradient of {name!r}")

    def _set_gradient(self, name: str, values: np.ndarray | None) -> None:
        parameter, gradient = self._parameters[name], self._gradient(name)
        if values is None:
            parameter.grad = None
        elif gradient is None or not gradient.flags.writeable:
            parameter.grad = values.astype(self._value(name).dtype)
        else:
            np.copyto(gradient, values, casting="same_kind")

    def extra_state(self) -> dict[str, np.ndarray]:
        return self._model.extra_state() if hasattr(self._model, "extra_state") else {}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        if state:
            self._model.load_extra_state(state)

    buffers, load_buffers = extra_state, load_extra_state


def _named(model: NumpyModel) -> dict[str, NumpyParameter]:
    named: dict[int, tuple[str, NumpyParameter]] = {}
    for name, parameter in model.named_parameters():
        named.setdefault(id(parameter), (name, parameter))
    return dict(named.values())


def _data(name: str, parameter: NumpyParameter) -> np.ndarray:
    return host_array(parameter.data, f"parameter {name!r}")


def _spec(name: str, parameter: NumpyParameter) -> ParameterSpec:
    data = _data(name, parameter) if hasattr(parameter.data, "__dlpack__") else parameter.data
    if not isinstance(data, np.ndarray) or data.dtype.kind not in "fc":
        found = f"{data.dtype} array" if isinstance(data, np.ndarray) else type(data).__name__
        raise ArgumentError(f"parameter {name!r}: expected .data as an array of floating-point numbers, got {found}")
    if not data.flags.writeable and not isinstance(parameter.data, np.ndarray):
        raise ArgumentError(f"parameter {name!r}: expected .data that can be written to, got a read-only tensor")
    return ParameterSpec(name, data.shape, "float32" if data.dtype == np.float16 else str(data.dtype))
