"""The hash on the device equals the host's."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm.base.host.arrays import hash_words
from clcomm.engine import Linear
from clcomm.engine.codec import hash_buffer


@pytest.mark.parametrize("words", [1, 2, 63, 64, 4097, 100_003])
def test_is_that_of_the_host(device, words):
    data = np.random.default_rng(words).integers(0, 256, 8 * words, np.uint8)
    assert hash_buffer(device, device.upload(data), data.size) == hash_words(data)


def test_of_a_module_is_that_of_its_parameters(device):
    space = Linear(7, 3, device=device).flat_space()
    params = np.empty(space.layout.span, np.uint8)
    device.read(space.params, params)
    assert hash_buffer(device, space.params, space.layout.span) == hash_words(params)
