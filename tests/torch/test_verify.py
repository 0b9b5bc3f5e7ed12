"""`clcomm verify` of drawn trainings that use PyTorch; `python -m tests.proofs.verify` draws more."""

from __future__ import annotations

from tests.faults.launch import mpiexec
from tests.proofs import verify as proof


def test_drawn_trainings_with_pytorch_are_judged_rightly():
    mpiexec()  # skips where there is none
    found = proof.main(8, 3, ["collectives", "ddp", "hvd"], counts=(2,), hang=False)
    assert found == {"mistakes": [8, 8], "right": [8, 8], "others": []}
