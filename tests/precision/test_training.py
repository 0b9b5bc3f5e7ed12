"""Parameters stored in 16 bits train with the bits of two models: one in float32, one with its rounded values."""

from __future__ import annotations

import random

import numpy as np
import pytest

from clcomm import clip_grad_norm
from models import MLP, ConvNet
from tests.precision.jobs import KINDS, PRECISIONS, Job, TwoModels
from tests.training.trainers import assert_same_bits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_train_as_a_float32_model_does(comm, kind, precision):
    expected = TwoModels(comm, kind, precision)
    states = expected.run(4, micro_batches=1 + len(kind) % 2)
    for sharded in (False, True):
        job = Job(comm, kind, sharded, precision=precision)
        assert_same_bits(job.run(4, micro_batches=1 + len(kind) % 2), states)
        masters = job.optimizer.state_dict()["master"].view(np.uint8)
        layout = job.model.flat_space().layout
        for name, values in expected.model.state_dict().items():
            assert layout.view(masters, name).tobytes() == values.tobytes()
