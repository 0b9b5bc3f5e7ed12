"""Cases of the fault matrix about the start: options that differ between ranks, and invalid numbers."""

from __future__ import annotations

from tests.faults.cases import Case
from tests.faults.file_cases import FileCase

#: Arguments of rank 1 only.
DIFFERENT = (
    ("--seed", "3"), ("--batch-size", "16"), ("--sharding", "contiguous"), ("--grad-accumulation", "2"),
    ("--transport", "mpi"), ("--engine", "torch"), ("--eval",), ("--report", "{dir}/report.json"),
    ("--trace", "{dir}/trace.json"), ("--log-csv", "{dir}/log.csv"), ("--checkpoint", "{dir}/run.npz"),
    ("--overlap", "on"), ("--compression", "fp16"), ("--bucket-size", "64KiB"), ("--quiet",),
)  # fmt: skip
#: Arguments of both ranks.
NO_NUMBERS = (
    ("--batch-size", "99999999", "batch_size: expected at most .* would take [0-9.]+ GiB a rank"),
    ("--grad-accumulation", "9" * 23, r"argument --grad-accumulation: expected a whole number up to \d+, got "),
    ("--epochs", "²", "argument --epochs: expected a whole number from 1 up, got '²'"),
    ("--momentum", "nan", "argument --momentum: expected a number from 0 up, got 'nan'"),
    ("--lr", "1e400", "argument --lr: expected a number above 0, got '1e400'"),
    ("--seed", "-1", "argument --seed: expected a whole number from 0 up, got '-1'"),
    ("--bucket-size", "1e9", "bucket_size: expected a positive number of bytes"),
)


def start_cases() -> list[Case]:
    """Return all of them."""
    cases: list[Case] = []
    for option, *value in DIFFERENT:
        said = (
            f"clcomm: {option}: expected the same on every rank, got .* on rank 0, .* on rank 1; start all ranks with"
        )
        cases.append(FileCase("different options", option, 1, said, 2, of_rank_1=(option, *value)))
    for option, text, said in NO_NUMBERS:
        cases.append(FileCase("no number", option, 0, f"clcomm: {said}", 2, arguments=(f"{option}={text}",)))
    return cases
