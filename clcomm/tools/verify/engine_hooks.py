"""Reports what a script does with clcomm's engine and optimizers, and with a Synchronizer of any model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from clcomm.tools.verify.watcher import Watcher

Values = list[tuple[Any, np.ndarray]]


def watch_modules(module: ModuleType, watcher: Watcher) -> None:
    """Hook the forwards of the engine's modules that are in no other module."""
    kind, inside = module.Module, [False]
    call = kind.__call__

    @wraps(call)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [] if inside[0] or not model.training else list(model.named_parameters())
        if not any(each.requires_grad for _, each in parameters):
            return call(model, *args, **kwargs)
        inside[0] = True
        try:
            if any(each.part is not None or each.stages is not None for _, each in parameters):
                watcher.refuse("its ranks hold parts of the model")
            buffers = {name: each.numpy() for name, each in model.named_buffers()}
            inputs = [each.numpy() for each in (*args, *kwargs.values()) if hasattr(each, "numpy")]
            watcher.enter()
            watcher.forward(parameters, buffers, inputs, lambda each: each.numpy())
            return call(model, *args, **kwargs)
        finally:
            inside[0] = False

    kind.__call__ = watched


def watch_optimizers(module: ModuleType, watcher: Watcher) -> None:
    """Hook the engine's optimizers, the gradients of their parameters, and backward."""
    kind, tensors, parameters = module.Optimizer, import_module("clcomm.engine.tensor").Tensor, []
    start, step, backward = kind.__init__, kind._step_trained, tensors.backward

    @wraps(start)
    def started(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        start(optimizer, *args, **kwargs)
        for each in optimizer._members.values():
            if watcher.is_new(each):
                parameters.append(each)
                each.register_post_accumulate_grad_hook(lambda leaf: watcher.accumulated(leaf, leaf.grad.numpy()))

    @wraps(backward)
    def watched_backward(loss: Any, gradient: Any = None) -> None:
        for each in parameters:
            gone = each.grad is None
            watcher.clear(each) if gone else watcher.carry(each)
        watcher.backward()
        backward(loss, gradient)

    kind.__init__, tensors.backward = started, watched_backward
    kind._step_trained = _watched_step(step, watcher, lambda optimizer: optimizer, sees=True)


def watch_distributed(module: ModuleType, watcher: Watcher) -> None:
    """Hook the sharded optimizer, whose step reduces the gradients."""
    kind = module.DistributedOptimizer
    kind._step = _watched_step(kind._step, watcher, lambda optimizer: optimizer.optimizer, sees=False)


def _watched_step(
    step: Callable[[Any], None], watcher: Watcher, plain: Callable[[Any], Any], sees: bool
) -> Callable[[Any], None]:
    @wraps(step)
    def watched(optimizer: Any) -> None:
        own = list(plain(optimizer)._members.values())
        values = [(each, each.numpy()) for each in own]
        gradients = [(each, each.grad.numpy()) for each in own if sees and each.grad is not None]
        watcher.record.hides_gradients |= not sees
        options = {
            f"{name} of group {index}": value
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.numbers.items()
        }
        watcher.step_begins(optimizer, values, gradients, options, partial(_state, optimizer if sees else None))
        step(optimizer)
        watcher.step_ends([(each, each.numpy()) for each in own])

    return watched


def _state(optimizer: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the entries of a state that is whole on every rank, which hyper-parameters are no part of."""
    if optimizer is not None and optimizer.steps:
        yield "steps", np.array(optimizer.steps)
        state = optimizer.state_dict()
        for name in optimizer.state_names:
            yield name, np.asarray(state[name])


def watch_synchronizer(module: ModuleType, watcher: Watcher) -> None:
    """Hook a Synchronizer's calls."""
    kind = module.Synchronizer
    synchronise, average = kind.sync_gradients, kind.average_parameters

    @wraps(synchronise)
    def synchronised(sync: Any, *args: Any, **kwargs: Any) -> None:
        watcher.record.hides_gradients |= sync.shards is not None
        watcher.record.averages_parameters |= sync.models.settings.policy is not None
        if not sync.models.is_paused:
            watcher.synchronised()
        synchronise(sync, *args, **kwargs)

    @wraps(average)
    def averaged(sync: Any, model: object) -> None:
        watcher.record.averages_parameters = True
        average(sync, model)

    kind.sync_gradients, kind.average_parameters = synchronised, averaged


def watch_clipping(module: ModuleType, watcher: Watcher) -> None:
    """Hook clipping by the norm of averaged gradients."""
    clip = module.clip_grad_norm

    @wraps(clip)
    def clipped(sync: Any, model: Any, max_norm: float) -> float:
        named = model.named_parameters() if hasattr(model, "named_parameters") else ()
        found = [(each, each.grad) for _, each in named if each.grad is not None]
        watcher.clipping([(each, np.asarray(grad.detach().numpy())) for each, grad in found])
        norm: float = clip(sync, model, max_norm)
        return norm

    vars(module)["clip_grad_norm"] = clipped
