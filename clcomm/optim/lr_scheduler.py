"""Learning rates by step or epoch, with PyTorch's names, arguments and values.

A scheduler sets the rates of an optimizer's groups when it is made and in each `step()`. Where another scheduler or the
program has changed a rate since, it goes on from there, by the ratio of its own rates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from clcomm.base.errors import ArgumentError

__all__ = [
    "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ExponentialLR", "LRScheduler", "LambdaLR",
    "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "SequentialLR", "StepLR",
]  # fmt: skip

_Factor = Callable[[int], float]
_UNSAVED = ("optimizer", "lr_lambdas", "_schedulers")


class LRScheduler:
    """Base of the schedulers: a subclass defines `_rate(base, epoch)`.

    Args:
        optimizer: whose `param_groups` have the rates.
        last_epoch: the number of steps before; -1: none.

    Attributes:
        base_lrs: the groups' rates before any scheduler.
        last_epoch: steps so far.
    """

    #: The rate towards which rates fall, where a ratio of rates applies to what is above it.
    _floor = 0.0
    #: Whether it sets its own rates, whatever the program set.
    _is_absolute = False

    def __init__(self, optimizer: Any, last_epoch: int = -1):
        if not hasattr(optimizer, "param_groups"):
            raise ArgumentError(f"optimizer: expected one with param_groups, got {type(optimizer).__name__}")
        self.optimizer, self.last_epoch = optimizer, last_epoch
        for group in optimizer.param_groups:
            if group.initial_lr is None:
                group.initial_lr = group["lr"]
        self.base_lrs = [group.initial_lr for group in optimizer.param_groups]
        self._last_lr = self._rates_of_groups()
        self.step()

    def _rate(self, base: float, epoch: int, group: int) -> float:
        raise TypeError("an LRScheduler defines _rate")

    def _rates_of_groups(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """Return the rates that this scheduler set last, by group."""
        return self._last_lr

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next epoch, or of `epoch`."""
        before = self.last_epoch
        self.last_epoch = before + 1 if epoch is None else epoch
        rates: list[float] = []
        for number, (group, base) in enumerate(zip(self.optimizer.param_groups, self.base_lrs, strict=True)):
            rate, rest = self._rate(base, self.last_epoch, number), self._floor
            own = base if before < 0 or self._is_absolute else self._rate(base, before, number)
            if epoch is None and not self._is_absolute and group["lr"] != own and own != rest:
                rate = rest + (group["lr"] - rest) * (rate - rest) / (own - rest)
            group["lr"] = float(rate)
            rates.append(group["lr"])
        self._last_lr = rates

    def state_dict(self) -> dict[str, Any]:
        """Return what the scheduler continues from, but for functions."""
        return {name: value for name, value in vars(self).items() if name not in _UNSAVED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; the optimizer's rates are the optimizer's own state."""
        vars(self).update(state)


class LambdaLR(LRScheduler):
    """The first rate times `lr_lambda(epoch)`; of a list each group has its own function."""

    _is_absolute = True

    def __init__(self, optimizer: Any, lr_lambda: _Factor | Sequence[_Factor], last_epoch: int = -1):
        groups = len(optimizer.param_groups)
        given: Any = lr_lambda
        self.lr_lambdas: list[_Factor] = [*given] if isinstance(given, (list, tuple)) else [given] * groups
        if len(self.lr_lambdas) != groups:
            raise ArgumentError(f"lr_lambda: expected a function, or {groups} of them, got {len(self.lr_lambdas)}")
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * self.lr_lambdas[group](epoch)


class StepLR(LRScheduler):
    """The rate times `gamma` every `step_size` epochs."""

    def __init__(self, optimizer: Any, step_size: int, gamma: float = 0.1, last_epoch: int = -1):
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * self.gamma ** (epoch // self.step_size)


class MultiStepLR(LRScheduler):
    """The rate times `gamma` at each of the `milestones`."""

    def __init__(self, optimizer: Any, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1):
        self.milestones, self.gamma = Counter(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * self.gamma ** bisect_right(sorted(self.milestones.elements()), epoch)


class ExponentialLR(LRScheduler):
    """The rate times `gamma` every epoch."""

    def __init__(self, optimizer: Any, gamma: float, last_epoch: int = -1):
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * self.gamma**epoch


class ConstantLR(LRScheduler):
    """The first rate times `factor` for `total_iters` epochs, then the first rate."""

    def __init__(self, optimizer: Any, factor: float = 1.0 / 3, total_iters: int = 5, last_epoch: int = -1):
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * (self.factor if epoch < self.total_iters else 1.0)


class LinearLR(LRScheduler):
    """The first rate times a factor that goes from `start_factor` to `end_factor` in `total_iters` epochs."""

    def __init__(
        self, optimizer: Any, start_factor: float = 1.0 / 3, end_factor: float = 1.0, total_iters: int = 5,
        last_epoch: int = -1,
    ):  # fmt: skip
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1:
            given = f"{start_factor} and {end_factor}"
            raise ArgumentError(f"LinearLR: expected factors up to 1, the first above 0, got {given}")
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        share = min(self.total_iters, epoch) / self.total_iters
        return base * (self.start_factor + (self.end_factor - self.start_factor) * share)


class PolynomialLR(LRScheduler):
    """The first rate times (1 - epoch / total_iters)^power, at last 0."""

    def __init__(self, optimizer: Any, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1):
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return base * math.pow(1.0 - min(self.total_iters, epoch) / self.total_iters, self.power)


class CosineAnnealingLR(LRScheduler):
    """From the first rate to `eta_min` along half a cosine in `T_max` epochs, and back in as many.

    Source: Loshchilov and Hutter, "SGDR", 2017.
    """

    def __init__(self, optimizer: Any, T_max: int, eta_min: float = 0.0, last_epoch: int = -1):
        self.T_max, self.eta_min, self._floor = T_max, eta_min, eta_min
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * epoch / self.T_max)) / 2


class CosineAnnealingWarmRestarts(LRScheduler):
    """From the first rate to `eta_min` along half a cosine, again and again, each time `T_mult` times as long."""

    _is_absolute = True

    def __init__(self, optimizer: Any, T_0: int, T_mult: int = 1, eta_min: float = 0.0, last_epoch: int = -1):
        if T_0 < 1 or T_mult < 1:
            raise ArgumentError(f"T_0, T_mult: expected whole numbers from 1 up, got {T_0} and {T_mult}")
        self.T_0, self.T_mult, self.eta_min, self._floor = T_0, T_mult, eta_min, eta_min
        super().__init__(optimizer, last_epoch)

    def _rate(self, base: float, epoch: int, group: int) -> float:
        length = self.T_0
        while epoch >= length:
            epoch, length = epoch - length, length * self.T_mult
            if self.T_mult == 1:
                epoch %= length
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * epoch / length)) / 2


class OneCycleLR(LRScheduler):
    """From `max_lr / div_factor` up to `max_lr`, then down; momentum, or the first beta, the other way round.

    Source: Smith and Topin, "Super-convergence", 2018.

    Raises ArgumentError unless `total_steps`, or `epochs` and `steps_per_epoch`, are given, and in a step beyond them.
    """

    _is_absolute = True

    def __init__(
        self, optimizer: Any, max_lr: float | Sequence[float], total_steps: int | None = None,
        epochs: int | None = None, steps_per_epoch: int | None = None, pct_start: float = 0.3,
        anneal_strategy: str = "cos", cycle_momentum: bool = True, base_momentum: float = 0.85,
        max_momentum: float = 0.95, div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False,
        last_epoch: int = -1,
    ):  # fmt: skip
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise ArgumentError("OneCycleLR: expected total_steps, or epochs and steps_per_epoch, got neither")
        if anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(f"anneal_strategy: expected 'cos' or 'linear', got {anneal_strategy!r}")
        self.total_steps = total_steps if total_steps is not None else (epochs or 0) * (steps_per_epoch or 0)
        groups = optimizer.param_groups
        given: Any = max_lr
        most: list[float] = [*given] if isinstance(given, (list, tuple)) else [given] * len(groups)
        first = [each / div_factor for each in most]
        self._most, self._first = most, first
        self._last = [each / final_div_factor for each in first]
        self.anneal_strategy, self._momenta = anneal_strategy, (max_momentum, base_momentum)
        self._key = "momentum" if "momentum" in groups[0] else "betas"
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and self._key == "momentum" and not groups[0]["momentum"]:
            raise ArgumentError("cycle_momentum: expected an optimizer with a momentum above 0, or False")
        up = float(pct_start * self.total_steps) - 1
        ends = [up, 2 * up, self.total_steps - 1] if three_phase else [up, self.total_steps - 1]
        self._ends, self._turns = ends, (0, 1, 0, 2) if three_phase else (0, 1, 2)
        for group, rate in zip(groups, first, strict=True):
            group["lr"] = group.initial_lr = rate
        super().__init__(optimizer, last_epoch)

    def _at(self, epoch: int, values: tuple[float, ...]) -> float:
        """Return where the curve through these first, turning and last values is."""
        start = 0.0
        for number, end in enumerate(self._ends):
            if epoch <= end or number == len(self._ends) - 1:
                share = (epoch - start) / (end - start)
                low, high = values[self._turns[number]], values[self._turns[number + 1]]
                bent = share if self.anneal_strategy == "linear" else (1 - math.cos(math.pi * share)) / 2
                return low + (high - low) * bent
            start = end
        raise AssertionError

    def _rate(self, base: float, epoch: int, group: int) -> float:
        if epoch > self.total_steps:
            raise ArgumentError(f"OneCycleLR: expected at most {self.total_steps} steps, got {epoch}")
        if self.cycle_momentum:
            high, low = self._momenta
            value: Any = self._at(epoch, (high, low, high))
            own = self.optimizer.param_groups[group]
            own[self._key] = value if self._key == "momentum" else (value, own["betas"][1])
        return self._at(epoch, (self._first[group], self._most[group], self._last[group]))


class SequentialLR(LRScheduler):
    """One scheduler after the other, each from its milestone on; all are of one optimizer."""

    def __init__(self, optimizer: Any, schedulers: list[LRScheduler], milestones: list[int], last_epoch: int = -1):
        if len(milestones) != len(schedulers) - 1 or any(each.optimizer is not optimizer for each in schedulers):
            raise ArgumentError(
                f"SequentialLR: expected schedulers of its optimizer and one milestone less than these, got "
                f"{len(schedulers)} and {len(milestones)}"
            )
        self.optimizer, self._schedulers, self.milestones = optimizer, schedulers, milestones
        self.last_epoch = last_epoch + 1
        for group in optimizer.param_groups:
            group["lr"] = group.initial_lr
        schedulers[0].step(0)
        self._last_lr = schedulers[0].get_last_lr()

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next epoch."""
        if epoch is not None:
            raise ArgumentError(f"SequentialLR: epoch: expected None, got {epoch}")
        self.last_epoch += 1
        number = bisect_right(self.milestones, self.last_epoch)
        begins = number > 0 and self.milestones[number - 1] == self.last_epoch
        self._schedulers[number].step(0 if begins else None)
        self._last_lr = self._schedulers[number].get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return what the schedulers continue from."""
        return {**super().state_dict(), "_schedulers": [each.state_dict() for each in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        vars(self).update({name: value for name, value in state.items() if name != "_schedulers"})
        for each, own in zip(self._schedulers, state["_schedulers"], strict=True):
            each.load_state_dict(own)


class ReduceLROnPlateau(LRScheduler):
    """The rate times `factor` when a value has not become better for more than `patience` epochs.

    Between ranks the value has to be the same, such as a mean over them.
    """

    def __init__(
        self, optimizer: Any, mode: str = "min", factor: float = 0.1, patience: int = 10, threshold: float = 1e-4,
        threshold_mode: str = "rel", cooldown: int = 0, min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ):  # fmt: skip
        if mode not in ("min", "max") or threshold_mode not in ("rel", "abs") or factor >= 1.0:
            raise ArgumentError(
                "ReduceLROnPlateau: expected mode 'min' or 'max', threshold_mode 'rel' or 'abs' and a factor below 1, "
                f"got {mode!r}, {threshold_mode!r} and {factor}"
            )
        self.optimizer, self.mode, self.factor, self.patience = optimizer, mode, factor, patience
        self.threshold, self.threshold_mode, self.cooldown, self.eps = threshold, threshold_mode, cooldown, eps
        groups = len(optimizer.param_groups)
        self.min_lrs = list(min_lr) if isinstance(min_lr, (list, tuple)) else [min_lr] * groups
        self.best, self.num_bad_epochs, self.cooldown_counter = math.inf if mode == "min" else -math.inf, 0, 0
        self.last_epoch, self._last_lr = 0, self._rates_of_groups()

    def step(self, metrics: Any) -> None:  # type: ignore[override]
        """Take note of an epoch's value: a number, or a tensor of one."""
        value = float(metrics.item() if hasattr(metrics, "item") else metrics)
        self.last_epoch += 1
        is_better = self._is_better(value)
        self.best = value if is_better else self.best
        self.num_bad_epochs = 0 if is_better else self.num_bad_epochs + 1
        if self.cooldown_counter > 0:
            self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
        if self.num_bad_epochs > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                rate = max(group["lr"] * self.factor, least)
                if group["lr"] - rate > self.eps:
                    group["lr"] = rate
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = self._rates_of_groups()

    def _is_better(self, value: float) -> bool:
        sign = -1.0 if self.mode == "min" else 1.0
        if self.threshold_mode == "rel":
            return sign * value > sign * self.best * (1.0 + sign * self.threshold)
        return sign * value > sign * self.best + self.threshold
