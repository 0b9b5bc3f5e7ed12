"""Timelines of all ranks' collectives, phases and kernels, in one file for Perfetto or Chrome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clcomm.insight.trace.recorder import Trace

__all__ = ["Trace"]


def __getattr__(name: str) -> Any:
    """Import `Trace` at its first access: every job reads clocks, and few record a timeline."""
    if name != "Trace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clcomm.insight.trace import recorder

    return recorder.Trace
