"""Checks of a file's fields: each takes a value and the field's name, and returns the value or raises ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

#: The longest list, the longest text, the largest number and the most entries by name that a field may hold.
MOST_ITEMS, MOST_TEXT, MOST_COUNT, MOST_NAMES = 1 << 16, 200, 1 << 62, 100


Check = Callable[[Any, str], Any]


def checked_fields(value: object, checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    """Return the checked fields of an object; fields without a check are left out, missing ones are checked as None.

    Args:
        checks: by the field's name.
        where: the object's own name, "" for the whole file.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'file'}: expected an object, got {shown(value)}")
    prefix = f"{where}." if where else ""
    return {name: check(value.get(name), prefix + name) for name, check in checks.items()}


def refuse_constant(text: str) -> float:
    """Refuse constants outside JSON, as json.loads's `parse_constant`."""
    raise ValueError(f"expected finite numbers, got {text}")


def shown(value: object) -> str:
    """Return a value for a message, in at most 40 characters."""
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def whole(least: int = 0, most: int = MOST_COUNT) -> Callable[[Any, str], int]:
    bounds = f"from {least} up" if most == MOST_COUNT else f"from {least} to {most}"

    def check(value: Any, name: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name}: expected a whole number {bounds}, got {shown(value)}")
        return value

    return check


def number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e300 or not math.isfinite(value):
        raise ValueError(f"{name}: expected finite numbers from 0 up, got {shown(value)}")
    return float(value)


def signed_number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"{name}: expected a finite number, got {shown(value)}")
    return float(value)


def boolean(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {shown(value)}")
    return value


def text(value: object, name: str, most: int = MOST_TEXT) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise ValueError(f"{name}: expected at most {most} printable characters, got {shown(value)}")
    return value


def long_text(value: object, name: str) -> str:
    return text(value, name, 10 * MOST_TEXT)


def or_none(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


def or_empty(check: Check) -> Check:
    return lambda value, name: [] if value is None else check(value, name)


def list_of(check: Check, most: int = MOST_ITEMS) -> Check:
    def check_list(value: object, name: str) -> list[object]:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"{name}: expected a list of at most {most}, got {shown(value)}")
        return [check(each, f"{name}[{index}]") for index, each in enumerate(value)]

    return check_list


def row_of(*checks: Check) -> Check:
    def check_row(value: object, name: str) -> list[object]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"{name}: expected {len(checks)} values, got {shown(value)}")
        return [check(each, name) for check, each in zip(checks, value, strict=True)]

    return check_row


def object_of(**checks: Check) -> Check:
    return lambda value, name: checked_fields(value, checks, name)


def instance_of(kind: type, **own: Check) -> Check:
    """Return a check of an object with the fields of a dataclass or a named tuple, which it converts to.

    A field is checked by its type unless `own` has a check for it; numbers are from 0 up.
    """
    checks = {name: own.get(name) or _of_type(each) for name, each in get_type_hints(kind).items()}
    return lambda value, name: kind(**checked_fields(value, checks, name))


def _of_type(kind: object) -> Check:
    types = get_args(kind)
    return or_none(_of_type(types[0])) if type(None) in types else _BY_TYPE[kind]


def by_name(check: Check) -> Check:
    """Return a check of an object with arbitrary names and values of one kind."""

    def check_values(value: object, name: str) -> dict[str, object]:
        if not isinstance(value, dict) or len(value) > MOST_NAMES:
            raise ValueError(f"{name}: expected an object of at most {MOST_NAMES}, got {shown(value)}")
        return {text(key, name): check(each, f"{name}.{key}") for key, each in value.items()}

    return check_values


_BY_TYPE: dict[object, Check] = {int: whole(), float: number, str: text}
