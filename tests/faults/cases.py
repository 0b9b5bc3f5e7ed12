"""The fault matrix: what is made to go wrong, where, on which rank, and how the job has to end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.faults.launch import END_S

PLACES = ("start-up", "forward", "collective", "checkpoint", "exit")
RANKS = (0, 1)
#: The newest step that is surely saved when something goes wrong at a place.
SAVED = {"start-up": 0, "forward": 4, "collective": 4, "checkpoint": 4, "exit": 8, "end": 8}


@dataclass(frozen=True)
class Case:
    """One fault. `says`: a pattern in what the job writes, {rank} filled in; `code`: None for any but 0.

    `damage`: what is wrong before the job starts. `disk`: how the disk for its checkpoints is mounted, where it has one
    of its own. `leaves`: a pattern of what may stay in /dev/shm. `ranks`: how many the job has. `ulfm`: whether it runs
    under Open MPI's `mpiexec --with-ft ulfm`, where MPI lets the others go on when a rank dies.
    """

    fault: str
    place: str
    rank: int
    says: str
    code: int | None
    damage: str = ""
    disk: str = ""
    within_s: float = END_S
    leaves: str = "nothing"
    ranks: int = 2
    ulfm: bool = False

    @property
    def planted(self) -> str:
        """What the job is given to go wrong: FAULT:PLACE:RANK."""
        return f"{self.fault}:{self.place}:{self.rank}"

    @property
    def name(self) -> str:
        """The case, unlike all others."""
        return f"{self.planted}{f':ulfm{self.ranks}' if self.ulfm else ''}"

    @property
    def survives(self) -> bool:
        """Whether the job finishes all the same."""
        return self.code == 0


#: How long a collective may take in these jobs; far more than any does on a busy machine.
STALL_WARNING_S, TIMEOUT_S = 4.0, 8.0
KILLED = r"clcomm: rank {rank} died{step} "
#: What stays in /dev/shm of a job that ends while MPI starts: MPICH's own file.
MPI_STARTING = r"mpich_shm_\w+"
#: How each way to end a rank ends the job, wherever it happens.
ENDINGS = {
    "exception": (r"clcomm: rank {rank} failed{step}:\n(.*\n)*RuntimeError: planted", 1),
    "exception in a thread": (r"clcomm: rank {rank} failed{step}:\n(.*\n)*RuntimeError: planted", 1),
    "sys.exit": (r"clcomm: rank {rank}: left with exit code 5{step}", 5),
    "os._exit": (r"clcomm: rank {rank}: left by os._exit\(7\){step}", 7),
    "os._exit(0)": (r"clcomm: rank {rank}: left by os._exit\(0\){step}", 1),
    "SIGKILL": (KILLED, None),
    "SIGSEGV": (KILLED, None),
    "SIGTERM": (r"clcomm: rank {rank}: ended by SIGTERM{step}", 143),
    "SIGINT": (r"clcomm: rank {rank}: interrupted{step}", 130),
}
#: Signals to more than a rank, as service managers and terminals send them, and what the job then says; MPICH's mpiexec
#: has an exit code of its own for Ctrl-C, and may end the ranks before they say anything.
GROUP_SIGNALS = {
    "SIGTERM to all": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGTERM to all twice": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGTERM to mpiexec": (r"clcomm: (rank \d: )?ended by SIGTERM", 143),
    "SIGINT to all": (r"clcomm: (rank \d: )?interrupted", None),
    "SIGINT to all twice": (r"clcomm: (rank \d: )?interrupted|Ctrl-C", None),
    "SIGINT to mpiexec": (r"clcomm: (rank \d: )?interrupted|Ctrl-C", None),
}
#: What keeps a rank from ending after its program.
STAYS = {
    "thread that stays": r"it waits for thread 'Thread-\d+ \(sleep\)'.*, which is no daemon",
    "thread that stays, finalized": r"it waits for thread 'Thread-\d+ \(sleep\)'.*, which is no daemon",
    "exit handler that stays": r"it waits for an exit handler at \S*victim.py:\d+.*",
}
#: Numbers of ranks under ULFM.
ULFM_RANKS = range(2, 9)
#: What a job takes in its stride.
HARMLESS = ("slow rank", "clock jump")
FINISHED = r"finished from step \d+ with "
#: Whatever comes between two things that it says.
THEN = r"(.*\n)*"
PASSED_OVER = r"damaged.*going on from .*run.npz.1"
REBUILT = r"kernel cache .*: damaged; building anew"
UNWRITTEN = r"clcomm: checkpoint .*could not be written \("
#: Calls that don't fit together, and where the victim makes them.
MISMATCHES = ("mismatched shapes", "mismatched order", "missing call")
MISMATCH_PLACES = ("start-up", "collective", "checkpoint", "exit")


def all_cases() -> list[Case]:
    """Return the whole matrix."""
    cases = [ending(fault, place, rank) for fault in ENDINGS for place in PLACES for rank in RANKS]
    cases += [Case(fault, place, rank, FINISHED, 0) for fault in HARMLESS for place in PLACES for rank in RANKS]
    for fault in MISMATCHES:
        for place in MISMATCH_PLACES:
            cases += [Case(fault, place, rank, r"clcomm: collective: .*rank {rank}\b", 2) for rank in RANKS]
    cases += [stopped(place, rank) for place in PLACES for rank in RANKS]
    for fault, (says, code) in GROUP_SIGNALS.items():
        cases += [Case(fault, place, 1, says, code) for place in PLACES if place != "start-up"]
    for fault, says in STAYS.items():
        said = rf"clcomm: rank {{rank}} has not ended .* after its program: {says}; .* the job ends"
        cases += [Case(fault, "end", rank, said, 124, within_s=TIMEOUT_S + END_S) for rank in RANKS]
    cases += [under_ulfm(fault, ranks) for fault in (*ENDINGS, "SIGSTOP") for ranks in ULFM_RANKS]
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
    """Return the case of a rank that ends in some way at some place."""
    says, code = ENDINGS[fault]
    step = {"start-up": "", "forward": " at step 5", "collective": " at step 5", "checkpoint": " at step 6"}
    says = says.replace("{step}", step.get(place, " at step 8"))
    if place == "start-up" and fault in ("SIGKILL", "SIGSEGV", "SIGTERM"):
        # Nobody knows it yet: the launcher tells.
        return Case(fault, place, rank, r"(?i)signal (9|11|15)\b", None, leaves=MPI_STARTING)
    if place == "checkpoint" and rank == 0 and fault in ("exception", "sys.exit"):
        return Case(fault, place, rank, r"clcomm: checkpoint .*could not be written", 1)  # in the writer's thread
    return Case(fault, place, rank, says, code)


def under_ulfm(fault: str, ranks: int) -> Case:
    """Return the case of a rank that ends, in the middle of training, where MPI does not end the others."""
    case = stopped("collective", 1) if fault == "SIGSTOP" else ending(fault, "collective", 1)
    return replace(case, ranks=ranks, ulfm=True)


def stopped(place: str, rank: int) -> Case:
    """Return the case of a rank that stops for longer than the time-out."""
    said, code = rf"clcomm: rank \d has waited .*; missing: rank {rank} \(stopped by SIGSTOP.* the job ends", 124
    if place == "start-up":
        # MPI, which is starting, does not know who is missing, and has nobody who would unlink its file.
        said, code = r"in _mpi4py\n(.*\n)*.*[Aa]larm clock", None
    leaves = MPI_STARTING if place == "start-up" else "nothing"
    return Case("SIGSTOP", place, rank, said, code, within_s=TIMEOUT_S + END_S, leaves=leaves)


#: What CI runs: one of each mechanism.
SAMPLE = (
    "exception:collective:1", "SIGSTOP:forward:1", "exception in a thread:forward:0", "sys.exit:start-up:1",
    "os._exit(0):exit:1", "SIGKILL:checkpoint:0", "SIGTERM:collective:1", "mismatched order:collective:1",
    "missing call:checkpoint:0", "NaN:forward:1", "flipped bit:forward:1", "truncated checkpoint:start-up:0",
    "clock jump:collective:0", "disk full:checkpoint:0", "read-only directory:checkpoint:0",
    "truncated kernel cache:start-up:0", "SIGTERM to all twice:collective:1", "thread that stays:end:1",
    "exception:collective:1:ulfm4", "SIGKILL:collective:1:ulfm8", "SIGSTOP:collective:1:ulfm3",
    "null device:--checkpoint:0", "named pipe:--trace:0", "directory:--report:0",
    "link in a circle:--log-csv:0", "endless device:--resume:0", "no HOME:start-up:0", "full disk:--log-csv:0",
    "different options:--trace:1", "different options:--batch-size:1", "no number:--epochs:0",
    "full disk:kernel cache:0", "a cache directory that others may write to:start-up:0",
)  # fmt: skip
