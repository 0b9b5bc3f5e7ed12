"""What a setting's ranks train on: samples of each replica and step, the parts they are cut into, their weights."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from tests.pairs.factors import Setting, mesh_of
from tests.pairs.networks import network_of

#: Steps of a training, and the one before which a checkpoint is taken.
STEPS, RESUMED = 4, 2
#: With a replayed step: it runs, is recorded, is compared and is replayed.
REPLAYED_STEPS = 6
#: The step in which replica 0's gradients overflow.
OVERFLOW = 1
#: The largest norm of clipped gradients: below those that occur.
MAX_NORM = 0.2
#: Local SGD averages after so many steps, and policies exchange parameters.
LOCAL_STEPS = 2
POLICIES = {
    "local": f"local:h={LOCAL_STEPS}", "diloco": f"diloco:h={LOCAL_STEPS}",
    "streaming": f"streaming:h={LOCAL_STEPS},fragments=1,bits=32",
}  # fmt: skip

#: Each replica's logical shards.
SHARDS = 2
#: By which the learning rate falls with each step, where it does.
FALL = 0.7
#: The step from which frozen parameters are trained, where they are thawed.
THAWED = RESUMED
#: Where a program edits parameters it clamps them to this after each step, or their averaged gradients to this before;
#: where these are divided between the ranks it multiplies each backward's own gradients by the third.
CLAMP, GRADIENT_CLAMP, FACTOR = 0.25, 0.01, 0.5

#: Where replicas have batches of other sizes.
UNEQUAL = ("samples", "expected", "join")

#: The rows of a step's samples that each replica takes: from, to; None: it has run out of batches.
Shares = list[tuple[int, int] | None]


class Part(NamedTuple):
    """Rows of a replica's own samples, and their weight in its gradient."""

    start: int
    stop: int
    weight: float


def steps_of(setting: Setting) -> int:
    return REPLAYED_STEPS if setting["replay"] == "on" else STEPS


def micro_batches_of(setting: Setting) -> int:
    """Return the micro-batches of a pipeline's step, or 1."""
    return mesh_of(setting).pp


def least_of(setting: Setting) -> int:
    """Return the number of samples that those of a replica are a multiple of."""
    return micro_batches_of(setting) * (1 if setting["batches"] == "1" else 3) * shards_each(setting)


def shards_each(setting: Setting) -> int:
    """Return into how many logical shards a replica's batch is cut."""
    return SHARDS if setting["reduction"] == "shards" else 1


def equal_batch(setting: Setting) -> int:
    """Return the samples of a replica where all have as many."""
    if setting["inputs"] == "balance":
        return 16 * least_of(setting)
    if setting["network"] != "resnet":
        return 2 * least_of(setting)
    # Batch norm of two samples gives their signs, so that a single rounding would move parameters as far as training.
    return least_of(setting) * (8 if setting["inputs"] in UNEQUAL else 4)


def shares_of(setting: Setting, step: int) -> Shares:
    """Return the replicas' rows of a step, where no measurement decides."""
    replicas, size = mesh_of(setting).dp, equal_batch(setting)
    counts = [size] * replicas
    if setting["inputs"] in UNEQUAL:
        counts = [size // 2 * (1 + (rank + 1) % 3) for rank in range(replicas)]
    if "join" in setting["inputs"] and step == steps_of(setting) - 1:
        counts = [0 if rank % 2 else count for rank, count in enumerate(counts)]
    ends = np.cumsum([0, *counts])
    return [(int(start), int(stop)) if stop > start else None for start, stop in itertools.pairwise(ends)]


def samples_of(setting: Setting, step: int, rows: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a step's samples, the same on any rank that asks for them."""
    most = 4 * equal_batch(setting) * mesh_of(setting).dp
    x, y = network_of(setting).batch(np.random.default_rng([17, step]), most)
    return x[slice(*rows)], y[slice(*rows)]


def parts_of(setting: Setting, count: int) -> list[Part]:
    """Return the parts of a replica's samples that have a backward each; all but a pipeline's own micro-batches."""
    parts, unit = 1 if setting["batches"] == "1" else 3, micro_batches_of(setting)
    ends = [unit * round(part * count / unit / parts) for part in range(parts + 1)]
    return [Part(start, stop, (stop - start) / count) for start, stop in itertools.pairwise(ends)]


def weights_of(setting: Setting, shares: Shares) -> list[float]:
    """Return each replica's weight in the mean."""
    counts = [0 if each is None else each[1] - each[0] for each in shares]
    if setting["inputs"] == "join all":
        return [(count > 0) / len(counts) for count in counts]
    return [count / sum(counts) for count in counts]
