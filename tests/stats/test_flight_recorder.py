"""The flight recorder: the last operations, in a line and in a private file."""

from __future__ import annotations

import json
import os
import stat

import pytest

from clcomm.comm.stats.events import Collective
from clcomm.comm.stats.flight_recorder import FlightRecorder, new_dump_folder


def filled(count: int) -> FlightRecorder:
    recorder = FlightRecorder(kept=8)
    for number in range(1, count + 1):
        recorder.collective_finished(
            Collective("all_reduce", "gradients", 4000, 0.0015, "shared", number, failed=number == count, bucket=3)
        )
    return recorder


def test_the_last_operations_are_kept() -> None:
    assert [event["sequence"] for event in filled(100).operations()] == list(range(93, 101))
    assert filled(0).operations() == [] and filled(0).summary() == "none"


def test_the_summary_names_number_bucket_bytes_and_time() -> None:
    summary = filled(20).summary()
    assert summary.startswith("#17 all_reduce 'gradients' bucket 3 4,000 bytes in 1.5 ms, #18 ")
    assert summary.endswith("#20 all_reduce 'gradients' bucket 3 4,000 bytes in 1.5 ms (failed)")


def test_a_dump_is_its_owners_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CLCOMM_DUMP_DIR", str(tmp_path))
    folder = new_dump_folder()
    path = filled(2).dump(folder, 5, place="train.py:3 in main")
    assert os.path.dirname(folder) == str(tmp_path)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700 and stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with open(path) as file:
        dumped = json.load(file)
    assert (dumped["schema"], dumped["rank"], dumped["place"]) == (1, 5, "train.py:3 in main")
    assert dumped["operations"] == json.loads(json.dumps(filled(2).operations()))


def test_nothing_is_overwritten_and_no_link_is_followed(tmp_path) -> None:
    (tmp_path / "rank-0.json").write_text("other's")
    (tmp_path / "rank-1.json").symlink_to(tmp_path / "elsewhere")
    for rank in (0, 1):
        with pytest.raises(OSError):
            filled(1).dump(str(tmp_path), rank)
    assert (tmp_path / "rank-0.json").read_text() == "other's" and not (tmp_path / "elsewhere").exists()


def test_without_a_place_to_write_there_is_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CLCOMM_DUMP_DIR", str(tmp_path / "missing"))
    assert new_dump_folder() == ""
