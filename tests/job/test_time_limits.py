"""How long a collective may take: arguments and environment."""

from __future__ import annotations

import math

import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.watch.job import Limits
from tests.helpers import one_line


@pytest.mark.parametrize("value", ["soon", "-1", "nan", ""])
def test_limits_that_are_no_seconds_are_refused(value, monkeypatch) -> None:
    monkeypatch.setenv("CLCOMM_TIMEOUT_S", value)
    with pytest.raises(ArgumentError) as caught:
        Communicator(transport="solo")
    assert one_line(caught) == f"CLCOMM_TIMEOUT_S: expected seconds, 0 for no limit, got {value!r}"
    monkeypatch.delenv("CLCOMM_TIMEOUT_S")
    with pytest.raises(ArgumentError, match="stall_warning_s: expected seconds"):
        Communicator(transport="solo", stall_warning_s=-2)


def test_the_environment_overrides_the_arguments(monkeypatch) -> None:
    monkeypatch.delenv("CLCOMM_STALL_WARNING_S", raising=False)
    monkeypatch.setenv("CLCOMM_TIMEOUT_S", "2.5")
    assert Limits.of(10, 300) == Limits(10, 2.5)
    assert Limits.of(10, 300).interval_s == 0.625
    assert Limits.of(0, 0) == Limits(math.inf, 2.5)
    monkeypatch.setenv("CLCOMM_TIMEOUT_S", "0")
    assert not Limits.of(0, 7), "nothing to watch for"


def test_the_time_limit_may_be_set_later(monkeypatch) -> None:
    monkeypatch.delenv("CLCOMM_TIMEOUT_S", raising=False)
    with Communicator(transport="solo", stall_warning_s=7, timeout_s=20) as comm:
        for given, expected in ((5, 5.0), (0, math.inf), (0.5, 0.5)):
            comm.set_timeout(given)
            assert comm.lifetime.limits.timeout_s == expected and comm.lifetime.limits.stall_warning_s == 7
        with pytest.raises(ArgumentError, match="timeout_s: expected seconds, 0 for no limit, got -1"):
            comm.set_timeout(-1)
        assert comm.lifetime.limits.timeout_s == 0.5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("timeout_s", [0, 20])
def test_the_watchdog_has_the_time_limit_that_was_set_later(monkeypatch, timeout_s) -> None:
    for name in ("CLCOMM_TIMEOUT_S", "CLCOMM_STALL_WARNING_S"):
        monkeypatch.delenv(name, raising=False)
    with Communicator(stall_warning_s=0, timeout_s=timeout_s) as comm:
        assert (comm.lifetime.watchdog is None) == (timeout_s == 0)
        comm.set_timeout(90)
        assert comm.lifetime.watchdog is not None and comm.lifetime.watchdog.limits == Limits(math.inf, 90.0)
        comm.barrier()
