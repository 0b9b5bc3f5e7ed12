"""The course both systems run, and that both run it alike."""

from __future__ import annotations

import argparse
import sys

import numpy as np
import pytest

from benchmarks.time_to_accuracy import __main__ as program
from benchmarks.time_to_accuracy import course
from clcomm.base.errors import LaunchError
from training.data.datasets import load_synthetic


def options(**changed):
    given = {"model": "mlp", "data": "synthetic", "batch_size": 32, "target": 0.98, "every": 5, "ranks": 1}
    return argparse.Namespace(**{**given, **changed})


def test_training_ends_at_the_first_look_that_reaches_the_target():
    loader, _ = course.loaders(options(), load_synthetic(640, 64), 0, 1)
    rates, looks = [], iter([0.1, 0.97, 0.98, 1.0])
    result = course.train(options(), loader, lambda images, labels, lr: rates.append(lr), lambda: next(looks))
    assert result == {"steps": 15, "accuracy": 0.98}
    assert len(rates) == 15 and np.all(np.diff(rates) > 0), "the learning rate warms up"


def test_training_that_never_gets_there_ends_too():
    loader, _ = course.loaders(options(), load_synthetic(64, 64), 0, 1)
    result = course.train(options(every=4), loader, lambda *batch: None, lambda: 0.5)
    assert result == {"steps": 20, "accuracy": 0.5}


def test_both_systems_take_the_same_course():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    given = options(target=0.7)
    ours, ddp = program.start_ours(given), program.start_ddp(given)
    assert ours["steps"] == ddp["steps"] and ours["accuracy"] >= 0.7
    assert ours["accuracy"] == pytest.approx(ddp["accuracy"], abs=0.01)


def test_a_worker_that_fails_is_reported():
    with pytest.raises(LaunchError, match=r"exit code 3:\nno such luck"):
        program._result(
            [program._popen([sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"])]
        )
    with pytest.raises(LaunchError, match="expected one line of results, got 0"):
        program._result([program._popen([sys.executable, "-c", "pass"])])
