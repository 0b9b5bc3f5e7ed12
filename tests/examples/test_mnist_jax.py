"""examples.mnist_jax as a user runs it: it learns, with the same accuracy at any bucket size."""

from __future__ import annotations

import pytest

from tests.examples.test_examples import launch, run

for library in ("jax", "optax", "sklearn"):
    pytest.importorskip(library, reason=f"{library} is not installed; pip install -e '.[jax,digits]'")


def test_the_network_learns_the_digits_with_the_same_accuracy_at_any_bucket_size() -> None:
    found = []
    for size in ("1KiB", "1MiB"):
        output = run("examples.mnist_jax", "--data", "digits", "--epochs", "4", "--bucket-size", size, ranks=2)
        found.append([line.rpartition(" ")[2] for line in output.splitlines() if "accuracy" in line])
    assert len(found[0]) == 4 and found[0] == found[1] and float(found[0][-1].strip("%")) > 80


def test_another_bucket_size_is_refused_in_one_line() -> None:
    done = launch("examples.mnist_jax", "--data", "digits", "--bucket-size", "many", ranks=2)
    assert done.returncode == 2 and done.stderr.startswith("clcomm: bucket_size: ") and done.stderr.count("\n") == 1
