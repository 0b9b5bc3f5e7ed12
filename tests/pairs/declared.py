"""What a Synchronizer's table of settings refuses, as levels: `make pairs` begins with it."""

from __future__ import annotations

from clcomm.sync.settings import EXCLUDED
from tests.pairs.factors import Level

#: A level for each argument, call and setting of the table; None: no factor has it.
_LEVELS: dict[str, Level | None] = {
    "zero": ("zero", "2"), "split_tensors": ("buckets", "split"), "overlap": ("overlap", "on"),
    "check_replicas_every": ("checks", "replicas"), "check_start": None, "check_finite": ("checks", "finite"),
    "precision": ("precision", "bf16"), "shards": ("reduction", "shards"), "hook": ("compression", "fp16"),
    "samples": ("inputs", "samples"), "average_parameters": ("reduction", "local SGD"),
    "clip_grad_norm": ("clip", "on"),
    "sync: expected no DistributedOptimizer": ("zero", "1"), "sync: expected no loss scaling": ("scaler", "on"),
    "policy": ("reduction", "diloco"), "combination": ("reduction", "adasum"),
}  # fmt: skip


def declared() -> dict[frozenset[Level], str]:
    """Return the levels that the table refuses together, and how the line begins."""
    found = {}
    for excluded, settings in EXCLUDED.items():
        level = _LEVELS[excluded if excluded in _LEVELS else excluded.partition(":")[0]]
        for setting in settings:
            other = _LEVELS[setting]
            if level is not None and other is not None and level[0] != other[0]:
                found[frozenset({level, other})] = excluded
    return found
