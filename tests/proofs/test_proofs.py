"""What is promised of synchronisation on any number of ranks, by drawn cases: a sample here, all in `make proofs`.

CLCOMM_PROOF_LAYOUTS: models drawn for each number of ranks. CLCOMM_PROOF_SHARDED: networks drawn for all of them.
CLCOMM_PROOF_FLIPS: bits that are flipped on each number of ranks.
CLCOMM_PROOF_ARRIVALS: synchronisations in a row.
CLCOMM_PROOF_SEED: what they are drawn from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from clcomm.base.schedules import ALGORITHMS
from clcomm.comm.costs.forecast import traffic
from tests.faults.launch import ROOT, memory_environment, mpiexec
from tests.proofs import hangs

LAYOUTS = int(os.environ.get("CLCOMM_PROOF_LAYOUTS", "0"))
SHARDED = int(os.environ.get("CLCOMM_PROOF_SHARDED", "0"))
FLIPS = int(os.environ.get("CLCOMM_PROOF_FLIPS", "0"))
ARRIVALS = int(os.environ.get("CLCOMM_PROOF_ARRIVALS", "100"))
SEED = os.environ.get("CLCOMM_PROOF_SEED", "0")
#: Models drawn in the sample, by the number of ranks: more ranks than cores take their time.
SAMPLE = {2: 16, 3: 8, 4: 6, 5: 3, 8: 2}
#: More than any of it takes: what a hang is told by.
LIMIT_S = 240 + LAYOUTS * 8 + SHARDED * 20 + FLIPS * 2 + ARRIVALS / 20
SPARE_BYTES = 1 << 20


def on_ranks(ranks: int, module: str, count: int, *options: str) -> str:
    """Run a module of this folder under mpiexec, and return what it printed."""
    command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", f"tests.proofs.{module}", str(count), SEED, *options]
    ended = subprocess.run(
        command, cwd=ROOT, env=memory_environment(), capture_output=True, text=True, timeout=LIMIT_S,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("ranks", SAMPLE)
def test_the_bits_of_drawn_models_are_those_of_the_documented_order(ranks):
    layouts = LAYOUTS or SAMPLE[ranks]
    compared = json.loads(on_ranks(ranks, "bits", layouts))
    ways = {"shared", "mpi", "no room in shared memory"}
    ways |= {"two hosts", "two hosts without room"} if ranks > 2 else set()
    assert compared["ways"].keys() == ways
    assert sum(compared["ways"].values()) == sum(compared["cuts"].values()) == layouts
    if layouts >= 1000:
        assert compared["sums"]["device"] > layouts // 3
        assert len(compared["cuts"]) == 14 and min(compared["ways"].values()) > layouts // 8


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("words", [(), ("torch",)], ids=str)
def test_drawn_networks_with_logical_shards_have_the_same_bits_on_any_number_of_ranks(words):
    if words:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    ranks, cases = (18, SHARDED) if SHARDED else (4, 5 if words else 3)
    found = json.loads(on_ranks(ranks, "shards", cases, *words))
    assert found["differ"] == []
    assert found["compared"] == {str(count): cases for count in (2, 3, 4, 8) if count <= ranks}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("words", [(), ("torch",)], ids=str)
def test_ranks_that_add_their_own_shards_up_first_are_found(words):
    if words:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    found = json.loads(on_ranks(3, "shards", 1, "planted", *words))
    assert found["differ"] and found["compared"] == {"2": 1, "3": 1}


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("ranks", [3, 2])
def test_audits_name_the_rank_step_and_parameter_of_flipped_bits_and_nothing_else(ranks):
    flips = FLIPS or 9
    found = json.loads(on_ranks(ranks, "audit", flips))
    assert found["wrong"] == []
    assert sum(found["totals"].values()) == flips
    assert found["totals"]["named"] >= flips // 2


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("ranks", range(2, 10))
def test_messages_and_bytes_of_each_algorithm_equal_its_formula(ranks):
    sent = json.loads(on_ranks(ranks, "messages", 0))
    assert {name: tuple(counts) for name, counts in sent.items()} == {
        f"{algorithm} {size}": (expected.messages, expected.volume * size * 4)
        for algorithm in ALGORITHMS
        for size in (0, 1, 1000, 100_003)
        for expected in [traffic(algorithm, ranks)]
    }


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize(("ranks", "sums"), [(4, "device"), (4, "numpy"), (2, "device")])
def test_ranks_that_come_at_random_times_leave_no_trace(ranks, sums):
    grown = json.loads(on_ranks(ranks, "arrivals", ARRIVALS, sums))
    assert len(grown) == ranks
    for rank, (memory, mapped, descriptors) in enumerate(grown):
        assert memory < SPARE_BYTES, f"rank {rank} grew by {memory} bytes"
        assert mapped <= 0 and descriptors <= 0, f"rank {rank}: {mapped} files in /dev/shm, {descriptors} descriptors"


@pytest.mark.timeout(hangs.LIMIT_S * 2)
@pytest.mark.parametrize("at", range(len(hangs.APIS) * len(hangs.FAULTS)))
def test_pytorchs_analyser_names_what_clcomm_names_of_a_hang(torch, at):
    case = hangs.draw(at + 1, int(SEED))[at]
    own, other = hangs.verdicts(case)
    assert isinstance(own, hangs.Verdict) and own.is_that_of(other), (case, own, other)
