"""Records a timeline of all ranks: collectives, phases and kernels, in one file for Perfetto or Chrome."""

from __future__ import annotations

from clcomm.trace.recorder import Trace

__all__ = ["Trace"]
