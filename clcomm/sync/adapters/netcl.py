"""netcl modules under the Synchronizer: netcl runs forward and backward on the rank's device.

`NetclModel` gives a netcl module the interface of a native one, so that one training loop runs both:

    device = prepare("cpu")
    model = NetclModel(MyNetclModule(device.queue))
    loss = cross_entropy(model(x), labels)      # x: float32 array (N, ...), labels: integers (N,)
    loss.backward(); sync.sync_gradients(model); optimizer.step(); optimizer.zero_grad()

Linear weights have PyTorch's shape, (out, in); netcl stores their transpose. Written for netcl 0.4.4; comments name
each workaround.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import require_same_parameters, require_same_trainable
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.engine.modes import is_recording
from clcomm.sync.adapters.netcl_runtime import FLAT_DTYPES, NetclParameter, NetclTensor, named_tensors, prepare, quiet
from clcomm.sync.adapters.numpy import NumpyAdapter

__all__ = ["NetclAdapter", "NetclModel", "NetclParameter", "NetclTensor", "cross_entropy", "prepare"]


class NetclModel:
    """A netcl module with the interface of a native one; inputs are host arrays.

    Parameters are named by attribute path ("conv1.weight"). Within `clcomm.engine.no_grad()` nothing is recorded.
    """

    def __init__(self, module: Any):
        self.module = module
        self._tensors = list(named_tensors(module))
        if not any(parameter.requires_grad for parameter in self._tensors):
            raise ArgumentError("model: expected a netcl module with parameters, got none that needs gradients")
        self._queue = self._tensors[0].tensor.queue
        if getattr(self._queue, "backend", "cl") == "cpu":
            raise ArgumentError("model: expected a module on an OpenCL queue, got netcl's NumPy backend; pass queue=")

    def __call__(self, x: object) -> NetclTensor:
        """Run forward on a batch: a float32 array (N, ...). Raises ArgumentError for an empty one."""
        from netcl import autograd
        from netcl.core.tensor import Tensor

        # netcl uploads in the background: give it a copy of its own, as the caller may refill the array.
        batch = np.array(x, np.float32, order="C")
        if not batch.size:
            raise ArgumentError(f"model: expected a batch of at least one element, got shape {batch.shape}")
        data = Tensor.from_host(self._queue, batch)
        with quiet():
            if not is_recording():
                with autograd.no_grad():
                    return NetclTensor(_value(self.module(autograd.tensor(data))))
            # No Tape here: one that goes out of scope cuts the graph, and backward() finds its nodes without it.
            node = self.module(autograd.tensor(data))
        return NetclTensor(node.value, node)

    def named_parameters(self) -> Iterator[tuple[str, NetclParameter]]:
        """Yield (name, parameter) of the trained parameters, in the module's order."""
        return ((p.name, p) for p in self._tensors if p.requires_grad)

    def parameters(self) -> Iterator[NetclParameter]:
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        for parameter in self._tensors:
            parameter.tensor.grad = None

    def train(self, mode: bool = True) -> NetclModel:
        """Switch layers such as Dropout to training."""
        self.module.train(mode)
        return self

    def eval(self) -> NetclModel:
        """Switch layers such as Dropout to evaluation."""
        return self.train(False)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all parameters and buffers by name, as host arrays."""
        return {parameter.name: parameter.numpy() for parameter in self._tensors}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Restore a `state_dict`.

        Raises ArgumentError, changing nothing, for other names or shapes, or for values other than numbers.
        """
        expected = {p.name: p.shape for p in self._tensors}
        got = {name: np.shape(array) for name, array in state.items()}
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                raise ArgumentError(
                    f"state: expected {name!r} of shape {expected.get(name)}, got {got.get(name)} (None: not there)"
                )
            if (dtype := np.asarray(state[name]).dtype).kind not in "fiu":
                raise ArgumentError(f"state: expected {name!r} to hold numbers, got {dtype}")
        for parameter in self._tensors:
            parameter.copy_from(state[parameter.name])
        self.forget_derived()

    def forget_derived(self) -> None:
        """Drop netcl's caches derived from the weights: evaluation keeps a copy with BatchNorm folded in."""
        from netcl.nn.state import invalidate_derived

        invalidate_derived(self.module)

    def require_unchanged(self) -> None:
        """Raise ArgumentError where a trained tensor of the module was added, removed or replaced."""
        now = {parameter.name: parameter.tensor for parameter in named_tensors(self.module)}
        known = {parameter.name: parameter.tensor for parameter in self._tensors}
        buffers = {name for name, tensor in known.items() if name in now and not tensor.requires_grad}
        now, known = ({n: t for n, t in each.items() if n not in buffers} for each in (now, known))
        require_same_parameters(now, known, "the tensor of the start", "make a new NetclModel after replacing a layer")

    def as_adapter(self) -> NetclAdapter:
        return NetclAdapter(self)


def cross_entropy(logits: NetclTensor, labels: object) -> NetclTensor:
    """Return the batch's mean cross-entropy of logits (N, classes) and integer labels (N,).

    Raises ArgumentError for logits of another shape or without elements, and for labels of another length or outside
    the classes, which netcl would read past.
    """
    from netcl import autograd
    from netcl.core.tensor import Tensor

    if len(logits.shape) != 2 or 0 in logits.shape:
        raise ArgumentError(f"logits: expected shape (rows, classes), at least one of each, got {logits.shape}")
    rows, classes = logits.shape
    y = np.asarray(labels)
    if y.shape != (rows,) or y.dtype.kind not in "iu":
        raise ArgumentError(f"labels: expected {rows} integers, got {y.dtype} of shape {y.shape}")
    if y.min() < 0 or y.max() >= classes:
        raise ArgumentError(f"labels: expected 0 to {classes - 1}, got {y.min()} to {y.max()}")
    # netcl's loss on integer labels never returns on PoCL: it leaves the kernel ahead of a barrier. One-hot works.
    targets = autograd.tensor(Tensor.from_host(logits.value.queue, np.eye(classes, dtype=np.float32)[y]))
    with quiet():
        if logits.node is None or not is_recording():
            with autograd.no_grad():
                return NetclTensor(_value(autograd.cross_entropy(autograd.tensor(logits.value), targets)))
        node = autograd.cross_entropy(logits.node, targets)
    return NetclTensor(node.value, node)


class NetclAdapter(NumpyAdapter):
    """The adapter of a NetclModel or a bare netcl module.

    float16 parameters are float32 in the flat space. Frozen parameters and buffers are `extra_state`.
    """

    def __init__(self, model: Any):
        self._model = model if isinstance(model, NetclModel) else NetclModel(model)
        self._parameters = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            if parameter.tensor.dtype not in FLAT_DTYPES:
                raise ArgumentError(f"parameter {name!r}: expected a floating-point dtype, got {parameter.dtype}")
        self.specs = tuple(ParameterSpec(name, p.shape, p.dtype) for name, p in self._parameters.items())

    def require_unchanged(self) -> None:
        self._model.require_unchanged()
        require_same_trainable((name for name, _ in self._model.named_parameters()), self._parameters)

    def push_parameters(self) -> None:
        super().push_parameters()
        self._model.forget_derived()

    def drop_gradients(self) -> None:
        self._model.zero_grad()

    def _value(self, name: str) -> np.ndarray:
        values: np.ndarray = self._parameters[name].numpy()
        return values

    def _set_value(self, name: str, values: np.ndarray) -> None:
        self._parameters[name].copy_from(values)

    def _gradient(self, name: str) -> np.ndarray | None:
        gradient = self._parameters[name].grad
        return None if gradient is None else gradient.numpy()

    def _set_gradient(self, name: str, values: np.ndarray | None) -> None:
        if values is None:
            self._parameters[name].tensor.grad = None
        else:
            self._parameters[name].set_gradient(values)

    def extra_state(self) -> dict[str, np.ndarray]:
        return {name: array for name, array in self._model.state_dict().items() if name not in self._parameters}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        for parameter in self._model._tensors:
            if parameter.name in state:
                parameter.copy_from(state[parameter.name])
        self._model.forget_derived()

    buffers, load_buffers = extra_state, load_extra_state


def _value(result: object) -> object:
    return getattr(result, "value", result)
