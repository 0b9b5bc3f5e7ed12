"""A sample of the settings that `make pairs` runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from clcomm import Communicator
from clcomm.engine.random_stream import RandomStream
from tests.faults.launch import ROOT, clean_environment, mpiexec
from tests.helpers import cpu_device
from tests.pairs import page
from tests.pairs.covering import Covering
from tests.pairs.declared import declared
from tests.pairs.factors import FACTORS, pairs, pairs_of, ranks_of, setting_of, why_not
from tests.pairs.outcome import REFUSED, RIGHT, outcome_of
from tests.pairs.search import Findings

#: Every level alone, with what it needs.
LEVELS = [
    {factor: level} | ({"norm": "batch"} if level == "resnet" else {})
    for factor, levels in FACTORS.items()
    for level in levels[1:]
]


def test_the_table_counts_every_pair_and_none_that_is_wrong():
    text = (ROOT / "tests" / "proofs" / "pairs.md").read_text(encoding="utf-8")
    impossible = sum(bool(why_not(dict(pair))) for pair in pairs())
    counts = page.counts_of(text)
    assert {*counts} == {page.RIGHT, page.REFUSED, page.IMPOSSIBLE} and sum(counts.values()) == len([*pairs()])
    assert counts[page.IMPOSSIBLE] == impossible
    refused = [_in_order(cause) for cause in page.refused_of(text) if len(cause) == 2]
    assert len({*refused}) == len(refused) and 0 < len(refused) <= counts[page.REFUSED]
    assert not any(why_not(dict(pair)) for pair in refused)


def test_a_table_read_back_is_what_was_found():
    """A pair that every wrapper refuses in a line of its own is refused; one of a cause that is wrong is wrong."""
    first, second = ("zero", "1"), ("overlap", "on")
    causes = [frozenset({first, second, ("wrapper", level)}) for level in FACTORS["wrapper"]]
    refused = {cause: f"rank 0: sync: no {number} of 'a'" for number, cause in enumerate(causes)}
    possible = {pair for pair in pairs() if not why_not(dict(pair))}
    bad, unseen = (("zero", "2"), ("overlap", "on")), (("zero", "3"), ("overlap", "on"))
    found = Findings({*possible} - {(first, second), bad, unseen}, refused, {frozenset(bad): ""}, 9)
    text = page.page_of(found, seed=3)
    assert "Seed 3, 9 settings." in text and text.count("| `sync: no 0 of 'a'` |") == 1
    counts = page.counts_of(text)
    assert [counts[end] for end in (page.RIGHT, page.REFUSED, page.WRONG, page.UNKNOWN)] == [len(possible) - 3, 1, 1, 1]
    assert {*page.refused_of(text)} == {*causes}


def _in_order(cause):
    return tuple(sorted(cause, key=lambda level: [*FACTORS].index(level[0])))


def test_settings_cover_every_pair_that_may_stand():
    wanted = [pair for pair in pairs() if not why_not(dict(pair))]
    covering, count = Covering(wanted, lambda levels: not why_not(levels), seed=1), 0
    while (setting := covering.next()) is not None:
        assert not why_not(setting)
        count += 1
        for pair in pairs_of(setting):
            covering.missing.pop(pair, None)
    assert len(wanted) > 3500 and 40 < count < 150


@pytest.mark.sampled(None)
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("levels", LEVELS, ids=lambda levels: "-".join(levels.values()).replace(" ", "_"))
def test_every_level_trains_as_one_rank(levels):
    world, setting = Communicator(stall_warning_s=60, timeout_s=120), setting_of(levels)
    if why_not(setting, world.size):
        pytest.skip("needs more ranks")
    found = outcome_of(setting, world)
    assert found.kind == RIGHT, found.text


@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
def test_mended_pairs_train_as_one_rank():
    """Tied over steps of a pipeline, 16 bits averaged, dropout after unequal draws, parts of a sequence again, and a
    Synchronizer in place of another after parameters were thawed.
    """
    world = Communicator(stall_warning_s=60, timeout_s=120)
    for _ in range(world.rank):
        RandomStream.of(cpu_device("cpu")).ticket()
    for levels in (
        {"dp": "1", "pp": "2 gpipe", "batches": "3", "tied": "on"},
        {"dp": "1", "pp": "2 1f1b", "zero": "1", "batches": "3 no_sync", "tied": "on"},
        {"precision": "bf16", "reduction": "local SGD"},
        {"precision": "fp16", "reduction": "local SGD", "optimizer": "adam", "dp": str(world.size)},
        {"precision": "bf16", "reduction": "local SGD", "hosts": "halves", "dp": str(world.size)},
        {"dp": "1", "tp": "2", "dropout": "on"},
        {"dp": "1", "tp": "2 sequence", "dropout": "on", "activations": "recomputed"},
        {"dp": "1", "tp": "2 sequence", "network": "gpt", "activations": "recomputed"},
        {"frozen": "thawed", "overlap": "on"},
        {"frozen": "thawed", "scaler": "on"},
    ):
        found = outcome_of(setting_of(levels), world)
        assert found.kind == RIGHT, f"{levels}: {found.text}"


#: Levels that give no right numbers together, and the argument or call that the line names.
REFUSALS = [
    ({"dp": "1", "pp": "2 1f1b", "tied": "on", "zero": "2"}, "zero: "),
    ({"dp": "1", "pp": "2 1f1b", "tied": "on", "zero": "3"}, "zero: "),
    ({"clip": "on", "reduction": "local SGD"}, "gradients: expected sync_gradients() after the last backward"),
    ({"scaler": "on", "reduction": "local SGD"}, "gradients: expected sync_gradients() after the last backward"),
    ({"inputs": "expected", "reduction": "local SGD"}, "average_parameters: expected no expect_samples()"),
    ({"inputs": "join", "reduction": "local SGD"}, "average_parameters: expected no join()"),
    ({"norm": "sync", "reduction": "local SGD"}, "average_parameters: expected a model without SyncBatchNorm"),
    ({"clip": "on", "reduction": "diloco"}, "clip_grad_norm: expected clcomm.engine.nn.utils.clip_grad_norm_ with"),
    ({"scaler": "on", "reduction": "streaming"}, "sync: expected no loss scaling with policy='streaming'"),
    ({"norm": "sync", "reduction": "adasum"}, "combination='adasum': expected a model without SyncBatchNorm"),
    ({"norm": "sync", "inputs": "join all", "wrapper": "DDP"}, "join: expected a model without SyncBatchNorm"),
    ({"norm": "sync", "inputs": "join", "pp": "2 1f1b"}, "join: expected a model without SyncBatchNorm"),
    ({"norm": "sync", "inputs": "samples", "pp": "2 1f1b"}, "samples: expected them before backward"),
    ({"tp": "2", "compression": "int8"}, "model: expected one that tensor-parallel ranks do not divide with int8"),
    ({"tp": "2", "compression": "topk"}, "model: expected one that tensor-parallel ranks do not divide with topk"),
    ({"tp": "2", "reduction": "adasum"}, "model: expected one that tensor-parallel ranks do not divide with adasum"),
    ({"dp": "1", "tp": "2", "network": "convnet"}, "linear: expected the layer to be called"),
    ({"dp": "1", "pp": "2 1f1b", "optimizer": "adam", "checkpoint": "from one rank"}, "state_dict['names']: expected"),
    ({"dp": "1", "pp": "2 1f1b", "optimizer": "adam", "checkpoint": "to one rank"}, "state_dict['names']: expected"),
    ({"norm": "sync", "reduction": "adasum", "pp": "2 gpipe"}, "combination='adasum': "),
    ({"edits": "gradients", "zero": "1"}, "gradient: expected no change between sync_gradients() and the Distributed"),
    ({"clip": "own", "zero": "1"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"clip": "own", "zero": "2"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"clip": "own", "zero": "1", "reduction": "shards"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"clip": "own", "device": "mixed"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"clip": "own", "tp": "2", "dp": "1"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"clip": "own", "pp": "2 1f1b", "dp": "1"}, "clip_grad_norm_: expected gradients that this rank has"),
    ({"tp": "2", "dp": "1", "device": "mixed"}, "parallelize_module: expected the same on every rank"),
    ({"zero": "3", "device": "mixed", "transport": "mpi"}, "zero=3: expected the same on every rank"),
]


@pytest.mark.sampled(6)
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("levels", "line"), REFUSALS)
def test_what_would_be_wrong_is_refused_on_every_rank(levels, line):
    """Also where the layer that is in the way is another stage's."""
    world, setting = Communicator(stall_warning_s=60, timeout_s=120), setting_of(levels)
    if ranks_of(setting) > world.size:
        pytest.skip("needs more ranks")
    found = outcome_of(setting, world)
    assert found.kind == REFUSED and f": {line}" in found.text, found


@pytest.mark.sampled(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("levels", "line"), declared().items())
def test_what_the_table_of_settings_excludes_is_refused_on_every_rank(levels, line):
    found = outcome_of(setting_of(dict(levels)), Communicator(stall_warning_s=60, timeout_s=120))
    assert found.kind == REFUSED and f": {line}" in found.text, found


def test_eight_ranks_train_as_one():
    """A GPT on dp=2 x tp=2 x pp=2; and groups of three that lie on two hosts in different ways."""
    settings = "network=gpt,dp=2,tp=2,pp=2 1f1b,wrapper=DDP,optimizer=adam", "dp=3,tp=2,hosts=halves"
    environment = clean_environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [mpiexec(), "-n", "8", sys.executable, "-m", "tests.pairs", *settings]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0 and ended.stdout.count("   right") == 2, ended.stdout[-2000:] + ended.stderr[-2000:]
