"""Loss scaling: gradients computed and sent at a scale suited to 16 bits, which is found dynamically.

The names, formulas and defaults are those of torch.amp.GradScaler; the method is that of Micikevicius et al., "Mixed
precision training" (ICLR 2018). All ranks find the same scale: they decide together whether to skip a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.engine import Device, Tensor
from clcomm.optim import Optimizer
from clcomm.sync.agreement import CHECKS
from clcomm.sync.clipping import averaged_part, scale_averaged
from clcomm.sync.compression import StatefulHook
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.model_ranks import ModelRanks
from clcomm.sync.shared_space import SharedSpace
from clcomm.sync.synchronizer import Synchronizer

#: The entry of a state that counts steps without NaN and Inf since the scale last changed.
_TRACKER = "_growth_tracker"


class GradScaler:
    """Multiplies losses by a scale, and skips the steps in which a gradient overflowed.

    The loop is `scaler.scale(loss).backward()`, `sync_gradients`, perhaps `scaler.unscale_(optimizer)` and clipping,
    `scaler.step(optimizer)`, `scaler.update()`, `zero_grad`. `unscale_` and `step` are collective: every rank calls
    them. A skipped step changes neither parameters nor the optimizer's state.

    Args:
        sync: the Synchronizer that averages the gradients.
        init_scale: the first scale.
        growth_factor: by which the scale grows after `growth_interval` steps in a row without NaN and Inf.
        backoff_factor: by which it shrinks after a skipped step.
        enabled: False: losses stay as they are, and every step is taken.
        ranks: those that skip a step together; None: the Synchronizer's, and with tensor or pipeline parallelism all
            that have a part of the model.

    Raises ArgumentError for a number outside its range, for `check_finite`, which would end the run, and for
    compression that keeps residuals, which are at the scale of their step.
    """

    def __init__(
        self,
        sync: Synchronizer,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        ranks: Communicator | None = None,
    ):
        self.sync, self._enabled, self._ranks = sync, bool(enabled), ranks
        self._settings = _checked(init_scale, growth_factor, backoff_factor, growth_interval)
        self._scale, self._steps = self._settings.pop("scale"), 0
        self._device: Device | None = None  # of the losses
        self._found: dict[int, tuple[object, bool, bool]] = {}  # by id: optimizer, whether it overflowed, has stepped
        if self._enabled:
            self._refuse_settings()

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        """Return the scale, 1.0 if not enabled."""
        return float(self._scale) if self._enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale; `loss.backward(scaler.get_scale())` computes the same gradients."""
        if not self._enabled:
            return loss
        self._device = loss.device
        return loss * self.get_scale()

    def unscale_(self, optimizer: Optimizer | DistributedOptimizer) -> None:
        """Divide the averaged gradients by the scale, once a step; where one has overflowed, leave them. Collective.

        A DistributedOptimizer averages them here.
        """
        if not self._enabled:
            return
        if id(optimizer) in self._found:
            raise ArgumentError("unscale_: expected one call before step() and update(), got another")
        self._refuse_settings()
        self._found[id(optimizer)] = optimizer, self._unscale(optimizer, 1.0 / self.get_scale()), False

    def step(self, optimizer: Optimizer | DistributedOptimizer) -> bool:
        """Take the optimizer's step unless a gradient holds NaN or Inf; return whether it was taken. Collective."""
        if not self._enabled:
            optimizer.step()
            return True
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        _, overflowed, has_stepped = self._found[id(optimizer)]
        if has_stepped:
            raise ArgumentError("step: expected update() after the last step(), got another step()")
        self._found[id(optimizer)] = optimizer, overflowed, True
        if not overflowed:
            optimizer.step()
        return not overflowed

    def update(self, new_scale: float | None = None) -> None:
        """Set the next step's scale: grown, shrunk or unchanged; or `new_scale`."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._use(np.float32(_between("new_scale", new_scale)))
        elif not self._found:
            raise ArgumentError("update: expected step() or unscale_() before, got none since the last update()")
        elif any(overflowed for _, overflowed, _ in self._found.values()):
            self._use(np.float32(self.get_scale() * self._settings["backoff_factor"]))
            self._steps = 0
        else:
            self._grow()
        self._found.clear()

    def _grow(self) -> None:
        self._steps += 1
        if self._steps == self._settings["growth_interval"]:
            with np.errstate(over="ignore"):
                grown = np.float32(self.get_scale() * self._settings["growth_factor"])
            self._use(grown if np.isfinite(grown) else self._scale)
            self._steps = 0

    def _use(self, scale: np.float32) -> None:
        """Change the scale; a Replay records its steps anew."""
        if scale != self._scale and self._device is not None:
            self._device.revision += 1
        self._scale = scale

    def _unscale(self, optimizer: Optimizer | DistributedOptimizer, factor: float) -> bool:
        """Multiply the averaged gradients by a factor, unless one on any rank holds NaN or Inf; return whether so."""
        comm = self.sync.comm
        if isinstance(optimizer, DistributedOptimizer):
            space = self.sync.models.space_of(optimizer.optimizer.space)
            if self._anywhere(not optimizer.has_finite_gradients(), space):
                return True
            optimizer.scale_gradients(factor)
            return False
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"optimizer: expected one of clcomm.optim or a DistributedOptimizer, got {type(optimizer).__name__}; "
                "with PyTorch's, use torch.amp.GradScaler after sync_gradients"
            )
        space = self.sync.models.space_of(optimizer.current_space())
        if not optimizer.is_alone:  # another one would divide the same gradients again
            raise ArgumentError("optimizer: expected one with all of a model's trainable parameters, got one with some")
        part, written = averaged_part(comm, space)
        if self._anywhere(not np.isfinite(part.view(np.float32)).all(), space):
            return True
        scale_averaged(comm, space, factor, written)
        return False

    def _anywhere(self, here: bool, space: SharedSpace) -> bool:
        found = (self._ranks or self.sync.comm).all_gather(np.array([here]), label=CHECKS)
        return bool(found.any()) if self._ranks is not None else ModelRanks.of(space).anywhere(bool(found.any()))

    def _refuse_settings(self) -> None:
        known = self.sync.models
        known.refuse("sync: expected no loss scaling")
        if known.settings.check_finite:
            raise ArgumentError(
                "sync: expected check_finite False with loss scaling, which skips steps with NaN or Inf, got True"
            )
        if isinstance(known.hook, StatefulHook):
            raise ArgumentError(
                f"sync: expected compression none, fp16 or bf16 with loss scaling, as residuals are at the scale of "
                f"their step, got {self.sync.compression}"
            )

    # --- checkpoints ---

    def state_dict(self) -> dict[str, float | int]:
        """Return scale, factors and counter, with the names of PyTorch's; empty if not enabled."""
        if not self._enabled:
            return {}
        return {"scale": self.get_scale(), **self._settings, _TRACKER: self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`; raises ArgumentError, changing nothing, for anything else."""
        if not self._enabled:
            return
        expected = sorted(self.state_dict())
        if sorted(state) != expected:
            raise ArgumentError(f"state_dict: expected the entries {expected}, got {sorted(state)}")
        steps = _whole("state_dict['_growth_tracker']", state[_TRACKER], 0)
        self._settings = _checked(state["scale"], *(state[name] for name in self._settings))
        self._use(self._settings.pop("scale"))
        self._steps = steps
        self._found.clear()


def _checked(init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int) -> dict[str, Any]:
    """Return the settings by name; ArgumentError for one outside its range."""
    return {
        "scale": np.float32(_between("init_scale", init_scale)),
        "growth_factor": _between("growth_factor", growth_factor, 1),
        "backoff_factor": _between("backoff_factor", backoff_factor, 0, 1),
        "growth_interval": _whole("growth_interval", growth_interval, 1),
    }


def _between(name: str, value: float, low: float = 0, high: float = math.inf) -> float:
    """Return a number between two others; ArgumentError for others, and for those outside float32."""
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    with np.errstate(over="ignore"):
        if not is_number or not 0 < np.float32(value) < math.inf or not low < value < high:
            ends = f"between {low} and {high}" if high < math.inf else f"above {low}"
            raise ArgumentError(f"{name}: expected a number {ends} that float32 holds, got {value!r}")
    return float(value)


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(value)
