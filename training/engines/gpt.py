"""The parts of a run that trains a GPT, on the native engine; tensor-parallel ranks may divide its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.engine import Device
from clcomm.parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    VocabularyParallel,
    VocabularyParallelCrossEntropyLoss,
    parallelize_module,
)
from clcomm.parallel.pipeline import Pipeline
from clcomm.parallel.tensor_parallel.styles import Style
from models import GPT
from models.gpt import next_token_loss
from training.engines.parts import Parts, native_parts, rehearsal_of
from training.engines.pipeline_parts import pipeline_parts, rehearsed_parts


class Stages(NamedTuple):
    """The stages of a pipeline: the ranks that have them, the parts of a batch, and a schedule's name."""

    comm: Communicator
    micro_batches: int
    schedule: str


def gpt_parts(
    device: Device, seed: int, vocabulary: int, context: int, tp: Communicator | None = None,
    stages: Stages | None = None, **settings: Any,
) -> Parts:  # fmt: skip
    """Return the parts of a GPT, for batches of tokens [N, context] and as many that follow them.

    Args:
        device: where it computes.
        seed: of the initial values.
        vocabulary, context, settings: the model's.
        tp: the ranks that divide its layers, and its vocabulary where their number divides that; collective then.
        stages: of a pipeline that the layers are cut into; collective then.
    """

    def make(on: Device, seed: int = 0) -> GPT:
        return GPT(vocabulary, context, **settings, device=on, seed=seed)

    def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((size, context), np.int32)
        return tokens, tokens

    model, rehearse, loss_fn = (
        make(device, seed),
        rehearsal_of(device, make, batch_of, next_token_loss),
        next_token_loss,
    )
    divides_vocabulary = tp is not None and vocabulary % tp.size == 0
    if tp is not None:
        parallelize_module(model, tp, division(divides_vocabulary))
        loss_fn = VocabularyParallelCrossEntropyLoss(tp) if divides_vocabulary else loss_fn
    if stages is None:
        parts = native_parts(model, loss_fn, device)
    else:
        pipeline = Pipeline(
            model, stages.comm, loss=loss_fn, micro_batches=stages.micro_batches, schedule=stages.schedule,
            costs=layer_costs(model),
        )  # fmt: skip
        del model  # and with it the other stages' parameters
        parts, rehearse = pipeline_parts(pipeline, loss_fn, device), rehearsed_parts(rehearse, stages.micro_batches)
    predict = _gathered(parts.predict, tp) if tp is not None and divides_vocabulary else parts.predict
    return replace(parts, predict=predict, rehearse=rehearse)


def layer_costs(model: GPT) -> list[float]:
    """Return the cost of each of a GPT's `pipeline_layers()`: the products for a token, an embedding's being none."""
    return [0.0, *(each.parameter_count() for each in model.transformer.h), 0.0, model.lm_head.parameter_count()]


def division(vocabulary: bool) -> dict[str, Style]:
    """Return the plan that divides a GPT's layers between ranks, and its vocabulary if asked to."""
    plan: dict[str, Style] = {
        "transformer.h.*.attn": HeadsParallel("heads"),
        "transformer.h.*.attn.c_attn": ColumnParallel(sections=3),
        "transformer.h.*.mlp.c_fc": ColumnParallel(),
        "transformer.h.*.*.c_proj": RowParallel(),
    }
    return plan | {"transformer.wte": VocabularyParallel(), "lm_head": ColumnParallel()} if vocabulary else plan


def _gathered(predict: Callable[[np.ndarray], np.ndarray], tp: Communicator) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that gives every rank the logits of all."""

    def predict_whole(tokens: np.ndarray) -> np.ndarray:
        return np.concatenate(list(tp.all_gather(predict(tokens), label="logits")), -1)

    return predict_whole
