"""What an elastic training goes back to: models, optimizers, schedules, samplers and plain objects."""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import torch

from clcomm.horovod import world
from clcomm.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from clcomm.horovod.operations import HorovodInternalError, raising_internal_errors
from clcomm.sync.elastic import is_lost_peer, newest, survivors_of

# --- A training function that is called again, on the ranks that are left, after others were lost. ---

_log = logging.getLogger("clcomm")


class HostsUpdatedInterrupt(Exception):
    """A change of hosts: raised by no call here, as ranks are not added; a program may raise it on all ranks.

    skip_sync: whether the state stays as it is.
    """

    def __init__(self, skip_sync: bool = False):
        super().__init__("hosts were updated")
        self.skip_sync = skip_sync


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function `train(state, ...)` that goes on from the last commit when ranks are lost.

    Where another rank dies (under Open MPI's `mpiexec --with-ft ulfm`, else MPI ends the job), those that are left
    make a Communicator of their own, go back to the state's last commit, call its reset callbacks, take the newest
    state among them and call the function again.
    """

    @functools.wraps(function)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        prepare: Callable[[], object] = state.sync
        while True:
            ended, result = _attempt(prepare, function, state, *args, **kwargs)
            if ended is None:
                return result
            prepare = partial(_resume, state, ended)

    return train


def _attempt(
    prepare: Callable[[], object], function: Callable[..., object], *args: object, **kwargs: object
) -> tuple[Exception | None, Any]:
    """Return (None, result) of the function, or (error, None) where training can go on after the error."""
    try:
        prepare()
        return None, function(*args, **kwargs)
    except Exception as error:
        if is_lost_peer(error):
            _go_on_without_the_lost()
        elif not isinstance(error, (HorovodInternalError, HostsUpdatedInterrupt)):
            raise
        return error, None


def _resume(state: Any, ended: Exception) -> None:
    """Bring the state to where all ranks go on."""
    is_interrupt = isinstance(ended, HostsUpdatedInterrupt)
    if not is_interrupt:
        state.restore()
    state.on_reset()
    if not is_interrupt or not ended.skip_sync:  # type: ignore[attr-defined]
        state.sync()


def _go_on_without_the_lost() -> None:
    """Replace the Communicator by one of the ranks that are left; collective over these."""
    left = world.communicator()
    size = left.size
    while True:
        left = survivors_of(left)
        try:
            world.replace_communicator(left)
            break
        except Exception as error:
            if not is_lost_peer(error):
                raise
    if left.rank == 0:
        _log.warning("elastic: %d of %d ranks go on from the last commit", left.size, size)


# --- A sampler that divides what is left of an epoch among the ranks that are left. ---


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Gives each rank its part of the samples that this epoch has not processed yet.

    Make it part of a TorchState, call `record_batch` after each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: of constant length.
        shuffle: whether samples are shuffled, anew in each epoch.
        seed: of the shuffle, the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples to process."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch of `batch_size` samples; batch_idx, its number, is not needed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of samples processed in it, over all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with today's ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left among the ranks of now."""
        self.rank, self.num_replicas = world.rank(), world.size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices; the first ones repeat where the ranks would have unequal numbers."""
        left = self.remaining_indices
        for position in range(self.rank, self.total_size, self.num_replicas):
            yield left[position % len(left)]

    def __len__(self) -> int:
        return self.num_samples


# --- What an elastic training goes back to: models, optimizers, schedules, samplers and plain objects ---


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
