"""The parameters that a run which lost ranks has to end with: its steps computed again, on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.sampler import DistributedSampler
from tests.faults.elastic_log import Ends
from training.console import make_console
from training.options import TrainingOptions
from training.session import Session


def replayed(options: TrainingOptions, steps: list[tuple[int, dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Return the parameters after steps of `examples.mnist`, each on the samples of all its ranks together."""
    session = Session(options, comm := Communicator(transport="solo"), console=make_console(comm))
    trainer, train, parts = session.trainer, session.splits.train, session.parts
    for ranks, place in steps:
        indices = []
        for rank in range(ranks):
            sampler = DistributedSampler(len(train), rank, ranks, seed=options.seed, pad=options.uneven_inputs == "pad")
            sampler.set_epoch(place["epoch"])
            sampler.leave_out(place["done"])
            indices += [*sampler.batches(options.batch_size)[place["batch"] : place["batch"] + 1]]
        images, labels = train.batch(np.concatenate(indices))
        trainer.optimizer.lr = place["lr"]
        parts.forward_backward(*parts.prepare(images, labels), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    return parts.model.state_dict()


def difference(ends: Ends, expected: dict[str, np.ndarray]) -> float:
    """Return the largest difference of a survivor's parameters from the expected ones, beside the largest of these."""
    largest = max(float(np.abs(value).max()) for value in expected.values())
    return max(
        float(np.abs(np.asarray(value, np.float64) - expected[name]).max()) / largest
        for parameters in ends.parameters
        for name, value in parameters.items()
    )
