"""Steps on several devices of each rank."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.parallel.devices import shard_batch
from tests.devices.several import batch_of, bits, queues, require_close, train, train_alone


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("uneven", [False, True])
def test_ranks_with_several_devices_equal_one_device(kind, uneven):
    comm = Communicator()
    count = 2
    sizes = [[3 + uneven * (rank + 2 * index) for index in range(count)] for rank in range(comm.size)]
    if uneven and comm.size > 1:
        sizes[-1] = [0, 0]
    parts = [[batch_of(sum(own), step, rank) for rank, own in enumerate(sizes)] for step in range(4)]
    joined = [tuple(np.concatenate(column) for column in zip(*each, strict=True)) for each in parts]
    replicas, model, _ = train(
        queues(count, kind), [each[comm.rank] for each in parts], sizes[comm.rank],
        synchronizer=Synchronizer(comm, bucket_size=128), seed=comm.rank,
    )  # fmt: skip
    require_close(model, train_alone(joined, [size for own in sizes for size in own])[0])
    everyone = comm.all_gather_object([bits(params) for params in replicas])
    assert all(each == everyone[0][0] for own in everyone for each in own)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (5, 0, 3, 9)])
def test_as_many_ranks_have_the_same_bits_as_devices(sizes):
    comm = Communicator()
    sizes = sizes[: comm.size]
    batches = [batch_of(sum(sizes), step) for step in range(3)]
    mine = [tuple(shard_batch(array, comm.size, sizes)[comm.rank] for array in batch) for batch in batches]
    _, spread, _ = train(queues(1), mine, [sizes[comm.rank]], synchronizer=Synchronizer(comm))
    _, local, _ = train(queues(comm.size), batches, sizes)
    assert bits(spread.parameters()) == bits(local.parameters())
