"""Whose sums are measured: the device's, where every rank has one that training would sum on, else NumPy's."""

from __future__ import annotations

import pytest

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.engine import Device
from clcomm.engine.fold import DeviceFold
from clcomm.insight.measure.timing import agreed_fold
from tests.helpers import cpu_device, one_line


@pytest.mark.parametrize("asked", [None, "device", "numpy"])
def test_sums_are_the_devices_where_training_has_them(comm, asked, monkeypatch):
    chosen = cpu_device("cpu")
    monkeypatch.setattr(Device, "select", lambda **place: chosen)
    monkeypatch.setattr(chosen, "runs_in_caller", True)
    assert isinstance(agreed_fold(comm, asked), DeviceFold) == (asked != "numpy")


def no_platform(**place):
    raise DeviceError("no OpenCL platform found")


def no_pyopencl(**place):
    raise ImportError("No module named 'pyopencl'")


@pytest.mark.parametrize("why", ["GPU", no_platform, no_pyopencl])
def test_without_such_a_device_on_every_rank_sums_are_numpys(comm, why, monkeypatch):
    chosen, select = cpu_device("cpu"), (lambda **place: chosen)
    monkeypatch.setattr(Device, "select", select if why == "GPU" or comm.rank < comm.size - 1 else why)
    monkeypatch.setattr(chosen, "runs_in_caller", why != "GPU")
    assert agreed_fold(comm, None) is None
    with pytest.raises(ArgumentError) as caught:
        agreed_fold(comm, "device")
    text = one_line(caught)
    assert text.startswith("--sums: expected every rank's device to compute in the calling thread, but on rank ")
    assert text.endswith("; use --sums numpy")
