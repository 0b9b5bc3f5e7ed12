"""A Synchronizer's options, each declared once: name, default, check and help; and which of them exclude each other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.parameters import Precision, parse_precision
from clcomm.base.units import parse_size
from clcomm.comm.communicator import AUTO, Communicator
from clcomm.sync.compression import CommHook
from clcomm.sync.decision import Decision, DecisionLog
from clcomm.sync.divergence import ON_DIVERGENCE, ReplicaGuard
from clcomm.sync.hooks import AdasumHook
from clcomm.sync.logical_shards import LogicalShards
from clcomm.sync.policies import parse_policy

if TYPE_CHECKING:
    from clcomm.sync.policies.policy import Policy

#: The stages of ZeRO.
STAGES = (1, 2, 3)
_OWN_STEPS = "under which ranks take steps of their own"
#: What is expected of an argument, by the settings with which nothing else goes, and why; see `SyncState.refuse`.
EXCLUDED: Mapping[str, Mapping[str, str]] = {
    "zero: expected 1": {"shards": "whose gradients each rank needs whole", "policy": ""},
    "split_tensors: expected False": {"zero": "which moves whole tensors", "hook": "which need whole tensors"},
    "overlap: expected False": {"policy": ""},
    "check_replicas_every: expected 0": {"policy": ""},
    "check_start: expected True": {"policy": ""},
    "check_finite: expected False": {"policy": ""},
    "precision: expected float32": {"policy": ""},
    "shards: expected None": {"policy": ""},
    "hook: expected none, no compression, algorithm or combination": {
        "shards": "which sum in an order of their own", "policy": _OWN_STEPS,
    },
    "samples: expected None": {
        "overlap": "where gradients are on their way before they could be weighed; use overlap=False",
        "shards": "all of which count alike",
        "policy": _OWN_STEPS,
        "combination": "which is no mean over samples",
        "zero": "which reduces gradients during backward, before they could be weighed; use zero=1",
    },
    "average_parameters: expected no call": {
        "policy": _OWN_STEPS, "shards": "which have the same parameters at every step",
    },
    "clip_grad_norm: expected clcomm.engine.nn.utils.clip_grad_norm_": {"policy": _OWN_STEPS},
    "sync: expected no DistributedOptimizer": {"policy": _OWN_STEPS},
    "sync: expected no loss scaling": {"policy": _OWN_STEPS},
}  # fmt: skip

_OPTION = re.compile(r"Option\[(.*), .*\]")  # an annotation, and what is given
Given = TypeVar("Given")
Kept = TypeVar("Kept")
Made = TypeVar("Made")
Arguments = ParamSpec("Arguments")


class Option(Generic[Given, Kept]):
    """A field of a dataclass that keeps something else than it is given.

    Args:
        default: where none is given.
        help: what it is for, in a command's help.
        keep: returns what is kept, from the instance and what is given; None: that is kept.
        allows: whether a value is one; ArgumentError says what was `expected`, if not.
    """

    def __init__(
        self, default: Given, help: str = "", *, keep: Callable[[Any, Any], Kept] | None = None,
        allows: Callable[[Any], bool] = lambda _: True, expected: str = "",
    ):  # fmt: skip
        self.default, self.help, self.expected, self._keep, self._allows = default, help, expected, keep, allows

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, of: None, owner: type) -> Given: ...
    @overload
    def __get__(self, of: object, owner: type) -> Kept: ...
    def __get__(self, of: object | None, owner: type) -> Any:
        return self.default if of is None else vars(of)[self._name]

    def __set__(self, of: object, value: Given) -> None:
        if not self._allows(value):
            raise ArgumentError(f"{self._name}: expected {self.expected}, got {value!r}")
        vars(of)[self._name] = value if self._keep is None else self._keep(of, value)


def takes(make: Callable[Arguments, Made]) -> Callable[..., Callable[Concatenate[Any, Arguments], None]]:
    """Return a decorator for a constructor that takes what `make` makes of its caller's arguments."""

    def decorate(init: Callable[[Any, Made], None]) -> Callable[Concatenate[Any, Arguments], None]:
        def __init__(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            init(self, make(*args, **kwargs))

        declared = inspect.signature(make)
        given = [each.replace(annotation=_OPTION.sub(r"\1", each.annotation)) for each in declared.parameters.values()]
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        __init__.__signature__ = declared.replace(parameters=[own, *given])  # type: ignore[attr-defined]
        make.__init__.__qualname__ = __init__.__qualname__ = init.__qualname__
        return __init__

    return decorate


def _use_bucketing(settings: SyncSettings, value: bool | None) -> bool:
    comm: object = settings.comm
    if not isinstance(comm, Communicator):
        given = comm.__name__ if isinstance(comm, type) else type(comm).__name__
        raise ArgumentError(f"comm: expected a Communicator, got {given}; make one: Communicator()")
    return comm.use_bucketing if value is None else value


def _bucket_size(settings: SyncSettings, value: int | str | None) -> int | str:
    if value is None:
        return AUTO if settings.comm.auto_bucket_size else settings.comm.bucket_size
    return AUTO if value == AUTO else parse_size(value)


def _shards(settings: SyncSettings, value: int | LogicalShards | None) -> LogicalShards | None:
    return value if value is None or isinstance(value, LogicalShards) else LogicalShards.of(settings.comm, value)


@dataclass(frozen=True)
class SyncSettings:
    """The arguments of a Synchronizer, which describes them; every model's averaging follows these."""

    comm: Communicator = field(compare=False)
    use_bucketing: Option[bool | None, bool] = Option(None, keep=_use_bucketing)  # checks `comm` before others use it
    _: KW_ONLY
    bucket_size: Option[int | str | None, int | str] = Option(None, "of gradients reduced at a time", keep=_bucket_size)
    first_bucket_size: Option[int | str | None, int | None] = Option(
        None, "of the first bucket, so that communication begins early",
        keep=lambda _, value: None if value is None else parse_size(value, "first_bucket_size"),
    )  # fmt: skip
    split_tensors: Option[bool, bool] = Option(False, "cut tensors larger than the bucket size")
    overlap: Option[bool | str, bool | str] = Option(
        False, allows=lambda value: isinstance(value, bool) or value in (AUTO,), expected="True, False or 'auto'"
    )
    check_replicas_every: Option[int, int] = Option(
        0, "compare the replicas' hashes every K steps",
        allows=lambda value: isinstance(value, int) and value >= 0, expected="a number of steps, 0 for never",
    )  # fmt: skip
    check_start: bool = True
    on_divergence: Option[str, str] = Option(
        "raise", "where replicas differ: end with an error, or go on with what most ranks have",
        allows=ON_DIVERGENCE.__contains__, expected=" or ".join(ON_DIVERGENCE),
    )  # fmt: skip
    check_finite: Option[bool, bool] = Option(False, "end with an error when a gradient holds NaN or Inf")
    compression: Option[str, str] = Option(
        "none", "what gradients travel as: none, fp16, bf16, int8, topk:SHARE, powersgd:RANK, demo:COUNT"
    )
    algorithm: str | None = None
    combination: str = "mean"
    zero: Option[int, int] = Option(
        1, allows=lambda value: not isinstance(value, bool) and value in STAGES, expected="a stage of ZeRO, 1, 2 or 3"
    )
    precision: Option[Precision | str, Precision] = Option(
        "float32", "what parameters are stored and sent in; the optimizer has float32 masters",
        keep=lambda _, value: parse_precision(value),
    )  # fmt: skip
    shards: Option[int | None, LogicalShards | None] = Option(None, keep=_shards)
    policy: Option[str, Policy | None] = Option(
        "none", "what ranks exchange every H steps in place of gradients: none, local:h=8, diloco:h=50, streaming, "
        "sparseloco or noloco; see docs/policies.md",
        keep=lambda _, value: parse_policy(value),
    )  # fmt: skip

    def changed(self, **changes: Any) -> SyncSettings:
        """Return the settings with other values of some."""
        made = copy(self)
        for name, value in changes.items():
            object.__setattr__(made, name, value)
        return made

    @property
    def is_auto(self) -> bool:
        """Whether the fastest bucket size is looked for."""
        return self.bucket_size == AUTO

    @property
    def bucket_nbytes(self) -> int:
        """The largest size of a bucket, while the fastest is not known."""
        return self.comm.bucket_size if isinstance(self.bucket_size, str) else self.bucket_size

    def compared(self) -> list[str]:
        """Return in words what ranks compare for each model; its bucket plan has the rest."""
        names = ("overlap", "check_replicas_every", "check_start", "on_divergence", "check_finite", "zero", "precision",
                 "shards", "policy")  # fmt: skip
        return [f"{name} {getattr(self, name)}" for name in names]

    @property
    def unit_sizes(self) -> tuple[int | None, int | None]:
        """The most bytes of parameters in a unit that `zero` above 1 moves, None: a unit is a tensor; the first's."""
        return (self.bucket_nbytes, self.first_bucket_size) if self.use_bucketing else (None, None)

    def decisions_without_buckets(self) -> list[Decision]:
        """Return the decisions on what "auto" would measure, where a sharded update leaves no buckets."""
        stage = self.zero
        size = "none" if stage == 1 else str(self.bucket_nbytes)
        asked = {"overlap": ("off", self.overlap == AUTO), "bucket_size": (size, self.is_auto and self.use_bucketing)}
        why = "a sharded update has no buckets" if stage == 1 else f"with zero={stage}"
        if self.shards is not None:
            why = "ranks have several shards, whose mean has no buckets"
        reason = f"without measuring: {why}"
        return [Decision(what, chosen, reason, (), 0) for what, (chosen, is_asked) in asked.items() if is_asked]


class SyncState:
    """What a Synchronizer sets for all of its models.

    Attributes:
        settings: its arguments; `use` replaces them.
        hook: reduces each bucket in place of a plain all-reduce; None: a plain all-reduce.
        guard: compares the replicas.
        decisions: what was chosen by measuring.
        is_paused: whether gradients accumulate.
        in_join: whether ranks may run out of batches.

    Raises ArgumentError for settings that exclude each other.
    """

    def __init__(self, settings: SyncSettings):
        self.settings, self.comm = settings, settings.comm
        self.is_paused = self.in_join = False
        self.hook: CommHook | None = None
        self.guard = ReplicaGuard(self.comm, settings.check_replicas_every, settings.on_divergence)
        self.decisions = DecisionLog(self.comm.rank)
        for decision in settings.decisions_without_buckets() if settings.shards and settings.shards.is_divided else ():
            self.decisions.add(decision)
        self._models: dict[int, Any] = {}  # each one's ModelSync, by the model's id
        plain = SyncSettings(self.comm)
        for excluded in EXCLUDED:
            name = excluded.partition(":")[0]
            given = getattr(settings, name, None)
            if given != getattr(plain, name, None):
                self.refuse(excluded, f"got {given}")

    def refuse(self, excluded: str, given: str = "", ours: Any = None, hook: CommHook | None = None) -> None:
        """Raise ArgumentError where a setting is in the way of what EXCLUDED names.

        Args:
            excluded: one of its keys.
            given: end of the message.
            ours: the model that it is about; None: any.
            hook: what is to reduce each bucket; None: what does now.
        """
        settings, hook = self.settings, self.hook if hook is None else hook
        divides = settings.zero > 1 and (ours is None or ours.sharded_update is not None)
        names = {
            "policy": settings.policy and f"policy={settings.policy.name!r}",
            "shards": settings.shards and f"shards={settings.shards}",
            "zero": divides and f"zero={settings.zero}",
            "hook": hook is not None and "a compression or a hook",
            "combination": isinstance(hook, AdasumHook) and "combination='adasum'",
            "overlap": (settings.overlap is True or any(each.overlaps for each in self._models.values())) and "overlap",
        }
        for name, why in EXCLUDED[excluded].items():
            if names[name]:
                raise ArgumentError(", ".join(filter(None, (f"{excluded} with {names[name]}", why, given))))

    def use(self, settings: SyncSettings) -> None:
        """Let all models follow other settings."""
        self.settings = settings
        for ours in self._models.values():
            ours.follow_settings()
