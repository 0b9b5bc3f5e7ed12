"""Reports what a script does with PyTorch: forwards, gradients, clipping, calls of collectives, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from clcomm.tools.verify.watcher import Watcher

#: A loss is taken to be multiplied by numbers in these operations of its end.
_SCALINGS = {"MulBackward0": 1, "DivBackward0": -1}
#: Wrappers whose forward only prepares that of the model within, and those that divide its parameters.
_TRANSPARENT, _DIVIDING = "DistributedDataParallel", "FullyShardedDataParallel"


def install(torch: ModuleType, watcher: Watcher) -> None:
    """Hook PyTorch's modules, optimizers and functions in this process."""
    _TorchHooks(torch, watcher)


def watch_horovod(module: ModuleType, watcher: Watcher) -> None:
    """Hook the synchronisations that a program asks a Horovod optimizer for."""
    kind = module._Distributed
    kind.synchronize = _before(kind.synchronize, lambda *_: watcher.synchronised())


def watch_join(module: ModuleType, watcher: Watcher) -> None:
    """Hook the call by which Horovod's ranks run out of batches at different steps."""
    vars(module)["join"] = _before(vars(module)["join"], lambda *_: setattr(watcher.record, "joins", True))


def _before(function: Callable[..., Any], note: Callable[..., object]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return function(*args, **kwargs)

    return call


class _TorchHooks:
    def __init__(self, torch: ModuleType, watcher: Watcher):
        self._torch, self._watcher = torch, watcher
        self._is_inside, self._is_wrapped, self._loss_scale = False, False, 1.0
        torch.nn.Module.__call__ = self._watched_call(torch.nn.Module.__call__)
        torch.Tensor.backward = _before(torch.Tensor.backward, self._backward)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = _before(getattr(torch.nn.utils, name), self._clip)
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                setattr(module, name, clip)
        if torch.distributed.is_available():
            torch.distributed.all_reduce = _before(torch.distributed.all_reduce, self._all_reduce)
            join = import_module("torch.distributed.algorithms.join").Join
            join.__enter__ = _before(join.__enter__, lambda *_: setattr(watcher.record, "joins", True))
        self._watch_scaler(torch.amp.GradScaler)
        optimizers = import_module("torch.optim.optimizer")
        kind = optimizers.Optimizer
        kind.add_param_group = _before(kind.add_param_group, lambda _, group: self._hook_all(group["params"]))
        optimizers.register_optimizer_step_pre_hook(self._step_begins)
        optimizers.register_optimizer_step_post_hook(lambda each, *_: watcher.step_ends(self._values(each)))

    # --- forward and backward ---

    def _watched_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self._is_training(module):
                return call(module, *args, **kwargs)
            if not self._is_wrapped:
                self._watcher.enter()
            if type(module).__name__ == _TRANSPARENT:
                return self._called_within(call, module, args, kwargs)
            self._is_inside = True
            try:
                self._forward(module, args, kwargs)
                return call(module, *args, **kwargs)
            finally:
                self._is_inside = False

        return watched

    def _called_within(self, call: Callable[..., Any], wrapper: Any, args: Any, kwargs: Any) -> Any:
        """Call a wrapper, whose model then counts as called by it."""
        self._is_wrapped = True
        try:
            return call(wrapper, *args, **kwargs)
        finally:
            self._is_wrapped = False

    def _is_training(self, module: Any) -> bool:
        is_on = module.training and self._torch.is_grad_enabled()
        return is_on and any(each.requires_grad for each in module.parameters())

    def _forward(self, module: Any, args: object, kwargs: object) -> None:
        parameters = dict(module.named_parameters())
        if type(module).__name__ == _DIVIDING or any(hasattr(each, "device_mesh") for each in parameters.values()):
            self._watcher.refuse("its ranks hold parts of the parameters (FSDP, DTensor)")
            return
        self._hook_all(parameters.values())
        buffers = {name: _bytes(each) for name, each in module.named_buffers()}
        inputs = [_on_host(each) for each in self._tensors((args, kwargs))]
        arrays = [each.double().numpy() if each.is_floating_point() else each.numpy() for each in inputs]
        self._watcher.forward(parameters.items(), buffers, arrays, _bytes)

    def _tensors(self, found: object) -> Iterator[Any]:
        if isinstance(found, self._torch.Tensor):
            yield found
        elif isinstance(found, (list, tuple)):
            for each in found:
                yield from self._tensors(each)
        elif hasattr(found, "values") and callable(found.values):
            yield from self._tensors(list(found.values()))

    def _hook_all(self, parameters: Any) -> None:
        for each in [parameters] if isinstance(parameters, self._torch.Tensor) else list(parameters):
            tensor = each[1] if isinstance(each, tuple) else each
            if isinstance(tensor, self._torch.Tensor) and tensor.requires_grad and self._watcher.is_new(tensor):
                tensor.register_hook(self._gradient_hook(tensor))

    def _gradient_hook(self, parameter: Any) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            before = None if parameter.grad is None else _numbers(parameter.grad)
            self._watcher.gradient(parameter, before, _numbers(gradient) / self._loss_scale)

        return hook

    def _backward(self, loss: Any, *_: object) -> None:
        """Note a backward, and by which numbers the loss was multiplied at its end."""
        factor, node = 1.0 / self._loss_scale, loss.grad_fn
        while node is not None and node.name() in _SCALINGS:
            values = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
            numbers = [float(each) for each in values if each is not None and _is_number(each)]
            if not numbers:
                break
            factor *= numbers[0] ** _SCALINGS[node.name()]
            node = node.next_functions[0][0]
        self._watcher.backward(factor)

    def _watch_scaler(self, kind: Any) -> None:
        scale = kind.scale

        @wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            self._loss_scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
            return result

        kind.scale = scaled

    # --- synchronisation and step ---

    def _all_reduce(self, tensor: Any, *_: object) -> None:
        if tensor.is_floating_point() and tensor.numel() > 1:
            self._watcher.synchronised()

    def _clip(self, parameters: Any, *_: object) -> None:
        given = [parameters] if isinstance(parameters, self._torch.Tensor) else parameters
        self._watcher.clipping([(each, _numbers(each.grad)) for each in given if each.grad is not None])

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(args[1:]) or kwargs.get("closure") is not None:
            self._watcher.record.hides_gradients = True  # they are made within the step
        reduction = getattr(optimizer, "_reduction", None)  # of a Horovod optimizer
        if reduction is not None and reduction.op.name == "Adasum":
            self._watcher.refuse("Adasum is not the mean of the ranks' gradients")
        options = {
            f"{name} of group {index}": float(value) if isinstance(value, self._torch.Tensor) else value
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        own = [each for group in optimizer.param_groups for each in group["params"]]
        gradients = [(each, _numbers(each.grad)) for each in own if each.grad is not None]
        self._loss_scale = 1.0  # a later loss may be without
        self._watcher.step_begins(
            optimizer, self._values(optimizer), gradients, options, lambda: self._state(optimizer)
        )

    def _values(self, optimizer: Any) -> list[tuple[Any, np.ndarray]]:
        return [(each, _bytes(each)) for group in optimizer.param_groups for each in group["params"]]

    def _state(self, optimizer: Any) -> Iterator[tuple[Any, np.ndarray]]:
        for parameter, entries in optimizer.state.items():
            tensors = [self._torch.as_tensor(each) for each in entries.values() if each is not None]
            yield parameter, np.concatenate([_bytes(each) for each in tensors] or [np.empty(0, np.uint8)])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (getattr(value, "ndim", 1) == 0 and not value.requires_grad)


def _numbers(tensor: Any) -> np.ndarray:
    import torch

    values = _on_host(tensor)
    array: np.ndarray = (torch.view_as_real(values) if values.is_complex() else values).double().numpy()
    return array


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    array: np.ndarray = _on_host(tensor).contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _on_host(tensor: Any) -> Any:
    """Return a tensor's values, dense and on the host; reports count no copies of the check's own."""
    import torch

    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg()
