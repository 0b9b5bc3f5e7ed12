"""Run the whole suite: plain pytest, then the tests marked mpi on each number of ranks, all of them whatever fails.

`make test` calls it. The last lines say how long each part took, what failed, and what was skipped, with the reason and
the command that runs it. `--only-skipped-for PyTorch` runs what the run before skipped for that reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.caches import use_own_caches
from tests.outcomes import Outcomes

#: Why tests are skipped, by a pattern of the reasons they give: its name, and what runs them.
REASONS = [
    (r"trainers", "Lightning, accelerate or transformers is not installed", "make test TEST_EXTRAS=test,trainers"),
    (r"pytorch_ocl", "PyTorch's OpenCL device is not installed", "build it as in docs/pytorch-ddp.md, then make test"),
    (r"C\+\+ compiler", "a C++ compiler is not installed", "install g++, then make test"),
    (r"(?i)torch", "PyTorch is not installed", "make test-torch"),
    (r"JAX|jax", "JAX is not installed", "make test TEST_EXTRAS=test,jax"),
    (r"tinygrad", "tinygrad is not installed", "make test TEST_EXTRAS=test,tinygrad"),
    (r"Open MPI|ULFM", "Open MPI's ULFM is needed", "make ulfm"),
    (r"Intel", "Intel's OpenCL runtime is not installed", "make intel, then make test"),
    (r"MNIST", "MNIST's files are not at hand", "make test CLCOMM_DATA=<their folder>"),
    (r"Oclgrind:", "every build of each kernel under Oclgrind", "make oclgrind"),
    (r"Oclgrind", "Oclgrind is not installed", "make oclgrind, where there is a wheel of it"),
    (r"[Cc]hromium", "Chromium is not installed", "install chromium, then make test"),
    (r"namespaces|two hosts", "two hosts need root and network namespaces", "make hosts, as root"),
]


#: pytest's codes for a run in which all passed, and for one that had nothing to run.
ENDED_WELL = (0, 5)
#: Several ranks' NumPy on few cores: one thread each. A crash in a thread that is not Python's has no stack in
#: faulthandler; the UCX in MPICH prints one.
ON_RANKS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "UCX_HANDLE_ERRORS": "bt"}


@dataclass(frozen=True)
class Part:
    """One of the suite's runs: its name, its command, and the file for its outcomes."""

    name: str
    command: list[str]
    outcomes: Path

    def run(self) -> tuple[int, float, Outcomes]:
        """Return the exit code, the seconds and the outcomes."""
        self.outcomes.unlink(missing_ok=True)
        print(f"== {self.name} ==", flush=True)
        environment = os.environ if self.name == "plain" else ON_RANKS | os.environ
        begin = time.monotonic()
        code = subprocess.run(self.command, env=environment).returncode
        took_s = time.monotonic() - begin
        return code, took_s, Outcomes.read(self.outcomes) if self.outcomes.is_file() else Outcomes()


def main(arguments: list[str]) -> int:
    use_own_caches()
    options = _parsed(arguments)
    plain = [] if options.no_plain else [_plain(options)]
    parts = [*plain, *(_ranks(options, ranks) for ranks in options.ranks)]
    if options.only_skipped_for:
        parts = [again for part in parts if (again := _again(part, options.only_skipped_for))]
        if not parts:
            print(f"Nothing in {options.record} was skipped for {options.only_skipped_for}: run `make test` first")
            return 2
    print(f"Parts: {', '.join(part.name for part in parts)}; each runs whatever fails before it", flush=True)
    lines, failed, again, skipped = [], [], [], Counter[str]()
    for part in parts:
        code, took_s, outcomes = part.run()
        lines.append(f"{part.name:<10} {_verdict(code):<12} {outcomes.passed:>6,} passed {len(outcomes.failed):>4} "
                     f"failed {len(outcomes.skipped):>5,} skipped {took_s:>6.0f} s")  # fmt: skip
        failed += [f"{part.name}: {name}" for name in outcomes.failed] or [part.name] * (code not in ENDED_WELL)
        again += [f"{part.name}: {name}" for name in outcomes.again]
        skipped.update(outcomes.skipped.values())
    print("\n".join(["", *lines, *_skips(skipped), *(f"FAILED {name}" for name in failed)]))
    if again:
        print(f"{len(again)} failed once and ran again: {', '.join(again)}")
    return 1 if failed else 0


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--no-plain", action="store_true", help="run only what needs ranks")
    parser.add_argument("--launch", default="mpiexec", help="the launcher, before -n")
    parser.add_argument("--workers", default="3", help="processes among which the plain tests are divided")
    parser.add_argument("--limit-s", default="1200", help="seconds that a part on several ranks may take")
    parser.add_argument("--record", type=Path, default=Path(".test-caches/outcomes"), help="folder of the outcomes")
    parser.add_argument("--only-skipped-for", help="run what was skipped for this reason, a pattern")
    return parser.parse_args(arguments)


def _plain(options: argparse.Namespace) -> Part:
    # Where a process of its own ends, pytest-xdist 3.8 would wait for ever for the one that replaces it: that gets one
    # file, and runs a last test only when it is told of another or of the end.
    flags = ["--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    return _part("plain", [sys.executable], ["-n", options.workers, *flags], options)


def _ranks(options: argparse.Namespace, ranks: int) -> Part:
    launch = ["timeout", "--kill-after", "10", options.limit_s, *shlex.split(options.launch), "-n", str(ranks)]
    # The ranks would share one test cache.
    flags = ["--with-mpi", "-x", "-p", "no:cacheprovider"]
    return _part(f"{ranks} ranks", [*launch, sys.executable, "-m", "mpi4py"], flags, options)


def _part(name: str, python: list[str], flags: list[str], options: argparse.Namespace) -> Part:
    outcomes = options.record / f"{name.replace(' ', '-')}.json"
    tests = [f"--outcomes={outcomes}", *flags, *shlex.split(os.environ.get("TEST_ARGS", ""))]
    return Part(name, [*python, "-m", "pytest", *tests], outcomes)


def _again(part: Part, pattern: str) -> Part | None:
    """Return the part with only what its last run skipped for a reason that matches, or None if that is nothing."""
    skipped = Outcomes.read(part.outcomes).skipped if part.outcomes.is_file() else {}
    names = [name for name, reason in skipped.items() if re.search(pattern, _reason(reason)[0])]
    if not names:
        return None
    listed = part.outcomes.with_suffix(".listed")
    listed.write_text("\n".join(names))
    outcomes = part.outcomes.with_suffix(".again.json")
    command = [argument.replace(str(part.outcomes), str(outcomes)) for argument in part.command]
    # With "=": pytest takes a path by itself for a folder of tests, and looks for options there.
    return Part(part.name, [*command, f"--only-listed={listed}"], outcomes)


def _verdict(code: int) -> str:
    return "passed" if code in ENDED_WELL else "took too long" if code in (124, 137) else "failed"


def _reason(reason: str) -> tuple[str, str]:
    """Return the name that REASONS has for a reason, and what runs its tests; the reason itself if none has."""
    for pattern, name, command in REASONS:
        if re.search(pattern, reason):
            return name, command
    return reason, ""


def _skips(reasons: Counter[str]) -> Iterable[str]:
    together = Counter[tuple[str, str]]()
    for reason, count in reasons.items():
        together[_reason(reason)] += count
    if together:
        yield "Skipped tests and files of tests:"
    for (name, command), count in together.most_common():
        yield f"{count:>6,}  {name}" + (f": {command}" if command else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
