"""netcl's DeviceManager, which has the process's own device too."""

from __future__ import annotations

from typing import Any

from clcomm import devices
from clcomm.engine.device import Device, default_device, process_devices

__all__ = ["DeviceManager"]


class DeviceManager(devices.DeviceManager):
    """clcomm's DeviceManager with netcl's `default`."""

    @staticmethod
    def default(device: str | None = "auto") -> Device:
        """Return the process's device: the same one at each call with a name.

        device: a name as for `Device.select`; "auto" or None: NETCL_DEVICE's or CLCOMM_DEVICE's, else the rank's own,
        on which layers without a queue lie. Raises DeviceError if no device fits.
        """
        if device is None or device == "auto":
            return default_device()
        by_name = process_devices().by_name
        if device not in by_name:
            own, found = default_device(), Device.select(device)
            by_name[device] = own if own.cl_device == found.cl_device else found
        return by_name[device]


def device_of(queue: object) -> Any:
    """Return the Device with this OpenCL queue, of those that `default` returned; anything else as it is."""
    if queue is None or isinstance(queue, Device):
        return queue
    devices = (*process_devices().by_name.values(), default_device())
    return next((each for each in devices if each.queue is queue), queue)
