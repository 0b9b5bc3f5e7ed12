"""Explores all protocols on 2 to 4 ranks, and finds the planted bugs: `python -m tests.model_checker`.

Prints states and time of each; exit code 1 and the interleaving where something is wrong. With part of a planted bug's
name it prints that one's interleaving.
"""

from __future__ import annotations

import multiprocessing
import sys

from tests.model_checker.planted import BUGS
from tests.model_checker.protocols import explored, scenarios


def main() -> int:
    if len(sys.argv) > 1:
        for bug in BUGS:
            if sys.argv[1] in bug.name:
                finding = explored(bug.name)[1].finding
                print(bug.name, *((finding.reason, *finding.course) if finding else ("not found",)), sep="\n  ")
        return 0
    bugs = [bug.name for bug in BUGS]
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for name, found, seconds in pool.imap(explored, [*(each.name for each in scenarios()), *bugs]):
            is_right = (found.finding is not None) == (name in bugs)
            wrong += not is_right
            said = (
                f"found: {found.finding.reason[:90]}"
                if found.finding
                else f"{found.states:,} states, {found.steps:,} steps"
            )
            print(f"{'' if is_right else 'WRONG '}{name}: {said}, {seconds:.1f} s", flush=True)
            if found.finding and not is_right:
                print("  " + "\n  ".join(found.finding.course), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
