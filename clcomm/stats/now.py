"""What this rank is at: its step, its samples so far, its phase. One assignment each, read about once a second.

`clcomm top` shows them (`clcomm/job/figures.py`).
"""

from __future__ import annotations

from time import perf_counter_ns


class Now:
    """This process's state. `step_ns`: when the step began; `numbered`: whether the program numbers its steps."""

    step = step_ns = samples = 0
    phase = ""
    numbered = False


def note_step(step: int) -> None:
    """Note that a step begins, by the program's number for it."""
    Now.numbered, Now.step, Now.step_ns = True, step, perf_counter_ns()


def count_step() -> None:
    """Count a synchronisation as a step, unless the program numbers its steps."""
    if not Now.numbered:
        Now.step += 1
        Now.step_ns = perf_counter_ns()


def note_samples(samples: int) -> None:
    """Add to the samples that this rank has trained on."""
    Now.samples += samples
