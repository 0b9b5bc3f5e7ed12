"""`python -m training.replay`: a step of a run again, in this process, with hashes of values; where two runs part."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from clcomm._version import __version__
from clcomm.base.console.option_types import whole_number
from clcomm.base.errors import ArgumentError, CheckpointError
from clcomm.tools.cli import run_alone
from clcomm.tools.commands.command import Command
from training import command

if TYPE_CHECKING:
    import numpy as np

    from clcomm.jobs.checkpoint import Checkpoint

#: Characters of a hash that are printed.
_SHOWN = 16
#: Packages that a file without a signature may name: clcomm's own programs.
_KNOWN = ("training", "examples")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", metavar="FILE", help="the run's --checkpoint; earlier ones lie beside it")
    parser.add_argument("--step", type=whole_number(1), metavar="N", help="the step, from 1 on")
    parser.add_argument("--rank", type=whole_number(), default=0, metavar="R", help="whose step; default: %(default)s")
    parser.add_argument("--trust", action="append", metavar="PACKAGE",
                        help="import this package's modules, too, if a file without a signature names one")  # fmt: skip
    parser.add_argument("--against", metavar="FILE", help="another run's --checkpoint: find the step where they part")


def run(options: argparse.Namespace) -> None:
    """Print a step's hashes, or the first difference of two runs; CheckpointError where a run cannot be replayed."""
    if (options.step is None) == (options.against is None):
        raise ArgumentError("replay: expected --step N for a step's hashes, or --against FILE for a difference")
    trusted = {*_KNOWN, *(options.trust or ())}
    if options.against is None:
        _print_step(Saved.of(options.run_file, trusted), options.step, options.rank)
    else:
        _print_difference(Saved.of(options.run_file, trusted), Saved.of(options.against, trusted))


class Saved(NamedTuple):
    """A run's checkpoints by step, each with its file."""

    path: Path
    steps: dict[int, tuple[Path, Checkpoint]]

    @classmethod
    def of(cls, path: str, trusted: Collection[str] = _KNOWN) -> Saved:
        """Read a series; CheckpointError where none of it is undamaged or one was not written by a Session.

        trusted: packages that a file without a signature may name.
        """
        from training.checkpoint_series import undamaged

        steps = {}
        for source, checkpoint in undamaged(Path(path)):
            _check_program(source, checkpoint.facts, trusted)
            steps[int(checkpoint.facts["training"]["progress"]["step"])] = source, checkpoint
        return cls(Path(path), dict(sorted(steps.items())))

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts of the first checkpoint at or after a step, whose ranks computed it; else the last one's."""
        return self.steps[next((each for each in self.steps if each >= step), max(self.steps))][1].facts

    def before(self, step: int) -> tuple[Path | None, int]:
        """Return the last checkpoint before a step, and its step; None, 0: the run's start."""
        facts = self.facts(step)
        began, shards = facts["program"]["began"], facts["program"]["settings"]["logical_shards"]
        usable = [
            each for each, (_, checkpoint) in self.steps.items()
            if each >= began and (shards or checkpoint.facts["world_size"] == facts["world_size"])
        ]  # fmt: skip
        found = [each for each in usable if each < step]
        if not found and began:
            raise ArgumentError(
                f"--step: expected one after {usable[0]}, the first saved since the run went on from step {began}, got "
                f"{step}"
            )
        return (self.steps[found[-1]][0], found[-1]) if found else (None, 0)

    def replayed(self, source: Path | None, first: int, last: int) -> Iterator[tuple[int, Mapping[Any, np.ndarray]]]:
        """Yield the values of these steps, computed from a checkpoint of the run or its start."""
        from training.replayed_steps import replayed

        return replayed(self.facts(last), source, first, last)


def _check_program(source: Path, facts: dict[str, Any], trusted: Collection[str]) -> None:
    from clcomm.jobs.checkpoint.manifest import signing_key

    program = facts.get("program")
    if not isinstance(program, dict):
        raise CheckpointError(
            f"checkpoint {source}: expected one that a Session saved, whose class is in a module, found no program to "
            f"replay"
        )
    if program["version"] != __version__:
        raise CheckpointError(
            f"checkpoint {source}: expected one of clcomm {__version__}, found {program['version']}; replay with the "
            f"release that computed it"
        )
    for name in (program["session"], program["options"]):
        package = str(name).partition(":")[0].partition(".")[0]
        if package not in trusted and signing_key() is None:
            raise CheckpointError(
                f"checkpoint {source}: expected a program of {', '.join(_KNOWN)}, found {name!r}, which anybody can "
                f"have written, as the file has no signature; if {package} is your own, add --trust {package}"
            )


def _print_step(saved: Saved, step: int, rank: int) -> None:
    facts = saved.facts(step)
    ranks = facts["world_size"]
    if rank >= ranks:
        raise ArgumentError(f"--rank: expected 0 to {ranks - 1}, the run's ranks, got {rank}")
    source, _ = saved.before(step)
    shards = facts["program"]["settings"]["logical_shards"] or ranks
    own = range(rank * shards // ranks, (rank + 1) * shards // ranks)
    ((_, values),) = saved.replayed(source, step, step)
    print(f"step {step} of rank {rank} of {ranks}, from {source or 'the start'}, on clcomm {__version__}")
    for value, array in values.items():
        what, shard, name = value
        if shard is None or shard in own:
            whose = "" if shard is None or len(own) == 1 else f" of shard {shard}"
            digest = hashlib.sha256(array.tobytes()).hexdigest()[:_SHOWN]
            print(f"{what:9}  {digest}  {name}{whose}  {array.dtype} {array.shape}")
    if step in saved.steps:
        file, checkpoint = saved.steps[step]
        found = _first_difference(_parameters(values), checkpoint.group("parameter"))
        print(f"parameters: as in {file}" if found is None else f"parameters: other than in {file}: {found}")


def _print_difference(ours: Saved, theirs: Saved) -> None:
    common = [step for step in ours.steps if step in theirs.steps]
    parted = next((step for step in common if _state(ours, step) != _state(theirs, step)), None)
    if not common:
        raise ArgumentError(
            f"--against: expected a checkpoint at one of {ours.path}'s steps, {_listed(ours.steps)}, got "
            f"{_listed(theirs.steps)}"
        )
    if parted is None:
        print(f"no difference: parameters and optimizer are equal at step {_listed(common)}")
        return
    equal = max((step for step in common if step < parted), default=0)
    if not equal and any(saved.facts(parted)["program"]["began"] for saved in (ours, theirs)):
        raise ArgumentError(
            f"--against: expected a checkpoint in which both runs are equal, or their start, found neither before step "
            f"{parted}"
        )
    sources = [saved.steps[equal][0] if equal else None for saved in (ours, theirs)]
    runs = [saved.replayed(source, equal + 1, parted) for saved, source in zip((ours, theirs), sources, strict=True)]
    mine: Mapping[Any, np.ndarray] = {}
    for (step, mine), (_, others) in zip(*runs, strict=True):
        found = _first_difference(mine, others)
        if found is not None:
            print(f"step {step}: the runs part: {found}; equal up to step {step - 1}")
            return
    print(f"steps {equal + 1} to {parted}: both programs compute the same")
    for saved in (ours, theirs):
        file, checkpoint = saved.steps[parted]
        found = _first_difference(_parameters(mine), checkpoint.group("parameter"))
        if found is not None:
            print(f"{file} differs from it: {found}; a fault of memory, or another device, in that run")


def _state(saved: Saved, step: int) -> dict[str, bytes]:
    """Return the bits of a checkpoint's parameters and optimizer."""
    checkpoint = saved.steps[step][1]
    groups = checkpoint.group("parameter"), checkpoint.group("optimizer")
    return {f"{number}/{name}": array.tobytes() for number, each in enumerate(groups) for name, array in each.items()}


def _parameters(values: Mapping[Any, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for (what, _, name), array in values.items() if what == "parameter"}


def _first_difference(ours: Mapping[Any, np.ndarray], theirs: Mapping[Any, np.ndarray]) -> str | None:
    """Return in words the first array that both have with other bits, and its first such element; None: none."""
    import numpy as np

    for value, array in ours.items():
        other = theirs.get(value)
        if other is None or (array.shape == other.shape and array.tobytes() == other.tobytes()):
            continue
        name = value if isinstance(value, str) else _in_words(*value)
        if array.shape != other.shape or array.dtype != other.dtype:
            return f"{name} is {array.dtype} {array.shape} and {other.dtype} {other.shape}"
        bits = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(each.size, -1) for each in (array, other)]
        first = int((bits[0] != bits[1]).any(1).argmax())
        place = tuple(map(int, np.unravel_index(first, array.shape)))
        return f"{name}{list(place) if place else ''} is {array.flat[first]!s} and {other.flat[first]!s}"
    return None


def _in_words(what: str, shard: int | None, name: str) -> str:
    return f"{what} {name}{'' if shard is None else f' of shard {shard}'}"


def _listed(steps: Any) -> str:
    return ", ".join(map(str, steps))


COMMAND = Command(
    "replay",
    "compute a step of a run again in one process, or find where two runs part",
    "Compute a step of a run again, in this process, from the last of the run's checkpoints before it, and print a "
    "hash of each layer's result, gradient, mean and parameter: the bits are the run's own. --against compares two "
    "runs' checkpoints step by step, and replays both from the last equal one. It runs the program that the checkpoint "
    "names: clcomm's own, one that --trust names, or any that CLCOMM_CHECKPOINT_KEY signed. "
    "docs/robustness.md says which runs it can repeat.",
    add_arguments,
    run,
    (
        ("python -m training.replay run.npz --step 4711 --rank 2", "the hashes of rank 2's step"),
        ("python -m training.replay run.npz --against other.npz", "the first step, layer and element that differ"),
    ),
)
main = partial(command.run, COMMAND)


if __name__ == "__main__":
    run_alone(main)
