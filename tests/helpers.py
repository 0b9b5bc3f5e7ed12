"""What several test files use."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from clcomm import ClcommError
from clcomm.engine import Device
from clcomm.sync import auto_buckets


@cache
def cpu_device(kind: str) -> Device:
    """Return this process's CPU device, treated as one of `kind`; a new one would compile its kernels again.

    CLCOMM_TEST_DEVICE names another than the first.
    """
    if kind == "cpu":
        return Device.select(os.environ.get("CLCOMM_TEST_DEVICE", "cpu"))
    return Device(cpu_device("cpu").cl_device, kind=kind)


def cpus_own() -> Device:
    """Return the CPU device; the calling test, of what CPUs alone do, is skipped where another device is tested."""
    device = cpu_device("cpu")
    if not device.is_cpu:
        pytest.skip("about CPUs alone")
    return device


def installs(extra: str) -> str:
    """Return the command that installs an extra here, in a checkout."""
    return f"pip install -e '{Path(__file__).resolve().parents[1]}[{extra}]'"


def one_line(caught) -> str:
    """Return the text of a caught clcomm error, which has to be one line."""
    assert isinstance(caught.value, ClcommError)
    message = str(caught.value)
    assert "\n" not in message
    return message


class Recorder:
    """An observer that keeps the events that it receives."""

    def __init__(self):
        self.events = []

    def collective_finished(self, event):
        self.events.append(event)


def try_sizes_at_once() -> None:
    """Let `bucket_size="auto"` of this process try another size in each step, and spend little on its first guess."""
    auto_buckets.WARM_UP_STEPS, auto_buckets.TURN_STEPS = 0, 1
    auto_buckets._FIRST_ROUND_TURNS = auto_buckets._LAST_ROUND_TURNS = 1
    auto_buckets._BUDGET_S = 0.0


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let this process make no file longer than that, as on a full disk."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
