"""A prepared all-reduce of ranks that share cores: a work queue, from which ranks that have a core take parts.

If each rank summed a part of its own, every core would have to run each of its ranks twice: until it arrives, and for
its part. Here the ranks that run once all have arrived take parts until none is left; a rank that gets its core later
finds the result complete. That halves the context switches of an all-reduce. An element's sum is the same, whoever
computes it. A rank that has to wait yields its core in the kernel, some times, before it goes on in Python.

Two words in shared memory (`HostRendezvous.claims`) count the parts taken and the parts summed, each with the number of
the rendezvous above PART_BITS. No rank can be at the sum of the next rendezvous before all have arrived there, so the
words need no reset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clcomm.comm.transport.fused import (
    ARRIVED_NS,
    CLAIMS,
    NOT_MET,
    PART,
    POLLED,
    RESUMES,
    SLEEPERS,
    STATE,
    TAG,
    FusedReduction,
    words_of,
)
from clcomm.comm.transport.rendezvous import HostRendezvous

#: As in kernels/fold.cl.
_PART_BITS = 16
#: Bytes of a part: small enough that ranks finish together, large beside the atomic operations that take it.
_LEAST_PART, _LARGEST_PART, _PARTS = 16 << 10, 256 << 10, 16


def part_size(array: np.ndarray) -> int:
    """Return the number of elements of a part of this array."""
    nbytes = min(max(array.nbytes // _PARTS, _LEAST_PART), _LARGEST_PART)
    return nbytes // 64 * 64 // array.itemsize


class WorkQueueReduction(FusedReduction):
    """The ranks meet once and share the sum.

    Args:
        rendezvous: the ranks' rendezvous.
        kind: see `length_and_dtype`.
        array: the result.
        prepare: returns the kernel's function for the words of a call; None: the arrays are not of its kind.
    """

    def __init__(
        self,
        rendezvous: HostRendezvous,
        kind: int,
        array: np.ndarray,
        prepare: Callable[[np.ndarray], Callable[[], object] | None],
    ):
        words, part = words_of(rendezvous, rendezvous.yields()), part_size(array)
        words[CLAIMS], words[PART] = rendezvous.claims.ctypes.data, part
        super().__init__(rendezvous, kind, words.data, prepare(words))
        self._summed, self._parts = rendezvous.claims[1:].data, -(-array.size // part)

    def complete(self) -> None:
        rendezvous, words = self._rendezvous, self.words
        if words[STATE] == NOT_MET:
            rendezvous.wait(words[ARRIVED_NS], words[POLLED])
            rendezvous.compare(words[TAG])
        else:
            rendezvous.wake()
            self._note_rendezvous()
        complete = rendezvous.counters[rendezvous.rank] << _PART_BITS | self._parts
        if self._summed[0] < complete and words[STATE] in (NOT_MET, SLEEPERS):
            self._resume()
        if self._summed[0] < complete:
            rendezvous.wait_for(self._summed, complete, words[POLLED])

    def _resume(self) -> None:
        """Take parts in the kernel, which left before, and wake those that wait for them."""
        words = self.words
        words[RESUMES] = 1
        try:
            self.launch()  # type: ignore[misc]
        finally:
            words[RESUMES] = 0
        if words[STATE] == SLEEPERS:
            self._rendezvous.wake()
