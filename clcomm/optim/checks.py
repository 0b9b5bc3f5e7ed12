"""What an optimizer's hyper-parameters and the numbers in its state_dict may be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn.module import Module

#: The entry of a state_dict with the number of steps that each parameter missed.
MISSED = "missed"
#: That with each parameter's group, where there are several.
GROUPS = "groups"


def checked(name: str, value: float, below: float = math.inf) -> float:
    """Return a hyper-parameter as a float; ArgumentError outside [0, below)."""
    if not isinstance(value, (int, float, np.floating, np.integer)) or not 0.0 <= value < below:
        limit = "a number of at least 0" if below == math.inf else f"a number from 0 to below {below:g}"
        raise ArgumentError(f"{name}: expected {limit}, got {value!r}")
    return float(value)


def require_parameters(params: Any) -> None:
    """Raise ArgumentError for a class, a method that was not called, and for what cannot be iterated over."""
    if isinstance(params, type):
        raise ArgumentError(f"params: expected a model, got the class {params.__name__}; make one")
    if callable(params) and hasattr(params, "__func__"):
        raise ArgumentError(
            f"params: expected parameters, got the method {params.__name__}; call it: model.{params.__name__}()"
        )
    if not isinstance(params, (Module, Iterable)):
        raise ArgumentError(f"params: expected a Module or an iterable of Parameters, got {type(params).__name__}")


def require_numbers(state: Mapping[str, np.ndarray], names: Iterable[str]) -> None:
    """Raise ArgumentError for an entry that is more or less than one number."""
    for name in names:
        if np.shape(state[name]) != ():
            raise ArgumentError(f"state_dict[{name!r}]: expected one number, got {np.size(state[name])}")


def steps_of(state: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps in a state_dict; ArgumentError for what is none."""
    steps = np.asarray(state["steps"])
    if steps.dtype.kind not in "iu" or steps < 0:
        raise ArgumentError(f"state_dict['steps']: expected a whole number of at least 0, got {steps}")
    return int(steps)


def hyper_parameter_of(state: Mapping[str, np.ndarray], name: str, below: float = math.inf) -> float:
    """Return a hyper-parameter in a state_dict; ArgumentError outside [0, below)."""
    array = np.asarray(state[name])
    value: Any = array.item() if array.dtype.kind in "fiu" else str(array)
    return checked(f"state_dict[{name!r}]", value, below)


def numbers_of_groups(
    state: Mapping[str, np.ndarray], own: Mapping[str, Any], limits: Mapping[str, float], switches: Iterable[str]
) -> list[dict[str, float]]:
    """Return each group's hyper-parameters in a state_dict; ArgumentError for invalid ones and for other groups.

    Args:
        state: with the entries of `own`.
        own: the optimizer's `settings()`.
        limits: what some hyper-parameters stay below.
        switches: those that are 0 or 1.
    """
    names = [name for name in own if name not in ("kind", "steps", GROUPS)]
    groups = [{name: state[name] for name in names}]
    if GROUPS in own:
        if np.asarray(state[GROUPS]).tolist() != own[GROUPS]:
            raise ArgumentError(
                f"state_dict[{GROUPS!r}]: expected those of this optimizer's parameters, got others; "
                "give it the groups of the job that saved it"
            )
        count = len(own["lr"])
        for name in names:
            if np.shape(state[name]) != (count,):
                raise ArgumentError(
                    f"state_dict[{name!r}]: expected {count} numbers, got shape {np.shape(state[name])}"
                )
        groups = [{name: state[name][at] for name in names} for at in range(count)]
    found = []
    for group in groups:
        require_numbers(group, names)
        found.append({name: hyper_parameter_of(group, name, limits.get(name, math.inf)) for name in names})
        for name in switches:
            if found[-1][name] not in (0.0, 1.0):
                raise ArgumentError(f"state_dict[{name!r}]: expected 0 or 1, got {found[-1][name]!r}")
    return found


def missed_steps_of(state: Mapping[str, np.ndarray], count: int) -> list[int]:
    """Return the steps that each of `count` parameters missed; ArgumentError for impossible numbers."""
    missed = np.asarray(state.get(MISSED, np.zeros(count, np.int64)))
    if missed.shape != (count,) or missed.dtype.kind not in "iu" or not (missed >= 0).all():
        raise ArgumentError(f"state_dict[{MISSED!r}]: expected {count} numbers of steps, got {missed}")
    if (missed > int(state["steps"])).any():
        raise ArgumentError(f"state_dict[{MISSED!r}]: expected at most {state['steps']} steps, got {missed.max()}")
    return [int(each) for each in missed]
