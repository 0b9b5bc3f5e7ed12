"""What ranks that may die do and write: deaths at the places of CLCOMM_TEST_KILL, and in CLCOMM_TEST_LOG steps and end.

The variables name the deaths as `Death` writes them, joined by ";", and a directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Death(NamedTuple):
    """A rank dies some seconds after its `turn`-th arrival at a place."""

    rank: int
    place: str
    turn: int
    delay_s: float

    def __str__(self) -> str:
        return f"{self.rank}:{self.place}:{self.turn}:{self.delay_s:.4f}"

    @classmethod
    def read(cls, text: str) -> Death:
        rank, place, turn, delay_s = text.split(":")
        return cls(int(rank), place, int(turn), float(delay_s))


RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
_own = [each for text in os.environ.get("CLCOMM_TEST_KILL", "").split(";") if text
        for each in [Death.read(text)] if each.rank == RANK]  # fmt: skip
_arrivals: Counter[str] = Counter()


def dies_at(place: str) -> bool:
    return any(death.place == place for death in _own)


def at(place: str) -> None:
    """Note this rank's arrival at a place; kill it, once the delay is over, if its turn has come."""
    if _own:
        _arrivals[place] += 1
        for death in _own:
            if (death.place, death.turn) == (place, _arrivals[place]):
                threading.Thread(target=_die, args=(death.delay_s,), daemon=True).start()


def _die(delay_s: float) -> None:
    time.sleep(delay_s)
    stamp("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def stamp(what: str) -> None:
    os.write(2, f"rank {RANK} {what} at {time.time():.4f}\n".encode())
    sys.stderr.flush()


def _file(name: str) -> Path | None:
    folder = os.environ.get("CLCOMM_TEST_LOG")
    return Path(folder) / f"{name}-{RANK}" if folder else None


def step_done(step: int, ranks: int, **place: Any) -> None:
    """Write that this rank has done a step among so many."""
    path = _file("steps")
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps([step, ranks, place]) + "\n")


def ended(parameters: Mapping[str, np.ndarray]) -> None:
    """Write this rank's parameters at the end."""
    path = _file("final")
    if path is not None:
        with path.open("wb") as file:
            np.savez(file, **parameters)


class Ends(NamedTuple):
    """What the survivors wrote.

    Attributes:
        steps: (ranks, place) of each step that counts, in order.
        parameters: of each survivor.
    """

    steps: list[tuple[int, dict[str, Any]]]
    parameters: list[dict[str, np.ndarray]]

    @classmethod
    def read(cls, folder: Path) -> Ends:
        """Read a directory.

        A step that one of the survivors has done is not done again by the others. One that none of them has was done by
        ranks that died later: by the fewest that did, as each time after the first there are fewer.
        """
        finals, found = sorted(folder.glob("final-*")), {}
        logs = {path.name.replace("steps", "final"): path.read_text().splitlines() for path in folder.glob("steps-*")}
        survivors = {path.name for path in finals}
        for name in sorted(logs, key=lambda name: name in survivors):
            for line in logs[name]:
                step, ranks, place = json.loads(line)
                if name in survivors or step not in found or ranks < found[step][0]:
                    found[step] = ranks, place
        return cls([found[step] for step in sorted(found)], [dict(np.load(path)) for path in finals])
