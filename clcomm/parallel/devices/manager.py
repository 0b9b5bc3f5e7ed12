"""The devices that one process computes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.engine import selection
from clcomm.engine.device import Device

if TYPE_CHECKING:
    import pyopencl as cl


class DeviceManager:
    """Several devices of this process; each Device is an in-order queue, as which netcl's interface passes it on.

    Args:
        devices: Devices, OpenCL devices of PyOpenCL's, or names as for `Device.select`, such as ["gpu:0", "gpu:1"] or
            ["cpu:0", "intel"]; a name given twice makes two queues on that device. None: the devices of the kind that
            a rank takes by default, divided between the ranks of the host.
        parts: divides each device into so many sub-devices with equal shares of its compute units; None: into none.

    Attributes:
        devices: the Devices, in order.

    Raises:
        ArgumentError: no devices, something else than a device, or `parts` below 1.
        DeviceError: no device fits a name, or one has too few compute units for its parts.
    """

    def __init__(self, devices: Sequence[Device | str | cl.Device] | None = None, *, parts: int | None = None):
        if parts is not None and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 1):
            raise ArgumentError(f"parts: expected a whole number of at least 1, got {parts!r}")
        found = _own_devices() if devices is None else _devices(devices)
        if parts is not None:
            found = [part for each in found for part in _divided(each, parts)]
        self.devices: list[Device] = [each if isinstance(each, Device) else Device(each) for each in found]

    def num_devices(self) -> int:
        """Return the number of devices."""
        return len(self.devices)

    def get_queues(self) -> list[Device]:
        """Return the devices, each of which is its queue."""
        return list(self.devices)

    def __repr__(self) -> str:
        return f"DeviceManager({', '.join(map(repr, self.devices))})"


def _own_devices() -> list[Any]:
    """Return this rank's share of the devices that the ranks of a host use by default."""
    rank, size = selection.local_place()
    selection.prepare_environment(selection.core_share(size))
    matches = selection.matching(None)
    return [each.cl_device for each in matches[rank::size] or [matches[rank % len(matches)]]]


def _devices(given: Sequence[object]) -> list[Any]:
    if isinstance(given, (str, Device)) or not isinstance(given, Sequence) or not given:
        raise ArgumentError(f"devices: expected a list of devices or their names, got {given!r}")
    names = [each for each in given if isinstance(each, str)]
    rank, size = selection.local_place()
    for name in names:  # before any of them loads OpenCL
        selection.prepare_environment(selection.core_share(size), name)
    return [_device(each, rank) for each in given]


def _device(given: object, rank: int) -> Any:
    """Return a Device, or an OpenCL device."""
    import pyopencl as cl

    if isinstance(given, str):
        return selection.choose(given, rank).cl_device
    if isinstance(given, (Device, cl.Device)):
        return given
    raise ArgumentError(f"devices: expected Devices or names such as 'gpu:0', got {given!r}")


def _divided(given: Any, parts: int) -> list[Any]:
    """Return the sub-devices of a device, the first ones larger by one unit where the parts are not equal."""
    import pyopencl as cl

    device = given.cl_device if isinstance(given, Device) else given
    units, name = selection.compute_units(device), device.name.strip()
    if parts == 1:
        return [given]
    if parts > units:
        raise DeviceError(
            f"parts: expected at most {units}, the compute units of {name} that this rank may use, got {parts}; for "
            "several queues on one device give its name several times"
        )
    counts: list[Any] = [units // parts + (index < units % parts) for index in range(parts)]
    by = cl.device_partition_property
    try:
        return list(device.create_sub_devices([by.BY_COUNTS, *counts, by.BY_COUNTS_LIST_END]))
    except cl.Error as error:
        text = " ".join(str(error).split())
        raise DeviceError(f"parts: expected a device that can be divided, got {name}: {text}") from None
