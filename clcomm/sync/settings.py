"""How gradients are averaged: what a Synchronizer sets for all of its models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.parameters import FLOAT32, Precision, parse_precision
from clcomm.base.units import parse_size
from clcomm.comm.communicator import AUTO, Communicator
from clcomm.sync.compression import CommHook
from clcomm.sync.decision import Decision
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.policies.choose import parse_policy
from clcomm.sync.policies.policy import Policy

#: The stages of ZeRO.
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class SyncSettings:
    """The arguments of a Synchronizer, which every model's averaging follows; a change makes new ones.

    bucket_size is in bytes; with `is_auto` it is that of a model whose fastest size is not known yet. overlap: True,
    False or "auto". hook: reduces each bucket in place of a plain all-reduce; None: a plain all-reduce.
    shards: the logical shards of a step; None: each rank's batch is its own. policy: what ranks exchange in place of
    each step's gradients; None: they average these.
    """

    use_bucketing: bool
    bucket_size: int
    is_auto: bool
    first_bucket_size: int | None
    split_tensors: bool
    overlap: bool | str
    check_replicas_every: int = 0
    check_start: bool = True
    on_divergence: str = "raise"
    check_finite: bool = False
    zero: int = 1
    precision: Precision = FLOAT32
    hook: CommHook | None = None
    shards: LogicalShards | None = None
    policy: Policy | None = None

    @classmethod
    def of(
        cls,
        comm: Communicator,
        use_bucketing: bool | None = None,
        bucket_size: int | str | None = None,
        first_bucket_size: int | str | None = None,
        split_tensors: bool = False,
        overlap: bool | str = False,
        zero: int = 1,
        precision: Precision | str = FLOAT32,
        shards: int | None = None,
        policy: str = "none",
        **others: Any,
    ) -> SyncSettings:
        """Return the settings for a Synchronizer's arguments; None: the Communicator's. Raises ArgumentError."""
        if not isinstance(comm, Communicator):
            given = comm.__name__ if isinstance(comm, type) else type(comm).__name__
            raise ArgumentError(f"comm: expected a Communicator, got {given}; make one: Communicator()")
        shared = None if shards is None else LogicalShards.of(comm, shards)
        if isinstance(zero, bool) or zero not in STAGES:
            raise ArgumentError(f"zero: expected a stage of ZeRO, 1, 2 or 3, got {zero!r}")
        if zero > 1 and shards is not None:
            raise ArgumentError(f"zero: expected 1 with shards, whose gradients each rank needs whole, got {zero}")
        if zero > 1 and split_tensors:
            raise ArgumentError(f"split_tensors: expected False with zero={zero}, which moves whole tensors, got True")
        is_auto = comm.auto_bucket_size if bucket_size is None else bucket_size == AUTO
        settings = cls(
            use_bucketing=comm.use_bucketing if use_bucketing is None else use_bucketing,
            bucket_size=comm.bucket_size if bucket_size is None or is_auto else parse_size(bucket_size),
            is_auto=is_auto,
            first_bucket_size=None if first_bucket_size is None else parse_size(first_bucket_size, "first_bucket_size"),
            split_tensors=split_tensors,
            overlap=_checked_overlap(overlap),
            zero=zero,
            precision=parse_precision(precision),
            shards=shared,
            policy=parse_policy(policy),
            **others,
        )
        settings._require_policy_alone()
        return settings

    def _require_policy_alone(self) -> None:
        """Raise ArgumentError where a policy is asked for together with what works on each step's gradients."""
        if self.policy is None:
            return
        plain: dict[str, Any] = {
            "overlap": False, "check_replicas_every": 0, "check_start": True, "check_finite": False, "zero": 1,
            "precision": FLOAT32, "shards": None,
        }  # fmt: skip
        for name, expected in plain.items():
            if getattr(self, name) != expected:
                given = self.shards.count if name == "shards" and self.shards else getattr(self, name)
                raise ArgumentError(f"{name}: expected {expected} with policy={self.policy.name!r}, got {given}")

    def compared(self) -> list[str]:
        """Return in words what ranks compare for each model; its bucket plan has the rest."""
        names = ("overlap", "check_replicas_every", "check_start", "on_divergence", "check_finite", "zero", "precision")
        shards = [] if self.shards is None else [f"shards {self.shards.count}"]
        policy = [] if self.policy is None else [f"policy {self.policy}"]
        return [*(f"{name} {getattr(self, name)}" for name in names), *shards, *policy]

    def refuse_policy(self, argument: str, expected: str) -> None:
        """Raise ArgumentError where ranks average no gradients, which excludes something."""
        if self.policy is not None:
            raise ArgumentError(
                f"{argument}: expected {expected} with policy={self.policy.name!r}, under which ranks take steps of "
                f"their own"
            )

    def refuse_shards(self, argument: str, expected: str, reason: str) -> None:
        """Raise ArgumentError where steps have logical shards, which exclude something."""
        if self.shards is not None:
            raise ArgumentError(f"{argument}: expected {expected} with shards={self.shards.count}, {reason}")

    def with_hook(self, hook: CommHook | None) -> SyncSettings:
        """Return these settings with another hook; ArgumentError for one that cannot reduce their buckets."""
        if hook is not None and not callable(hook):
            raise ArgumentError(
                f"hook: expected something to call with (gradient, comm, out, bucket), got {type(hook).__name__}"
            )
        if hook is not None:
            self.refuse_shards(
                "hook", "none, no compression, algorithm or combination", "which sum in an order of their own"
            )
        if hook is not None:
            self.refuse_policy("hook", "none, no compression, algorithm or combination")
        if hook is not None and self.split_tensors:
            raise ArgumentError("split_tensors: expected False with a compression or a hook, which need whole tensors")
        return replace(self, hook=hook)

    @property
    def unit_sizes(self) -> tuple[int | None, int | None]:
        """The most bytes of parameters in a unit that `zero` above 1 moves, None: a unit is a tensor; the first's."""
        return (self.bucket_size, self.first_bucket_size) if self.use_bucketing else (None, None)

    def decisions_without_buckets(self) -> list[Decision]:
        """Return the decisions on what "auto" would measure, where a sharded update leaves no buckets."""
        stage = self.zero
        size = "none" if stage == 1 else str(self.bucket_size)
        asked = {"overlap": ("off", self.overlap == AUTO), "bucket_size": (size, self.is_auto and self.use_bucketing)}
        why = "a sharded update has no buckets" if stage == 1 else f"with zero={stage}"
        if self.shards is not None:
            why = "ranks have several shards, whose mean has no buckets"
        reason = f"without measuring: {why}"
        return [Decision(what, chosen, reason, (), 0) for what, (chosen, is_asked) in asked.items() if is_asked]


def _checked_overlap(setting: bool | str) -> bool | str:
    """Return the setting; ArgumentError unless it is True, False or "auto"."""
    if not isinstance(setting, bool) and not (isinstance(setting, str) and setting == AUTO):
        raise ArgumentError(f"overlap: expected True, False or 'auto', got {setting!r}")
    return setting
