"""Parameters stored in 16 bits train with the bits of two models: one in float32, one with its rounded values."""

from __future__ import annotations

import numpy as np
import pytest

from tests.precision.jobs import KINDS, PRECISIONS, Job, TwoModels
from tests.sharded_jobs import cpu, discrete
from tests.training.trainers import assert_same_bits


@pytest.mark.sampled(9)
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


#: What is crossed with 16 bits; the plain run has none of them.
WAYS = [
    {"zero": stage, "make_device": make_device, "bucket_size": size}
    for stage in (1, 2, 3)
    for make_device, size in ((cpu, "4KiB"), (discrete, "1MiB"))
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sharded_updates_have_the_plain_runs_bits(comm, precision, options):
    plain = Job(comm, "adam", False, make_device=options["make_device"], precision=precision)
    sharded = Job(comm, "adam", True, precision=precision, **options)
    assert_same_bits(sharded.run(3), plain.run(3))
    assert_same_bits(sharded.optimizer.state_dict(), plain.optimizer.state_dict())
    sharded.sync.check_replicas(sharded.model)
    # What a program stores is a master from the next step on, and so are the masters of a state.
    state = {name: values * np.float32(0.7) for name, values in plain.model.state_dict().items()}
    for job in (plain, sharded):
        job.model.load_state_dict(state)
    assert_same_bits(sharded.run(2, 3), plain.run(2, 3))
    again = Job(comm, "adam", True, precision=precision, **options)
    again.optimizer.load_state_dict(plain.optimizer.state_dict())
    again.model.load_state_dict(plain.model.state_dict())
    assert_same_bits(again.run(2, 5), plain.run(2, 5))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_state_passes_from_16_bits_to_float32_and_back(comm, precision):
    """Moments go on; the parameters are the model's own, without the masters of another one."""
    narrow, wide = Job(comm, "adam", False, precision=precision), Job(comm, "adam", False, precision="float32")
    narrow.run(3)
    stored = narrow.model.state_dict()
    wide.model.load_state_dict(stored)
    wide.optimizer.load_state_dict(narrow.optimizer.state_dict())
    state = wide.optimizer.state_dict()
    assert "master" not in state and state["steps"] == 3
    assert all((wide.model.state_dict()[name] == values).all() for name, values in stored.items())
    again, moments = Job(comm, "adam", False, precision=precision), narrow.optimizer.state_dict()
    again.model.load_state_dict(stored)
    again.optimizer.load_state_dict(state)
    assert all((again.optimizer.state_dict()[name] == moments[name]).all() for name in ("mean", "square"))
    again.run(1, 3)
    wide.run(1, 3)
    for name, values in wide.model.state_dict().items():
        np.testing.assert_allclose(again.model.state_dict()[name], values, rtol=1e-2, atol=1e-3)
