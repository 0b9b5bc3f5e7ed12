"""A policy's exchange that a lost rank breaks: what survivors go on from."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator
from tests.sync.test_policies import POLICIES, flat_of, one_step, settings_of, train


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exchange_that_a_lost_rank_breaks_changes_nothing_that_is_kept(comm, policy, monkeypatch):
    """The rank's own step has moved its parameters; anchors, momentum, what is unsent and the count are as before."""
    period = int(settings_of(policy)[1]["h"])
    model, sync, optimizer = train(comm, policy, 2 * period - 1)
    before = sync.state_dict(model)

    def lost(*_, out=None, **__):
        if out is not None:
            out[...] = 7
        raise ConnectionError

    for name in ("all_reduce", "all_gather", "all_to_all", "all_reduce_async", "all_gather_async"):
        monkeypatch.setattr(Communicator, name, lost)
    with pytest.raises(ConnectionError):
        one_step(comm, model, sync, optimizer, 2 * period - 1)
    after = sync.state_dict(model)
    assert before.keys() == after.keys()
    assert before.pop("parameters").tobytes() != after.pop("parameters").tobytes()
    assert all(array.tobytes() == after[name].tobytes() for name, array in before.items())
    everyone = flat_of(model)
    assert np.isfinite(everyone).all() and np.abs(everyone).max() < 7
