"""Drawn models, cut into buckets in many ways, with overlap and without: the mean gradient's bits against NumPy's fold.

`python -m tests.proofs.bits LAYOUTS SEED`, under mpiexec. All ranks draw the same models and know all ranks' gradients,
so each rank folds them itself in the order that docs/summation-order.md promises. Each model takes one of the ways that
gradients can go, is cut in one way, and is summed by NumPy or by each rank's device, all drawn. Rank 0 prints how many
were compared, by way, by cut and by who summed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from clcomm import Communicator, Synchronizer
from clcomm.comm.transport import host_memory, mpi_communicators
from clcomm.comm.watch.endings import run
from clcomm.engine.fold import DeviceFold
from tests.helpers import cpu_device, try_sizes_at_once
from tests.numpy_models import TellingModel, values
from tests.transport.references import folded, layout_hosts, pretended_host

#: Pretended hosts of the way over several: ranks alternate between two.
HOSTS = "interleaved"
LARGEST = 3000
#: Steps: with overlap buckets begin in backward from the third on; auto tries a size in each.
STEPS, AUTO_STEPS = 3, 8
Gradients = list[list[np.ndarray | None]]


class Way:
    """A Communicator, and the hosts whose ranks' values it adds first; `full`: /dev/shm takes no array any more.

    expects: the transports that it may use, separated by a blank.
    """

    def __init__(self, name: str, comm: Communicator, expects: str, hosts: tuple = (), full: bool = False):
        self.name, self.comm, self.expects, self.full = name, comm, expects.split(), full
        self.hosts = hosts or (range(comm.size),)
        comm.add_observer(self)

    def collective_finished(self, event) -> None:
        if event.label == "gradients":
            assert event.transport in self.expects, f"{self.name} went through {event.transport}"


def ways() -> list[Way]:
    """Return every way that gradients can take here."""
    made = [Way("shared", Communicator(), "shared"), Way("mpi", Communicator(transport="mpi"), "mpi")]
    made.append(Way("no room in shared memory", Communicator(), "staged mpi", full=True))  # overlapped: through MPI
    if made[0].comm.size > 2:
        one_host, mpi_communicators.host_of = mpi_communicators.host_of, lambda comm: pretended_host(HOSTS, comm)
        hosts = layout_hosts(HOSTS, made[0].comm.size)
        made.append(Way("two hosts", Communicator(), "hierarchical", hosts))
        made.append(Way("two hosts without room", Communicator(), "mpi", hosts, full=True))
        mpi_communicators.host_of = one_host
    return made


@contextmanager
def room(full: bool) -> Iterator[None]:
    """Let /dev/shm look full while Communicators ask."""
    real = host_memory._free_shared_memory
    if full:
        host_memory._free_shared_memory = lambda: 0
    try:
        yield
    finally:
        host_memory._free_shared_memory = real


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


def cut(rng: np.random.Generator, nbytes: int) -> tuple[str, dict]:
    """Return a way to cut a model of so many bytes, by name: 1 B to whole, per tensor, auto; overlap or not."""
    size = int(np.exp(rng.uniform(0, np.log(nbytes + 1))))
    every: dict[str, dict] = {
        "1 B": {"bucket_size": 1},
        "drawn": {"bucket_size": size},
        "first": {"bucket_size": size, "first_bucket_size": max(1, size // 3)},
        "split": {"bucket_size": size, "split_tensors": True, "first_bucket_size": max(1, size // 3)},
        "whole": {"bucket_size": nbytes},
        "per tensor": {"use_bucketing": False},
        "auto": {"bucket_size": "auto"},
    }
    name, overlap = list(every)[rng.integers(len(every))], bool(rng.integers(2))
    return f"{name}{', overlap' if overlap else ''}", {**every[name], "overlap": overlap}


def mean_of(gradients: Gradients, parameters: list, hosts: tuple) -> list[bytes]:
    """Return the bits of each parameter's mean in the documented order; who has no gradient counts as zero."""
    rows = [
        [np.zeros(shape, dtype) if own is None else own for own, (shape, dtype) in zip(mine, parameters, strict=True)]
        for mine in gradients
    ]
    return [np.asarray(folded(list(column), "mean", hosts)).tobytes() for column in zip(*rows, strict=True)]


def require_bits(way: Way, parameters: list, order: list[int], gradients: Gradients, options: dict, what: str) -> None:
    """Synchronise a model in some steps, and require the mean's bits after each."""
    named = [(f"p{n}", np.zeros(shape, dtype)) for n, (shape, dtype) in enumerate(parameters)]
    model, sync = TellingModel(named), Synchronizer(way.comm, **options)
    expected = mean_of(gradients, parameters, way.hosts)
    for step in range(AUTO_STEPS if options.get("bucket_size") == "auto" else STEPS):
        model.backward({f"p{n}": gradients[way.comm.rank][n] for n in order})
        sync.sync_gradients(model)
        assert model.gradient_bits() == expected, f"{what}, {parameters}, {way.name}, {options}, step {step}"


def main() -> None:
    layouts, seed = int(sys.argv[1]), int(sys.argv[2])
    try_sizes_at_once()
    all_ways = ways()
    compared = {"ways": dict.fromkeys((way.name for way in all_ways), 0), "cuts": Counter(), "sums": Counter()}
    folds = {"NumPy": None, "device": DeviceFold(cpu_device("cpu"))}
    for number in range(layouts):
        rng = np.random.default_rng([seed, number])
        parameters, gradients = draw(rng, all_ways[0].comm.size)
        nbytes = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in parameters)
        order = [int(n) for n in rng.permutation(len(parameters))]
        way, (name, options) = all_ways[rng.integers(len(all_ways))], cut(rng, nbytes)
        summing = str(rng.choice(list(folds)))
        way.comm.fold_with(folds[summing])
        with room(way.full):
            require_bits(way, parameters, order, gradients, options, f"seed {seed}, layout {number}")
        compared["ways"][way.name] += 1
        compared["cuts"][name] += 1
        compared["sums"][summing] += 1
    if all_ways[0].comm.rank == 0:
        print(json.dumps(compared))
    for way in all_ways:
        way.comm.finalize()


if __name__ == "__main__":
    run(main)
