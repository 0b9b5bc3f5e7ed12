"""`python -m benchmarks.top`: what `clcomm top` costs a job, as a share of its step, on 8 ranks.

A job pays whether somebody looks or not: a few assignments a step (`clcomm/comm/stats/events.py`), and about once a
second, in the watchdog's thread, the figures on the rank's status page (`clcomm/comm/watch/figures.py`). Both are timed
in the ranks of a job that has just trained, and compared with its step. Where ranks share cores, each core pays for all
of its ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks import harness
from benchmarks.harness import Bar, Grid, Report
from benchmarks.on_ranks import relaunch
from clcomm import Communicator
from clcomm.base.host import usable_cores
from clcomm.comm.stats import events
from clcomm.comm.stats.events import Collective
from clcomm.comm.stats.flight_recorder import FlightRecorder
from clcomm.comm.watch import run
from clcomm.comm.watch.figures import Figures
from clcomm.comm.watch.running_jobs import find_jobs
from clcomm.comm.watch.status_page import StatusPage
from clcomm.jobs.top import view
from clcomm.jobs.top.view import rows_of
from training.options import TrainingOptions
from training.session import Session

PROGRAM = "benchmarks.top"
RANKS, TARGET = 8, 0.001
#: Phases of a training step that note their names, the epoch's included.
PHASES = 5
_REPEATS, _ROUNDS = 2000, 9


def main() -> int | None:
    """Measure on the ranks; rank 0 reports."""
    options = parse()
    code = relaunch(PROGRAM, options.ranks)
    if code is not None:
        return code
    step_s = trained_step_s(options.steps)
    comm = Communicator()
    notes_s = seconds_of(note_a_step, _REPEATS) + PHASES * seconds_of(note_a_phase, _REPEATS)
    figures_s = seconds_of(figures_of(comm), _REPEATS // 10)
    look_s = seconds_of_a_look() if comm.rank == 0 else 0.0
    everyone = comm.all_gather_object((step_s, notes_s, figures_s))
    if comm.rank == 0:
        step_s, notes_s, figures_s = (statistics.median(column) for column in zip(*everyone, strict=True))
        interval_s = comm.lifetime.limits.interval_s
        harness.conclude(report(comm, step_s, notes_s, figures_s, interval_s, look_s), harness.make_console(),
                         options.record)  # fmt: skip
    comm.finalize()
    return None


def parse() -> argparse.Namespace:
    parser = harness.parser(PROGRAM, "The cost of clcomm top to a job.", windows=1, window_s=0)
    parser.add_argument("--ranks", type=harness.positive, default=RANKS, help="default: %(default)s")
    parser.add_argument("--steps", type=harness.positive, default=60, help="of training; default: %(default)s")
    return parser.parse_args()


def trained_step_s(steps: int) -> float:
    """Return the median step of a ConvNet on synthetic images, batch 32 a rank; collective."""
    chosen = TrainingOptions(data="synthetic", max_steps=steps, epochs=100, eval=False, quiet=True)
    result = Session(chosen).run()
    return result.step_p50_s


def note_a_step() -> None:
    """Do what a step's notes do."""
    events.note_step(7)
    events.note_samples(32)
    events.count_step(1)


def note_a_phase() -> None:
    """Do what a phase adds to its begin and its end."""
    outer, events.NOW.phase = events.NOW.phase, "forward_backward"
    events.NOW.phase = outer


def figures_of(comm: Communicator) -> Callable[[], None]:
    """Return a function that takes the figures with a full recorder and writes them on a status page."""
    recorder, page = FlightRecorder(), StatusPage.alone(comm.rank)
    for number in range(64):
        began_s = time.perf_counter() + 3600  # all are newer than the last look
        recorder.collective_finished(
            Collective("all_reduce", "gradients", 1000, 1e-3, "shared", number, began_s=began_s, last_rank=1)
        )
    figures = Figures(recorder)

    def take() -> None:
        page.write(0, 0, "all_reduce 'gradients' #12", "train.py:5 in main", figures.take(comm, None))

    return take


def seconds_of(once: Callable[[], object], repeats: int) -> float:
    """Return the median processor seconds of a call, of _ROUNDS rounds."""
    found = []
    for _ in range(_ROUNDS):
        began_s = time.thread_time()
        for _ in range(repeats):
            once()
        found.append((time.thread_time() - began_s) / repeats)
    return statistics.median(found)


def seconds_of_a_look() -> float:
    """Return the processor seconds of one look of `clcomm top` at this job."""
    jobs, _ = find_jobs()
    return seconds_of(lambda: str(view.table(jobs[0], rows_of(jobs[0].lines()))), 20) if jobs else 0.0


def report(
    comm: Communicator, step_s: float, notes_s: float, figures_s: float, interval_s: float, look_s: float
) -> Report:
    """Return the report of all ranks' medians."""
    crowd = max(1.0, comm.size / len(usable_cores()))
    each_step_s = notes_s + figures_s * step_s / interval_s
    share = crowd * each_step_s / step_s
    grid = Grid(f"cost to a job of {comm.size} ranks on {len(usable_cores())} cores", ("of", "time", "how often"))
    grid.add("notes of step, samples and phases", f"{notes_s * 1e9:,.0f} ns", "each step")
    grid.add("figures on the status page", f"{figures_s * 1e6:,.1f} us", f"each {interval_s:g} s")
    grid.add("both", f"{each_step_s * 1e9:,.0f} ns", "each step, of a rank")
    grid.add("a step", f"{step_s * 1e3:,.2f} ms", "")
    found = Report("clcomm top", harness.command_line(PROGRAM), [grid])
    found.bars.append(Bar("share of a step", 100 * share, 100 * TARGET, "%", at_least=False))
    found.notes.append(
        f"clcomm top itself takes {look_s * 1e3:.1f} ms of a core for a look, at the scheduler's idle priority"
    )
    return found


if __name__ == "__main__":
    run(main)
