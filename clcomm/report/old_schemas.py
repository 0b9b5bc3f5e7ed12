"""Converts documents of older schemas to the current one."""

from __future__ import annotations

from typing import Any

from clcomm.report.record import SCHEMA

#: Renamed fields, by the last schema with the old name.
_RENAMED: dict[int, dict[str, str]] = {3: {"untold_ns": "wait_unknown_ns"}}
#: The schemas of a run's document that can be read.
READABLE = (*_RENAMED, SCHEMA)


def upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """Return a run's document with the current names."""
    names = _RENAMED.get(document["schema"])
    return document if names is None else {**_renamed(document, names), "schema": SCHEMA}


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(name, name): _renamed(each, names) for name, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value
