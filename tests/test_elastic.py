"""The Communicator of a recovery has the old one's settings; tests/faults/test_elastic.py loses ranks."""

from __future__ import annotations

import inspect
import math
from itertools import product
from types import SimpleNamespace

import pytest

from clcomm import Communicator, Synchronizer
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.transport import mpi_failures
from clcomm.sync import elastic

ARGUMENTS = inspect.signature(Communicator.__init__).parameters.keys()
SETTINGS = [
    {
        "bucket_size": size,
        "use_bucketing": bucketing,
        "transport": "solo",
        "stall_warning_s": warning_s,
        "timeout_s": end_s,
    }
    for size, bucketing, (warning_s, end_s) in product(
        ["auto", 4096, "2MiB"], [True, False], [(10.0, 300.0), (0, 0), (1.5, 0), (0, 20.0)]
    )
]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are alone and survive."""
    monkeypatch.setattr(mpi_failures, "survivors", lambda comm: comm)


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("given", SETTINGS, ids=str)
@pytest.mark.parametrize("recoveries", [1, 2])
def test_a_recovery_keeps_every_setting(monkeypatch: pytest.MonkeyPatch, given: dict, recoveries: int) -> None:
    monkeypatch.delenv("CLCOMM_STALL_WARNING_S", raising=False)
    monkeypatch.delenv("CLCOMM_TIMEOUT_S", raising=False)
    observers, later = [CommStats(), CommStats()], CommStats()
    old = comm = Communicator(**given, observers=(each for each in observers))
    old.add_observer(later)
    for _ in range(recoveries):
        comm = elastic.survivors_of(comm)
    assert comm.auto_bucket_size == old.auto_bucket_size == (given["bucket_size"] == "auto")
    assert (comm.bucket_size, comm.use_bucketing, comm.transport) == (old.bucket_size, given["use_bucketing"], "solo")
    limits = [given[name] or math.inf for name in ("stall_warning_s", "timeout_s")]
    assert [comm.lifetime.limits.stall_warning_s, comm.lifetime.limits.timeout_s] == limits
    assert Synchronizer(comm).models.settings == Synchronizer(old).models.settings
    comm.barrier()
    assert [each.total("barrier")["calls"] for each in (*observers, later)] == [1, 1, 0]


def test_the_settings_are_all_arguments_but_the_ranks() -> None:
    assert Communicator(transport="solo").settings().keys() == ARGUMENTS - {"self", "comm"}


def test_the_news_of_a_death_may_come_after_what_the_dead_rank_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = pytest.importorskip("mpi4py.MPI", reason="no MPI library", exc_type=ImportError)
    answers = iter([False, False, True])
    monkeypatch.setattr(mpi_failures, "tolerates_failures", lambda: True)
    monkeypatch.setattr(mpi_failures, "_has_lost_ranks", lambda: next(answers))
    monkeypatch.setattr(mpi_failures, "_job", lambda: SimpleNamespace(Iprobe=lambda: False))
    with pytest.raises(mpi.Exception):
        mpi_failures.require_live_ranks()
