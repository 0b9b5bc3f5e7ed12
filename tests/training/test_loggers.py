"""What the loggers write, read back: CSV rows, and TensorBoard's records with their check sums."""

from __future__ import annotations

import csv
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.comm_stats import Collective
from clcomm.insight.exporters.tensorboard import TensorBoard
from tests.helpers import largest_file
from training.communication_clock import CommunicationClock
from training.console import make_console
from training.evaluate import Evaluation
from training.loggers import COLUMNS, POINT_EVERY, CsvLogger, PointLogger
from training.metrics import StepRecord
from training.options import TrainingOptions
from training.run_callbacks import run_callbacks

ROOT = Path(__file__).resolve().parents[2]


def drive(logger: CsvLogger | PointLogger, clock: CommunicationClock, steps: range) -> None:
    """Tell of steps that take 10 ms, a fifth of it in communication, and of an evaluation and an epoch in the end."""
    for step in steps:
        clock.collective_finished(Collective("all_reduce", "gradients", 100, 0.005, "shared", step, exposed_s=0.002))
        logger.step_finished(StepRecord(step, 1, step, 32, 1.0 / step, 0.125, 0.01, 0.001, 0.002))
    clock.collective_finished(Collective("all_reduce", "metrics", 24, 0.5, "mpi", 99))  # the evaluation's
    logger.evaluation_finished(steps[-1], Evaluation(0.75, 0.5, 100))
    logger.epoch_finished(1, 0.625)


def test_csv_has_a_row_for_each_step(tmp_path: Path) -> None:
    clock = CommunicationClock()
    logger = CsvLogger(tmp_path / "log.csv", 4, clock)
    drive(logger, clock, range(1, 4))
    drive(logger, clock, range(4, 5))
    logger.close()
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert tuple(rows[0]) == COLUMNS
    assert [float(row["loss"]) for row in rows] == [1.0, 0.5, 1 / 3, 0.25]
    expected = {
        "epoch": "2", "lr": "0.125", "step_ms": "10.000", "data_wait_ms": "1.000", "communication_ms": "2.000",
        "images_per_s": "12800.0",
    }  # fmt: skip
    assert all({name: row[name] for name in expected} == expected for row in rows)
    ends = [(row["epoch_loss"], row["test_loss"], row["test_accuracy"]) for row in rows]
    assert ends == [("", "", ""), ("", "", ""), ("0.625", "0.5", "0.75"), ("0.625", "0.5", "0.75")]


def test_an_evaluation_after_no_step_of_its_own_names_the_step_it_belongs_to(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path / "log.csv", 1, CommunicationClock())
    logger.evaluation_finished(7, Evaluation(0.75, 0.5, 100))
    logger.close()
    with open(tmp_path / "log.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: value for name, value in row.items() if value} == {
        "step": "7", "test_loss": "0.5", "test_accuracy": "0.75",
    }  # fmt: skip


def test_a_resumed_run_goes_on_in_its_file_and_others_start_anew(tmp_path: Path) -> None:
    path, clock = tmp_path / "log.csv", CommunicationClock()
    for steps, goes_on in ((range(1, 3), False), (range(3, 5), True)):
        logger = CsvLogger(path, 1, clock, goes_on)
        drive(logger, clock, steps)
        logger.close()
    lines = path.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2", "3", "4"]
    CsvLogger(path, 1, clock, goes_on=False).close()
    assert path.read_text().splitlines() == [",".join(COLUMNS)]
    path.write_text("another,file\n1,2\n")
    CsvLogger(path, 1, clock, goes_on=True).close()
    assert path.read_text().splitlines() == [",".join(COLUMNS)]


def records(path: Path) -> list[bytes]:
    """Return the records of a TFRecord file: length, its CRC, data, its CRC; the CRCs are checked."""
    crc32c = pytest.importorskip("tensorboardX.crc32c").crc32c
    data, found = path.read_bytes(), []
    while data:
        (length,), (length_crc,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        payload, (crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
        for stored, of in ((length_crc, data[:8]), (crc, payload)):
            plain = crc32c(of)
            assert stored == ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
        found.append(payload)
        data = data[16 + length :]
    return found


def test_tensorboard_needs_no_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    script = (
        "import sys; "
        "from training.loggers import PointLogger; from clcomm.insight.exporters.tensorboard import TensorBoard; "
        f"logger = PointLogger(TensorBoard({str(tmp_path)!r}), 1); logger.epoch_finished(0, 0.5); "
        "logger.close(); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and list(tmp_path.iterdir())


def test_tensorboard_reads_the_points(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    clock = CommunicationClock()
    exporter = TensorBoard(tmp_path / "logs")
    exporter.every_s = 0.0
    logger = PointLogger(exporter, 4)
    drive(logger, clock, range(1, POINT_EVERY + 3))
    logger.close()
    (path,) = (tmp_path / "logs").glob("events.out.tfevents.*")
    points: dict[str, list[tuple[int, float]]] = {}
    for payload in records(path):
        event = events.Event.FromString(payload)
        for value in event.summary.value:
            points.setdefault(value.tag, []).append((event.step, value.simple_value))
    last = POINT_EVERY + 2
    first_loss = sum(1 / step for step in range(1, POINT_EVERY + 1)) / POINT_EVERY
    last_loss = (1 / (last - 1) + 1 / last) / 2
    expected = {
        "train/loss": [(POINT_EVERY, first_loss), (last, last_loss)],
        "train/lr": [(POINT_EVERY, 0.125), (last, 0.125)],
        "speed/step_ms": [(POINT_EVERY, 10.0), (last, 10.0)],
        "speed/images_per_s": [(POINT_EVERY, 12800.0), (last, 12800.0)],
        "speed/data_wait_share": [(POINT_EVERY, 0.1), (last, 0.1)],
        "speed/communication_share": [(POINT_EVERY, 0.2), (last, 0.2)],
        "test/accuracy": [(last, 0.75)],
        "test/loss": [(last, 0.5)],
        "train/epoch_loss": [(2, 0.625)],
    }
    assert points.keys() == expected.keys()
    for tag, values in expected.items():
        assert points[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in values], tag


@pytest.mark.mpi(min_size=1)
def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(auto: Communicator, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wanted in ({"log_csv": str(tmp_path)}, {"log_csv": str(tmp_path / "file" / "log.csv")}):
        options = TrainingOptions(quiet=True, **wanted)
        with pytest.raises(ArgumentError, match="logs: expected a file to write, got "):
            run_callbacks(options, auto, make_console(auto), 10).__enter__()
    with run_callbacks(TrainingOptions(quiet=True), auto, make_console(auto), 10) as callbacks:
        assert callbacks == []
    with run_callbacks(
        TrainingOptions(log_csv=str(tmp_path / "log.csv"), quiet=True), auto, make_console(auto), 10
    ) as callbacks:
        assert len(callbacks) == (1 if auto.rank == 0 else 0)


# tensorboardX leaves a file that cannot be flushed to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("nbytes", [0, 100, 5000, 20_000])
@pytest.mark.parametrize("option", ["log_csv", "tensorboard"])
def test_a_disk_that_fills_up_ends_a_logger_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, option: str, nbytes: int
) -> None:
    if option == "tensorboard":
        pytest.importorskip("tensorboardX", reason="tensorboardX is not installed; pip install -e '.[tensorboard]'")
    comm, place = Communicator(transport="solo"), str(tmp_path / "log")
    options = TrainingOptions(quiet=True, **{option: place})
    watching = run_callbacks(options, comm, make_console(comm), 10_000)
    with caplog.at_level("WARNING", "clcomm"), watching as (logger,), largest_file(nbytes):
        for first in range(1, 10_000, 100):
            drive(logger, CommunicationClock(), range(first, first + 100))
        logger.close()
    (record,) = caplog.records
    option = option.replace("_", "-")
    assert record.getMessage() == f"--{option} {place}: File too large; the training goes on without it"
