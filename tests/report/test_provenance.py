"""What a report says ran, and where: from what the ranks recorded, whatever their number and hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clcomm.insight.report import read_runs
from clcomm.insight.report.report import provenance, subtitle
from tests.report.runs import VERSIONS, document, written


def known(folder: Path, ranks: int = 2, of_rank: dict[int, dict[str, Any]] | None = None, **figures: Any) -> Any:
    whole = document(ranks, **figures)
    for rank, own in (of_rank or {}).items():
        whole["ranks"][rank].update(own)
    return read_runs(written(folder, [whole]))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [({"bucket_size": 1 << 20}, "1 MiB"),
     ({"bucket_size": 8192, "settings": {"bucket_size": "auto"}}, "8 KiB (auto)"),
     ({"bucket_size": None, "settings": {"no_bucketing": True}}, "none, each tensor on its own"),
     ({"bucket_size": None}, "128 B to 784 KiB"),  # what was reduced
     ({"bucket_size": 1 << 20, "settings": {"sharded_optimizer": True}},
      "none, a sharded update reduces all gradients at once"),
     ({"bucket_size": 1 << 20, "settings": {"sharded_optimizer": False, "zero": 1}},
      "none, a sharded update reduces all gradients at once"),
     ({"bucket_size": 1 << 20, "settings": {"sharded_optimizer": True, "zero": 2}}, "1 MiB"),
     ({"bucket_size": 1 << 20, "settings": {"logical_shards": 8}}, "none, the mean over shards has one sum"),
     ({"bucket_size": 1 << 20, "settings": {"logical_shards": 2}}, "1 MiB"),
     ({"bucket_size": 1 << 20, "settings": {"logical_shards": None}}, "1 MiB"),
     ({"bucket_size": 1 << 20, "settings": {"sharded_optimizer": False, "zero": 0}}, "1 MiB")],
)  # fmt: skip
def test_bucket_sizes(tmp_path: Path, figures: dict[str, Any], expected: str) -> None:
    run = known(tmp_path, **figures)
    assert provenance(run)["bucket size"] == expected
    assert "buckets of none" not in subtitle(run) and (not expected or expected.split(", ")[-1] in subtitle(run))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [1, 4])
def test_batches(tmp_path: Path, ranks: int, parts: int) -> None:
    micro = " in 4 micro-batches of 32" if parts > 1 else ""
    text = provenance(known(tmp_path, ranks, grad_accumulation=parts))["batch"]
    assert text == f"{32 * parts} a rank{micro}, {32 * parts * ranks:,} in all"


def test_batches_of_logical_shards(tmp_path: Path) -> None:
    text = provenance(known(tmp_path, 3, grad_accumulation=1, settings={"logical_shards": 8}))["batch"]
    assert text == "32 for each of 8 shards, 256 in all"


def test_hosts_that_differ_are_all_named(tmp_path: Path) -> None:
    other = {"host": 1, "host_name": "south", "cpus": "0-1", "device": "gpu other",
             "versions": {**VERSIONS, "numpy": "3"}}  # fmt: skip
    found = provenance(known(tmp_path, 3, {2: other}))
    assert (found["hosts"], found["cores"], found["device"]) == (
        "north, south",
        "8 cores, 2 cores",
        "cpu basic, gpu other",
    )
    assert found["numpy"] == "2, 3" and found["MPI"] == "MPICH 5.0.2" and found["transport"] == "shared"


def test_ranks_of_a_host_that_are_bound_to_cores_of_their_own_use_them_together(tmp_path: Path) -> None:
    bound = {rank: {"cpus": f"{2 * rank}-{2 * rank + 1}"} for rank in range(3)}
    assert provenance(known(tmp_path, 3, bound))["cores"] == "6 cores"


def test_a_date_is_readable_and_the_loss_is_there(tmp_path: Path) -> None:
    found = provenance(known(tmp_path))
    assert found["date"].endswith(" UTC") and "T" not in found["date"][:11] and found["training loss"] == "0.2000"
