"""What the docs offer, as data: factors, the levels of each, and which levels cannot stand together by their nature.

The first level of a factor is its default: a setting names only what differs from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

FACTORS: dict[str, tuple[str, ...]] = {
    "dp": ("2", "1", "3", "4", "5", "6", "7", "8"),
    "tp": ("1", "2", "2 sequence", "4"),
    "pp": ("1", "2 gpipe", "2 1f1b", "2 interleaved", "4 1f1b"),
    "network": ("layers", "gpt", "convnet", "resnet"),
    "wrapper": ("Synchronizer", "DDP"),
    "zero": ("0", "1", "2", "3"),
    "optimizer": ("sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "radam"),
    "groups": ("off", "on"),
    "rate": ("constant", "falls"),
    "precision": ("float32", "bf16", "fp16"),
    "scaler": ("off", "on", "overflow"),
    "clip": ("off", "on", "own"),
    "batches": ("1", "3 no_sync", "3"),
    "inputs": ("equal", "samples", "expected", "balance", "join", "join all"),
    "norm": ("layer", "batch", "sync"),
    "buffers": ("sent", "kept"),
    "tied": ("off", "on"),
    "frozen": ("off", "on", "thawed"),
    "edits": ("none", "parameters", "gradients"),
    "evaluation": ("off", "on"),
    "unused": ("none", "all ranks", "some ranks"),
    "dropout": ("off", "on"),
    "buckets": ("1 MiB", "512 B", "per tensor", "split", "auto"),
    "overlap": ("off", "on", "auto"),
    "compression": ("none", "fp16", "bf16", "int8", "topk", "powersgd"),
    "reduction": ("mean", "ring", "tree", "adasum", "local SGD", "local", "diloco", "streaming", "shards"),
    "transport": ("auto", "mpi"),
    "hosts": ("one", "halves", "interleaved"),
    "device": ("cpu", "gpu", "mixed"),
    "checks": ("off", "replicas", "finite"),
    "replay": ("off", "on"),
    "activations": ("kept", "recomputed"),
    "functions": ("called", "fused"),
    "checkpoint": ("none", "same", "rolled back", "to one rank", "from one rank"),
}
MOST_RANKS = 8
#: Reductions under which each rank takes steps of its own.
LOCAL = ("local SGD", "local", "diloco", "streaming")

Setting = Mapping[str, str]
Level = tuple[str, str]
Pair = tuple[Level, Level]


class Mesh(NamedTuple):
    """Ranks along each axis."""

    dp: int
    tp: int
    pp: int


def setting_of(levels: Mapping[str, str]) -> dict[str, str]:
    """Return a whole setting: these levels, and the defaults of the other factors."""
    return {factor: levels.get(factor, choices[0]) for factor, choices in FACTORS.items()}


def named(setting: Setting) -> dict[str, str]:
    """Return the levels of a setting that are no defaults."""
    return {factor: level for factor, level in setting.items() if level != FACTORS[factor][0]}


def words(setting: Setting) -> str:
    """Return a setting as "dp 3, zero 1"; defaults are left out."""
    return ", ".join(f"{factor} {level}" for factor, level in named(setting).items()) or "defaults"


def mesh_of(setting: Setting) -> Mesh:
    return Mesh(*(int(setting[axis].split()[0]) for axis in ("dp", "tp", "pp")))


def ranks_of(setting: Setting) -> int:
    return math.prod(mesh_of(setting))


def pairs() -> Iterator[Pair]:
    """Yield every two levels of two factors."""
    for first, second in itertools.combinations(FACTORS, 2):
        for one, other in itertools.product(FACTORS[first], FACTORS[second]):
            yield (first, one), (second, other)


def pairs_of(setting: Setting) -> Iterator[Pair]:
    """Yield the pairs in a setting."""
    yield from itertools.combinations(setting.items(), 2)


# --- what cannot be ---

#: Levels that a network has beside the defaults; others belong to "layers".
_OWN = {
    "gpt": {
        "tp": FACTORS["tp"],
        "pp": FACTORS["pp"],
        "tied": ("off", "on"),
        "frozen": FACTORS["frozen"],
        "activations": FACTORS["activations"],
    },
    "convnet": {"tp": ("1", "2"), "pp": FACTORS["pp"], "frozen": FACTORS["frozen"]},
    "resnet": {"pp": FACTORS["pp"], "frozen": FACTORS["frozen"], "norm": ("batch", "sync")},
}
_FEATURES = ("tp", "pp", "norm", "tied", "frozen", "unused", "dropout", "activations", "functions")


def why_not(levels: Mapping[str, str], most_ranks: int = MOST_RANKS) -> str:
    """Return why levels cannot stand together by their nature, whatever the other factors are; "": they can.

    This is about what does not exist, not about what clcomm refuses.
    """
    has = levels.items().__contains__
    sizes = [int(levels[axis].split()[0]) for axis in ("dp", "tp", "pp") if axis in levels]
    network = levels.get("network", "layers")
    if math.prod(sizes) > most_ranks:
        return f"more than {most_ranks} ranks"
    if network != "layers":
        for factor in _FEATURES:
            if factor in levels and levels[factor] not in _OWN[network].get(factor, FACTORS[factor][:1]):
                return "another network's"
    if levels.get("reduction") in LOCAL and has(("checkpoint", "to one rank")):
        return "each rank has its own state"
    own = {("dropout", "on"), ("norm", "batch"), ("norm", "sync")} & set(levels.items())
    if has(("reduction", "shards")) and (own or network == "resnet"):
        return "each shard has its own random numbers and statistics, as none of one rank's batches has"
    if {("edits", "gradients"), ("zero", "1"), ("reduction", "shards")} <= set(levels.items()):
        return "gradients of shards lie aside until the step, p.grad is None"
    if "join" in levels.get("inputs", "") and has(("frozen", "thawed")):
        return "a block of join() is one Synchronizer's"
    if network != "layers" and levels.get("pp", "1") != "1" and has(("frozen", "thawed")):
        return "a stage with nothing to thaw does not see that another is refused"
    if levels.get("pp", "1") != "1" and levels.get("checkpoint") in ("to one rank", "from one rank"):
        return "an optimizer's state is its stage's: test_pairs sees that another's is refused"
    return ""
