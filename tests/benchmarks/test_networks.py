"""What GPT and ResNet are tested by in benchmarks.networks, and that both systems train alike."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.networks import course, worker
from benchmarks.networks.workload import batches_of, read, write
from benchmarks.workers import Job


def test_a_test_takes_all_batches_together():
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((3, 2, 5)), rng.integers(0, 5, (3, 2))) for _ in range(4)]
    found = worker.tested(lambda inputs: inputs, batches)
    logits, labels = (
        np.concatenate([x.reshape(-1, 5) for x, _ in batches]),
        np.concatenate([y.ravel() for _, y in batches]),
    )
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found["loss"] == pytest.approx(-np.log(chances[np.arange(24), labels]).mean())
    assert found["accuracy"] == (chances.argmax(1) == labels).mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_both_systems_take_the_same_course(model, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    write(tmp_path, model, "small", 1, 3, 4, "synthetic", 8)
    assert read(tmp_path).network == model and len(batches_of(tmp_path, "train0", 4)) == 3
    given = ["--folder", str(tmp_path), "--batch", "4"]
    with Job("benchmarks.networks.native", *given) as ours, Job("benchmarks.networks.ddp", *given, mpi=False) as theirs:
        tests = course.course({course.OURS: ours, course.PYTORCH: theirs}, 3, 2)
    assert [steps for steps, _ in tests] == [1, 3]
    for _, found in tests:
        assert found[course.OURS]["loss"] == pytest.approx(found[course.PYTORCH]["loss"], rel=1e-3)
    assert course.apart("gpt", tests[-1][1]) < 0.1
