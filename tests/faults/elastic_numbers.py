"""The parameters that a run which lost ranks has to end with: its steps computed again, on one rank."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from clcomm import Communicator
from clcomm.engine import Tensor
from clcomm.sync.sampler import DistributedSampler
from tests.faults.elastic_log import Ends
from training.console import make_console
from training.options import TrainingOptions
from training.session import Session


def replayed(options: TrainingOptions, steps: list[tuple[int, dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Return the parameters after steps of `examples.mnist`, bit for bit.

    Each rank's batch is a backward of its own, and gradients are added in the order of ranks: rounded otherwise, a unit
    close to ReLU's edge is sooner or later on its other side, and parameters that were 1e-7 apart are 1e-2 apart.
    """
    session = Session(options, comm := Communicator(transport="solo"), console=make_console(comm))
    trainer, train, parts = session.trainer, session.splits.train, session.parts
    for ranks, place in steps:
        trainer.optimizer.lr, gradients = place["lr"], []
        for rank in range(ranks):
            sampler = DistributedSampler(len(train), rank, ranks, seed=options.seed, pad=options.uneven_inputs == "pad")
            sampler.set_epoch(place["epoch"])
            sampler.leave_out(place["done"])
            images, labels = train.batch(sampler.batches(options.batch_size)[place["batch"]])
            parts.forward_backward(*parts.prepare(images, labels), 1.0)
            gradients.append([each.grad.numpy() for each in parts.model.parameters()])
            trainer.optimizer.zero_grad()
        for parameter, *ours in zip(parts.model.parameters(), *gradients, strict=True):
            parameter.grad = Tensor(reduce(np.add, ours) / np.float32(ranks), parameter.device)
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
