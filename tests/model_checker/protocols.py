"""All that is explored, by number of ranks."""

from __future__ import annotations

import time

from tests.model_checker import elastic, exit_monitor, sharing
from tests.model_checker.explorer import Explored, Explorer
from tests.model_checker.planted import BUGS, plant
from tests.model_checker.scenario import Scenario


def scenarios(most_ranks: int = 4) -> list[Scenario]:
    """Return what is explored on 2 to so many ranks."""
    made = sharing.ring_scenarios()
    for ranks in range(2, most_ranks + 1):
        made += sharing.rendezvous_scenarios(ranks) + elastic.scenarios(ranks)
        if ranks < 4:
            made += sharing.work_scenarios(ranks) + exit_monitor.scenarios(ranks)
    return made


def explored(name: str) -> tuple[str, Explored, float]:
    """Explore the scenario of this name, or what has to find the planted bug; return how long it took too."""
    began = time.perf_counter()
    bug = next((each for each in BUGS if each.name == name), None)
    if bug is None:
        found = Explorer(next(each for each in scenarios() if each.name == name)).explore()
    else:
        with plant(bug):
            found = Explorer(bug.scenario()).explore()
    return name, found, time.perf_counter() - began
