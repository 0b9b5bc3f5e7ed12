"""The parts of a run whose model is in stages on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clcomm.engine import Device, Tensor
from clcomm.engine.nn.module import evaluating
from clcomm.parallel.pipeline import Pipeline
from training.engines.parts import Parts, make_native_optimizer
from training.engines.rehearsal import Rehearsal

#: The label of results, which the last stage's rank sends to the others.
RESULTS = "results"


class _Loss(NamedTuple):
    """A batch's mean loss, which every rank has."""

    value: float

    def item(self) -> float:
        return self.value


def pipeline_parts(pipeline: Pipeline, loss_fn: Callable[[Any, Any], Tensor], device: Device) -> Parts:
    """Return the parts of a pipeline's rank; forward, backward and prediction are collective over the stages.

    Kernels' share of a step is left out: the rest of it is not Python and launches alone, but waits for stages too.
    """
    module = pipeline.module
    module.flat_space()

    def forward_backward(inputs: np.ndarray, targets: np.ndarray, weight: float = 1.0) -> _Loss:
        return _Loss(pipeline.step(inputs, targets, weight=weight))

    return Parts(
        model=module,
        loss_fn=loss_fn,
        forward_backward=forward_backward,
        make_optimizer=lambda name, lr, **settings: make_native_optimizer(module, name, lr, **settings),
        prepare=lambda inputs, targets: (inputs, targets),
        predict=_Prediction(pipeline),
        device=f"native engine on {device.kind} {device.name}",
        opencl=device,
        pipeline=pipeline,
    )


class _Prediction:
    """Tokens [N, T] -> logits [N, T, classes] on every rank.

    Batches are filled up to equal micro-batches, and shorter windows to the longest so far, as causal attention allows:
    each new shape would open channels between the stages.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline, self._longest = pipeline, 0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        pipeline = self._pipeline
        (rows, length), parts = tokens.shape, pipeline.schedule.micro_batches
        self._longest = max(self._longest, length)
        filled = np.zeros((-(-rows // parts) * parts, self._longest), np.int32)
        filled[:rows, :length] = tokens
        with evaluating(pipeline.module):
            found = pipeline.forward(filled)
        last, comm = pipeline.schedule.rank_of(pipeline.schedule.stages - 1), pipeline.comm
        shape = comm.broadcast_object(None if found is None else found.shape, last, label=RESULTS)
        logits = np.empty(shape, np.float32) if found is None else found.numpy().copy()
        return comm.broadcast(logits, last, label=RESULTS)[:rows, :length]


def rehearsed_parts(rehearse: Callable[..., Rehearsal], micro_batches: int) -> Callable[..., Rehearsal]:
    """Return a `rehearse` of Parts for the parts of each batch."""

    def rehearse_parts(sizes: Sequence[int], *arguments: Any) -> Rehearsal:
        return rehearse([-(-size // micro_batches) for size in sizes], *arguments)

    return rehearse_parts
