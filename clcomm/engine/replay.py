"""Replay: a step's launches, recorded once and queued again without running the step's Python code.

CUDA graphs do the same; this works on any OpenCL device. In a small model Python takes as long as the kernels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, NamedTuple

from clcomm.base.errors import ArgumentError, ReplayError
from clcomm.base.host import variables
from clcomm.engine.device import Device
from clcomm.engine.guards import Guards, noting_code
from clcomm.engine.modes import is_recording
from clcomm.engine.recording import LaunchRecording, Results, record, without_tape
from clcomm.engine.recording_diff import first_difference
from clcomm.engine.tensor import Tensor

if TYPE_CHECKING:
    import pyopencl as cl

_MOST_FAILURES = 3  # attempts to record a signature before its function runs as Python only
_MOST_STATES = 6  # recordings of a signature, for different states of gradients and guards
#: The most signatures whose calls are counted, and the calls after which all counts are halved: what counts is recent.
_MOST_COUNTED, _COUNTED_CALLS = 1024, 1024
#: A signature takes another's place if it was called so many times as often.
_MORE_OFTEN = 2
#: Replays before the function runs as Python and is compared with its recording; later every `check_every`.
_FIRST_CHECKS = (0, 10, 100)
#: Bytes of an arena above which it is released during a check, which needs memory of its own. Smaller ones are kept, as
#: making the kernel objects again takes as long as dozens of steps.
_LARGE_ARENA = 16 << 20


class _Signature:
    """The recordings for one set of shapes and values, one for each state of gradients and guards.

    Attributes:
        failures: attempts to record that failed, and recordings that were never replayed.
        calls: how often it was called lately.
    """

    def __init__(self) -> None:
        self.recordings: list[LaunchRecording] = []
        self.failures = self.calls = 0


class _Latest(NamedTuple):
    """The recording that was replayed last, of which signature, and what it was called with.

    arguments: of each Tensor its (device, shape, dtype), else the value.
    """

    recording: LaunchRecording
    signature: _Signature
    arguments: list[object]
    is_recording: bool

    def serves(self, args: tuple[object, ...], inputs: list[Tensor]) -> bool:
        """Return whether a call with these is like the last one, of which no run is due and nothing has changed."""
        recording, tape = self.recording, is_recording()
        if tape != self.is_recording or len(args) != len(self.arguments) or recording.device.recorder is not None:
            return False
        for arg, known in zip(args, self.arguments, strict=True):
            if isinstance(arg, Tensor):
                if (arg.device, arg.shape, arg.dtype) != known or (tape and arg.requires_grad):
                    return False
            elif type(arg) is not type(known) or arg != known:
                return False
        return recording.is_bound and recording.runs != recording.next_check and recording.fits(inputs)


class Replay:
    """A function of tensors that queues kernels, recorded once for each set of shapes and then replayed.

    The first call with new shapes and values runs the function, the second records it, later ones replay it. Gradients,
    hooks and optimizer steps have the same results as without a Replay, bit for bit. The function is recorded again for
    other states of the gradients (none, own, averaged), after hooks or `requires_grad` changed, when Python values that
    its code can name (attributes of modules, globals, ...) have changed, and for labels, indices or lengths of which an
    operation decides otherwise, as of an ignored label; it runs, and raises the operation's error, for one outside.

    A function that copies values to or from the host, synchronises with other ranks, keeps tensors that it does not
    return, changes such Python values, or draws random numbers is never replayed; `refusal` is the reason. Before a
    recording's first replay, the 11th, the 101st, and then every `check_every` replays, the function runs and its
    launches are compared with the recording: a difference before the first replay is a refusal, a later one a
    ReplayError. CLCOMM_REPLAY=0 in the environment turns replaying off.

    Args:
        function: takes Tensors, and hashable values such as a gradient's weight, in any order; returns None, a Tensor
            or a tuple of Tensors, which are not on the tape. It may run forward and backward.
        limit: the most sets of shapes and values that are recorded; of more, as of sequences' lengths, those that
            are called most often.
        check_every: replays between checks.

    Attributes:
        enabled: whether calls may be recorded and replayed.
        recorded, replayed, checked: the numbers of these runs.
        refusal: the reason of the latest refusal; None: there was none.
    """

    def __init__(self, function: Callable[..., Results], *, limit: int = 64, check_every: int = 1000):
        if limit < 1:
            raise ArgumentError(f"limit: expected a number of sets of shapes from 1 up, got {limit}")
        if check_every < 1:
            raise ArgumentError(f"check_every: expected a number of replays from 1 up, got {check_every}")
        self.function, self.limit, self.check_every = function, limit, check_every
        self.enabled = variables.is_on("CLCOMM_REPLAY")
        self.recorded = self.replayed = self.checked = 0
        self.refusal: str | None = None
        self._signatures: OrderedDict[object, _Signature] = OrderedDict()
        self._code: frozenset[CodeType] | None = frozenset()  # code that ran in the function; None: not known
        self._arena: cl.Buffer | None = None
        self._busy = False
        self._latest: _Latest | None = None
        self._calls = 0

    def __call__(self, *args: object) -> Results:
        """Run the function, or queue its recorded launches; raises the function's exceptions."""
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        latest = self._latest
        if latest is not None and self.enabled and not self._busy and latest.serves(args, inputs):
            latest.signature.calls += 1
            return self._run(latest.recording, inputs)
        device = self._device(inputs)
        if not self.enabled or self._busy or device.recorder is not None or _on_tape(inputs):
            return without_tape(self.function(*args))
        self._busy, self._latest = True, None
        try:
            return self._replay_or_run(device, args, inputs)
        finally:
            self._busy = False

    def _run(self, recording: LaunchRecording, inputs: list[Tensor]) -> Results:
        self._busy = True
        self.replayed += 1
        try:
            return recording.run(inputs)
        finally:
            self._busy = False

    def _replay_or_run(self, device: Device, args: tuple[object, ...], inputs: list[Tensor]) -> Results:
        signature = self._signature_of(args)
        if signature.calls == 1:
            with self._noting_code():
                return without_tape(self.function(*args))
        if signature.failures >= _MOST_FAILURES:
            return without_tape(self.function(*args))
        for recording in signature.recordings:
            if recording.fits(inputs):
                if recording.runs == recording.next_check:
                    return self._check(device, signature, recording, args)
                if not recording.is_bound:
                    recording.bind(self._arena_for(recording))
                keys = [(arg.device, arg.shape, arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
                self._latest = _Latest(recording, signature, keys, is_recording())
                return self._run(recording, inputs)
        if not signature.recordings and not self._has_place_for(signature):
            return without_tape(self.function(*args))
        return self._record(device, signature, args)

    @property
    def __wrapped__(self) -> Callable[..., Results]:
        return self.function

    @staticmethod
    def _device(inputs: list[Tensor]) -> Device:
        if not inputs:
            raise ArgumentError("Replay: expected at least one Tensor among the arguments, got none")
        device = inputs[0].device
        for tensor in inputs:
            if tensor.device is not device:
                raise ArgumentError("Replay: expected tensors on one device, got several")
        return device

    def _signature_of(self, args: tuple[object, ...]) -> _Signature:
        """Return the signature of these arguments, with this call counted."""
        keys = [(arg.device, arg.shape, arg.dtype) if isinstance(arg, Tensor) else arg for arg in args]
        key = (is_recording(), *keys)
        try:
            signature = self._signatures.setdefault(key, _Signature())
        except TypeError:
            raise ArgumentError("Replay: expected tensors and hashable values; wrap arrays in Tensor(...)") from None
        self._signatures.move_to_end(key)
        if len(self._signatures) > _MOST_COUNTED:
            self._signatures.popitem(last=False)
        self._calls += 1
        if self._calls % _COUNTED_CALLS == 0:
            for each in self._signatures.values():
                each.calls = -(-each.calls // 2)
        signature.calls += 1
        return signature

    def _has_place_for(self, signature: _Signature) -> bool:
        """Return whether a signature is to be recorded: there is a place, or one that is called less gives up its own.

        Recording takes as long as some ten calls, so that one that is soon displaced would be a loss.
        """
        recorded = [each for each in self._signatures.values() if each.recordings]
        if len(recorded) < self.limit:
            return True
        rarest = min(recorded, key=lambda each: each.calls)
        if signature.calls < _MORE_OFTEN * rarest.calls:
            return False
        rarest.recordings = []
        return True

    def _record(self, device: Device, signature: _Signature, args: tuple[object, ...]) -> Results:
        code = self._code
        guards = Guards(self.function, args, code)
        with self._noting_code():
            recorder, results = record(device, self.function, args)
        change = guards.change()
        if self._code != code and Guards(self.function, args, self._code).followed != guards.followed:
            recorder.refuse("it runs other code than before")
        if guards.unreadable is not None:
            recorder.refuse(f"it may draw from {guards.unreadable}, whose state cannot be compared")
        if change is not None:
            recorder.refuse(f"it changes {change}")
        if recorder.refusal is not None:
            self._note_failure(signature, recorder.refusal)
            return results
        self._add(signature, LaunchRecording(device, recorder, results, guards))
        self.recorded += 1
        return results

    @contextmanager
    def _noting_code(self) -> Iterator[None]:
        ran = set(self._code or ())
        with noting_code(ran) as is_complete:
            yield
        self._code = frozenset(ran) if is_complete and self._code is not None else None

    def _check(
        self, device: Device, signature: _Signature, recording: LaunchRecording, args: tuple[object, ...]
    ) -> Results:
        """Run the function, and compare its launches with the recording."""
        is_large = recording.nbytes > _LARGE_ARENA
        if is_large:
            self._release_arena()
        recorder, results = record(device, self.function, args)
        found = recorder.refusal or first_difference(recording, LaunchRecording(device, recorder, results))
        if is_large:
            device.memory.release_unused()
        later = self.check_every * (1 + recording.runs // self.check_every)
        recording.next_check = min([later, *(runs for runs in _FIRST_CHECKS if runs > recording.runs)])
        self.checked += 1
        if found is None:
            return results
        signature.recordings.remove(recording)
        if recording.runs:
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            raise ReplayError(
                f"Replay: expected {name} to queue what was recorded, but {found}: some of its last {recording.runs:,} "
                "results may be wrong; pass what this depends on as an argument, or set CLCOMM_REPLAY=0"
            )
        self._note_failure(signature, f"it does not do the same each time: {found}")
        return results

    def _note_failure(self, signature: _Signature, reason: str) -> None:
        self.refusal = reason
        signature.failures += 1

    def _add(self, signature: _Signature, recording: LaunchRecording) -> None:
        kept = [old for old in signature.recordings if old.is_valid][1 - _MOST_STATES :]
        for old in signature.recordings:
            if old not in kept and not old.runs:
                signature.failures += 1
                if signature.failures >= _MOST_FAILURES:
                    change = old.guards.change() if old.guards and old.is_valid else None
                    self.refusal = f"{change or 'what it uses'} changes from call to call"
        signature.recordings = [*kept, recording]
        for other in self._signatures.values():  # recordings that are no longer valid would keep memory
            other.recordings = [old for old in other.recordings if old.is_valid]
        recording.device.memory.release_unused()  # the memory of the recorded run, which replays do not need

    def _arena_for(self, recording: LaunchRecording) -> cl.Buffer | None:
        """Return the arena, large enough for all recordings."""
        if self._arena is None or self._arena.size < recording.nbytes:
            self._release_arena()
            nbytes = max(each.nbytes for signature in self._signatures.values() for each in signature.recordings)
            self._arena = recording.device.memory.exact(max(nbytes, 1))
        return self._arena

    def _release_arena(self) -> None:
        for signature in self._signatures.values():
            for recording in signature.recordings:
                recording.release()
        self._arena = None


def _on_tape(inputs: list[Tensor]) -> bool:
    return is_recording() and any(tensor.requires_grad for tensor in inputs)
