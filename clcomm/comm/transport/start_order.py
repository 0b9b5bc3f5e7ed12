"""The order in which the ranks of a host start operations in the background.

An operation in the background needs all ranks. Ranks that start theirs in different orders, or that wait for different
ones in a blocking call, would wait for each other. So each rank notes, in shared memory, what it starts under which
number, and a rank that waits looks at the others' notes, and at whether one of them is in a blocking call.
"""

from __future__ import annotations

import numpy as np

from clcomm.comm.transport.rendezvous import HostRendezvous

#: How many of its latest starts a rank's notes hold; in front of them nothing is found.
_KEPT = 256
#: A note is one word, which is written at once: a mark, the number of the operation, and bits of its tag.
_MARK, _NUMBER_BITS, _TAG_BITS = 1 << 62, 38, 24


class StartOrder:
    """This rank's notes, and the other ranks'.

    Args:
        memory: `nbytes(ranks)` zeroed bytes, shared by all ranks.
        rendezvous: the ranks' rendezvous.
    """

    def __init__(self, memory: np.ndarray, rendezvous: HostRendezvous):
        self._notes = [row.data for row in memory.view(np.int64).reshape(-1, _KEPT)]
        self._rendezvous, self._own = rendezvous, self._notes[rendezvous.rank]

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the number of bytes that the notes of `ranks` ranks need."""
        return ranks * _KEPT * 8

    def note(self, number: int, tag: int) -> None:
        """Note that this rank starts its operation of this number, before it does."""
        self._own[number % _KEPT] = _word(number, tag)

    def differs(self, number: int, tag: int) -> bool:
        """Return whether a rank has come to another operation in place of this one, which not all have started.

        One has if it noted another one under this number, or if it has not come to this number and is in a blocking
        call to which this rank has not come.
        """
        word = _word(number, tag)
        if self.is_left_for(self._rendezvous, number):
            return True
        found = (notes[number % _KEPT] for notes in self._notes)
        return any(note != word and note >> _TAG_BITS == word >> _TAG_BITS for note in found)

    def is_left_for(self, rendezvous: HostRendezvous, number: int) -> bool:
        """Return whether a rank waits at a rendezvous of these ranks, and has not come to this number before.

        That is one to which this rank has not come. It may be another Communicator's.
        """
        counters = rendezvous.counters.tolist()  # read before the notes, which a rank writes before it goes on
        met, mark = counters[rendezvous.rank], _word(number, 0) >> _TAG_BITS
        pairs = zip(counters, self._notes, strict=True)
        return any(counter > met and notes[number % _KEPT] >> _TAG_BITS < mark for counter, notes in pairs)


def _word(number: int, tag: int) -> int:
    return _MARK | number % (1 << _NUMBER_BITS) << _TAG_BITS | tag % (1 << _TAG_BITS)
