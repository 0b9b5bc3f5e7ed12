"""What this rank is at: its step, its samples so far, its phase. One assignment each, read about once a second.

`clcomm top` shows them (`clcomm/comm/watch/figures.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns


class Now:
    """What this process is at.

    Attributes:
        step_ns: when the step began.
        numbered: whether the program numbers its steps.
        step_begins: called with the number of each step; None: nothing follows them.
    """

    def __init__(self) -> None:
        self.step = self.step_ns = self.samples = 0
        self.phase = ""
        self.numbered = False
        self.stepped = set[int]()  # what was counted since the step began
        self.step_begins: Callable[[int], None] | None = None


NOW = Now()


def note_step(step: int) -> None:
    """Note that a step begins, by the program's number for it."""
    NOW.numbered, NOW.step, NOW.step_ns = True, step, perf_counter_ns()
    if NOW.step_begins is not None:
        NOW.step_begins(step)


def count_step(by: int) -> bool:
    """Count a synchronisation of something, by its id, as a step; return whether a step has begun.

    Of several models or optimizers that take turns, all together count once. Steps that the program numbers stay so.
    """
    begins = not NOW.stepped or by in NOW.stepped
    NOW.stepped = {by} if begins else {*NOW.stepped, by}
    if begins and not NOW.numbered:
        NOW.step += 1
        NOW.step_ns = perf_counter_ns()
        if NOW.step_begins is not None:
            NOW.step_begins(NOW.step)
    return begins


def note_samples(samples: int) -> None:
    """Add to the samples that this rank has trained on."""
    NOW.samples += samples
