"""netcl's optimizers with the interface of `clcomm.optim`: a settable rate, and state as named host arrays.

netcl's optimizers keep their state in different attributes, and Adam and RMSProp cannot save it; _STATE lists the
attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.sync.adapters.netcl import NetclModel, NetclParameter
from clcomm.sync.adapters.netcl_runtime import quiet

# netcl's optimizer -> the name of a kind of state here -> netcl's attribute: id(tensor) -> buffer or host array.
_STATE = {
    "SGD": {"momentum": "_v_buf"},
    "Momentum": {"momentum": "vel"},
    "Adam": {"exp_avg": "_m_buf", "exp_avg_sq": "_v_buf"},
    "AdamW": {"exp_avg": "_m_buf", "exp_avg_sq": "_v_buf"},
    "RMSProp": {"square_avg": "square_avg", "momentum": "mom"},
}


class NetclOptimizer:
    """An optimizer of netcl by name: "sgd" (momentum, nesterov), "adam", "adamw" or "rmsprop" (momentum).

    `weight_decay` None means PyTorch's default: 0.01 for "adamw", else 0. Raises ArgumentError for other names, and
    for `nesterov` without "sgd".
    """

    def __init__(
        self,
        model: NetclModel,
        name: str,
        lr: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
    ):
        self._model, self._parameters = model, list(model.parameters())
        self._optimizer = _make(name, self._parameters, lr, momentum, nesterov, weight_decay)
        self._kind = type(self._optimizer).__name__
        self._step = 0

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        lr: float = self._optimizer.lr
        return lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._optimizer.lr = value

    def step(self) -> None:
        """Update the parameters that have a gradient; ArgumentError where layers were replaced."""
        self._model.require_unchanged()
        with quiet():
            self._optimizer.step()
        self._step += 1

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.tensor.grad = None

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the optimizer's kind, number of steps, and state by kind and parameter ("momentum/fc1.weight")."""
        state = {"kind": np.array(self._kind), "step": np.array(self._step)}
        for kind, places in self._places():
            for parameter in self._parameters:
                state[f"{kind}/{parameter.name}"] = _read(parameter, places)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a `state_dict`; CheckpointError, changing nothing, for another optimizer's."""
        if str(state.get("kind")) != self._kind:
            raise CheckpointError(f"optimizer state: expected that of {self._kind}, got that of {state.get('kind')}")
        shapes = {f"{kind}/{p.name}": p.shape for kind, _ in self._places() for p in self._parameters}
        found = {name: np.shape(array) for name, array in state.items()}
        expected = {"kind": (), "step": (), **shapes}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise CheckpointError(
                    f"optimizer state: expected {name!r} of shape {expected.get(name)}, got {found.get(name)} "
                    "(None: not there); resume with the optimizer that wrote it"
                )
        step = np.asarray(state["step"])
        if step.dtype.kind not in "iu" or step < 0:
            raise CheckpointError(f"optimizer state: expected 'step' to be a whole number of at least 0, got {step}")
        for name in shapes:
            if np.asarray(state[name]).dtype.kind not in "fiu":
                raise CheckpointError(
                    f"optimizer state: expected {name!r} to hold numbers, got {np.asarray(state[name]).dtype}"
                )
        self._step = int(step)
        if hasattr(self._optimizer, "t"):
            self._optimizer.t = self._step
        for kind, places in self._places():
            for parameter in self._parameters:
                _write(parameter, places, state[f"{kind}/{parameter.name}"])

    def _places(self) -> Iterable[tuple[str, dict[int, Any]]]:
        attributes = _STATE[self._kind]
        places = [(kind, getattr(self._optimizer, attribute)) for kind, attribute in attributes.items()]
        return [(kind, place) for kind, place in places if place is not None]


def _make(
    name: str, parameters: list[NetclParameter], lr: float, momentum: float, nesterov: bool, weight_decay: float | None
) -> Any:
    from netcl import optim

    tensors = [parameter.tensor for parameter in parameters]
    if nesterov and name != "sgd":
        raise ArgumentError(f"nesterov: expected only with optimizer 'sgd', got it with {name!r}")
    decay = (0.01 if name == "adamw" else 0.0) if weight_decay is None else weight_decay
    if name == "sgd" and nesterov:
        return optim.Momentum(tensors, lr, momentum, nesterov=True, weight_decay=decay)
    if name == "sgd":
        return optim.SGD(tensors, lr, momentum, decay)
    if name == "adam":
        return optim.Adam(tensors, lr, weight_decay=decay)
    if name == "adamw":
        optimizer = optim.AdamW(tensors, lr, weight_decay=decay)
        # Its fused path resets the moments whenever another set of parameters has gradients.
        optimizer._fused_enabled = False
        return optimizer
    if name == "rmsprop":
        return optim.RMSProp(tensors, lr, weight_decay=decay, momentum=momentum)
    raise ArgumentError(f"optimizer: expected sgd, adam, adamw or rmsprop, got {name!r}")


def _read(parameter: NetclParameter, places: dict[int, Any]) -> np.ndarray:
    from netcl.core import transfer

    tensor = parameter.tensor
    place = places.get(id(tensor))
    if isinstance(place, np.ndarray):
        values = np.array(place, np.float32)
    else:  # device buffers appear with the first step
        values = np.zeros(tensor.shape, np.float32)
        if place is not None:
            transfer.read(tensor.queue, values, place)
    return np.ascontiguousarray(values.T) if parameter.transposed else values


def _write(parameter: NetclParameter, places: dict[int, Any], values: np.ndarray) -> None:
    import pyopencl as cl

    tensor = parameter.tensor
    array = np.ascontiguousarray(values.T if parameter.transposed else values, np.float32)
    if isinstance(places.get(id(tensor)), np.ndarray):
        places[id(tensor)] = array.copy()
        return
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    places[id(tensor)] = cl.Buffer(tensor.context, flags, hostbuf=array)
