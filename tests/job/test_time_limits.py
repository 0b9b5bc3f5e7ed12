"""How long a collective may take: arguments and environment."""

from __future__ import annotations

import math

import pytest

from clcomm import Communicator
from clcomm.errors import ArgumentError
from clcomm.job.time_limits import Limits
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
