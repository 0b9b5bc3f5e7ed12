"""DiLoCo and Streaming DiLoCo beside torchft's: the digits of its tests' fixtures.

Source: https://github.com/meta-pytorch/torchft, commit 7eb7087, test_fixtures, DiLoCoMockedUpdateTest, of which those
with alpha 1, where nothing of other ranks arrives, are refused here. Two parameters of one number each begin at 1 and
lose 2 in each step of every rank; the outer optimizer is SGD with a rate of 2. The first parameter takes its outer
steps at 3, 9, 15, the second at 6 and 12.
"""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Synchronizer
from tests.numpy_models import Model

#: Both parameters after each of 15 steps, by what they are sent ahead of the outer step, and the share that is kept.
TORCHFT = {
    (0, "0"): [
        (-1, -1), (-3, -3), (-11, -5), (-13, -7), (-15, -9), (-17, -23), (-19, -25), (-21, -27), (-35, -29), (-37, -31),
        (-39, -33), (-41, -47), (-43, -49), (-45, -51), (-59, -53),
    ],
    (0, "0.5"): [
        (-1, -1), (-3, -3), (-8, -5), (-10, -7), (-12, -9), (-14, -17), (-16, -19), (-18, -21), (-24.5, -23),
        (-26.5, -25), (-28.5, -27), (-30.5, -32), (-32.5, -34), (-34.5, -36), (-40.25, -38),
    ],
    (1, "0"): [
        (-1, -1), (-3, -3), (-7, -5), (-9, -7), (-11, -9), (-13, -19), (-15, -21), (-17, -23), (-27, -25), (-29, -27),
        (-31, -29), (-33, -39), (-35, -41), (-37, -43), (-47, -45),
    ],
    (1, "0.5"): [
        (-1, -1), (-3, -3), (-6, -5), (-8, -7), (-10, -9), (-12, -15), (-14, -17), (-16, -19), (-21.5, -21),
        (-23.5, -23), (-25.5, -25), (-27.5, -29), (-29.5, -31), (-31.5, -33), (-35.75, -35),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("delay", "alpha"), TORCHFT)
def test_fragments_have_the_digits_of_torchft(comm, delay, alpha):
    model = Model((name, np.ones(1, np.float32)) for name in ("first", "second"))
    policy = f"streaming:h=6,fragments=2,delay={delay},alpha={alpha},lr=2,momentum=0,bits=32"
    sync, found = Synchronizer(comm, policy=policy), []
    for step in range(15):
        for parameter in model.parameters.values():
            parameter.grad = np.full(1, 2, np.float32)
        sync.sync_gradients(model)
        if step == 0:  # torchft counts the delay back from the outer step, this policy forward from the sending
            sync.load_state_dict(model, sync.state_dict(model) | {"steps": np.array(delay)})
        for parameter in model.parameters.values():
            parameter.data -= parameter.grad
        sync.finish_step(model)
        found.append(tuple(float(parameter.data[0]) for parameter in model.parameters.values()))
    assert found == TORCHFT[delay, alpha]
