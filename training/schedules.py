"""Learning-rate schedules: pure functions of the step's number (0, 1, 2, …) to a factor of the base rate.

Those with names of torch.optim.lr_scheduler have its values. A pure function of the step needs no state to resume.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from clcomm.base.errors import ArgumentError

Schedule = Callable[[int], float]


def constant() -> Schedule:
    """Return a schedule that keeps the base rate."""
    return lambda step: 1.0


def step_decay(size: int, gamma: float = 0.1) -> Schedule:
    """Return a schedule that multiplies the rate by `gamma` every `size` steps (StepLR)."""
    _at_least("size", size, 1)
    return lambda step: _power(gamma, step // size)


def multi_step(milestones: Sequence[int], gamma: float = 0.1) -> Schedule:
    """Return a schedule that multiplies the rate by `gamma` at each step in `milestones` (MultiStepLR)."""
    ordered = sorted(milestones)
    return lambda step: _power(gamma, bisect_right(ordered, step))


def exponential(gamma: float) -> Schedule:
    """Return a schedule that multiplies the rate by `gamma` at every step (ExponentialLR)."""
    return lambda step: _power(gamma, step)


def linear(total: int, start: float = 1.0, end: float = 0.0) -> Schedule:
    """Return a schedule that goes linearly from `start` to `end` over `total` steps, then stays (LinearLR)."""
    _at_least("total", total, 1)
    return lambda step: start + (end - start) * min(step, total) / total


def cosine(total: int, floor: float = 0.0) -> Schedule:
    """Return a schedule of half a cosine from 1 to `floor` over `total` steps, then `floor` (CosineAnnealingLR).

    Source: Loshchilov & Hutter, "SGDR: Stochastic gradient descent with warm restarts", ICLR 2017, eq. 5.
    """
    _at_least("total", total, 1)
    return lambda step: floor + (1 - floor) * (1 + math.cos(math.pi * min(step, total) / total)) / 2


def warm_up(steps: int, then: Schedule, start: float | None = None) -> Schedule:
    """Return a schedule that rises linearly to the first value of `then` over `steps` steps, and then follows `then`.

    It begins at `start` times that value, by default 1 / steps. The same as
    SequentialLR([LinearLR(start_factor=start, total_iters=steps), then], milestones=[steps]).
    Source: Goyal et al., "Accurate, large minibatch SGD", 2017, section 2.2.
    """
    _at_least("warmup", steps, 0)
    if steps == 0:
        return then
    first = 1 / steps if start is None else start
    return lambda step: (first + (1 - first) * step / steps) * then(0) if step < steps else then(step - steps)


def parse_schedule(text: str, total_steps: int) -> Schedule:
    """Return the schedule that `text` names for a run of `total_steps` steps.

    A name, and options after a colon: "constant", "cosine:floor=0.01,warmup=100", "linear:end=0.1",
    "step:size=500,gamma=0.5", "multistep:at=300+600,gamma=0.1", "exponential:gamma=0.999". All accept `warmup=STEPS`;
    cosine and linear take all steps of the run, or `steps=STEPS` with the warm-up's.
    Raises ArgumentError, which names the part that is wrong.
    """
    name, _, rest = text.partition(":")
    options = _options(text, rest)
    warmup = int(_number(text, options.pop("warmup", "0"), whole=True))
    if name in _OVER_ALL and "steps" in options:
        total_steps = int(_number(text, options.pop("steps"), whole=True))
    remaining = max(1, total_steps - warmup)
    if name not in _BUILDERS:
        raise ArgumentError(f"schedule: expected one of {', '.join(_BUILDERS)}, got {text!r}")
    allowed, build = _BUILDERS[name]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        known = ", ".join(("warmup", *(("steps",) if name in _OVER_ALL else ()), *allowed))
        raise ArgumentError(f"schedule: {name} takes the options {known}, got {unknown[0]!r} in {text!r}")
    missing = [key for key, default in allowed.items() if default is None and key not in options]
    if missing:
        raise ArgumentError(f"schedule: {name} needs {missing[0]}=…, got {text!r}")
    filled = {key: options.get(key, default) for key, default in allowed.items()}
    return warm_up(warmup, build(text, filled, remaining))


def _step_from(text: str, options: dict[str, str], total: int) -> Schedule:
    return step_decay(int(_number(text, options["size"], whole=True)), _number(text, options["gamma"]))


def _multi_step_from(text: str, options: dict[str, str], total: int) -> Schedule:
    milestones = [int(_number(text, part, whole=True)) for part in options["at"].split("+")]
    return multi_step(milestones, _number(text, options["gamma"]))


#: For each name its options with their defaults, None for one that has to be given, and a function that builds it.
_BUILDERS: dict[str, tuple[dict, Callable[[str, dict, int], Schedule]]] = {
    "constant": ({}, lambda text, options, total: constant()),
    "step": ({"size": None, "gamma": "0.1"}, _step_from),
    "multistep": ({"at": None, "gamma": "0.1"}, _multi_step_from),
    "exponential": ({"gamma": None}, lambda text, options, total: exponential(_number(text, options["gamma"]))),
    "linear": ({"end": "0"}, lambda text, options, total: linear(total, end=_number(text, options["end"]))),
    "cosine": ({"floor": "0"}, lambda text, options, total: cosine(total, _number(text, options["floor"]))),
}
#: Those that end with the run.
_OVER_ALL = ("cosine", "linear")


def _options(text: str, rest: str) -> dict[str, str]:
    options = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not value:
            raise ArgumentError(f"schedule: expected options as name=value, got {item!r} in {text!r}")
        options[key.strip()] = value.strip()
    return options


def _number(text: str, value: str, whole: bool = False) -> float:
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        kind = "a whole number" if whole else "a number"
        raise ArgumentError(f"schedule: expected {kind} from 0 up, got {value!r} in {text!r}")
    return number


def _power(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ArgumentError(f"schedule: {name}: expected at least {least} steps, got {value}")
