"""The fault matrix: the faults, their places and ranks, and the expected end of the job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.faults.launch import END_S

PLACES = ("start-up", "forward", "collective", "checkpoint", "exit")
RANKS = (0, 1)
#: The newest step that is certainly saved when a fault happens at a place.
SAVED = {"start-up": 0, "forward": 4, "collective": 4, "one kernel": 4, "checkpoint": 4, "exit": 8, "end": 8}


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        pattern: of text in the job's output, {rank} filled in.
        code: the exit code; None for any but 0.
        damage: the fault that is there before the job starts.
        disk: mount options of a disk for its checkpoints alone.
        leaves: a pattern of files that may stay in /dev/shm.
        ranks: number of ranks.
        two_hosts: whether half of its ranks run on another host.
        ulfm: whether it runs under Open MPI's `mpiexec --with-ft ulfm`, where the others continue when a rank dies.
    """

    fault: str
    place: str
    rank: int
    pattern: str
    code: int | None
    damage: str = ""
    disk: str = ""
    within_s: float = END_S
    leaves: str = "nothing"
    ranks: int = 2
    ulfm: bool = False
    two_hosts: bool = False

    @property
    def planted(self) -> str:
        """The fault as the job gets it: FAULT:PLACE:RANK."""
        return f"{self.fault}:{self.place}:{self.rank}"

    @property
    def name(self) -> str:
        """The case's unique name."""
        ranks = f":ulfm{self.ranks}" if self.ulfm else "" if self.ranks == 2 else f":{self.ranks}"
        return self.planted + ranks + (":two hosts" if self.two_hosts else "")

    @property
    def survives(self) -> bool:
        """Whether the job finishes despite the fault."""
        return self.code == 0


#: Limits for a collective in these jobs; far more than any takes on a busy machine.
STALL_WARNING_S, TIMEOUT_S = 4.0, 8.0
KILLED = r"clcomm: rank {rank} died{step} "
#: The file that MPICH leaves in /dev/shm when a job ends while MPI starts.
MPI_STARTING = r"mpich_shm_\w+"
#: The job's end for each end of a rank, at any place.
ENDINGS = {
    "exception": (r"clcomm: rank {rank} failed{step}:\n(.*\n)*RuntimeError: planted", 1),
    "exception in a thread": (r"clcomm: rank {rank} failed{step}:\n(.*\n)*RuntimeError: planted", 1),
    "sys.exit": (r"clcomm: rank {rank}: left with exit code 5{step}", 5),
    "os._exit": (r"clcomm: rank {rank} exited unexpectedly{step} with exit code 7", None),
    "os._exit(0)": (r"clcomm: rank {rank} exited unexpectedly{step} with exit code 0", None),
    "SIGKILL": (KILLED, None),
    "SIGSEGV": (KILLED, None),
    "SIGTERM": (r"clcomm: rank {rank}: ended by SIGTERM{step}", 143),
    "SIGINT": (r"clcomm: rank {rank}: interrupted{step}", 130),
}
#: Exits of a script that does not call `run(main)`. Python has no hook for SystemExit, so its code is not the job's.
PLAIN_EXITS = {
    "sys.exit, plain script": (r"clcomm: rank {rank}: left while rank \d waits for it in .*{step}", 1),
    "SIGTERM, plain script": (r"clcomm: rank {rank}: ended by SIGTERM{step}", 143),
}
PLAIN_PLACES = ("start-up", "forward", "collective", "exit")
BEFORE = " before it had a Communicator"
#: Signals to several processes, as from service managers and terminals, and the job's output; MPICH's mpiexec has an
#: exit code of its own for Ctrl-C, and may end the ranks before they print anything.
GROUP_SIGNALS = {
    "SIGTERM to all": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGTERM to all twice": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGTERM to mpiexec": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGINT to all": (r"clcomm: (rank \d: )?interrupted", None),
    "SIGINT to all twice": (r"clcomm: (rank \d: )?interrupted|Ctrl-C", None),
    "SIGINT to mpiexec": (r"clcomm: (rank \d: )?interrupted|Ctrl-C", None),
}
#: Faults that keep a rank from ending after its program.
STAYS = {
    "thread that stays": r"it waits for thread 'Thread-\d+ \(sleep\)'.*, which is no daemon",
    "thread that stays, finalized": r"it waits for thread 'Thread-\d+ \(sleep\)'.*, which is no daemon",
    "exit handler that stays": r"it waits for an exit handler at \S*planted.py:\d+.*",
}
#: Numbers of ranks under ULFM.
ULFM_RANKS = range(2, 9)
#: Faults that a job survives.
HARMLESS = ("slow rank", "clock jump")
FINISHED = r"finished from step \d+ with "
#: Pattern for any output between two others.
THEN = r"(.*\n)*"
PASSED_OVER = r"damaged.*going on from .*run.npz.1"
REBUILT = r"kernel cache .*: damaged; building anew"
UNWRITTEN = r"clcomm: checkpoint .*could not be written \("
#: A prepared all-reduce of float32, which is one kernel of each rank: for its own part where there is a core for each,
#: for what the others have not taken where there are more ranks.
IN_KERNEL, MORE_RANKS = "one kernel", 4
KERNEL_ENDINGS = ("exception", "sys.exit", "os._exit", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGINT")
#: Mismatched calls, and where the victim makes them.
MISMATCHES = ("mismatched shapes", "mismatched order", "missing call")
MISMATCH_PLACES = ("start-up", "collective", IN_KERNEL, "checkpoint", "exit")


def all_cases() -> list[Case]:
    """Return the whole matrix."""
    cases = [ending(fault, place, rank) for fault in ENDINGS for place in PLACES for rank in RANKS]
    cases += [ending(fault, place, rank) for fault in PLAIN_EXITS for place in PLAIN_PLACES for rank in RANKS]
    cases += [ending(fault, IN_KERNEL, rank) for fault in KERNEL_ENDINGS for rank in RANKS]
    places = (*PLACES, IN_KERNEL)
    cases += [Case(fault, place, rank, FINISHED, 0) for fault in HARMLESS for place in places for rank in RANKS]
    for fault in MISMATCHES:
        for place in MISMATCH_PLACES:
            cases += [Case(fault, place, rank, r"clcomm: collective: .*rank {rank}\b", 2) for rank in RANKS]
    cases += [stopped(place, rank) for place in places for rank in RANKS]
    cases += [replace(case, ranks=MORE_RANKS) for case in cases if case.place == IN_KERNEL]
    for fault, (pattern, code) in GROUP_SIGNALS.items():
        cases += [Case(fault, place, 1, pattern, code) for place in PLACES if place != "start-up"]
    for fault, cause in STAYS.items():
        pattern = rf"clcomm: rank {{rank}} has not ended .* after its program: {cause}; .* the job ends"
        cases += [Case(fault, "end", rank, pattern, 124, within_s=TIMEOUT_S + END_S) for rank in RANKS]
    cases += [under_ulfm(fault, ranks) for fault in (*ENDINGS, *PLAIN_EXITS, "SIGSTOP") for ranks in ULFM_RANKS]
    cases += [Case("NaN", "forward", rank, r"clcomm: gradient: .*rank {rank}\b", 1) for rank in RANKS]
    for place in ("forward", "collective", "checkpoint"):
        cases += [Case("flipped bit", place, rank, r"clcomm: replicas: .*'part1'.*rank", 1) for rank in RANKS]
    cases += [
        Case("disk full", "checkpoint", 0, rf"{UNWRITTEN}No space left on device\)", 1, disk="size=1m"),
        Case("read-only directory", "start-up", 0, r"clcomm: checkpoint: .*: Read-only file", 2, disk="ro"),
        Case("read-only directory", "checkpoint", 0, rf"{UNWRITTEN}Read-only file system\)", 1, disk="size=1m"),
        Case("truncated checkpoint", "start-up", 0, PASSED_OVER + THEN + FINISHED, 0, "newest"),
        Case("truncated checkpoints", "start-up", 0, r"clcomm: checkpoint .*damaged", 2, "all"),
        Case(
            "truncated kernel cache",
            "start-up",
            0,
            REBUILT + THEN + FINISHED,
            0,
            "cut",
        ),
        Case(
            "corrupt kernel cache",
            "start-up",
            0,
            REBUILT + THEN + FINISHED,
            0,
            "flip",
        ),
        Case("/dev/shm full", "start-up", 0, r"/dev/shm has no room" + THEN + FINISHED, 0, "shm"),
    ]
    return cases


def ending(fault: str, place: str, rank: int) -> Case:
    """Return the case of a rank's end of this kind at this place."""
    pattern, code = {**ENDINGS, **PLAIN_EXITS}[fault]
    step = {"start-up": "", "checkpoint": " at step 6", "exit": " at step 8", "end": " at step 8"}
    pattern = pattern.replace("{step}", step.get(place, " at step 5"))
    if place == "start-up" and fault.startswith(("SIGKILL", "SIGSEGV", "SIGTERM")):
        # Only the launcher knows the rank, and reports it.
        return Case(fault, place, rank, r"(?i)signal (9|11|15)\b", None, leaves=MPI_STARTING)
    if place == "start-up" and fault.startswith(("os._exit", "sys.exit, plain")):
        if fault.startswith("sys.exit"):
            pattern = r"clcomm: rank {rank} exited unexpectedly with exit code 5"
        return Case(fault, place, rank, pattern + BEFORE, None, leaves=MPI_STARTING)
    if place == "checkpoint" and rank == 0 and fault in ("exception", "sys.exit"):
        return Case(fault, place, rank, r"clcomm: checkpoint .*could not be written", 1)  # in the writer's thread
    return Case(fault, place, rank, pattern, code)


def under_ulfm(fault: str, ranks: int) -> Case:
    """Return the case of a rank that ends during training where MPI does not end the others."""
    case = stopped("collective", 1) if fault == "SIGSTOP" else ending(fault, "collective", 1)
    if fault == "os._exit" and ranks == 2:
        case = replace(case, pattern="")  # Open MPI's launcher ends with that code at once, and passes no line on
    return replace(case, ranks=ranks, ulfm=True)


def stopped(place: str, rank: int) -> Case:
    """Return the case of a rank that stops for longer than the time-out."""
    pattern, code = rf"clcomm: rank \d has waited .*; missing: rank {rank} \(stopped by SIGSTOP.* the job ends", 124
    if place == "start-up":
        # MPI, which is starting, does not know which rank is missing, and no rank unlinks its file.
        pattern, code = r"in load_mpi\n(.*\n)*.*([Aa]larm clock|Terminated|EXIT CODE: 14)", None
    leaves = MPI_STARTING if place == "start-up" else "nothing"
    return Case("SIGSTOP", place, rank, pattern, code, within_s=TIMEOUT_S + END_S, leaves=leaves)


#: The sample that CI runs: one case of each mechanism.
SAMPLE = (
    "exception:collective:1", "SIGSTOP:forward:1", "exception in a thread:forward:0", "sys.exit:start-up:1",
    "os._exit(0):exit:1", "os._exit:start-up:1", "sys.exit, plain script:collective:1",
    "SIGKILL:checkpoint:0", "SIGTERM:collective:1", "mismatched order:collective:1",
    "SIGKILL:one kernel:1", "SIGKILL:one kernel:1:4", "mismatched order:one kernel:0", "missing call:checkpoint:0",
    "NaN:forward:1", "flipped bit:forward:1", "truncated checkpoint:start-up:0",
    "clock jump:collective:0", "disk full:checkpoint:0", "read-only directory:checkpoint:0",
    "truncated kernel cache:start-up:0", "SIGTERM to all twice:collective:1", "thread that stays:end:1",
    "exception:collective:1:ulfm4", "SIGKILL:collective:1:ulfm8", "SIGSTOP:collective:1:ulfm3",
    "null device:--checkpoint:0", "named pipe:--trace:0", "directory:--report:0",
    "link in a circle:--log-csv:0", "endless device:--resume:0", "no HOME:start-up:0", "full disk:--log-csv:0",
    "different options:--trace:1", "different options:--batch-size:1", "no number:--epochs:0",
    "full disk:kernel cache:0", "a cache directory that others may write to:start-up:0",
)  # fmt: skip
