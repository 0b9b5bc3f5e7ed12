"""`examples.mnist`, in which a rank dies some time after it began a step: CLCOMM_TEST_KILL=RANK:STEP:DELAY_S.

Every survivor writes when it began its next step, or the one it died in again, on fewer ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from clcomm import elastic
from clcomm.job import note_step, run
from examples.mnist import main
from training import trainer

rank, step, delay_s = os.environ.get("CLCOMM_TEST_KILL", "-1:0:0").split(":")
recovered: list[bool] = []
survivors_of = elastic.survivors_of


def noted(number: int) -> None:
    """Note a step, and let it be the one in which this process dies where it is."""
    note_step(number)
    if recovered:
        recovered.clear()
        tell("went on")
    elif number == int(step) and os.environ["OMPI_COMM_WORLD_RANK"] == rank:
        threading.Thread(target=die, daemon=True).start()


def noted_recovery(comm):
    """Find the survivors, and remember that it happened."""
    recovered.append(True)
    return survivors_of(comm)


def die() -> None:
    time.sleep(float(delay_s))
    tell("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def tell(what: str) -> None:
    sys.stderr.write(f"{what} at {time.time():.4f}\n")
    sys.stderr.flush()


trainer.note_step, elastic.survivors_of = noted, noted_recovery
run(main)
