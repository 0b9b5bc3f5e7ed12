"""The parts of a run that trains a GPT, on the native engine; tensor-parallel ranks may divide its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from clcomm.communicator import Communicator
from clcomm.engine import Device
from clcomm.parallel import (
    ColumnParallel,
    HeadsParallel,
    RowParallel,
    VocabularyParallel,
    VocabularyParallelCrossEntropyLoss,
    parallelize_module,
)
from clcomm.parallel.tensor_parallel.styles import Style
from models import GPT
from models.gpt import next_token_loss
from training.engines.parts import Parts, native_parts, rehearsal_of


def gpt_parts(
    device: Device, seed: int, vocabulary: int, context: int, tp: Communicator | None = None, **settings: Any
) -> Parts:
    """Return the parts of a GPT, for batches of tokens [N, context] and as many that follow them.

    Args:
        device: where it computes.
        seed: of the initial values.
        vocabulary, context, settings: the model's.
        tp: the ranks that divide its layers, and its vocabulary where their number divides that; collective then.
    """

    def make(on: Device, seed: int = 0) -> GPT:
        return GPT(vocabulary, context, **settings, device=on, seed=seed)

    def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((size, context), np.int32)
        return tokens, tokens

    model, rehearse = make(device, seed), rehearsal_of(device, make, batch_of, next_token_loss)
    if tp is None:
        return replace(native_parts(model, next_token_loss, device), rehearse=rehearse)
    divides_vocabulary = vocabulary % tp.size == 0
    parallelize_module(model, tp, division(divides_vocabulary))
    if not divides_vocabulary:
        return replace(native_parts(model, next_token_loss, device), rehearse=rehearse)
    parts = native_parts(model, VocabularyParallelCrossEntropyLoss(tp), device)
    return replace(parts, predict=_gathered(parts.predict, tp), rehearse=rehearse)


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
