"""What an elastic training goes back to: models, optimizers, schedules, samplers and plain objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from clcomm.horovod import world
from clcomm.horovod.elastic.sampler import ElasticSampler
from clcomm.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from clcomm.horovod.lost_ranks import raising_internal_errors
from clcomm.sync.elastic import newest


class State:
    """A state with a last commit. A subclass has `save`, `restore` and `take_from`."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these functions after ranks were lost, before training goes on, such as to set the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def reset(self) -> None:
        """Do nothing; a subclass may prepare here for the ranks that are left, before the callbacks."""

    def on_reset(self) -> None:
        """Call `reset` and what was registered."""
        self.reset()
        for each in self._reset_callbacks:
            each()

    def commit(self) -> None:
        """Keep the state as it is now, to go back to; on every rank after the same step."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Hosts are not added here: nothing to check."""

    @raising_internal_errors()
    def sync(self) -> None:
        """Take the newest commit of all ranks, of equally new ones the lowest rank's, and keep it; collective."""
        comm = world.communicator()
        root = newest(comm, self._commits)
        commits = comm.broadcast_object(self._commits, root)
        self.take_from(root)
        self.save()
        self._commits = commits  # not before: root may have been lost meanwhile

    def save(self) -> None:
        """Keep the state in this process."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what `save` kept."""
        raise NotImplementedError

    def take_from(self, root: int) -> None:
        """Give every rank root's state; collective."""
        raise NotImplementedError


class ObjectState(State):
    """Objects as attributes; they are pickled."""

    def __init__(self, **objects: Any):
        super().__init__()
        self._names = tuple(objects)
        for name, value in objects.items():
            setattr(self, name, value)
        self._kept: Mapping[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._kept = copy.deepcopy({name: getattr(self, name) for name in self._names})

    def restore(self) -> None:
        for name, value in copy.deepcopy(dict(self._kept)).items():
            setattr(self, name, value)

    def take_from(self, root: int) -> None:
        for name, value in broadcast_object({name: getattr(self, name) for name in self._names}, root).items():
            setattr(self, name, value)


def _take_scheduler(scheduler: Any, root: int) -> None:
    scheduler.load_state_dict(broadcast_object(scheduler.state_dict(), root))


#: What has a state_dict: the kind, and how every rank gets root's.
_KINDS: tuple[tuple[type, Callable[[Any, int], None]], ...] = (
    (torch.nn.Module, lambda model, root: broadcast_parameters(model.state_dict(), root)),
    (torch.optim.Optimizer, broadcast_optimizer_state),
    (torch.optim.lr_scheduler.LRScheduler, _take_scheduler),
    (ElasticSampler, _take_scheduler),
)


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer, and anything else by name, each an attribute of it.

    Modules, optimizers, learning-rate schedulers and an ElasticSampler are kept by their state_dict, other objects by
    copies.

    Args:
        model: the model; None: none.
        optimizer: its optimizer, wrapped by DistributedOptimizer or not; None: none.
        kwargs: further modules, optimizers, schedulers, samplers and objects, such as epoch=0 and batch=0.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._held = {name: value for name, value in given.items() if _taker(value) is not None}
        for name, value in self._held.items():
            setattr(self, name, value)
        super().__init__(**{name: value for name, value in given.items() if name not in self._held})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_held", ()):
            self._held[name] = value

    def save(self) -> None:
        super().save()
        self._kept_states = {name: copy.deepcopy(each.state_dict()) for name, each in self._held.items()}

    def restore(self) -> None:
        super().restore()
        for name, each in self._held.items():
            each.load_state_dict(copy.deepcopy(self._kept_states[name]))

    def take_from(self, root: int) -> None:
        super().take_from(root)
        for each in self._held.values():
            take = _taker(each)
            assert take is not None
            take(each, root)


def _taker(value: Any) -> Callable[[Any, int], None] | None:
    return next((take for kind, take in _KINDS if isinstance(value, kind)), None)
