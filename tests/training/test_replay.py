"""`python -m training.replay`: the bits of any rank's step, in one process; and where two runs part."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clcomm.base.errors import ClcommError
from clcomm.comm.communicator import Communicator
from clcomm.jobs import checkpoint
from tests.helpers import one_line
from training import replay
from training.console import make_console
from training.options import TrainingOptions
from training.replay import Saved
from training.replayed_steps import replayed
from training.session import Session
from training.step_values import StepValues, Value
from training.text_options import TextOptions
from training.text_session import TextSession
from training.trainer import Progress

STEPS, SAVED, PLANTED = 6, 3, 5
Values = dict[int, dict[Value, np.ndarray]]
OPTIONS = TrainingOptions(
    model="mlp", data="synthetic", batch_size=4, max_steps=STEPS, device="cpu", quiet=True, eval=False, overlap="off",
    checkpoint_every=SAVED, checkpoint_keep=3, checkpoint="run.npz", optimizer="adam", clip_norm=0.5,
)  # fmt: skip
TEXT = TextOptions(
    text=__file__, layers=1, width=24, heads=2, context=16, dropout=0.2, batch_size=2, max_steps=STEPS, device="cpu",
    quiet=True, eval=False, overlap="off", checkpoint_every=SAVED, checkpoint_keep=3, checkpoint="run.npz",
)  # fmt: skip
RUNS = {
    "mlp": OPTIONS, "convnet": replace(OPTIONS, model="convnet", augment=True, optimizer="sgd", grad_accumulation=2),
    "gpt": TEXT, "zero": replace(OPTIONS, zero=1), "shards": replace(OPTIONS, logical_shards=5),
    "bf16": replace(OPTIONS, precision="bf16"), "scaled": replace(OPTIONS, loss_scaling=True),
}  # fmt: skip


def start(options: TrainingOptions, comm: Communicator, kind: type[Session] = Session) -> Session:
    if isinstance(options, TextOptions):
        return TextSession(options, comm, make_console(comm))
    return kind(options, comm, console=make_console(comm))


def recorded(options: TrainingOptions, comm: Communicator) -> Values:
    """Run a job, and return the values that this rank saw in each step."""
    session, kept = start(options, comm), {}
    whole = session.steps

    def steps() -> Iterator[Progress]:
        going = whole()
        while True:
            values = session.trainer.values = StepValues(session.parts, comm.rank)
            progress = next(going, None)
            if progress is None:
                return
            values.keep_parameters()
            kept[progress.step] = values.arrays
            yield progress

    session.steps = steps
    session.run()
    return kept


def assert_same(found: dict[Value, np.ndarray], expected: dict[Value, np.ndarray]) -> None:
    for value, array in expected.items():
        assert found[value].tobytes() == array.tobytes(), value


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", RUNS)
def test_each_value_of_a_rank_has_its_bits(auto: Communicator, tmp_path: Path, name: str) -> None:
    """From the start, from a checkpoint, and several steps after one."""
    path = Path(auto.broadcast_object(str(tmp_path / "run.npz")))
    kept = recorded(replace(RUNS[name], checkpoint=str(path)), auto)
    facts = checkpoint.load(path).facts
    auto.rendezvous()
    apart = {"mean"} if name == "zero" else set()  # a sharded update has no whole mean
    for source, first, last in ((None, 1, 2), (checkpoint.earlier(path, 1), SAVED + 1, STEPS)):
        for step, values in replayed(facts, source, first, last):
            assert_same(values, {value: array for value, array in kept[step].items() if value.what not in apart})
            assert {value.what for value in values} == {"forward", "gradient", "mean", "parameter"}
            shards = {value.shard for value in values if value.what == "forward"}
            assert shards == set(range(5 if name == "shards" else auto.size))


@pytest.mark.mpi(min_size=2)
def test_steps_after_a_run_went_on_with_other_ranks_have_their_bits(auto: Communicator, tmp_path: Path) -> None:
    path = Path(auto.broadcast_object(str(tmp_path / "run.npz")))
    options = replace(OPTIONS, checkpoint=str(path), checkpoint_keep=9, checkpoint_every=2)
    if auto.rank == 0:
        start(replace(options, max_steps=2), Communicator(transport="solo")).run()
    auto.rendezvous()
    kept = recorded(replace(options, resume=str(path)), auto)
    auto.rendezvous()
    saved = Saved.of(str(path))
    assert saved.before(6) == (checkpoint.earlier(path, 1), 4) and saved.before(2) == (None, 0)
    with pytest.raises(
        ClcommError, match="--step: expected one after 4, the first saved since the run went on from step 2, got 4"
    ):
        saved.before(4)
    for step, values in saved.replayed(saved.before(5)[0], 5, 6):
        assert_same(values, kept[step])


class Planted(Session):
    """A run in which one weight is another before one step."""

    def steps(self) -> Iterator[Progress]:
        self._plant()
        for progress in super().steps():
            yield progress
            self._plant()

    def _plant(self) -> None:
        if self.trainer.progress.step == PLANTED - 1:
            weight = self.parts.model.fc2.weight
            values = weight.numpy().copy()
            values[3, 4] += 1
            weight.copy_from(values)


def run_of(path: Path, kind: type[Session] = Session, **given: Any) -> Path:
    options = replace(OPTIONS, checkpoint=str(path), logical_shards=3, **given)
    start(options, Communicator(transport="solo"), kind).run()
    return path


@pytest.fixture(scope="module", name="saved")
def make_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("run") / "run.npz")


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert replay.main(["--trust", "tests", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_command_prints_each_layer_and_compares_with_a_checkpoint(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *lines = shown(capsys, saved, "--step", STEPS).splitlines()
    assert first.startswith(f"step {STEPS} of rank 0 of 1, from {saved}.1, on clcomm ")
    assert lines[-1] == f"parameters: as in {saved}"
    pattern = r"(forward|gradient|mean|parameter) +[0-9a-f]{16}  .* float32 \([\d, ]*\)"
    assert all(re.fullmatch(pattern, line) for line in lines[:-1])
    assert sum("fc2.weight" in line for line in lines) == 3 + 2  # each shard's gradient, the mean, the parameter
    assert "from the start, on" in shown(capsys, saved, "--step", 2)


def test_two_runs_part_where_one_was_planted(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_of(tmp_path / "other.npz", Planted)
    out = shown(capsys, saved, "--against", other)
    found = re.search(
        rf"step {PLANTED}: the runs part: forward \d+ fc2 \w+ of shard 0\[\d+, 3\] is (\S+) and (\S+); equal up to "
        rf"step {PLANTED - 1}\n", out,
    )  # fmt: skip
    assert found and found[1] != found[2], out
    assert f"step {PLANTED}: the runs part" in shown(capsys, other, "--against", saved)


def test_runs_with_other_settings_part_at_their_first_other_value(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, saved, "--against", run_of(tmp_path / "other.npz", lr=3e-3))
    assert re.search(r"step 1: the runs part: parameter fc1.weight\[", out)


def test_equal_runs_have_no_difference(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, saved, "--against", saved) == (
        f"no difference: parameters and optimizer are equal at step {SAVED}, {STEPS}\n"
    )


def test_a_bit_that_flipped_in_one_run_is_told_from_a_difference_of_programs(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.npz"
    for age in (1, 0):
        held = checkpoint.load(checkpoint.earlier(saved, age))
        if age == 0:
            held.arrays["parameter/fc3.bias"][7] += 1
        checkpoint.save(other, held, keep=2)
    out = shown(capsys, saved, "--against", other)
    assert f"both programs compute the same\n{other} differs from it: fc3.bias[7] is " in out
    assert "parameters: other than in" in shown(capsys, other, "--step", STEPS)


def spoilt(saved: Path, into: Path, **program: Any) -> Path:
    held = checkpoint.load(saved)
    held.facts["program"].update(program)
    checkpoint.save(into, held)
    return into


def without_program(saved: Path, into: Path) -> Path:
    held = checkpoint.load(saved)
    del held.facts["program"]
    checkpoint.save(into, held)
    return into


@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        ({}, (), "replay: expected --step N for a step's hashes, or --against FILE for a difference"),
        ({}, ("--step", 9999999), r"--step: expected 1 to 6, the run's steps, got 9999999"),
        ({}, ("--step", 1, "--rank", 1), "--rank: expected 0 to 0, the run's ranks, got 1"),
        ({"version": "0.0.7"}, ("--step", 1), "expected one of clcomm .*, found 0.0.7; replay with the release"),
        ({"began": 6}, ("--step", 3), "--step: expected one after 6, the first saved since the run went on from"),
        ({"session": "nowhere:Session"}, ("--step", 1), "expected the run's nowhere:Session, found none in "),
        ({"session": "training.options:TrainingOptions"}, ("--step", 1), "expected the run's training.options:Train"),
        ({"device": "another"}, ("--step", 1), "replay: expected the run's device, another, got native engine on "),
    ],
)
def test_one_line_says_what_cannot_be_replayed(
    saved: Path, tmp_path: Path, change: dict[str, Any], words: tuple[object, ...], reason: str
) -> None:
    path = spoilt(saved, tmp_path / "run.npz", **change)
    with pytest.raises(ClcommError, match=reason) as caught:
        replay.main(["--trust", "nowhere", str(path), *map(str, words)])
    one_line(caught)


@pytest.mark.parametrize("field", ["session", "options"])
@pytest.mark.parametrize("place", ["run_file", "--against"])
def test_no_module_is_imported_that_a_file_without_a_signature_names(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, place: str
) -> None:
    name = f"planted_{os.getpid()}_{field}_{place.strip('-')}"
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Session: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = spoilt(saved, tmp_path / "run.npz", **{field: f"{name}:Session"})
    words = [str(path), "--step", "1"] if place == "run_file" else [str(saved), "--against", str(path)]
    with pytest.raises(
        ClcommError, match=f"found '{name}.*which anybody can have written.*add --trust {name}"
    ) as caught:
        replay.main(words)
    one_line(caught)
    assert not (tmp_path / "ran").exists() and name not in sys.modules
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    monkeypatch.setenv("CLCOMM_CHECKPOINT_KEY", str(key))
    checkpoint.save(tmp_path / "signed.npz", checkpoint_of(path, monkeypatch))
    with pytest.raises(ClcommError, match="replay: expected the run's"):  # it is imported, and is no Session
        replay.main([str(tmp_path / "signed.npz"), "--step", "1"])
    assert (tmp_path / "ran").exists()


def checkpoint_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> checkpoint.Checkpoint:
    """Return a checkpoint that was written without a key."""
    with monkeypatch.context() as patched:
        patched.delenv("CLCOMM_CHECKPOINT_KEY")
        return checkpoint.load(path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"data": "/nowhere/at/all"}, "data: expected auto, .* or a directory, got '/nowhere/at/all'"),
        ({"data": "digits"}, "was written with --data synthetic, this job has digits"),
        ({"compression": "fp16", "logical_shards": None}, "for each rank; --logical-shards: expected no --compr"),
        ({"balance": "auto", "logical_shards": None}, "expected --logical-shards in a run with --balance auto"),
    ],
)
def test_other_data_and_runs_that_depend_on_their_ranks_are_refused(
    saved: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    held = checkpoint.load(saved).facts["program"]["settings"]
    for age in (1, 0):
        old = checkpoint.load(checkpoint.earlier(saved, age))
        old.facts["program"]["settings"] = {**held, **settings}
        checkpoint.save(tmp_path / "run.npz", old, keep=2)
    with pytest.raises(ClcommError, match=reason) as caught:
        replay.main([str(tmp_path / "run.npz"), "--step", str(STEPS)])
    one_line(caught)


def test_a_run_without_a_program_is_refused(saved: Path, tmp_path: Path) -> None:
    path = without_program(saved, tmp_path / "run.npz")
    with pytest.raises(ClcommError, match="expected one that a Session saved, whose class is in a module, found no"):
        replay.main([str(path), "--step", "1"])
