"""PyTorch modules under the Synchronizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod

import numpy as np

from clcomm.base.errors import ArgumentError, needed
from clcomm.base.flat_space.buckets import Bucket
from clcomm.base.flat_space.layout import FlatLayout, require_same_parameters, require_same_trainable
from clcomm.base.flat_space.parameters import ParameterSpec
from clcomm.comm.stats.events import Phase
from clcomm.sync.adapters.adapter import FLAT_DTYPES, CopyingAdapter, FlatArrays, OnComplete

with needed("torch"):
    import torch

from clcomm.comm.tensors.arrays import HostCopies, dtype_name
from clcomm.comm.tensors.step_settings import StepSettings, computes_with
from clcomm.sync.adapters.torch_slots import ModuleTree, Slot, real, tensor_on, values


class TorchAdapter(CopyingAdapter):
    """A `torch.nn.Module` with parameters on any devices and of any floating dtypes.

    A gradient that the program keeps from step to step, as `zero_grad(set_to_none=False)` does, moves into `grads` at
    its second synchronisation: from then on backward adds to the memory that the other ranks read. Other gradients are
    copied there and back. The mean is copied from `reduced` in any case, as a program may write to its gradients, which
    must not change another rank's.

    In the flat space float16 and bfloat16 are float32: widening is exact, so a broadcast keeps every bit, and
    gradients are averaged in float32 and rounded once. Complex parameters appear as pairs of reals (..., 2).
    Shared parameters count once. Sparse gradients become dense. Frozen parameters and buffers (BatchNorm's running
    statistics) are `extra_state`, sent as they are.
    Raises ArgumentError where nothing is trainable, for lazy and meta parameters, and, at a synchronisation, where
    parameters were replaced, frozen or unfrozen since the first one.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._members = dict(model.named_parameters())
        self._parameters = dict(_trainable(model))
        if not self._parameters:
            raise ArgumentError("model: expected at least one parameter with requires_grad, got none")
        self.specs = tuple(_spec(name, parameter) for name, parameter in self._parameters.items())
        self._slots = {name: Slot(parameter) for name, parameter in self._parameters.items()}
        self._tree, self._settings = ModuleTree(model), StepSettings(self._parameters.values())
        self.count_copies(lambda phase: None)

    def count_copies(self, notify: Callable[[Phase], None]) -> None:
        self._copies = HostCopies(notify)

    def require_unchanged(self) -> None:
        if self._tree.is_unchanged():
            return
        now = dict(self._model.named_parameters())
        require_same_parameters(now, self._members)
        trained = (name for name, parameter in now.items() if parameter.requires_grad)
        require_same_trainable(trained, self._parameters)

    def attach(self, layout: FlatLayout, arrays: FlatArrays) -> None:
        for name, slot in self._slots.items():
            slot.attach(name, layout, arrays)
        first = arrays.grads.ctypes.data
        self._addresses = range(first, first + arrays.grads.nbytes)
        super().attach(layout, arrays)

    @torch.no_grad()
    def pull_parameters(self) -> None:
        with self._copies.counted("pack", self._trained):
            for slot in self._slots.values():
                slot.value.copy_(real(slot.parameter))

    @torch.no_grad()
    def push_parameters(self) -> None:
        with self._copies.counted("unpack", self._trained):
            for slot in self._slots.values():
                real(slot.parameter).copy_(slot.value)

    def decides_bits(self) -> list[str]:
        return [computes_with(self._members.values())]

    def new_settings(self) -> dict[object, str]:
        return self._settings.new

    def seed(self) -> int:
        return torch.initial_seed()

    @contextmanager
    def shard_block(self, seed: int) -> Iterator[None]:
        model: Any = self._model
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        if is_wrapped and model.static_graph:
            raise ArgumentError(
                "shard: expected a DistributedDataParallel without static_graph=True, whose first backward has to "
                "average, got one with it; leave it out"
            )
        with _NUMBERS.seeded(seed), model.no_sync() if is_wrapped else nullcontext():
            yield

    def set_aside(self) -> Callable[[], None]:
        earlier = {
            slot: gradient.clone() if gradient is slot.own else gradient
            for slot in self._slots.values()
            if (gradient := slot.parameter.grad) is not None
        }
        self.drop_gradients()

        @torch.no_grad()
        def add() -> None:
            for slot, gradient in earlier.items():
                if slot.parameter.grad is not None:
                    gradient = gradient + slot.parameter.grad
                slot.parameter.grad = gradient

        return add

    def pull_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients into the flat space, except those that lie there."""
        if bucket.index == 0:
            self._separate()
        lasting = [slot for place in bucket.opening if (slot := self._slots[place.name]).pull()]
        for slot in lasting:
            slot.move_in()
        self._mark(bucket, [p.name for p in bucket.opening if self._slots[p.name].parameter.grad is None])

    def _separate(self) -> None:
        """Give a gradient that lies in another parameter's range of `grads` memory of its own, before any is copied."""
        for slot in self._slots.values():
            gradient = slot.parameter.grad
            if gradient is None or gradient is slot.own or gradient.layout != torch.strided:
                continue
            if gradient.data_ptr() in self._addresses:
                slot.parameter.grad = gradient.detach().clone()

    def push_gradients(self, bucket: Bucket) -> None:
        """Copy a bucket's averaged gradients into the model, also where another rank alone had one, so that all ranks'
        optimizers apply momentum and weight decay to the same gradients.
        """
        missing = self._missing(bucket)
        for place in bucket.closing:
            self._slots[place.name].push(is_missing=place.name in missing)

    @torch.no_grad()
    def pull_written(self) -> tuple[str, ...]:
        """Copy gradients that differ from the averaged ones into the flat space; return their names."""
        written = []
        for name, slot in self._slots.items():
            if slot.parameter.grad is None:
                continue
            gradient = values(slot.parameter.grad)
            if not torch.equal(gradient, slot.averaged.to(gradient.device, gradient.dtype)):
                slot.own.copy_(gradient)
                written.append(name)
        return tuple(written)

    @torch.no_grad()
    def push_written(self, names: Sequence[str]) -> None:
        for name in names:
            slot = self._slots[name]
            real(slot.parameter.grad).copy_(slot.own)  # type: ignore[arg-type]  # written gradients are there

    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> Callable[[], None]:
        """Call `complete(name)` when backward has accumulated a parameter's gradient, then the returned action.

        complete: a bound method; only a weak reference to its object is kept.
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

    def extra_state(self) -> dict[str, np.ndarray]:
        return self._copied(dict(self._untrained()))

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        self._load([(tensor, state[name]) for name, tensor in self._untrained()])

    def buffers(self) -> dict[str, np.ndarray]:
        return self._copied(dict(self._model.named_buffers()))

    def load_buffers(self, state: dict[str, np.ndarray]) -> None:
        buffers = dict(self._model.named_buffers())
        self._load([(buffers[name], array) for name, array in state.items()])

    def _copied(self, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        with self._copies.counted("pack", [*tensors.values()]):
            return {name: np.array(_bits(tensor).cpu().numpy(), order="C") for name, tensor in tensors.items()}

    @torch.no_grad()
    def _load(self, pairs: list[tuple[torch.Tensor, np.ndarray]]) -> None:
        with self._copies.counted("unpack", [tensor for tensor, _ in pairs]):
            for tensor, array in pairs:
                _bits(tensor).copy_(tensor_on(np.asarray(array)))

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [slot.parameter for slot in self._slots.values()]

    def _untrained(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if name not in self._parameters:
                yield name, parameter.detach()
        yield from self._model.named_buffers()


class _ProcessNumbers:
    """The random numbers of PyTorch, NumPy and Python."""

    def __init__(self) -> None:
        self._is_seeded = False

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw those of a seed in this block, and then go on as before; a block within draws of the same."""
        if self._is_seeded:
            yield
            return
        states, self._is_seeded = (torch.get_rng_state(), np.random.get_state(), random.getstate()), True
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            self._is_seeded = False
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])


_NUMBERS = _ProcessNumbers()


def _trainable(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _spec(name: str, parameter: torch.nn.Parameter) -> ParameterSpec:
    if torch.nn.parameter.is_lazy(parameter):
        raise ArgumentError(f"parameter {name!r}: expected a shape, got a lazy one; run one batch through the model")
    if parameter.is_meta:
        raise ArgumentError(f"parameter {name!r}: expected values, got one on the meta device; use model.to_empty()")
    values = real(parameter.detach())
    if (kind := dtype_name(values.dtype)) not in FLAT_DTYPES:
        raise ArgumentError(f"parameter {name!r}: expected a floating-point dtype, got {parameter.dtype}")
    return ParameterSpec(name, tuple(values.shape), FLAT_DTYPES[kind])


_SAME_SIZE: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view as integers of the same size where NumPy lacks its dtype."""
    exotic = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize]) if exotic else tensor
