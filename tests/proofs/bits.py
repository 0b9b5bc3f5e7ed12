"""Drawn models, cut into buckets in many ways, on every transport: the mean gradient's bits against NumPy's fold.

`python -m tests.proofs.bits LAYOUTS SEED`, under mpiexec. All ranks draw the same models and know all ranks' gradients,
so each rank folds them itself in the order that docs/summation-order.md promises. Rank 0 prints how many were compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.job import run
from clcomm.transport import memory
from clcomm.transport import mpi as mpi_transport
from tests.numpy_models import Model, values
from tests.transport.references import folded, layout_hosts, pretended_host

#: Pretended hosts of the way over several: ranks alternate between two.
HOSTS = "interleaved"
LARGEST = 3000
#: Ways to cut each model into buckets.
CUTS = 2
Gradients = list[list[np.ndarray | None]]


class Way:
    """A Communicator, and the hosts whose ranks' values it adds first; `full`: /dev/shm takes no array any more."""

    def __init__(self, name: str, comm: Communicator, expects: str, hosts: tuple = (), full: bool = False):
        self.name, self.comm, self.expects, self.full = name, comm, expects, full
        self.hosts = hosts or (range(comm.size),)
        comm.add_observer(self)

    def collective_finished(self, event) -> None:
        if event.label == "gradients":
            assert event.transport == self.expects, f"{self.name} went through {event.transport}"


def ways() -> list[Way]:
    """Return every way that gradients can take here."""
    made = [Way("shared", Communicator(), "shared"), Way("mpi", Communicator(transport="mpi"), "mpi")]
    made.append(Way("no room in shared memory", Communicator(), "mpi", full=True))
    if made[0].comm.size > 2:
        one_host, mpi_transport.host_of = mpi_transport.host_of, lambda comm: pretended_host(HOSTS, comm)
        hosts = layout_hosts(HOSTS, made[0].comm.size)
        made.append(Way("two hosts", Communicator(), "hierarchical", hosts))
        made.append(Way("two hosts without room", Communicator(), "mpi", hosts, full=True))
        mpi_transport.host_of = one_host
    return made


@contextmanager
def room(full: bool) -> Iterator[None]:
    """Let /dev/shm look full while Communicators ask."""
    real = memory._free_shared_memory
    if full:
        memory._free_shared_memory = lambda: 0
    try:
        yield
    finally:
        memory._free_shared_memory = real


def draw(rng: np.random.Generator, ranks: int) -> tuple[list[tuple[tuple[int, ...], str]], Gradients]:
    """Return the parameters' shapes and dtypes, and each rank's gradients, None where it has none."""
    parameters = []
    for _ in range(rng.integers(1, 9)):
        dimensions = rng.integers(0, 4)
        shape = tuple(int(n) for n in rng.integers(1, [0, LARGEST, 50, 14][dimensions], dimensions))
        parameters.append((shape, str(rng.choice(["float32", "float32", "float32", "float64"]))))
    seed, missing = int(rng.integers(1 << 30)), rng.random((ranks, len(parameters))) < 0.05
    gradients: Gradients = [
        [None if missing[rank, n] else values(seed + n, rank, *parameter) for n, parameter in enumerate(parameters)]
        for rank in range(ranks)
    ]
    return parameters, gradients


def cuts(rng: np.random.Generator, nbytes: int) -> list[dict]:
    """Return two ways to cut a model of so many bytes: 1 B to whole, per tensor, tensors split or not."""
    drawn = [int(size) for size in np.exp(rng.uniform(0, np.log(nbytes + 1), 2))]
    every: list[dict] = [
        {"bucket_size": 1},
        {"bucket_size": drawn[0]},
        {"bucket_size": drawn[1], "split_tensors": True, "first_bucket_size": max(1, drawn[1] // 3)},
        {"bucket_size": nbytes},
        {"use_bucketing": False},
    ]
    return [every[index] for index in rng.choice(len(every), CUTS, replace=False)]


def mean_of(gradients: Gradients, parameters: list, hosts: tuple) -> list[bytes]:
    """Return the bits of each parameter's mean in the documented order; who has no gradient counts as zero."""
    rows = [
        [np.zeros(shape, dtype) if own is None else own for own, (shape, dtype) in zip(mine, parameters, strict=True)]
        for mine in gradients
    ]
    return [np.asarray(folded(list(column), "mean", hosts)).tobytes() for column in zip(*rows, strict=True)]


def synchronised(comm: Communicator, parameters: list, own: list[np.ndarray | None], cut: dict) -> list[bytes | None]:
    """Return the bits of the mean gradients that this rank has after a synchronisation."""
    model = Model((f"p{n}", np.zeros(shape, dtype)) for n, (shape, dtype) in enumerate(parameters))
    sync = Synchronizer(comm, **cut)
    for _ in range(2):  # the second time buckets are prepared, and memory holds the first time's values
        for parameter, gradient in zip(model.parameters.values(), own, strict=True):
            parameter.grad = None if gradient is None else gradient.copy()
        sync.sync_gradients(model)
    return model.gradient_bits()


def main() -> None:
    layouts, seed = int(sys.argv[1]), int(sys.argv[2])
    all_ways = ways()
    compared = {way.name: 0 for way in all_ways}
    for number in range(layouts):
        rng = np.random.default_rng([seed, number])
        parameters, gradients = draw(rng, all_ways[0].comm.size)
        nbytes = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in parameters)
        each = cuts(rng, nbytes)
        for way in all_ways:
            expected = mean_of(gradients, parameters, way.hosts)
            with room(way.full):
                for cut in each:
                    found = synchronised(way.comm, parameters, gradients[way.comm.rank], cut)
                    assert found == expected, f"seed {seed}, layout {number} {parameters}, {way.name}, {cut}"
                    compared[way.name] += 1
    if all_ways[0].comm.rank == 0:
        print(json.dumps(compared))
    for way in all_ways:
        way.comm.finalize()


if __name__ == "__main__":
    run(main)
