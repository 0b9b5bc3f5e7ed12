"""A rank of the test: trains an MLP for some steps with several bucket sizes, and without ranks, and compares bits.

Every rank can compute all ranks' gradients, so it knows what the mean has to be in any order; and what it has to be
where ranks run out of batches, or gradients are clipped. Rank 0 prints as JSON what it found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from clcomm import Communicator, Synchronizer, clip_grad_norm
from tests.helpers import Recorder, try_sizes_at_once
from tests.numpy_models import Model

STEPS, BATCH, RATE = 5, 16, np.float32(0.1)
SHAPES = {"w1": (64, 300), "b1": (300,), "w2": (300, 10), "b2": (10,)}
#: None: tensor by tensor. The weights are 76,800 and 12,000 bytes.
BUCKET_SIZES = (1, "13KiB", "1MiB", None, "auto")
MAX_NORM = 0.5


def initial(seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return Model((name, (0.1 * rng.standard_normal(shape)).astype(np.float32)) for name, shape in SHAPES.items())


def gradients(model: Model, rank: int, step: int) -> dict[str, np.ndarray]:
    """Return the gradients of a mean squared error on the batch of one rank in one step."""
    rng = np.random.default_rng([7, rank, step])
    x, y = rng.standard_normal((BATCH, 64), np.float32), rng.standard_normal((BATCH, 10), np.float32)
    w2 = model["w2"].data
    hidden = np.maximum(x @ model["w1"].data + model["b1"].data, 0)
    error = (hidden @ w2 + model["b2"].data - y) / np.float32(BATCH)
    back = (error @ w2.T) * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def train(model: Model, mean_gradients: Callable[[int], dict[str, np.ndarray]]) -> list[bytes]:
    for step in range(STEPS):
        means = mean_gradients(step)
        for name, parameter in model.parameters.items():
            parameter.data -= RATE * means[name]
    return model.bits()


def trained_on_ranks(comm: Communicator, bucket_size: int | str | None) -> list[bytes]:
    model = initial(seed=comm.rank)  # other values on each rank, until rank 0's are broadcast
    sync = Synchronizer(comm, bucket_size=bucket_size, use_bucketing=bucket_size is not None)
    sync.broadcast_parameters(model)

    def mean_gradients(step: int) -> dict[str, np.ndarray]:
        for name, gradient in gradients(model, comm.rank, step).items():
            model[name].grad = gradient
        sync.sync_gradients(model)
        return {name: parameter.grad for name, parameter in model.parameters.items()}

    return train(model, mean_gradients)


def trained_alone(hosts: Sequence[Sequence[int]]) -> list[bytes]:
    """Train with all ranks' gradients, added within each host first and then host by host."""
    model = initial(seed=0)
    size = sum(map(len, hosts))

    def mean_gradients(step: int) -> dict[str, np.ndarray]:
        own = [gradients(model, rank, step) for rank in range(size)]
        return {
            name: _sum([_sum([own[r][name] for r in ranks]) for ranks in hosts]) / np.float32(size) for name in SHAPES
        }

    return train(model, mean_gradients)


def _sum(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0].copy()
    for array in arrays[1:]:
        total = total + array
    return total


def joins(comm: Communicator) -> bool:
    """Let rank r run out of batches after r + 1 steps, and say whether each mean was that over all samples left."""
    model, sync = Model([("w", np.zeros(1000, np.float32))]), Synchronizer(comm)
    means: list[np.ndarray] = []
    with sync.join(model, lambda: means.append(model["w"].grad.copy())):
        for _ in range(comm.rank + 1):
            model["w"].grad = np.full(1000, comm.rank + 1, np.float32)
            sync.sync_gradients(model, samples=comm.rank + 1)
            means.append(model["w"].grad.copy())
    samples = np.arange(1.0, comm.size + 1)
    expected = [(samples[step:] ** 2).sum() / samples[step:].sum() for step in range(comm.size)]
    return len(means) == comm.size and all(
        np.allclose(mean, value, rtol=1e-6, atol=0) for mean, value in zip(means, expected, strict=True)
    )


def clips(comm: Communicator, hosts: Sequence[Sequence[int]]) -> bool:
    """Clip a mean, and say whether its norm before and the gradients after are those of the formula."""
    model, sync = initial(seed=0), Synchronizer(comm)
    own = [gradients(model, rank, 0) for rank in range(comm.size)]
    for name, gradient in own[comm.rank].items():
        model[name].grad = gradient.copy()
    sync.sync_gradients(model)
    norm = clip_grad_norm(sync, model, MAX_NORM)
    means = {n: _sum([_sum([own[r][n] for r in ranks]) for ranks in hosts]).astype(float) / comm.size for n in SHAPES}
    expected = np.sqrt(sum((mean**2).sum() for mean in means.values()))
    factor = MAX_NORM / (expected + 1e-6)
    return bool(factor < 1 and np.isclose(norm, expected, rtol=1e-6)) and all(
        np.allclose(model[name].grad, factor * mean, rtol=1e-5, atol=1e-9) for name, mean in means.items()
    )


def main() -> None:
    try_sizes_at_once()
    recorder = Recorder()
    comm = Communicator(observers=[recorder])
    places = comm.all_gather_object(comm.host)
    hosts = [[rank for rank, host in enumerate(places) if host == index] for index in range(comm.hosts)]
    by_bucket_size = [trained_on_ranks(comm, bucket_size) for bucket_size in BUCKET_SIZES]
    transports = {event.transport for event in recorder.events if event.label == "gradients"}
    plain = Communicator(transport="mpi")
    found = {
        "hosts": hosts,
        "transports": sorted(transports),
        "in_documented_order": [bits == trained_alone(hosts) for bits in by_bucket_size],
        "in_rank_order_through_mpi": trained_on_ranks(plain, "1MiB") == trained_alone([range(comm.size)]),
        "joins": joins(comm),
        "clips": clips(comm, hosts),
        "orders_differ": trained_alone(hosts) != trained_alone([range(comm.size)]),
    }
    everyone = comm.all_gather_object(found)
    if comm.rank == 0:
        print(json.dumps({**found, "ranks_agree": all(theirs == found for theirs in everyone)}))
    plain.finalize()
    comm.finalize()


if __name__ == "__main__":
    main()
