"""Horovod's environment variables: one table of what each does here; docs/horovod.md has the same."""

from __future__ import annotations

import logging
import os
from fnmatch import fnmatchcase
from typing import Any

from clcomm.base.errors import ArgumentError

_log = logging.getLogger("clcomm")
#: Horovod's levels of messages, as those of Python's logging.
_LEVELS = {"trace": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "fatal": 50}
HONOURED, MAPPED, IGNORED = "honoured", "mapped", "ignored"
_START = "HOROVOD_"


#: Names, of which `*` stands for any text; whether they are HONOURED, MAPPED to clcomm's own or IGNORED; and what for.
#: The first row that fits counts.
TABLE = (
    ("TIMELINE", HONOURED, "a timeline's file, or DYNAMIC: only what `start_timeline` begins"),
    ("DYNAMIC_PROCESS_SETS", HONOURED, "process sets can always be added"),
    ("STALL_CHECK_TIME_SECONDS", MAPPED, "`CLCOMM_STALL_WARNING_S`, by default 10"),
    ("STALL_SHUTDOWN_TIME_SECONDS", MAPPED, "`CLCOMM_TIMEOUT_S`, by default 300"),
    ("STALL_CHECK_DISABLE", MAPPED, "0 for both"),
    ("LOG_LEVEL", MAPPED, 'the level of `logging.getLogger("clcomm")`'),
    ("LOG_HIDE_TIME", IGNORED, "messages have no time"),
    ("CYCLE_TIME CACHE_CAPACITY TIMELINE_MARK_CYCLES", IGNORED, "ranks negotiate nothing, so there are no cycles"),
    ("FUSION_THRESHOLD", IGNORED, "buckets have the Communicator's size; the bits are those of any size"),
    ("DISABLE_GROUP_FUSION", IGNORED, "a group is always reduced together"),
    ("AUTOTUNE*", IGNORED, "there is nothing to tune"),
    ("HIERARCHICAL_* TORUS_ALLREDUCE", IGNORED, "each host reduces before hosts exchange data, where that is faster"),
    ("ADASUM_MPI_CHUNK_SIZE", IGNORED, "vectors are halved as they are"),
    ("MPI_THREADS_DISABLE THREAD_AFFINITY", IGNORED, "no thread runs in the background"),
    ("ENABLE_ASYNC_COMPLETION BATCH_D2D_MEMCOPIES NUM_NCCL_STREAMS DISABLE_NVTX_RANGES", IGNORED,
     "tensors of a GPU are copied through the host's memory"),
    ("ENABLE_XLA_OPS", IGNORED, "it is for TensorFlow"),
    ("CONTROLLER CPU_OPERATIONS GLOO_* CCL_*", IGNORED, "MPI and shared memory move the data"),
    ("RANK SIZE LOCAL_* CROSS_* HOSTNAME SECRET_KEY", IGNORED, "MPI tells the ranks what they are"),
    ("START_TIMEOUT", IGNORED, "`CLCOMM_TIMEOUT_S` limits the start too"),
    ("ELASTIC*", IGNORED, "ranks are not added; lost ones are noticed at once"),
    ("SPARK_*", IGNORED, "clcomm does not start ranks on Spark"),
    ("WITH* GPU* BUILD_* *_HOME NCCL_* CMAKE DEBUG ALLOW_MIXED_GPU_IMPL", IGNORED,
     "nothing is compiled at installation"),
    ("*", IGNORED, "Horovod does not know it either"),
)  # fmt: skip


def kind_of(name: str) -> str:
    """Return whether a variable whose name begins like Horovod's is HONOURED, MAPPED or IGNORED."""
    own = name.removeprefix(_START)
    return next(kind for names, kind, _ in TABLE if any(fnmatchcase(own, each) for each in names.split()))


def communicator_options() -> dict[str, Any]:
    """Return the Communicator's arguments that variables ask for, and set the level of messages.

    Raises ArgumentError for a value that is none of the variable's.
    """
    level = os.environ.get("HOROVOD_LOG_LEVEL", "")
    if level:
        if level.lower() not in _LEVELS:
            raise ArgumentError(f"HOROVOD_LOG_LEVEL: expected one of {', '.join(_LEVELS)}, got {level!r}")
        _log.setLevel(_LEVELS[level.lower()])
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return {"stall_warning_s": 0.0, "timeout_s": 0.0}
    given = {
        "stall_warning_s": _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS"),
        "timeout_s": _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    }
    return {name: seconds for name, seconds in given.items() if seconds is not None}


def _seconds(name: str) -> float | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ArgumentError(f"{name}: expected a whole number of seconds, got {text!r}")
    return float(text) if text else None


def name_ignored() -> None:
    """Name the variables that are set and ignored, in one line; for rank 0."""
    ignored = [each for each in sorted(os.environ) if each.startswith(_START) and kind_of(each) == IGNORED]
    if ignored:
        _log.warning("horovod: ignored: %s; docs/horovod.md says why", ", ".join(ignored))
