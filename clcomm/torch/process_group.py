"""The process group that `torch.distributed` calls: its methods have c10d's names, arguments and options.

PyTorch calls it from Python and, for DistributedDataParallel's reducer and the functional collectives, from C++ through
the methods that a Python ProcessGroup can override (torch/csrc/distributed/c10d/PyProcessGroup.hpp).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.optim.optimizer import register_optimizer_step_post_hook

from clcomm.base.errors import ArgumentError
from clcomm.comm.communicator import Communicator
from clcomm.comm.stats.events import count_step
from clcomm.comm.tensors.collectives import TensorCollectives
from clcomm.comm.tensors.private_torch import current_backward, queue_callback, register_device, set_default_backend
from clcomm.comm.transport import mpi_communicators
from clcomm.torch.interruptions import Interruptions
from clcomm.torch.launch import meets_at_store, require_same_world, world_at_store
from clcomm.torch.messages import GroupMessages
from clcomm.torch.work import (
    COMPARES,
    HAS_JOINED,
    MAKES,
    NOTIFIES,
    CollectiveWork,
    WorkQueue,
    in_stream_of,
    locals_of_caller,
    require_same_parameters,
    untraced,
)

if TYPE_CHECKING:
    from clcomm.sync.torch_replicas import TorchReplicas
    from clcomm.torch.recording import JobRecording

Tensors: TypeAlias = "torch.Tensor | list[torch.Tensor]"

#: Label of the all-reduces that DistributedDataParallel's backward calls.
GRADIENTS = "gradients"
_OPS = {
    "sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "prod": ReduceOp.PRODUCT, "min": ReduceOp.MIN, "max": ReduceOp.MAX,
    "band": ReduceOp.BAND, "bor": ReduceOp.BOR, "bxor": ReduceOp.BXOR,
}  # fmt: skip


@untraced
class ClcommProcessGroup(ProcessGroup):
    """A group of ranks whose collectives clcomm runs."""

    def __init__(self, comm: Communicator, store: object, name: str):
        super().__init__(comm.rank, comm.size)
        self._place = comm.rank, comm.size
        for device in ("cpu", "cuda", "xpu"):
            register_device(self, torch.device(device), ProcessGroup.BackendType.CUSTOM, None)
        set_default_backend(self, ProcessGroup.BackendType.CUSTOM)
        self._open: tuple[Communicator, TensorCollectives, GroupMessages] | None
        self._interruptions = Interruptions()
        comm.interrupt = self._interruptions.interrupt
        self._open = comm, TensorCollectives(comm), GroupMessages(comm, self._interruptions)
        self._name, self._description, self._store = name, "undefined", store
        self._queue = WorkQueue(name, self._interruptions)
        self._backward, self._bucket, self._met_in = -1, -1, -1
        self._sequence = 0
        self._join_works: WeakKeyDictionary[object, Work] = WeakKeyDictionary()
        self._notified: Work | None = None
        self._recording: JobRecording | None = None
        _count_steps()

    @classmethod
    def of_options(cls, options: Any, backend_options: Any = None) -> ClcommProcessGroup:
        """Return the group that PyTorch's options describe; collective over its ranks.

        Raises:
            ArgumentError: `pg_options` of another backend.
            GroupTimeoutError: not all ranks have met at the store in time.
            LaunchError: PyTorch's rank is not MPI's, or without MPI the ranks are on several hosts.
        """
        if backend_options is not None:
            raise ArgumentError(
                f"pg_options: expected None for backend 'clcomm', got {type(backend_options).__name__} of another"
            )
        ranks, limit_s = options.global_ranks_in_group, options.timeout.total_seconds()
        if not ranks:
            rank, size = options.group_rank, options.group_size
            if meets_at_store(size):
                group = cls.at_store(options.store, rank, size, options.group_id, options.timeout)
            else:
                require_same_world(rank, size)
                group = cls(Communicator(timeout_s=limit_s), options.store, options.group_id)
            from clcomm.torch.recording import JobRecording  # here, as it loads the report and the timeline

            group._recording = JobRecording.wanted(group.communicator)
            return group
        tag = zlib.crc32(options.group_id.encode()) & 0x7FFF
        return cls.of_ranks(ranks, tag, options.store, options.group_id, limit_s)

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], tag: int, store: object, name: str, limit_s: float) -> ClcommProcessGroup:
        """Return a group of some of the world's ranks, in this order; collective over them.

        tag: sets apart groups that threads make at one time. limit_s: the time-out of a collective.
        """
        if len(ranks) == 1:
            comm = Communicator(transport="solo")
        else:
            members = mpi_communicators.of_ranks(ranks, tag)
            comm = Communicator(members, timeout_s=limit_s)
            members.Free()
        return cls(comm, store, name)

    @classmethod
    def at_store(
        cls, store: Any, rank: int, size: int, name: str, timeout: timedelta, is_default: bool = True
    ) -> ClcommProcessGroup:
        """Return a group of the ranks that meet at a store, without MPI; collective. Raises as `world_at_store`."""
        if size == 1:
            return cls(Communicator(transport="solo"), store, name)
        comm: Any = world_at_store(store, rank, size, timeout, is_default)
        return cls(Communicator(comm, timeout_s=timeout.total_seconds()), store, name)

    @property
    def communicator(self) -> Communicator:
        """The group's Communicator; ArgumentError after destroy_process_group."""
        return self._parts()[0]

    @property
    def _moves(self) -> TensorCollectives:
        return self._parts()[1]

    @property
    def _messages(self) -> GroupMessages:
        return self._parts()[2]

    def _parts(self) -> tuple[Communicator, TensorCollectives, GroupMessages]:
        if self._open is None:
            raise ArgumentError("group: expected an open one, but destroy_process_group was called")
        return self._open

    # --- PyTorch's queries ---

    def getRank(self) -> int:
        return self._place[0]

    def getSize(self) -> int:
        return self._place[1]

    def getBackendName(self) -> str:
        return "clcomm"

    def name(self) -> str:
        return "clcomm"

    def get_group_store(self) -> object:
        return self._store

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a collective of this group may take until GroupTimeoutError names the missing ranks."""
        self.communicator.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    #: PyTorch's queries of a backend before it uses optional features.
    supports_coalescing = supports_splitting = supports_shrinking = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> ClcommProcessGroup:
        """This group is its own backend for all devices."""
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def shutdown(self) -> None:
        """Complete what was called, and leave the group's resources to be freed when all of its ranks have.

        Collective for the default group of a job whose report or timeline is wanted, which are written here.
        """
        self._queue.close()
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.write()
        self._open = None

    def abort(self) -> None:
        """Shut down without the other ranks."""
        self._recording = None
        self.shutdown()

    def __repr__(self) -> str:
        return f"<clcomm process group {self._name}: rank {self.rank()} of {self.size()}>"

    # --- how a collective runs ---

    def _run(
        self, name: str, outputs: list[torch.Tensor], options: object, move: Callable[..., object], *args: object,
        waits: bool = False,
    ) -> Work:  # fmt: skip
        """Run a collective: in this thread if the caller blocks or is a backward, which calls in one order."""
        self._sequence += 1
        backward = current_backward()
        blocking = waits or not getattr(options, "asyncOp", True) or backward >= 0
        self._met_in = backward if backward >= 0 else self._met_in
        tensors = [each for each in (*outputs, *args) if isinstance(each, torch.Tensor)]
        return self._queue.take(CollectiveWork(outputs, name), in_stream_of(tensors, partial(move, *args)), blocking)

    def _run_each(
        self, name: str, outputs: list[torch.Tensor], options: object, move: Callable[..., object],
        rows: Sequence[tuple[object, ...]],
    ) -> Work:  # fmt: skip
        """Run a collective with each of these arguments, as one."""
        return self._run(name, outputs, options, lambda: [move(*row) for row in rows])

    def _next_bucket(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Return label and bucket of an all-reduce, within a backward those of the next bucket."""
        backward = current_backward()
        if backward < 0 or not tensor.is_floating_point():
            return "", -1
        self._bucket = self._bucket + 1 if backward == self._backward else 0
        self._backward = backward
        return GRADIENTS, self._bucket

    # --- sums ---

    def allreduce(self, tensors: Tensors, opts: object = None, timeout: object = None) -> Work:
        tensors = _listed(tensors)
        (tensor,) = tensors
        move = self._moves.all_reduce_sparse if tensor.is_sparse else self._moves.all_reduce
        place = () if tensor.is_sparse else self._next_bucket(tensor)
        if current_backward() >= 0 or not getattr(opts, "asyncOp", True):
            return self._run("all_reduce", tensors, opts, move, tensor, _op(opts), *place)
        caller, known = locals_of_caller(NOTIFIES, HAS_JOINED)
        waits = caller == HAS_JOINED  # its hook, in C++, uses the result at once
        work = self._run("all_reduce", tensors, opts, move, tensor, _op(opts), *place, waits=waits)
        if caller == NOTIFIES:
            self._join_works[known["joinable"]] = work  # which the reducer asks in backward, and keeps C++'s half alone
            self._notified = work
        return work

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: object = None) -> Work:
        return self._run("all_reduce", tensors, opts, self._moves.all_reduce_coalesced, tensors, _op(opts))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        tensors = _listed(tensors)
        return self._run("reduce", tensors, opts, self._moves.reduce, tensors[0], _op(opts), opts.rootRank)

    def reduce_scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> Work:
        outputs = _listed(outputs)
        blocks = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        return self._run("reduce_scatter", outputs, opts, self._moves.reduce_scatter, outputs[0], blocks, _op(opts))

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: object = None) -> Work:
        move = self._moves.reduce_scatter_single
        return self._run("reduce_scatter", [output], opts, move, output, source, _op(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> Work:
        rows = [(output, source, _op(opts)) for output, source in zip(outputs, inputs, strict=True)]
        return self._run_each("reduce_scatter", outputs, opts, self._moves.reduce_scatter_single, rows)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- copies ---

    def broadcast(self, tensors: Tensors, opts: Any = None, timeout: object = None) -> Work:
        tensors = _listed(tensors)
        root = opts if isinstance(opts, int) else 0 if opts is None else opts.rootRank
        return self._run("broadcast", tensors, opts, self._moves.broadcast, tensors[0], root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        compared = locals_of_caller(COMPARES)[1].get("tensors")
        model = None if compared is None else locals_of_caller(MAKES)[1].get("self")

        def move() -> None:
            if compared is not None:
                self._compare(compared, model)
            self._moves.all_gather(outputs[0], inputs[0])

        return self._run("all_gather", outputs[0], opts, move)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: object = None) -> Work:
        return self._run("all_gather", [output], opts, self._moves.all_gather_single, output, source)

    _allgather_base = all_gather_single

    def _compare(self, parameters: list[torch.Tensor], model: torch.nn.Module | None) -> None:
        """Compare a new model's trained parameters, and from now on their values where ranks' devices are unlike."""
        from clcomm.sync.torch_replicas import TorchReplicas  # here, as few programs have models of unlike devices

        require_same_parameters(self.communicator, parameters)
        names = {} if model is None else {id(each): name for name, each in model.named_parameters()}
        named = {names.get(id(each), f"parameter {index}"): each for index, each in enumerate(parameters)}
        replicas = TorchReplicas(self._moves, named)
        for each in parameters if replicas.are_unlike else ():
            each.register_post_accumulate_grad_hook(partial(self._accumulated, replicas))

    def _accumulated(self, replicas: TorchReplicas, _: torch.Tensor) -> None:
        """Look at replicas at the end of a backward, when it needs the parameters no longer."""
        if replicas.backward != current_backward():
            replicas.backward = current_backward()
            queue_callback(partial(self._backward_ended, replicas))

    def _backward_ended(self, replicas: TorchReplicas) -> None:
        """Note that all ranks have averaged a model's gradients, unless this backward has not, or some have joined."""
        if self._met_in == replicas.backward and self._are_all_there():
            self._run("replicas", [], None, replicas.averaged, waits=True)

    def _are_all_there(self) -> bool:
        work = self._notified
        return work is None or (work.wait() and int(work.result()[0]) == self.size())

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: object = None
    ) -> Work:
        """outputs: for each rank, its tensors."""
        rows = [([each[index] for each in outputs], source) for index, source in enumerate(inputs)]
        flattened = [tensor for each in outputs for tensor in each]
        return self._run_each("all_gather", flattened, opts, self._moves.all_gather, rows)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None
    ) -> Work:
        rows = [*zip(outputs, inputs, strict=True)]
        return self._run_each("all_gather", outputs, opts, self._moves.all_gather_single, rows)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        gathered = outputs[0] if outputs else []
        return self._run("gather", gathered, opts, self._moves.gather, gathered, inputs[0], opts.rootRank)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None) -> Work:
        scattered = inputs[0] if inputs else []
        return self._run("scatter", outputs, opts, self._moves.scatter, outputs[0], scattered, opts.rootRank)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: object = None) -> Work:
        return self._run("all_to_all", outputs, opts, self._moves.all_to_all, outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_rows: Sequence[int] | None,
        source_rows: Sequence[int] | None,
        opts: object = None,
    ) -> Work:
        move, rows = self._moves.all_to_all_single, (output_rows or (), source_rows or ())
        return self._run("all_to_all", [output], opts, move, output, source, *rows)

    alltoall_base = all_to_all_single

    def barrier(self, opts: object = None) -> Work:
        return self._run("barrier", [], opts, self._moves.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when every rank has called it; else GroupTimeoutError names all that are missing after the time-out.

        Args:
            timeout: for this barrier; None: the group's.
            wait_all_ranks: as PyTorch has it; all missing ranks are named in any case.
        """
        comm = self.communicator
        before_s = comm.lifetime.limits.timeout_s
        if timeout is not None:
            comm.set_timeout(timeout.total_seconds())
        try:
            self.barrier().wait()
        finally:
            if timeout is not None:
                comm.set_timeout(0 if before_s == math.inf else before_s)

    # --- messages ---

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._messages.send(tensors[0], rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._messages.receive(tensors[0], rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Work:
        return self._messages.receive(tensors[0], None, tag)

    # --- several calls as one: each runs as it is called ---

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Work:
        return self._run("coalesced", [], None, lambda: None)


@cache
def _count_steps() -> None:
    """Count optimizers' steps, once where several take turns, by one hook for good."""

    def count(optimizer: object, *_: object) -> None:
        count_step(id(optimizer))

    register_optimizer_step_post_hook(count)


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(options: object) -> str:
    """Return clcomm's name of a reduction; options: c10d's, the reduction itself, or None for a sum."""
    given = getattr(options, "reduceOp", options)
    if given is None:
        return "sum"
    for name, op in _OPS.items():
        if given == op:
            return name
    raise ArgumentError(f"op: expected one of {', '.join(str(op) for op in _OPS.values())}, got {given}")
