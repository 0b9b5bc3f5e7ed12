"""Whatever lies in a file, a parser answers with its result or with one clean line, and soon; so does a trainer.

`make fuzz` feeds 100,000 files in all; the ordinary suite a sample. CLCOMM_FUZZ_INPUTS is how many in all,
CLCOMM_FUZZ_SEED where the draw begins.
"""

from __future__ import annotations

import copy
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ClcommError
from clcomm.comm.costs import costfile
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit
from clcomm.engine import Device, tuning
from clcomm.engine import pocl as sealed_programs
from clcomm.insight.report import build, read_runs
from clcomm.insight.report.formats import as_html
from clcomm.jobs import checkpoint
from tests.fuzz.mutation import mutated
from tests.report.runs import document, written
from tests.training.trainers import everything_of, make_trainer, solo, train
from training.checkpoint_series import CheckpointSeries
from training.data.idx import read_idx, write_idx
from training.snapshot import restore_snapshot, save_snapshot
from training.trainer_state import load_state

INPUTS, SEED = int(os.environ.get("CLCOMM_FUZZ_INPUTS", "3000")), int(os.environ.get("CLCOMM_FUZZ_SEED", "1"))
#: What parsing a file of a few kilobytes may take.
MOST_BYTES = 8 << 20

Target = tuple[bytes, Callable[[Path], Any]]


def checkpoints(folder: Path) -> Target:
    arrays = {"parameter/a": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "optimizer/kind": np.array("SGD")}
    checkpoint.save(folder / "good", checkpoint.Checkpoint(arrays, {"step": 3}))
    return (folder / "good").read_bytes(), checkpoint.load


def idx_files(folder: Path) -> Target:
    write_idx(folder / "good", np.arange(60, dtype=np.uint8).reshape(3, 4, 5))
    return (folder / "good").read_bytes(), lambda path: read_idx(path, max_bytes=1 << 20)


def gzipped_idx_files(folder: Path) -> Target:
    write_idx(folder / "good.gz", np.arange(60, dtype=np.uint8).reshape(3, 4, 5))
    return (folder / "good.gz").read_bytes(), lambda path: read_idx(path, max_bytes=1 << 20)


def cost_files(folder: Path) -> Target:
    fit = Fit(Cost(1e-5, 1e-9), 0.01, 0.1, ((256, 1e-5), (1 << 20, 1e-3)))
    costfile.store([MeasuredFit("shared", 4, 1, fit), MeasuredFit("mpi", 4, 2, fit)], folder / "good")
    return (folder / "good").read_bytes(), costfile.load


def tuning_files(folder: Path) -> Target:
    device = Device.select("cpu")
    identity = tuning.Identity.of(device.cl_device, device.kind)
    good = tuning.store(device.tuning, identity).read_bytes()

    def parse(path: Path) -> Any:
        text = tuning._bounded_text(path)
        assert text is not None
        return tuning.parse(text, identity)

    return good, _says_value_error(parse)


def seals(folder: Path) -> Target:
    program = folder / "AB" / "program"
    program.mkdir(parents=True)
    (program / "kernel.so").write_bytes(b"built")
    stored = sealed_programs.SealedProgram(folder / "seal-0")
    stored.seal({stored.line.split("clcomm_")[1].split("(")[0]: "AB/program"})

    def parse(path: Path) -> None:
        if sealed_programs.damaged(path.parent, [path.name]):
            raise ClcommError("damaged")

    return (folder / "seal-0").read_bytes(), parse


def reports(folder: Path) -> Target:
    (name,) = written(folder, [document(2, overlap=True)])
    return Path(name).read_bytes(), lambda path: as_html(build(read_runs([str(path)])))


def _says_value_error(parse: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a parser whose refusal is a ValueError, or deep nesting, which its caller turns into one clean line."""

    def parse_cleanly(path: Path) -> Any:
        try:
            return parse(path)
        except (ValueError, RecursionError) as error:
            raise ClcommError(" ".join(str(error).split())) from None

    return parse_cleanly


TARGETS = (checkpoints, idx_files, gzipped_idx_files, cost_files, tuning_files, seals, reports)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_hostile_files_are_refused_cleanly(target: Callable[[Path], Target], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path / "cache"))
    good, parse = target(tmp_path)
    draw, path = random.Random(f"{target.__name__} {SEED}"), tmp_path / "file"
    path.write_bytes(good)
    parse(path)
    refused = 0
    tracemalloc.start()
    try:
        for number in range(INPUTS // len(TARGETS)):
            path.write_bytes(mutated(good, draw))
            tracemalloc.reset_peak()
            try:
                parse(path)
            except ClcommError as error:
                refused += 1
                assert "\n" not in str(error) and len(str(error)) < 2000
            except BaseException as error:
                pytest.fail(f"input {number} of seed {SEED}: {error!r}: {path.read_bytes()!r}")
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, f"input {number}: {path.read_bytes()!r}"
    finally:
        tracemalloc.stop()
    assert refused > INPUTS // len(TARGETS) // 10, "a draw that hardly ever damages anything proves nothing"


#: What stands in a checkpoint that is whole, in place of what was written there.
_NONSENSE = (
    None, True, "x", "1\n2", [], [1], {}, -1, 0, 1, 7, 0.5, float("nan"), float("inf"), -1e300, 10**400, 1 << 31,
    1 << 64,
)  # fmt: skip
_NONSENSE_ARRAYS = (
    np.array("x"), np.array("1\n2"), np.array(-1), np.array(np.nan), np.array(1e300), np.zeros(0), np.zeros((2, 2)),
    np.full(1250, 1 << 31, np.uint32), np.full(1250, "x"), np.full(2, np.inf), np.array(1j), np.array([[True]]),
)  # fmt: skip


def test_nonsense_in_whole_checkpoints_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trainer, path = make_trainer(solo(), 120), tmp_path / "file"
    train(trainer, 2)
    save_snapshot(CheckpointSeries(solo(), path), trainer, {"model": "mlp"})
    draw, refused, before = random.Random(f"restoring {SEED}"), 0, everything_of(trainer)
    good = checkpoint.load(path)
    for number in range(INPUTS // 20):
        spoilt = checkpoint.Checkpoint(dict(good.arrays), copy.deepcopy(good.facts))
        for _ in range(draw.choice((1, 1, 3))):
            what = _spoil(spoilt, draw)
        checkpoint.save(path, spoilt)
        try:
            restore_snapshot(path, trainer, {"model": "mlp"})
            load_state(trainer, good.facts["training"])
        except ClcommError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 2000
            assert everything_of(trainer) == before, f"input {number} of seed {SEED}: {what}"
        except BaseException as error:
            pytest.fail(f"input {number} of seed {SEED}: {what}: {error!r}")
        else:
            checkpoint.save(path, good)
            restore_snapshot(path, trainer, {"model": "mlp"})
    assert refused > INPUTS // 40, "a draw that hardly ever damages anything proves nothing"


def _spoil(spoilt: checkpoint.Checkpoint, draw: random.Random) -> str:
    """Put nonsense in place of an array or a fact, at any depth, or leave it out; return what was done."""
    if draw.random() < 0.4:
        place: dict[str, Any] = spoilt.arrays
        name, value = draw.choice(sorted(place)), draw.choice(_NONSENSE_ARRAYS)
    else:
        place, value = spoilt.facts, draw.choice(_NONSENSE)
        name = draw.choice(sorted(place.keys() - {"format", "version"}))
        while isinstance(place[name], dict) and place[name] and draw.random() < 0.8:
            place = place[name]
            name = draw.choice(sorted(place))
    place[name] = value
    if draw.random() < 0.2:
        del place[name]
    return f"{name!r}: {value!r}"
