"""One interface to three engines: clcomm's own, netcl's kernels, and PyTorch.

All three start from the same bits for the same seed, and name and shape their parameters alike, so that losses,
gradients and parameters can be compared across them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clcomm import optim
from clcomm.base.errors import ArgumentError, needed
from clcomm.base.flat_space.parameters import parse_precision
from clcomm.base.host.arrays import aligned_zeros
from clcomm.engine import CrossEntropyLoss, Device, Module, Replay, Tensor, codec, fold, no_grad
from clcomm.engine.nn.module import evaluating
from models import MLP, ConvNet, LeNet, ResNet
from training.engines import gather
from training.engines.gather import DeviceGather
from training.engines.rehearsal import Rehearsal

if TYPE_CHECKING:
    from clcomm.parallel.pipeline import Pipeline

Shape = tuple[int, ...]
#: The models by name.
_KINDS: dict[str, Any] = {"mlp": MLP, "convnet": ConvNet, "lenet": LeNet, "resnet": ResNet}
#: Those that are built of netcl's layers too.
_OF_NETCL = ("mlp", "convnet")


@dataclass(frozen=True)
class Parts:
    """What a training loop needs of an engine.

    model: model(x) -> logits; works with `Synchronizer`, and has `state_dict()` and `load_state_dict()` of arrays.
    loss_fn: loss_fn(logits, y) -> mean cross-entropy with `item()` and `backward(weight)`.
    forward_backward: forward_backward(x, y, weight) -> loss with `item()`; adds `weight` times the gradients.
    make_optimizer: make_optimizer(name, lr, momentum=, nesterov=, weight_decay=) -> optimizer with `step()`,
        `zero_grad()`, a settable `lr`, and state like the model's; `momentum` is for sgd and rmsprop only.
    prepare: images (N, C, H, W) and integer labels (N,) -> inputs of model and loss_fn, which may lie in the arrays'
        memory: it must not change until the step's results were read.
    predict: images -> logits (N, classes), without a tape, in eval mode.
    device: the engine and its device, in words.
    profile: a `with` block that times the kernels queued within it; None: the engine cannot.
    opencl: the device of the native engine.
    prepare_gather: see training.data.datasets.ArrayDataset; None: the engine gathers no batches.
    rehearse: rehearse(batch sizes, optimizer name, lr, its settings, rows, divisor, compression, precision) -> the
        kernels that a run needs, if the engine builds kernels: training with the first batch size, prediction with all
        of them, sums of `rows` ranks' gradients over `divisor`, the compression, and the parameters' precision.
    pipeline: the stages of which `model` has this rank's; the model's calls are collective over them then. None: the
        model is whole.
    """

    model: Any
    loss_fn: Callable[[Any, Any], Any]
    forward_backward: Callable[[Any, Any, float], Any]
    make_optimizer: Callable[..., Any]
    prepare: Callable[[np.ndarray, np.ndarray], tuple[Any, Any]]
    predict: Callable[[np.ndarray], np.ndarray]
    device: str
    profile: Callable[[], AbstractContextManager[Any]] | None = None
    opencl: Device | None = None
    prepare_gather: Callable[..., Any] | None = None
    rehearse: Callable[..., Rehearsal] | None = None
    pipeline: Pipeline | None = None


@dataclass(frozen=True)
class Placement:
    """The device that a rank requests, and its place on its host; None: from the launcher's environment variables."""

    spec: str | None = None
    local_rank: int | None = None
    local_size: int | None = None
    cores: int | None = None

    def opencl(self) -> Device:
        """Return the OpenCL device; raises DeviceError, which lists the devices, if none fits."""
        return Device.select(self.spec, local_rank=self.local_rank, local_size=self.local_size, cores=self.cores)


def build_parts(
    engine: str,
    model: str,
    in_shape: Shape,
    classes: int,
    seed: int,
    device: Device | Placement | str | None = None,
) -> Parts:
    """Return the model of a name for images of `in_shape` (C, H, W) on the engine native, netcl or torch.

    Models are "mlp", "convnet", "lenet" and "resnet", on netcl the first two. A seed gives the same initial values on
    all engines. Raises ArgumentError for other names and
    if the engine's package is not installed, DeviceError for a device that is missing.
    """
    builders = {"native": _native, "netcl": _netcl, "torch": _torch}
    if engine not in builders:
        raise ArgumentError(f"engine: expected one of {', '.join(builders)}, got {engine!r}")
    known = _OF_NETCL if engine == "netcl" else tuple(_KINDS)
    if model not in known:
        raise ArgumentError(f"model: expected one of {', '.join(known)} with engine {engine}, got {model!r}")
    return builders[engine](model, in_shape, classes, seed, device)


def _forward_backward(model: Any, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any, float], Any]:
    def forward_backward(inputs: Any, targets: Any, weight: float = 1.0) -> Any:
        loss = loss_fn(model(inputs), targets)
        loss.backward(weight)
        return loss

    return forward_backward


def _opencl(device: Device | Placement | str | None) -> Device:
    if isinstance(device, Device):
        return device
    return (device if isinstance(device, Placement) else Placement(device)).opencl()


def _native(model: str, in_shape: Shape, classes: int, seed: int, device: Any) -> Parts:
    chosen = _opencl(device)

    def make(on: Device, seed: int = 0) -> Module:
        return _KINDS[model](in_shape, classes, device=on, seed=seed)

    def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((size, *in_shape), np.float32), np.zeros(size, np.int32)

    loss_fn = CrossEntropyLoss()
    return replace(
        native_parts(make(chosen, seed), loss_fn, chosen),
        prepare_gather=DeviceGather.on(chosen),
        rehearse=rehearsal_of(chosen, make, batch_of, loss_fn),
    )


def native_parts(module: Module, loss_fn: Callable[[Any, Any], Tensor], device: Device) -> Parts:
    """Return the parts of a model of the native engine; its kernels are built when they are first used."""
    module.flat_space()  # places the gradients before the first step is recorded

    def predict(inputs: np.ndarray) -> np.ndarray:
        with no_grad(), evaluating(module):
            return module(Tensor(inputs, device)).numpy()

    return Parts(
        model=module,
        loss_fn=loss_fn,
        forward_backward=Replay(_forward_backward(module, loss_fn)),
        make_optimizer=lambda name, lr, **settings: make_native_optimizer(module, name, lr, **settings),
        prepare=InputTensors(device),
        predict=predict,
        device=f"native engine on {device.kind} {device.name}",
        profile=device.profile,
        opencl=device,
    )


class InputTensors:
    """Makes tensors of batches; where the device computes in the arrays' memory, arrays that come again keep theirs."""

    _MOST = 64  # arrays: those of a step's micro-batches, and of batches fetched ahead

    def __init__(self, device: Device):
        self._device = device
        self._kept: dict[int, tuple[np.ndarray, Tensor]] = {}

    def __call__(self, images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._tensor(images), self._tensor(labels)

    def _tensor(self, array: np.ndarray) -> Tensor:
        kept = self._kept.get(id(array))
        if kept is not None:
            return kept[1]
        tensor = Tensor(array, self._device, copy=False)
        if self._device.lies_on(array, tensor.buffer):
            if len(self._kept) >= self._MOST:
                del self._kept[next(iter(self._kept))]
            self._kept[id(array)] = array, tensor  # with the array, so that no other gets its id
        return tensor


def rehearsal_of(
    opencl: Device,
    make: Callable[[Device], Module],
    batch_of: Callable[[int], tuple[np.ndarray, np.ndarray]],
    loss_fn: Callable[[Any, Any], Tensor],
) -> Callable[..., Rehearsal]:
    """Return the `rehearse` of Parts for the models that `make` makes and batches of the sizes of `batch_of`."""

    def rehearse(
        sizes: Sequence[int], name: str, lr: float, settings: dict[str, Any], rows: int = 1, divisor: int = 1,
        compression: str = "none", precision: str = "float32",
    ) -> Rehearsal:  # fmt: skip
        device = Rehearsal(opencl)
        module = make(device)
        space = module.flat_space()
        space.store_in(parse_precision(precision))
        sizes_of_arrays = space.params_nbytes, space.layout.span, space.layout.span
        space.rebind(*map(aligned_zeros, sizes_of_arrays))  # as the Synchronizer does
        optimizer = make_native_optimizer(module, name, lr, **settings)
        batches = [(Tensor(inputs, device), Tensor(targets, device)) for inputs, targets in map(batch_of, sizes)]
        _forward_backward(module, loss_fn)(*batches[0], 1.0)
        optimizer.step()
        with no_grad(), evaluating(module):
            for inputs, _ in batches:
                module(inputs)
        gather.rehearse(device)
        fold.rehearse(device, rows, divisor)
        codec.rehearse(device, compression)
        return device

    return rehearse


def make_native_optimizer(
    module: Any,
    name: str,
    lr: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float | None = None,
) -> optim.Optimizer:
    """Return the optimizer of `clcomm.optim` by name; raises ArgumentError for an unknown one.

    Args:
        module: the model.
        name: "sgd", "adam", "adamw" or "rmsprop".
        lr: the learning rate.
        momentum: for sgd and rmsprop; the others ignore it.
        nesterov: for sgd; the others ignore it.
        weight_decay: None: the optimizer's default.
    """
    decay: dict[str, Any] = {} if weight_decay is None else {"weight_decay": weight_decay}
    if name == "sgd":
        return optim.SGD(module, lr, momentum=momentum, nesterov=nesterov, **decay)
    if name == "adam":
        return optim.Adam(module, lr, **decay)
    if name == "adamw":
        return optim.AdamW(module, lr, **decay)
    if name == "rmsprop":
        return optim.RMSProp(module, lr, momentum=momentum, **decay)
    raise ArgumentError(f"optimizer: expected sgd, adam, adamw or rmsprop, got {name!r}")


def _netcl(model: str, in_shape: Shape, classes: int, seed: int, device: Any) -> Parts:
    from clcomm.sync.adapters import netcl
    from clcomm.sync.adapters.netcl_optim import NetclOptimizer

    chosen = netcl.prepare(_opencl(device))
    from training.engines.netcl_models import make_module  # not before `prepare`: it imports netcl, which loads OpenCL

    wrapped = netcl.NetclModel(make_module(model, in_shape, classes, seed, chosen.queue))

    def predict(images: np.ndarray) -> np.ndarray:
        with no_grad():
            return wrapped(images).numpy()

    return Parts(
        model=wrapped,
        loss_fn=netcl.cross_entropy,
        forward_backward=_forward_backward(wrapped, netcl.cross_entropy),
        make_optimizer=lambda name, lr, **settings: NetclOptimizer(wrapped, name, lr, **settings),
        prepare=lambda images, labels: (images, labels),
        predict=predict,
        device=f"netcl engine on {chosen.kind} {chosen.name}",
    )


def _torch(model: str, in_shape: Shape, classes: int, seed: int, device: Any) -> Parts:
    with needed("torch"):
        from training.engines import torch_engine
    if isinstance(device, Device):
        raise ArgumentError("device: expected the name of one of PyTorch's devices, got an OpenCL device")
    placement = device if isinstance(device, Placement) else Placement(device)
    chosen = torch_engine.choose_device(placement.spec, placement.local_rank or 0, placement.cores)
    wrapped = torch_engine.TorchModel(torch_engine.make_module(model, in_shape, classes, seed).to(chosen), chosen)
    return Parts(
        model=wrapped,
        loss_fn=torch_engine.cross_entropy,
        forward_backward=_forward_backward(wrapped, torch_engine.cross_entropy),
        make_optimizer=lambda name, lr, **settings: torch_engine.TorchOptimizer(wrapped.module, name, lr, **settings),
        prepare=wrapped.prepare,
        predict=wrapped.predict,
        device=f"PyTorch on {chosen}",
    )
