"""The mistakes that `clcomm verify` knows, each with the question that it answers and the remedy."""

from __future__ import annotations

from collections.abc import Iterable

from clcomm.base.console.finding import Finding, problem

#: By cause: the question that it answers, and what to do.
_SYNCHRONISE = "synchronise them between backward and the optimizer's step"
CAUSES = {
    "model": ("model", "build the same model on every rank"),
    "start": ("start", "call broadcast_parameters, wrap the model in DistributedDataParallel, or seed all ranks alike"),
    "options": ("optimizer", "give every rank the same options and schedule"),
    "state": ("optimizer", "load the checkpoint on every rank, or broadcast the state after loading it"),
    "same-data": ("data", "give each rank its shard, as a DistributedSampler does"),
    "overlap": ("data", "shuffle with the same seed on every rank, and take each rank's part of that order"),
    "skipped-step": ("course", "let all ranks take a step or none"),
    "unused": (
        "course",
        "use every parameter on every rank, or set find_unused_parameters in DistributedDataParallel",
    ),
    "zero-grad": ("gradients", "call zero_grad() once between steps"),
    "clip": ("gradients", "synchronise, then clip"),
    "apart": ("gradients", "change gradients alike on every rank after the synchronisation"),
    "left-out": ("gradients", "synchronise every parameter that the optimizer steps"),
    "late-sync": ("gradients", _SYNCHRONISE),
    "no-sync": ("gradients", _SYNCHRONISE),
    "unequal-batches": ("gradients", "give every rank as many samples, or weigh: sync_gradients(model, samples=...)"),
    "weights": ("gradients", "weigh ranks by their samples"),
    "sum": ("gradients", "divide by the number of ranks once"),
    "divided-twice": ("gradients", "divide by the number of ranks once"),
    "replicas": ("parameters", "see that every rank changes them alike"),
    "mismatch": ("end", "see the message"),
    "hang": ("end", "let all ranks call the same collectives"),
}


def wrong(cause: str, what: str, first: str = "") -> Finding:
    """Return the finding of a mistake; first: the first parameter with it."""
    check, remedy = CAUSES[cause]
    return problem(check, what, remedy, cause=cause, first=first)


def by_rank(values: Iterable[tuple[int, object]]) -> str:
    """Return values with their ranks in words."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in values)
