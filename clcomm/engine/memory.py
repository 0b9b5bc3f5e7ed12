"""A device's memory: pooled buffers for temporary values, buffers of exact size for lasting ones, all counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import DeviceError
from clcomm.base.units import format_size

if TYPE_CHECKING:
    import numpy as np
    import pyopencl as cl


class _Regions(dict[tuple[int, int, int], "cl.Buffer"]):
    """The sub-buffers of a buffer by origin, size and flags, released in the reverse order of their making.

    NVIDIA's driver (580) ends in a segmentation fault where overlapping sub-buffers are released in another order.
    """

    def __del__(self) -> None:
        while self:
            self.popitem()


@cache
def _exact_buffer_class() -> Any:
    import pyopencl as cl

    class ExactBuffer(cl.Buffer):
        """A buffer that reports its release; its sub-buffers keep it alive."""

        memory: Memory | None = None
        counted = 0
        array: np.ndarray | None = None
        regions: _Regions | None = None
        argument: Any = None  # what kernels get for it, see host_addresses.py

        def get_sub_region(self, origin: int, size: int, flags: int = 0) -> cl.Buffer:
            make = super().get_sub_region
            part: Any = make(origin, size, flags) if self.array is not None else self._region(make, origin, size, flags)
            part.whole = self  # OpenCL keeps a part's device memory, but not a host array under it
            return part  # type: ignore[no-any-return]

        def _region(self, make: Callable[..., cl.Buffer], origin: int, size: int, flags: int) -> Any:
            """Return another reference to the sub-buffer of a region, which is made at its first use."""
            if self.regions is None:
                self.regions = _Regions()
            region = self.regions.get((origin, size, flags))
            if region is None:
                region = self.regions[origin, size, flags] = make(origin, size, flags)
            return cl.Buffer.from_int_ptr(region.int_ptr, retain=True)

        def __del__(self) -> None:
            if self.memory is not None:
                self.memory._exact_bytes -= self.counted
                if self.regions is not None:
                    self.memory._retired.append(self.regions)
                if self.array is not None and self.memory.on_release is not None:
                    self.memory.on_release(self.array)

    return ExactBuffer


class Memory:
    """All memory of one context.

    `active_bytes` are in use, `held_bytes` are allocated on the device (the pool keeps some of them for later), and
    `peak_bytes` is the most that was ever held. A buffer on top of a host array counts like any other.

    Attributes:
        on_release: called, in any thread, with the host array under a buffer when that buffer is released.
    """

    on_release: Callable[[np.ndarray], None] | None = None

    def __init__(self, context: cl.Context, queue: cl.CommandQueue, name: str):
        import pyopencl as cl
        from pyopencl.tools import ImmediateAllocator, MemoryPool

        self.peak_bytes = 0
        self._context, self._name, self._flags, self._error = context, name, cl.mem_flags, cl.Error
        self._pool = MemoryPool(ImmediateAllocator(queue, cl.mem_flags.READ_WRITE))
        self._exact_bytes = 0
        #: Of released buffers. A part that is released last drops its buffer first, so its region is released later.
        self._retired: list[_Regions] = []
        self._exact_buffer = _exact_buffer_class()

    @property
    def active_bytes(self) -> int:
        return self._exact_bytes + self._pool.active_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes allocated on the device, in use or not."""
        return self._exact_bytes + self._pool.managed_bytes

    def allocate(self, nbytes: int) -> cl.Buffer:
        """Return a pooled buffer of at least `nbytes`, which returns to the pool with its last reference.

        Raises DeviceError if the device has no memory for it.
        """
        self._retired.clear()
        try:
            buffer: cl.Buffer = self._pool.allocate(nbytes)  # type: ignore[assignment]  # used as one
        except (self._error, MemoryError) as error:
            raise self._out_of_memory(nbytes, error) from None
        self._note_peak()
        return buffer

    def exact(self, nbytes: int = 0, *, copy_of: np.ndarray | None = None, on_top_of: np.ndarray | None = None) -> Any:
        """Return a buffer that is not pooled, by one of the three arguments.

        Args:
            nbytes: the size of an uninitialised buffer.
            copy_of: a C-contiguous array whose values a new buffer holds.
            on_top_of: a C-contiguous array whose memory the buffer uses.

        Raises:
            DeviceError: the device has no memory for it.
        """
        self._retired.clear()
        flags, array = int(self._flags.READ_WRITE), None
        if copy_of is not None:
            flags, array = flags | self._flags.COPY_HOST_PTR, copy_of
        elif on_top_of is not None:
            flags, array = flags | self._flags.USE_HOST_PTR, on_top_of
        nbytes = nbytes if array is None else array.nbytes
        try:
            buffer = self._exact_buffer(self._context, flags, 0 if array is not None else nbytes, array)
        except (self._error, MemoryError) as error:
            raise self._out_of_memory(nbytes, error) from None
        buffer.memory, buffer.counted, buffer.array = self, nbytes, on_top_of
        self._exact_bytes += nbytes
        self._note_peak()
        return buffer

    def release_unused(self) -> None:
        self._retired.clear()
        self._pool.free_held()

    def _note_peak(self) -> None:
        held = self._exact_bytes + self._pool.managed_bytes
        if held > self.peak_bytes:
            self.peak_bytes = held

    def _out_of_memory(self, nbytes: int, error: BaseException) -> DeviceError:
        asked, used = format_size(nbytes), format_size(self.active_bytes)
        text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
        return DeviceError(f"{self._name}: no memory for {asked} beside {used} in use: {text}")
