"""The ranks of a Horovod program: one Communicator for all of them, and one for each process set."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.communicator import Communicator
from clcomm.comm.tensors.collectives import TensorCollectives
from clcomm.comm.transport.mpi_communicators import checked
from clcomm.comm.watch import endings
from clcomm.horovod import environment
from clcomm.insight.report.recording import Recording
from clcomm.sync.agreement import require_agreement

#: Lets a mistake of one rank in a call of all ranks be raised on all of them.
refused = partial(refused_on_all, runner_of=lambda *_, **__: communicator().runner if is_initialized() else None)


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Create the Communicator of all ranks; collective. A second call does nothing.

    Args:
        comm: an mpi4py communicator of the ranks; None or []: COMM_WORLD.
        process_sets: sets to add, as by `add_process_set`; "dynamic", Horovod's word for sets that are added later,
            changes nothing: they always can be.

    Raises ArgumentError for a list of ranks that are not all: use process sets.
    """
    if not is_initialized():
        _open(Communicator(None if isinstance(comm, Sequence) else comm, **environment.communicator_options()))
        if rank() == 0 and global_process_set.generation == 1:
            environment.name_ignored()
        if not global_process_set.registers_exit:
            global_process_set.registers_exit = True
            atexit.register(_at_exit)
    _add_first(comm, process_sets)


@refused
def _add_first(comm: Any, process_sets: Iterable[ProcessSet] | str | None) -> None:
    if isinstance(comm, Sequence) and comm and list(comm) != list(range(size())):
        raise ArgumentError(f"comm: expected all ranks, got {list(comm)}; for some of them use process_sets")
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ArgumentError(f'process_sets: expected a list of hvd.ProcessSet or "dynamic", got {process_sets!r}')
        return
    for each in process_sets or ():
        add_process_set(each)


def _open(comm: Communicator) -> None:
    everyone = global_process_set
    everyone.generation += 1
    everyone.collectives, everyone.some_joined = _collectives_of(comm), False
    everyone.is_homogeneous = len(set(comm.all_gather_object(comm.local_size, label="init"))) == 1
    everyone.recording = Recording.wanted(comm, "HOROVOD_TIMELINE")


def _collectives_of(comm: Communicator) -> TensorCollectives:
    """Return the collectives of Horovod's calls: tensors are summed in their own dtype, halves too."""
    return TensorCollectives(comm, summed_in={}, moves_buffers=False)


def replace_communicator(comm: Communicator) -> None:
    """Go on with the Communicator of the ranks that are left; collective over these. Process sets are dropped."""
    for each in list(global_process_set.added.values()):
        each._drop()
    _open(comm)


def shutdown() -> None:
    """Finish what was started and close the Communicator; collective. Files of CLCOMM_REPORT are written now."""
    if not is_initialized():
        return
    everyone = global_process_set
    if everyone.recording is not None:
        everyone.recording.write()
        everyone.recording = None
    for each in list(everyone.added.values()):
        each._close()
    communicator().finalize()
    everyone.collectives = None


def _at_exit() -> None:
    """Write what was asked for, at the end of a program that did not call `shutdown`."""
    recording = global_process_set.recording
    if is_initialized() and recording is not None and not endings.is_reported():
        recording.write()


def communicator() -> Communicator:
    """Return the Communicator of all ranks, for its stats, observers and clcomm's other calls.

    Raises ArgumentError before `init`.
    """
    collectives = global_process_set.collectives
    if collectives is None:
        raise ArgumentError("horovod: expected hvd.init() before any other call, got none")
    return collectives.comm


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since."""
    return global_process_set.collectives is not None


def rank() -> int:
    """Return this process's rank."""
    return communicator().rank


def size() -> int:
    """Return the number of ranks."""
    return communicator().size


def local_rank() -> int:
    """Return this process's rank among those of its host."""
    return communicator().local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return communicator().local_size


def cross_rank() -> int:
    """Return the index of this host."""
    return communicator().host


def cross_size() -> int:
    """Return the number of hosts."""
    return communicator().hosts


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks."""
    communicator()
    return global_process_set.is_homogeneous


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record a timeline from now on, for ui.perfetto.dev; collective. `mark_cycles`: there are no cycles here."""
    everyone = global_process_set
    recording = everyone.recording = everyone.recording or Recording(communicator(), "", live=True)
    recording.start_trace(os.fspath(file_path))


def stop_timeline() -> None:
    """Write the timeline that `start_timeline` began; collective."""
    communicator()
    if global_process_set.recording is not None:
        global_process_set.recording.stop_trace()


# --- process sets ---


class ProcessSet:
    """Some of the ranks; a member of all collectives' arguments once `add_process_set` has made its Communicator.

    Args:
        ranks_or_comm: numbers of ranks, in any order; or an mpi4py communicator, then each rank gives the one that it
            belongs to: these may be several, such as those of MPI.COMM_WORLD.Split.

    Attributes:
        ranks: the numbers; of a communicator, once it is added, in its order.
        collectives: its collectives on tensors; None on ranks that do not belong to it, and before it is added.
    """

    process_set_id: int | None = None
    collectives: TensorCollectives | None = None

    def __init__(self, ranks_or_comm: object):
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if isinstance(ranks_or_comm, Iterable):
            ranks = list(ranks_or_comm)
            if not all(isinstance(each, int) for each in ranks):
                raise ArgumentError(f"process set: expected numbers of ranks, got {ranks_or_comm!r}")
            self.ranks = sorted(set(ranks))
        elif hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = checked(ranks_or_comm)
        else:
            raise ArgumentError(f"process set: expected numbers of ranks or a communicator, got {ranks_or_comm!r}")
        self._made: set[frozenset[int]] = set()  # the sets that the ranks added in the same call

    def _require_added(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ArgumentError("process_set: expected one that add_process_set has registered, got another")
        return self.ranks

    def included(self) -> bool:
        """Return whether this rank belongs to it."""
        return rank() in self._require_added()

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self._require_added())

    def rank(self) -> int:
        """Return this process's rank in it; ArgumentError for a rank that does not belong to it."""
        return self.communicator().rank

    def communicator(self) -> Communicator:
        """Return its Communicator; ArgumentError for a rank that does not belong to it."""
        return self.require_collectives().comm

    def require_collectives(self) -> TensorCollectives:
        """Return `collectives`; ArgumentError for a rank that does not belong to it."""
        ranks = self._require_added()
        if self.collectives is None:
            raise ArgumentError(f"process_set: expected a call by its ranks {ranks} alone, got one by rank {rank()}")
        return self.collectives

    def _drop(self) -> None:
        self.process_set_id, self.collectives = None, None
        global_process_set.added.pop(id(self), None)

    def _close(self) -> None:
        if self.collectives is not None:
            self.collectives.comm.finalize()
        self._drop()

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class _GlobalSet(ProcessSet):
    """All ranks, and what `init` has made for them; none before.

    Attributes:
        generation: counts the Communicators, so that what was prepared for an older one is known.
        recording: for the files that the environment or `start_timeline` asks for.
        added: the other process sets, by id.
        some_joined: whether ranks are known to have joined, which have to be told what the others do; the others agree.
    """

    some_joined = False
    process_set_id = 0

    def __init__(self) -> None:
        self.mpi_comm = None
        self.generation, self.is_homogeneous, self.registers_exit = 0, True, False
        self.recording: Recording | None = None
        self.added: dict[int, ProcessSet] = {}

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(size())) if is_initialized() else []

    def _require_added(self) -> list[int]:
        return list(range(size()))

    def communicator(self) -> Communicator:
        return communicator()


global_process_set = _GlobalSet()
_numbers = iter(range(1, 1 << 30))


@refused
def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks and return it; collective over all ranks, which pass the same numbers.

    Raises ArgumentError for numbers that are no ranks and for a set whose ranks are another's, MismatchError where
    ranks pass different numbers; on every rank.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    comm, ranks = communicator(), added.ranks if added.mpi_comm is None else _ranks_of(added.mpi_comm)
    if added.process_set_id is not None or not ranks or min(ranks) < 0 or max(ranks) >= comm.size:
        comm.runner.refuse(f"process_set: expected new ranks from 0 to {comm.size - 1}, got {added}")
    given = str(ranks) if added.mpi_comm is None else "a communicator"
    require_agreement(comm, "process_set", [given], "add the same sets in the same order on every rank")
    made = {frozenset(each) for each in comm.all_gather_object(ranks, label="process_set")}
    sets = (each for one in global_process_set.added.values() for each in one._made)
    for known in [frozenset(range(comm.size)), *sets]:
        if known in made:
            raise ArgumentError(f"process_set: expected ranks of no other set, got a duplicate of {sorted(known)}")
    if added.mpi_comm is not None:
        added.collectives = _collectives_of(Communicator(added.mpi_comm, **comm.settings()))
    else:
        part = comm.comm.Split(int(comm.rank in ranks), comm.rank)
        if comm.rank in ranks:
            added.collectives = _collectives_of(Communicator(part, **comm.settings()))
        else:
            part.Free()
    added.ranks, added._made, added.process_set_id = ranks, made, next(_numbers)
    global_process_set.added[id(added)] = added
    return added


def _ranks_of(mpi_comm: Any) -> list[int]:
    """Return the numbers of a communicator's ranks, in its order; below 0: one that does not belong to us."""
    own, all_ranks = mpi_comm.Get_group(), communicator().comm.Get_group()
    try:
        return own.Translate_ranks(None, all_ranks)
    finally:
        own.Free()
        all_ranks.Free()


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a set and return whether it was registered; collective over all ranks, MismatchError where these differ."""
    is_added = id(process_set) in global_process_set.added
    given = [str(process_set.process_set_id if is_added else None)]
    require_agreement(communicator(), "process_set", given, "remove the same sets in the same order on every rank")
    if not is_added:
        return False
    process_set._close()
    return True


# --- what Horovod was built with ---


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI: clcomm calls it from one."""
    communicator()
    return False


def mpi_enabled() -> bool:
    """Return whether MPI connects the ranks: always."""
    communicator()
    return True


def mpi_built() -> bool:
    """Return True: clcomm uses MPI."""
    return True


def _without(name: str) -> Callable[[], Any]:
    def answer() -> Any:
        return 0 if name == "nccl" else False

    answer.__doc__ = f"Return {'0' if name == 'nccl' else 'False'}: clcomm does not use {name}."
    answer.__name__ = answer.__qualname__ = f"{name}_built"
    return answer


gloo_built, gloo_enabled = _without("gloo"), _without("gloo")
nccl_built, ddl_built, ccl_built = _without("nccl"), _without("ddl"), _without("ccl")
cuda_built, rocm_built = _without("cuda"), _without("rocm")
