"""PyTorch's flight recorder analyser on drawn hangs: it has to name the collective and the ranks that clcomm names.

`python -m tests.proofs.hangs CASES SEED`: each case is a job of 2 to 4 ranks, with a Communicator or with backend
"clcomm", that runs some collectives and then into a planted fault. Prints how many verdicts were equal, and the others.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.faults.launch import ROOT, clean_environment, mpiexec

APIS, FAULTS = ("native", "torch"), ("missing", "behind", "kind", "size", "dtype")
#: How a collective may differ from the same one of other ranks, as the analyser names it.
MISMATCHES = {
    "kind": "COLLECTIVE_TYPE_MISMATCH", "size": "SIZE_OR_SYNTAX_MISMATCH", "dtype": "COLLECTIVE_DTYPE_MISMATCH",
}  # fmt: skip
TIMEOUT_S, LIMIT_S = 4.0, 400.0
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
#: "after #3" is a comparison of arguments before the fourth collective.
NUMBER = re.compile(r"( after)? #(\d+)")
WAITED = re.compile(r"has waited [\d.]+ s in ([^;]*), called at .*?; missing: (.*?); the (?:limit|group's)", re.DOTALL)


@dataclass(frozen=True)
class Drawn:
    """A hang: the ranks that are at fault, and the collectives of all before it.

    Attributes:
        before: how many collectives all ranks call; more than the recorder keeps, now and then.
        others: what the faultless ranks call then.
    """

    api: str
    fault: str
    ranks: int
    at_fault: tuple[int, ...]
    before: int
    others: str
    seed: int


class Verdict(NamedTuple):
    """Where ranks do not agree: the collective's number and name, and the division of the ranks, with its reason.

    The name is that of the ranks that wait, "" where ranks are in different ones; the reason "" where clcomm gives
    none, as it compares words.
    """

    number: int
    operation: str
    sides: frozenset[frozenset[int]]
    why: str

    def is_that_of(self, other: Verdict | str) -> bool:
        """Whether another verdict is this one, for the same reason if this has one."""
        return not isinstance(other, str) and self == other._replace(why=other.why if self.why else "")


def draw(cases: int, seed: int) -> list[Drawn]:
    """Draw hangs, all faults equally often with each interface."""
    rng, drawn = np.random.default_rng(seed), []
    every = [(api, fault) for api in APIS for fault in FAULTS]
    for at in range(cases):
        api, fault = every[at % len(every)]
        ranks = int(rng.integers(2, 5))
        faulty = rng.permutation(ranks)[: rng.integers(1, ranks)]
        others = str(rng.choice(OPERATIONS[:1] if fault == "behind" else OPERATIONS))
        before = int(rng.choice([0, 1, 5, 30, 150]))
        drawn.append(
            Drawn(api, fault, ranks, tuple(sorted(map(int, faulty))), before, others, int(rng.integers(1 << 20)))
        )
    return drawn


# --- a rank of the job ---


def play(case: Drawn, folder: str) -> None:
    """Be a rank of the job."""
    from clcomm import ClcommError

    comm, call = _native() if case.api == "native" else _torch()
    rng = np.random.default_rng(case.seed)
    for _ in range(case.before):
        call(str(rng.choice(OPERATIONS)), 4 * comm.size * int(rng.integers(1, 50)), "float32")()
    comm.barrier()
    comm.set_timeout(TIMEOUT_S)  # now, as ranks may start slowly
    faulty = comm.rank in case.at_fault
    if faulty and case.fault == "missing":
        _never()
    if case.fault == "behind":
        ends = [call("all_reduce", 64, "float32", True) for _ in range(1 if faulty else 3)]
        ends = [end() for end in ends]
        for end in ends:
            end()
        _never()
    operation, count, dtype = case.others, 64 * comm.size, "float32"
    if faulty:
        operation = next(each for each in OPERATIONS if each != operation) if case.fault == "kind" else operation
        count *= 2 if case.fault == "size" else 1
        dtype = "float64" if case.fault == "dtype" else dtype
    try:
        call(operation, count, dtype)()
    except ClcommError as error:
        if case.fault in MISMATCHES:
            comm.dump_operations(folder)
        raise error


def _native():
    from clcomm import Communicator

    comm = Communicator(stall_warning_s=0)

    def call(operation: str, count: int, dtype: str, starts: bool = False):
        array = np.ones(count, dtype)
        if starts:
            return lambda: comm.all_reduce_async(array).wait
        return lambda: getattr(comm, operation)(array)

    return comm, call


def _torch():
    import torch
    import torch.distributed as dist

    import clcomm.torch

    dist.init_process_group("clcomm")

    def call(operation: str, count: int, dtype: str, starts: bool = False):
        values = torch.ones(count, dtype=getattr(torch, dtype))
        size = dist.get_world_size()
        if starts:
            return lambda: dist.all_reduce(values, async_op=True).wait
        return {
            "all_reduce": lambda: dist.all_reduce(values),
            "broadcast": lambda: dist.broadcast(values, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(values.repeat(size), values),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(values[: count // size].clone(), values),
        }[operation]

    return clcomm.torch.communicator(), call


def _never() -> None:
    import time

    time.sleep(LIMIT_S)


# --- the two verdicts ---


def ours(case: Drawn, err: str) -> Verdict | str:
    """Return what clcomm said, or the job's output where it said nothing of the kind."""
    waited = WAITED.search(err)
    if waited and case.fault not in MISMATCHES:
        listed = " ".join(re.findall(r"ranks? ([\d, and]+) \(", waited[2]))
        missing, number = map(int, re.findall(r"\d+", listed)), NUMBER.search(waited[1])
        operation = waited[1].split()[0]
        return Verdict(int(number[2]) + bool(number[1]), operation, _sides(missing, case.ranks), "missing")
    got = re.search(r"on every rank, got (.*); call the same", err)
    if got is None or case.fault not in MISMATCHES:
        return err
    sides = [part.split(" in ", 1) for part in got[1].split("; ")]
    culprits = frozenset(map(int, re.findall(r"\d+", sides[0][0])))
    number = max(int(found[2]) + bool(found[1]) for _, text in sides for found in [NUMBER.search(text)])
    why = "" if "after #" in got[1] else MISMATCHES[case.fault]
    return Verdict(number, "", _sides(culprits, case.ranks), why)


def analysers(ranks: int, folder: str) -> Verdict | str:
    """Return what PyTorch's analyser says of a folder."""
    from torch.distributed.flight_recorder import fr_trace
    from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger

    FlightRecorderLogger().set_log_level(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as elsewhere:
        fr_trace.main([folder, "-o", os.path.join(elsewhere, "db")])
        database = pickle.loads(Path(elsewhere, "db").read_bytes())[1]
    for each in database.collectives:
        operation = each.collective_name.removeprefix("gloo:")
        if each.missing_ranks:
            return Verdict(each.collective_seq_id, operation, _sides(each.missing_ranks, ranks), "missing")
        if each.mismatch_collectives:
            reasons = {other.type_of_mismatch.state.name for other in each.mismatch_collectives.values()}
            return Verdict(
                each.collective_seq_id, "", _sides(each.mismatch_collectives, ranks), " and ".join(sorted(reasons))
            )
    return f"no fault in {len(database.collectives)} collectives"


def _sides(some: Iterable[int], ranks: int) -> frozenset[frozenset[int]]:
    some = frozenset(some)
    return frozenset({some, frozenset(range(ranks)) - some})


def verdicts(case: Drawn) -> tuple[Verdict | str, Verdict | str]:
    """Run a case, and return clcomm's verdict and the analyser's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [mpiexec(), "-n", str(case.ranks), sys.executable, "-m", "tests.proofs.hangs", repr(case), folder]
        ended = subprocess.run(
            command, cwd=ROOT, env=clean_environment(CLCOMM_DUMP_DIR=folder, OMP_NUM_THREADS="1"), text=True,
            capture_output=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        found = [path.parent for path in Path(folder).rglob("trace_*")]
        return ours(case, ended.stderr), analysers(case.ranks, str(found[0])) if found else f"no files; {ended.stderr}"


def main() -> None:
    if sys.argv[1].startswith("Drawn("):
        play(eval(sys.argv[1]), sys.argv[2])
        return
    cases = draw(int(sys.argv[1]), int(sys.argv[2]))
    equal = 0
    for case in cases:
        own, other = verdicts(case)
        if isinstance(own, Verdict) and own.is_that_of(other):
            equal += 1
        else:
            print(case, own, other, sep="\n  ", flush=True)
    print(f"{equal} of {len(cases)} hangs: the analyser's verdict is clcomm's")
    sys.exit(equal != len(cases))


if __name__ == "__main__":
    main()
