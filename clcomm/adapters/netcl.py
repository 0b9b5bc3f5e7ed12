"""netcl modules under the Synchronizer: netcl's own kernels run forward and backward on the rank's device.

`NetclModel` gives a netcl module the surface of the native engine, so that one training loop serves both:

    device = prepare("cpu")
    model = NetclModel(MyNetclModule(device.queue))
    loss = cross_entropy(model(x), labels)      # x: float32 array (N, ...), labels: integers (N,)
    loss.backward(); sync.sync_gradients(model); optimizer.step(); optimizer.zero_grad()

Linear weights appear as PyTorch keeps them, (out, in); netcl holds their transpose.
Written for netcl 0.4.4. What of it is worked around is said where that happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm.adapters.netcl_runtime import prepare, quiet
from clcomm.buckets import Bucket
from clcomm.engine.autograd import is_recording
from clcomm.errors import ArgumentError
from clcomm.layout import FlatLayout, ParameterSpec

if TYPE_CHECKING:
    from clcomm.replica import FlatArrays, Mark, OnComplete

__all__ = ["NetclModel", "NetclParameter", "NetclReplica", "NetclTensor", "cross_entropy", "prepare"]

_FLAT_DTYPES = {
    "float": "float32",
    "float32": "float32",
    "half": "float32",
    "float16": "float32",
    "double": "float64",
    "float64": "float64",
}


class NetclTensor:
    """A value that netcl computed: `shape`, `numpy()`, `item()`, and `backward()` where it was recorded."""

    def __init__(self, value: Any, node: Any = None, transposed: bool = False):
        self.value, self.node, self._transposed = value, node, transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        shape = tuple(int(length) for length in self.value.shape)
        return shape[::-1] if self._transposed else shape

    def numpy(self) -> np.ndarray:
        """Return a copy of the values on the host; waits for the device."""
        values = self.value.to_host()
        return np.ascontiguousarray(values.T) if self._transposed else values

    def item(self) -> float:
        """Return the value of a tensor of one element; waits for the device."""
        if self.value.size != 1:
            raise ArgumentError(f"item: expected a tensor of one element, got shape {self.shape}")
        return float(self.value.to_host().reshape(-1)[0])

    def backward(self, gradient: float = 1.0) -> None:
        """Add to the parameters' gradients those of this value, times `gradient`; once for each forward."""
        from netcl import autograd
        from netcl.core.tensor import Tensor

        if self.node is None:
            raise ArgumentError("backward: expected a value recorded since the last backward(), got none; run forward")
        seed = Tensor.from_shape(self.value.queue, self.value.shape, fill=float(gradient))
        with quiet():
            autograd.Tape(retain_grads=False).backward(self.node, seed)
        self.value.grad = self.node = None  # gives the graph's buffers back to netcl's pool


class NetclParameter:
    """A parameter of a netcl module, by the name and in the shape that PyTorch would give it."""

    def __init__(self, name: str, tensor: Any, transposed: bool):
        self.name, self.tensor, self.transposed = name, tensor, transposed
        self.dtype = _FLAT_DTYPES.get(tensor.dtype, tensor.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, PyTorch's way round."""
        shape = tuple(int(length) for length in self.tensor.shape)
        return shape[::-1] if self.transposed else shape

    @property
    def requires_grad(self) -> bool:
        """Whether backward() computes its gradient."""
        return bool(self.tensor.requires_grad) and not getattr(self.tensor, "_frozen", False)

    @property
    def grad(self) -> NetclTensor | None:
        """The gradient, or None."""
        return None if self.tensor.grad is None else NetclTensor(self.tensor.grad, transposed=self.transposed)

    def numpy(self) -> np.ndarray:
        """Return a copy of the values on the host; waits for the device."""
        return NetclTensor(self.tensor, transposed=self.transposed).numpy()

    def copy_from(self, values: Any) -> None:
        """Overwrite the values with a host array of the same shape."""
        array = np.asarray(values)
        if array.shape != self.shape:
            raise ArgumentError(f"parameter {self.name!r}: expected shape {self.shape}, got {array.shape}")
        self._write(self.tensor, array)

    def set_gradient(self, values: np.ndarray) -> None:
        """Make `values` the gradient, in memory of its own: netcl's may be shared with another parameter's."""
        from netcl.core.tensor import Tensor

        gradient = Tensor.from_shape(self.tensor.queue, self.tensor.shape, dtype=self.tensor.dtype)
        self._write(gradient, values)
        self.tensor.grad = gradient

    def _write(self, tensor: Any, values: np.ndarray) -> None:
        from netcl.core.transfer import write_tensor

        write_tensor(tensor, values.T if self.transposed else values)


class NetclModel:
    """A netcl module that takes host arrays and is trained, checkpointed and synchronised like a native one.

    Parameters are named by attribute path ("conv1.weight"). Within `clcomm.engine.no_grad()` nothing is recorded.
    """

    def __init__(self, module: Any):
        self.module = module
        self._tensors = list(_named_tensors(module))
        if not any(parameter.requires_grad for parameter in self._tensors):
            raise ArgumentError("model: expected a netcl module with parameters, got none that needs gradients")
        self._queue = self._tensors[0].tensor.queue
        if getattr(self._queue, "backend", "cl") == "cpu":
            raise ArgumentError("model: expected a module on an OpenCL queue, got netcl's NumPy backend; pass queue=")

    def __call__(self, x: Any) -> NetclTensor:
        """Run forward on a batch: a float32 array (N, ...)."""
        from netcl import autograd
        from netcl.core.tensor import Tensor

        # netcl uploads in the background: give it a copy of its own, as the caller may refill the array.
        data = Tensor.from_host(self._queue, np.array(x, np.float32, order="C"))
        with quiet():
            if not is_recording():
                with autograd.no_grad():
                    return NetclTensor(_value(self.module(autograd.tensor(data))))
            # No Tape here: one that goes out of scope cuts the graph, and backward() finds its nodes without it.
            node = self.module(autograd.tensor(data))
        return NetclTensor(node.value, node)

    def named_parameters(self) -> Iterator[tuple[str, NetclParameter]]:
        """Yield (name, parameter) of those that are trained, in the module's order."""
        return ((p.name, p) for p in self._tensors if p.requires_grad)

    def parameters(self) -> Iterator[NetclParameter]:
        """Yield the trained parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self) -> None:
        """Forget all gradients."""
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
        """Set what `state_dict` returned; ArgumentError, before anything is written, for other names or shapes."""
        expected = {p.name: p.shape for p in self._tensors}
        got = {name: np.shape(array) for name, array in state.items()}
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                raise ArgumentError(
                    f"state: expected {name!r} of shape {expected.get(name)}, got {got.get(name)} (None: not there)"
                )
        for parameter in self._tensors:
            parameter.copy_from(state[parameter.name])
        self.forget_derived()

    def forget_derived(self) -> None:
        """Drop what netcl derived from the weights: evaluation folds BatchNorm into a copy of them and keeps it."""
        from netcl.nn.state import invalidate_derived

        invalidate_derived(self.module)

    def as_replica(self) -> NetclReplica:
        """Return this model as the Synchronizer sees it."""
        return NetclReplica(self)


def cross_entropy(logits: NetclTensor, labels: Any) -> NetclTensor:
    """Return the batch's mean cross-entropy of logits (N, classes) and integer labels (N,).

    Raises ArgumentError for labels of another length or outside the classes, which netcl would read past.
    """
    from netcl import autograd
    from netcl.core.tensor import Tensor

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


class NetclReplica:
    """A NetclModel, or a bare netcl module, as the Synchronizer sees it.

    float16 parameters are float32 in the flat space. Frozen parameters and buffers are `extra_state`.
    """

    def __init__(self, model: Any):
        self._model = model if isinstance(model, NetclModel) else NetclModel(model)
        self._parameters = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            if parameter.tensor.dtype not in _FLAT_DTYPES:
                raise ArgumentError(f"parameter {name!r}: expected a floating-point dtype, got {parameter.dtype}")
        self.specs = tuple(ParameterSpec(name, p.shape, p.dtype) for name, p in self._parameters.items())

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        """Keep the flat arrays that pull and push copy to and from."""
        self._layout, self._arrays = layout, arrays

    def pull_parameters(self) -> None:
        """Copy the model's parameters into the flat space."""
        for name, parameter in self._parameters.items():
            self._layout.view(self._arrays.params, name)[...] = parameter.numpy()

    def push_parameters(self) -> None:
        """Copy the flat space's parameters into the model."""
        for name, parameter in self._parameters.items():
            parameter.copy_from(self._layout.view(self._arrays.params, name))
        self._model.forget_derived()

    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients into the flat space; one that is missing counts as zero."""
        for slot in bucket.opening:
            gradient = self._parameters[slot.name].grad
            self._layout.view(self._arrays.grads, slot.name)[...] = 0 if gradient is None else gradient.numpy()

    def send_gradients(self, bucket: Bucket, mark: Mark | None) -> None:
        """Copy a bucket's gradients into the flat space."""
        self.pull_gradients(bucket)

    def push_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's averaged gradients into the model; one that was missing appears."""
        for slot in bucket.closing:
            self._parameters[slot.name].set_gradient(self._layout.view(self._arrays.reduced, slot.name))

    def moves_in_place(self) -> None:
        """Return None: gradients are copied."""

    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> None:
        """Do nothing: netcl does not tell when a gradient is complete."""

    def mark(self) -> None:
        """Return None: what was called is done."""

    def extra_state(self) -> dict[str, np.ndarray]:
        """Return frozen parameters and buffers by name."""
        return {name: array for name, array in self._model.state_dict().items() if name not in self._parameters}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        """Set what `extra_state` returned."""
        for parameter in self._model._tensors:
            if parameter.name in state:
                parameter.copy_from(state[parameter.name])
        self._model.forget_derived()


def _value(result: Any) -> Any:
    return getattr(result, "value", result)


def _named_tensors(module: Any) -> Iterator[NetclParameter]:
    """Yield every tensor of a module once: those of public attributes by path, others that it calls parameters."""
    seen: set[int] = set()
    yield from _walk(module, "", seen)
    for index, tensor in enumerate(module.parameters()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield NetclParameter(f"parameter{index}", tensor, False)


def _walk(owner: Any, prefix: str, seen: set[int]) -> Iterator[NetclParameter]:
    from netcl.core.tensor import Tensor
    from netcl.nn import Linear
    from netcl.nn.layers import Module

    seen.add(id(owner))
    if isinstance(owner, dict):
        members = [(str(key), member) for key, member in owner.items()]
    elif isinstance(owner, (list, tuple)):
        members = [(str(index), member) for index, member in enumerate(owner)]
    else:  # private attributes hold caches made from the public ones
        members = [(name, member) for name, member in vars(owner).items() if not name.startswith("_")]
    for name, member in members:
        if id(member) in seen:
            continue
        if isinstance(member, Tensor):
            seen.add(id(member))
            yield NetclParameter(prefix + name, member, isinstance(owner, Linear) and name == "weight")
        elif isinstance(member, (Module, dict, list, tuple)):
            yield from _walk(member, f"{prefix}{name}.", seen)
