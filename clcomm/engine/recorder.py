"""The Recorder of the launches and allocations of one ordinary run of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from clcomm.engine.memory import Memory
from clcomm.engine.program import Kernel, Size

if TYPE_CHECKING:
    import pyopencl as cl


class Stateful(Protocol):
    """An object with state that a run may change, such as a gradient's slot."""

    state: int


#: The gradient slots of a flat space; their states are noted together.
Slots = tuple[Stateful, ...]


class Allocation:
    """Memory allocated in the run.

    Attributes:
        owner: the buffer, while anything else refers to it; then None.
        first, last: the numbers of the first and the last launch that use it; -1: none does.
    """

    def __init__(self, owner: object, nbytes: int):
        self.owner, self.nbytes = owner, nbytes
        self.first = self.last = -1

    def is_unused(self) -> bool:
        return sys.getrefcount(self.owner) <= _OWNED_ALONE


#: The reference count of a buffer to which only its Allocation refers, taken in the way that `is_unused` takes it.
_OWNED_ALONE = (lambda allocation: sys.getrefcount(allocation.owner))(Allocation(object(), 0))


class InputIndex(int):
    """An argument that is one of the run's inputs: the number of that input."""


class RecordedLaunch:
    """A kernel, its (global, local) size, and its arguments: an Allocation, an InputIndex, or the value itself."""

    def __init__(self, kernel: Kernel, sizes: tuple[Size, Size | None], args: list[object]):
        self.kernel, self.sizes, self.args = kernel, sizes, args


class Segment:
    """Launches, the gradient slots' states after them, and then a function that has to run on the host."""

    def __init__(self) -> None:
        self.launches: list[RecordedLaunch] = []
        self.states: list[tuple[Stateful, int]] = []
        self.function: Callable[..., object] | None = None
        self.args: tuple[object, ...] = ()


class Recorder:
    """Records the launches and allocations of one run of a function on a device.

    Args:
        revision: the device's `revision` when the run begins.
        inputs: the number of each input, by the address of its buffer.
    """

    def __init__(self, memory: Memory, revision: int, inputs: dict[int, int]):
        self.revision, self.inputs = revision, inputs
        self.refusal: str | None = None  # why the run can't be replayed
        self.in_doubt = False  # see LaunchQueue
        self.segments = [Segment()]
        self.written: list[Any] = []  # tensors from before the run that it writes to in place
        self.parts: dict[int, tuple[Any, int]] = {}  # roots of views from before, and their last writes, by address
        self.before: dict[Slots, list[int]] = {}  # states before the run
        self.allocations: dict[int, Allocation] = {}  # by address, as long as their memory is in use
        #: What the run has decided by values that the host knows: the number of an input or another tensor, the rule,
        #: and what it returned.
        self.decisions: list[tuple[Any, Callable[[Any], object], object]] = []
        self._memory = memory
        self._latest: dict[Slots, list[int]] = {}
        self._count = 0

    def refuse(self, reason: str) -> None:
        """Note the first reason why this run can't be replayed."""
        self.refusal = self.refusal or reason

    def allocate(self, nbytes: int) -> cl.Buffer:
        """Return a pooled buffer; memory of earlier ones without references may be used again."""
        self._release_unused()
        buffer = self._memory.allocate(nbytes)
        self.allocations[buffer.int_ptr] = Allocation(buffer, nbytes)
        return buffer

    def launch(self, kernel: Kernel, sizes: tuple[Size, Size | None], args: Iterable[object]) -> None:
        noted: list[object] = []
        for arg in args:
            address = getattr(arg, "int_ptr", None)
            allocation = self.allocations.get(address) if address is not None else None
            if allocation is not None:
                allocation.first = self._count if allocation.first < 0 else allocation.first
                allocation.last = self._count
                noted.append(allocation)
            elif address in self.inputs:
                noted.append(InputIndex(self.inputs[address]))
            else:
                noted.append(arg)
        self.segments[-1].launches.append(RecordedLaunch(kernel, sizes, noted))
        self._count += 1

    def note_decision(self, tensor: Any, rule: Callable[[Any], object], outcome: object) -> None:
        """Note what a rule returned of a tensor's known values: others in a later run may be decided otherwise."""
        address = tensor.buffer.int_ptr
        if address not in self.allocations:  # of which the host knows none
            self.decisions.append((self.inputs.get(address, tensor), rule, outcome))

    def note_write(self, tensor: Any) -> None:
        """Note a write in place."""
        address = tensor.buffer.int_ptr
        if address in self.inputs:
            self.refuse("it writes to an argument in place")
        elif address not in self.allocations:
            self.written.append(tensor)

    def note_part(self, buffer: cl.Buffer, root: Any) -> None:
        """Note the use of a view's own buffer, which a replay would not read again."""
        if buffer.int_ptr not in self.allocations:
            self.parts[buffer.int_ptr] = root, root.written_at

    def note_states(self, slots: Slots) -> None:
        """Save the states of a flat space's slots before their first change."""
        if slots not in self.before:
            self.before[slots] = self._latest[slots] = [slot.state for slot in slots]

    def end_segment(self, function: Callable[..., object] | None = None, args: tuple[object, ...] = ()) -> None:
        """End the last segment of the run, or the one before `function` runs on the host."""
        self._release_unused()
        segment = self.segments[-1]
        segment.function, segment.args = function, args
        for slots, latest in self._latest.items():
            pairs = zip(slots, latest, strict=True)
            segment.states += [(slot, slot.state) for slot, state in pairs if slot.state != state]

    def begin_segment(self) -> None:
        for slots in self._latest:
            self._latest[slots] = [slot.state for slot in slots]
        self.segments.append(Segment())

    def _release_unused(self) -> None:
        for address in [address for address, each in self.allocations.items() if each.is_unused()]:
            self.allocations.pop(address).owner = None
