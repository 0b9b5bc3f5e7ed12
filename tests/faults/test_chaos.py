"""`clcomm run --chaos`: faults follow from a seed, hit the same steps again, and are what the line says."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.watch.chaos import HELD_S, KILL, SLOW, Schedule
from clcomm.sync.model_sync import averaging_of
from tests.faults.launch import HUNG_S, ROOT, clean_environment
from tests.sharded_jobs import Job

#: Counts steps in a file, from which a restarted job goes on; 60 steps of so many seconds.
SCRIPT = """
import sys, time
from pathlib import Path
from clcomm import Communicator
from clcomm.comm.watch import note_saved, note_step, run
def main():
    comm, saved = Communicator(), Path(sys.argv[1])
    begun = comm.broadcast_object(int(saved.read_text()) if saved.exists() else 0)
    for step in range(begun + 1, 61):
        note_step(step)
        time.sleep(float(sys.argv[2]))
        comm.barrier()
        if comm.rank == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").rename(saved)
            note_saved(step)
run(main)
"""
LINE = re.compile(r"clcomm: chaos: fault (\d+): (\w+) rank (\d) in step (\d+)(.*), [\d.]+ s after its start$", re.M)


def run(folder: Path, chaos: str, step_s: float = 0.005) -> tuple[list[tuple[str, ...]], str]:
    """Run the script with faults to its end; return number, kind, rank and step of each, and all that was said."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "saved").unlink(missing_ok=True)
    ended = subprocess.run(
        [sys.executable, "-m", "clcomm", "run", "-n", "2", "--restarts", "9", "--pause", "0", "--chaos", chaos,
         str(folder / "script.py"), str(folder / "saved"), str(step_s)],
        env=clean_environment(), cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [found[:4] for found in LINE.findall(ended.stderr)], ended.stderr


@pytest.mark.parametrize("text", ["seed=7,every=20", "seed=7,every=2.5s,what=kill+slow", "seed=0,at=9+3+3,what=flip"])
def test_a_fault_depends_on_the_seed_and_its_number_alone(text: str) -> None:
    schedule = Schedule.read(text)
    faults = [schedule.fault(number, 4) for number in range(1, 200)]
    assert Schedule.read(schedule.text()) == schedule
    assert faults == [schedule.fault(number, 4) for number in range(1, 200)]
    planted = [fault for fault in faults if fault is not None]
    assert len(planted) == (3 if schedule.at else 199)
    for fault in planted:
        assert fault.kind in schedule.kinds and 0 <= fault.rank < 4
        assert 0 <= fault.within < 1 and HELD_S[0] <= fault.lasts_s <= HELD_S[1]
    if not schedule.at:
        moments = [0.0, *(fault.at for fault in planted)]
        distances = np.diff(moments) if schedule.in_steps else np.array(moments[1:])
        assert (distances >= schedule.every / 2).all() and (distances <= 1.5 * schedule.every).all()
        assert {fault.rank for fault in planted} == set(range(4)) and {f.kind for f in planted} == set(schedule.kinds)
        assert faults != [schedule._replace(seed=8).fault(number, 4) for number in range(1, 200)]


@pytest.mark.parametrize(
    "text",
    ["", "seed=7", "every=20s", "seed=7,every=0s", "seed=7,every=0", "seed=7,every=-1", "seed=7,every=1.5",
     "seed=,at=1", "seed=7,every=2,at=3", "seed=7,seed=8,every=2", "seed=7,every=2,what=die", "seed=7,every=2,what=",
     "seed=7,every=2,what=kill+", "seed=٣,at=1", "seed=7,every=2,how=often", "seed=7,every=2,how", "seed=7,every=2,"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^expected .*; got|^expected every= above 0, got"):
        Schedule.read(text)


def test_a_restarted_job_has_each_fault_once_and_again_in_the_same_steps(tmp_path: Path) -> None:
    text = "seed=4,every=8,what=kill+slow"
    first, said = run(tmp_path, text)
    schedule = Schedule.read(text)
    drawn = [fault for number in range(1, 20) if (fault := schedule.fault(number, 2)) and fault.at <= 60]
    assert first == [(str(f.number), f.kind, str(f.rank), f"{f.at:.0f}") for f in drawn]
    assert {kind for _, kind, _, _ in first} == {KILL, SLOW}
    assert f"clcomm run: chaos: {len(first)} faults\n" in said
    assert re.search(r"clcomm: chaos: step \d+ begins [\d.]+ s after fault \d", said)
    assert run(tmp_path, text)[0] == first


def test_faults_by_the_clock_can_be_planted_in_the_same_steps_again(tmp_path: Path) -> None:
    first, said = run(tmp_path, "seed=21,every=1.5s,what=stop+slow", 0.04)
    again = re.search(r"in the same steps again: --chaos (\S+)", said)
    if again is None:  # all ended before a step, or none was planted
        pytest.skip("a machine too slow for a step within seconds")
    assert sorted(run(tmp_path, again[1])[0]) == sorted(first)  # two ranks may have theirs in one step


@pytest.mark.parametrize("slowly", [False, True])
def test_a_held_process_is_stopped_and_goes_on(slowly: bool) -> None:
    script = f"from clcomm.comm.watch.chaos import hold; hold(0.5, {slowly}); print('goes on')"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        states = []
        while process.poll() is None:
            states.append(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            time.sleep(0.001)
        assert (process.returncode, process.communicate()[0]) == (0, "goes on\n")
    stops = sum(later and not earlier for earlier, later in pairwise(states))
    assert stops > 1 if slowly else stops == 1


#: The last two hit the sign and a high bit of a gradient, which no sum rounds away.
@pytest.mark.parametrize("where", [2, 776, 0, 3 * 5 * 1009 + 3, 123456789, 3 * 31 + 1, 3 * (1009 * 800 + 30) + 1])
def test_a_flip_changes_one_bit_of_a_parameter_or_in_the_next_averaging(several: Communicator, where: int) -> None:
    job = Job(several, sharded=False, bucket_size=512, overlap=False)
    job.step(0)
    averaging = averaging_of(job.model)
    assert averaging is not None
    space, is_hit = averaging.space, several.rank == 1
    job.backward(1)
    job.device.finish()
    before = space.arrays.params.copy()
    mean = several.all_reduce(space.arrays.grads.view(np.float32), "mean")
    said = several.all_gather_object(averaging.flip_bit(where) if is_hit else "")[1]
    job.sync.sync_gradients(job.model)
    several.barrier()
    place, hit = said.split("'")[:2]
    parameters, reduced = before ^ space.arrays.params, mean.view(np.uint8) ^ space.arrays.reduced
    several.barrier()
    assert place == ("the mean of ", "the own gradient of ", "parameter ")[where % 3]
    for part, is_flipped in (
        (parameters, place == "parameter " and is_hit),
        (
            reduced,
            place == "the own gradient of " or (place == "the mean of " and (is_hit or several.transport != "mpi")),
        ),
    ):
        changed = np.unpackbits(part).sum()
        assert (changed > 0) == is_flipped and (changed <= 1 or place == "the own gradient of ")
        assert np.unpackbits(space.layout.view(part, hit).view(np.uint8)).sum() == changed
