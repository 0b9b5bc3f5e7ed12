"""`clcomm verify`: whether a script trains on several ranks as one process would, with clcomm/tools/verify/."""

from __future__ import annotations

import argparse
import sys

from clcomm.base.console.option_types import number, whole_number
from clcomm.base.errors import ArgumentError
from clcomm.base.host.rank_process import launched_ranks
from clcomm.tools.commands.command import Command
from clcomm.tools.commands.run import require_script

#: Exit codes: the script has mistakes; it cannot be judged.
FOUND, UNKNOWN = 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--ranks", type=whole_number(2), default=2, metavar="N", help="number of ranks; default: %(default)s")
    add("--steps", type=whole_number(1, 1000), default=5, metavar="K",
        help="end the script after so many steps of each optimizer; default: %(default)s")  # fmt: skip
    add("--timeout", type=number(above=True), default=60.0, metavar="S",
        help="end it when training ranks are silent for so many seconds; default: %(default)g")  # fmt: skip
    add("--json", action="store_true", help="print the findings as JSON, with their evidence")
    add("--show-output", action="store_true", help="print what the ranks printed, too")
    add("-m", "--module", action="store_true", help="what follows is a module's name, as with python -m")
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="script ...", help="such as train.py --epochs 3")


def run(options: argparse.Namespace) -> int:
    """Watch the script, print the findings, and return 0, FOUND or UNKNOWN."""
    if launched_ranks() > 1:
        raise ArgumentError("verify: expected to be outside mpiexec, as in clcomm verify -n 2 train.py, got a rank")
    require_script("verify", options.job, options.module)
    from clcomm.base.console import finding
    from clcomm.base.storage.scratch import remove_stale
    from clcomm.jobs.launch.keeper import kept_job
    from clcomm.tools.verify import job as watched
    from clcomm.tools.verify.judge import judge, refusal

    remove_stale()
    with kept_job() as keeper:
        output = keeper.folder / "output"
        words = [*["-m"] * options.module, *options.job]
        record = watched.watch(words, options.ranks, options.steps, options.timeout, keeper, output)
        printed = output.read_text(errors="replace")
    if options.show_output:
        sys.stdout.write(printed)
    found = judge(record)
    is_wrong = any(each.level == finding.PROBLEM for each in found)
    why = "" if is_wrong else refusal(record)
    if why:
        raise ArgumentError(f"verify: cannot judge this script: {why}; --show-output prints what it printed")
    finding.show(found, "clcomm verify", options.json)
    return FOUND if is_wrong else 0


COMMAND = Command(
    "verify",
    "find out whether a script trains on several ranks as one process would",
    "Run an unchanged script on some ranks for a few optimizer steps and watch it: parameters, batches, gradients, "
    "options, buffers. Say what differs from one process with the whole batch, where first, and why. It knows "
    "PyTorch with backend clcomm or another, DistributedDataParallel, Horovod's calls, and clcomm's Synchronizer. "
    "Exit code 0: it trains alike; 1: mistakes were found; 2: it cannot be judged.",
    add_arguments,
    run,
    (
        ("clcomm verify train.py --epochs 3", "two ranks, five steps"),
        ("clcomm verify -n 3 --steps 20 -m package.train", "three ranks of a module, twenty steps"),
    ),
)
