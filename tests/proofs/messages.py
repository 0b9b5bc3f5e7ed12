"""The messages of all ranks in all-reduces by `clcomm.base.schedules`, and their bytes, as a line of JSON."""

from __future__ import annotations

import json

import numpy as np

from clcomm import Communicator
from clcomm.base.schedules import ALGORITHMS

SIZES = (0, 1, 1000, 100_003)


def main() -> None:
    """Print what each algorithm sends at each size, as the stats counted it; the sums are checked."""
    sent = {}
    with Communicator() as comm:
        for algorithm in ALGORITHMS:
            for size in SIZES:
                label = f"{algorithm} {size}"
                source = np.arange(size, dtype=np.float32) % 97 + comm.rank
                result = comm.all_reduce(source.copy(), algorithm=algorithm, label=label)
                ranks = np.arange(comm.size, dtype=np.float32)
                assert np.array_equal(result, comm.size * (np.arange(size, dtype=np.float32) % 97) + ranks.sum())
                counts = comm.stats.total("all_reduce", label)
                own = np.array([counts["messages"], counts["message_bytes"]])
                sent[label] = [int(each) for each in comm.all_reduce(own)]
        if comm.rank == 0:
            print(json.dumps(sent))


if __name__ == "__main__":
    main()
