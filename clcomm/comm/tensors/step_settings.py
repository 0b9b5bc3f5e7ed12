"""What PyTorch's optimizers step with, for ranks to compare: new learning rates and the like, and devices."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepSettings:
    """Notes what the optimizers of some parameters step with: PyTorch reports the steps of all optimizers.

    parameters: an optimizer counts whose first parameter is one of them.

    Attributes:
        new: the settings that no comparison has taken yet, by the optimizer, whose address another may get.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self._ids = set(map(id, parameters))
        self._known: WeakKeyDictionary[torch.optim.Optimizer, str] = WeakKeyDictionary()
        self.new: dict[object, str] = {}
        _ALIVE.add(self)
        _hook()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's settings where they are new, before its step."""
        groups = optimizer.param_groups
        if id(next((each for group in groups for each in group["params"]), None)) in self._ids:
            said = "; ".join(map(_said, groups))
            if self._known.get(optimizer) != said:
                self._known[optimizer] = said
                self.new[ref(optimizer)] = f"{type(optimizer).__name__} with {said}"


_ALIVE: WeakSet[StepSettings] = WeakSet()


@cache
def _hook() -> None:
    """Give PyTorch one hook for good: its table must not change within a step, where garbage may be collected."""
    register_optimizer_step_pre_hook(_note)


def _note(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for each in list(_ALIVE):
        each.note(optimizer)


def _said(group: Mapping[str, Any]) -> str:
    """Return a group's numbers in words, without those that the host would have to wait for."""
    held = {name: each.tolist() if _is_here(each) else each for name, each in group.items()}
    return ", ".join(f"{name} {each}" for name, each in held.items() if isinstance(each, (Real, tuple)))


def _is_here(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def computes_with(tensors: Iterable[torch.Tensor]) -> str:
    """Return in words what decides the bits of this process's arithmetic on tensors.

    Processors without fused multiply-add and graphics chips round a product and a sum that others round once.
    """
    places = ", ".join(sorted({_said_device(each) for each in {tensor.device for tensor in tensors}}))
    return f"PyTorch {torch.__version__} with {torch.get_num_threads()} threads on {places}"


def _said_device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    name_of = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return device.type if name_of is None else f"{device.type} ({name_of(device)})"
