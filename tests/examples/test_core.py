"""examples/core.py: replicas are equal, and equal to one rank's training on the whole batch; counts by formulas."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

from tests.examples.test_examples import run
from tests.faults.launch import ROOT, clean_environment, mpiexec

STEPS, BATCH, LAYERS = 40, 96, (64, 128, 128, 128, 10)
BYTES = [4 * size for inputs, outputs in pairwise(LAYERS) for size in (inputs * outputs, outputs)]
SOURCE = ROOT / "examples" / "core.py"


def number_of_buckets(bucket_size: int) -> int:
    """Return how many calls the gradients need if each call takes neighbours of up to so many bytes in all."""
    count, filled = 0, bucket_size + 1
    for nbytes in BYTES:
        count, filled = (count + 1, nbytes) if filled + nbytes > bucket_size else (count, filled + nbytes)
    return count


def test_it_is_short_and_needs_mpi4py_and_numpy_alone() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) <= 300 and text.count("# IDEA ") == 3
    nodes = list(ast.walk(ast.parse(text)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name not in sys.stdlib_module_names} == {"mpi4py", "numpy"}
    assert "(examples/core.py)" in (ROOT / "README.md").read_text()


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("bucket_size", [0, 40_000, 1 << 20])
def test_the_ranks_train_as_one_on_the_whole_batch(bucket_size: int) -> None:
    MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py found no MPI library")
    from examples import core

    comm = core.Communicator()
    network, losses = core.train(comm, bucket_size)
    bits = b"".join(parameter.tobytes() for parameter in network.parameters)
    assert MPI.COMM_WORLD.allgather(bits) == [bits] * comm.size
    count = number_of_buckets(bucket_size)
    assert (comm.calls["all_reduce"], comm.nbytes["all_reduce"]) == (STEPS * count, STEPS * sum(BYTES))
    assert (comm.calls["broadcast"], comm.nbytes["broadcast"]) == (len(BYTES), sum(BYTES))
    alone, whole = core.train(core.Communicator(MPI.COMM_SELF), 0) if comm.rank == 0 else (None, None)
    parameters, whole = MPI.COMM_WORLD.bcast((alone and alone.parameters, whole))
    for own, reference in zip(network.parameters, parameters, strict=True):
        np.testing.assert_allclose(own, reference, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(np.mean(MPI.COMM_WORLD.allgather(losses), 0), whole, rtol=1e-4)
    assert whole[-1] < 0.8 * whole[0]


def test_gradients_are_those_of_central_differences() -> None:
    pytest.importorskip("mpi4py.MPI", reason="mpi4py found no MPI library")
    from examples import core

    network = core.Network(seed=1)
    network.parameters = [parameter.astype(np.float64) for parameter in network.parameters]
    network.gradients = [np.zeros_like(parameter) for parameter in network.parameters]
    random = np.random.default_rng(2)
    x, labels = random.standard_normal((5, LAYERS[0])), random.integers(0, LAYERS[-1], 5)
    network.backward(x, labels)
    gradients = [gradient.copy() for gradient in network.gradients]
    for parameter, gradient in zip(network.parameters, gradients, strict=True):
        where = tuple(random.integers(0, length) for length in parameter.shape)
        losses = []
        for shift in (1e-5, -2e-5, 1e-5):
            parameter[where] += shift
            losses.append(network.backward(x, labels))
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[where], rel=1e-4, abs=1e-8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_table_is_what_the_formulas_say(ranks: int) -> None:
    out = run("examples.core", ranks=ranks)
    figures = {line[:22].strip(): line[22:].split() for line in out.splitlines()[2:6]}
    calls = STEPS, STEPS * len(BYTES)
    total = f"{STEPS * sum(BYTES):,}"
    assert figures["Total bytes sent"] == [total, total, "1"]
    assert figures["Total all-reduce calls"] == [*map("{:,}".format, calls), "0.125"]
    assert figures["Average bytes/call"] == [*(f"{STEPS * sum(BYTES) / each:,.0f}" for each in calls), "8"]
    assert float(figures["Milliseconds in them"][0].replace(",", "")) >= 0
    assert f"{ranks} ranks, {STEPS} steps" in out and "replicas equal: True" in out
    assert len(re.findall(r"\b[0-9a-f]{16}\b", out)) == 2


def test_ranks_that_do_not_divide_the_batch_are_refused_in_one_line() -> None:
    ended = subprocess.run(
        [mpiexec(), "-n", "5", sys.executable, "-m", "examples.core"], cwd=ROOT, env=clean_environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [line for line in ended.stderr.splitlines() if line.startswith("core:")]
    assert lines == ["core: expected a number of ranks that divides the batch of 96, got 5"] and ended.returncode
