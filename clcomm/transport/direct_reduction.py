"""All-reduces in which ranks read each other's arrays: no copies beside those that a rank reads."""

from __future__ import annotations

import errno

import numpy as np

from clcomm.host.arrays import PAGE, aligned_empty
from clcomm.transport.other_memory import OtherMemory, unreadable
from clcomm.transport.reduction import RowsFold
from clcomm.transport.rendezvous import HostRendezvous
from clcomm.transport.shards import shards

#: From which size on these are faster than slots.
LEAST_BYTES = 512 << 10
#: The most bytes that are folded of a rank's array at once, and of all: they are to stay in a core's cache.
_PIECE_BYTES, _PIECES_BYTES = 256 << 10, 1 << 20


class DirectReduction:
    """Blocking all-reduces of arrays anywhere, between ranks that can read each other's memory.

    Rank r folds shard r of all ranks' arrays, in rank order, and then reads the other shards' results. The first of
    three rendezvous tells where the arrays are, at the second all shards are folded, at the third all are read.
    """

    def __init__(self, rendezvous: HostRendezvous, others: OtherMemory):
        self._rendezvous, self._others, self._ranks = rendezvous, others, len(rendezvous.cells)
        self._piece_bytes = min(_PIECE_BYTES, _PIECES_BYTES // self._ranks // PAGE * PAGE)
        self._pieces: np.ndarray | None = None

    def reduce(self, source: np.ndarray, out: np.ndarray, fold: RowsFold, kind: int) -> None:
        """Reduce `source` over the ranks into `out`, which may be the same array; kind: see Rendezvous.

        Raises ResourceError where a rank's array can no longer be read.
        """
        rendezvous, rank = self._rendezvous, self._rendezvous.rank
        places = rendezvous.exchange([_address(source), _address(out)], kind).tolist()
        parts = shards(out, self._ranks)
        self._fold_shard(source, out, parts[rank], fold, [place for place, _ in places])
        rendezvous.leave()
        for other in (*range(rank + 1, self._ranks), *range(rank)):  # each begins with another one
            part = parts[other]
            self._read(other, places[other][1] + part.start * out.itemsize, out[part])
        rendezvous.leave()

    def _fold_shard(self, source: np.ndarray, out: np.ndarray, part: slice, fold: RowsFold, places: list[int]) -> None:
        if self._pieces is None:
            self._pieces = aligned_empty((self._ranks, self._piece_bytes), np.uint8)
        rank, itemsize, step = self._rendezvous.rank, source.itemsize, self._piece_bytes // source.itemsize
        pieces = self._pieces.view(source.dtype)
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            rows = [piece[: stop - start] for piece in pieces]
            for other, row in enumerate(rows):
                if other != rank:
                    self._read(other, places[other] + start * itemsize, row)
            if rank < 2:
                rows[rank] = source[start:stop]  # read before the fold writes, also where that is `out`
            else:
                rows[rank][...] = source[start:stop]
            fold.into(rows, out[start:stop])

    def _read(self, rank: int, address: int, out: np.ndarray) -> None:
        try:
            self._others.read(rank, address, out)
        except OSError as error:
            if error.errno == errno.ESRCH:
                self._rendezvous.leave()  # a rank that has died is named where the others wait for it
            raise unreadable(rank, error) from None


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
