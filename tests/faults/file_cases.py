"""Cases of the fault matrix about files: options that name unsuitable files, missing homes, full disks.

They run `examples.mnist` on two ranks, as a user does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.faults.cases import Case

#: Options that name a file or a directory to write, and the message if it cannot be written.
OPTIONS = ("--checkpoint", "--report", "--trace", "--log-csv", "--tensorboard", "--resume")
#: Kinds of files that an option may not name, with the message for each.
KINDS = {
    "named pipe": "a named pipe", "socket": "a socket", "null device": "a device", "full device": "a device",
    "endless device": "a device", "link to a device": "a device", "link in a circle": "a symbolic link that leads in",
    "below a file": "Not a directory", "name too long": "File name too long", "in /proc": "No such file or directory",
    "directory": "a directory",
}  # fmt: skip
#: The reason that another system call gives, for a directory and for a file that is read.
_OTHERWISE = "File exists|Not a directory|No such device|Too many levels|found none"
FINISHED = r"images/s"
SMALL = ("--data", "synthetic", "--model", "mlp", "--no-eval", "--max-steps", "6", "--epochs", "1")


@dataclass(frozen=True)
class FileCase(Case):
    """A case of a job with these command-line `arguments`; {at} stands for a file of the `kind`.

    `environment`: None removes a variable. `small`: bytes of the disk at {small}. `of_rank_1`: rank 1's arguments.
    """

    arguments: tuple[str, ...] = ()
    kind: str = ""
    environment: dict[str, str | None] = field(default_factory=dict)
    small: str = ""
    of_rank_1: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)


#: Writes to a disk that is too small: the disk's size, arguments, message, and exit code.
_GOES_ON = r"FULL; the training goes on(.*\n)*.*images/s"
FULL = (
    ("--log-csv", "4k", ("--log-csv", "{small}/log", "--max-steps", "100"), rf"--log-csv .*{_GOES_ON}", 0),
    (
        "--tensorboard",
        "4k",
        ("--tensorboard", "{small}/log", "--epochs", "4", "--max-steps", "500"),
        rf"--tensorboard .*{_GOES_ON}",
        0,
    ),
    ("--trace", "12k", ("--trace", "{small}/trace.json"), r"trace: .*FULL(.*\n)*.*images/s", 0),
    ("--report", "4k", ("--report", "{small}/report.json"), "--report: expected a file to write, .*FULL", 1),
    (
        "--checkpoint",
        "64k",
        ("--checkpoint", "{small}/run.npz"),
        r"clcomm: checkpoint .*could not be written \(FULL\)",
        1,
    ),
    ("kernel cache", "256k", (), "clcomm: .*kernel cache .*FULL", 1),
)


def file_cases() -> list[Case]:
    """Return all of them."""
    cases: list[Case] = [_at(option, kind) for option in OPTIONS for kind in KINDS if _is_fault(option, kind)]
    cases += [_homeless(name, **settings) for name, settings in HOMES.items()]
    return cases + [_full(*row) for row in FULL]


def _full(place: str, size: str, arguments: tuple[str, ...], said: str, code: int) -> FileCase:
    said = said.replace("FULL", "No space left on device")
    if place == "kernel cache":
        return FileCase(
            "full disk", place, 0, said, code, environment={"POCL_CACHE_DIR": "{small}/kernels"}, small=size
        )
    return FileCase("full disk", place, 0, said, code, arguments=arguments, small=size)


def _is_fault(option: str, kind: str) -> bool:
    return not (option == "--tensorboard" and kind == "directory") and not (option == "--resume" and kind == "in /proc")


def _at(option: str, kind: str) -> FileCase:
    reason = f"({KINDS[kind]}|{_OTHERWISE})" if option in ("--tensorboard", "--resume") else KINDS[kind]
    said = rf"clcomm: (checkpoint|{option}).*{reason}"
    return FileCase(kind, option, 0, said, 2, arguments=(option, "{at}"), kind=kind)


#: Environments of homes that hold no caches, by name.
HOMES: dict[str, dict] = {
    "no HOME": {"HOME": None},
    "a HOME that is missing": {"HOME": "/proc/none"},
    "a HOME that is a file": {"HOME": "/proc/self/status"},
    "a cache directory that cannot be made": {"XDG_CACHE_HOME": "/proc/none"},
    "a cache directory that others may write to": {"POCL_CACHE_DIR": "{open}"},
}


def _homeless(name: str, **environment: str | None) -> FileCase:
    settings: dict[str, str | None] = {"XDG_CACHE_HOME": None, "POCL_CACHE_DIR": None, "TMPDIR": "{dir}", **environment}
    if "others" in name:
        return FileCase(
            name, "start-up", 0, r"clcomm: POCL_CACHE_DIR: expected a directory that only", 2, environment=settings
        )
    return FileCase(name, "start-up", 0, FINISHED, 0, environment=settings)
