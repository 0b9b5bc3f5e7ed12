"""The fault matrix: what is made to go wrong, where, on which rank, and how the job has to end."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.launch import END_S

PLACES = ("start-up", "forward", "collective", "checkpoint", "exit")
RANKS = (0, 1)
#: The newest step that is surely saved when something goes wrong at a place.
SAVED = {"start-up": 0, "forward": 4, "collective": 4, "checkpoint": 4, "exit": 8}


@dataclass(frozen=True)
class Case:
    """One fault. `says`: a pattern in what the job writes, {rank} filled in; `code`: None for any but 0.

    `damage`: what is wrong before the job starts. `disk`: how the disk for its checkpoints is mounted, where it has one
    of its own. `leaves`: a pattern of what may stay in /dev/shm.
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

    @property
    def name(self) -> str:
        """The case as the victim is told it, FAULT:PLACE:RANK."""
        return f"{self.fault}:{self.place}:{self.rank}"

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
    "truncated kernel cache:start-up:0",
)  # fmt: skip
