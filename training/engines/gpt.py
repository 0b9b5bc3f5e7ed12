"""The parts of a run that trains a GPT, on the native engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from clcomm.engine import Device
from models import GPT
from models.gpt import next_token_loss
from training.engines.parts import Parts, native_parts, rehearsal_of


def gpt_parts(device: Device, seed: int, vocabulary: int, context: int, **settings: Any) -> Parts:
    """Return the parts of a GPT, for batches of tokens [N, context] and as many that follow them.

    Args:
        device: where it computes.
        seed: of the initial values.
        vocabulary, context, settings: the model's.
    """

    def make(on: Device, seed: int = 0) -> GPT:
        return GPT(vocabulary, context, **settings, device=on, seed=seed)

    def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.zeros((size, context), np.int32)
        return tokens, tokens

    return replace(
        native_parts(make(device, seed), next_token_loss, device),
        rehearse=rehearsal_of(device, make, batch_of, next_token_loss),
    )
