"""`examples.mnist` with dying ranks: CLCOMM_TEST_KILL=RANKS:PLACE:TURN:DELAY_S, such as 1,3:sync:20:0.001.

Places: "step" when a rank notes a step; "data", "forward_backward", "sync", "checkpoint" and "evaluate" when the phase
of that name begins (or, for data, ends); "report" while the report is written; "exit" when the program has ended; or
"nowhere".
A rank dies DELAY_S after its TURN-th arrival at the place. Every survivor writes the time at which it began its next
step, or the interrupted one again, on fewer ranks. PLANTED_ERROR=STEP raises on all ranks, PLANTED_RMDIR=DIRECTORY
replaces the directory by a file at step 20.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from typing import Any

from clcomm import Communicator, elastic
from clcomm.job.endings import note_step, run
from examples import mnist
from training import trainer

ranks, place, turn, delay_s = os.environ.get("CLCOMM_TEST_KILL", ":nowhere:0:0").split(":")
is_victim = os.environ["OMPI_COMM_WORLD_RANK"] in ranks.split(",")
recovered: list[bool] = []
turns: list[str] = []
survivors_of = elastic.survivors_of
phase, notify_phase, write_document = Communicator.phase, Communicator.notify_phase, mnist.write_document


def at(where: str) -> None:
    """Kill this process if this is its place and turn."""
    if where == place and is_victim:
        turns.append(where)
        if len(turns) == int(turn):
            threading.Thread(target=die, daemon=True).start()


def noted(number: int) -> None:
    """Note a step."""
    note_step(number)
    if str(number) == os.environ.get("PLANTED_ERROR"):
        raise RuntimeError("planted")
    if number == 20 and "PLANTED_RMDIR" in os.environ:
        shutil.rmtree(os.environ["PLANTED_RMDIR"], ignore_errors=True)
        open(os.environ["PLANTED_RMDIR"], "w").close()
    if recovered:
        recovered.clear()
        stamp("went on")
    at("step")


def noted_recovery(comm: Communicator) -> Communicator:
    """Find the survivors, and record the loss."""
    recovered.append(True)
    return survivors_of(comm)


def noted_phase(comm: Communicator, name: str, **details: Any) -> Any:
    at(name)
    return phase(comm, name, **details)


def noted_data(comm: Communicator, event: Any) -> None:
    if event.name == "data":
        at("data")
    notify_phase(comm, event)


def noted_report(*arguments: Any) -> None:
    at("report")
    write_document(*arguments)


def main() -> int:
    code = mnist.main()
    at("exit")
    if place == "exit" and is_victim:
        time.sleep(float(delay_s) + 1)
    return code


def die() -> None:
    time.sleep(float(delay_s))
    stamp("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def stamp(what: str) -> None:
    sys.stderr.write(f"{what} at {time.time():.4f}\n")
    sys.stderr.flush()


trainer.note_step, elastic.survivors_of = noted, noted_recovery
Communicator.phase, Communicator.notify_phase = noted_phase, noted_data  # type: ignore[method-assign]
mnist.write_document = noted_report
run(main)
