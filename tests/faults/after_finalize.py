"""A program that calls clcomm after its own MPI.Finalize() and prints each call's outcome as a line of JSON."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from clcomm import ClcommError, Communicator, Synchronizer, clip_grad_norm
from clcomm.engine import CrossEntropyLoss, Linear, Tensor
from clcomm.optim import SGD

#: Methods of the Communicator and the Synchronizer that need no other rank (for a whole model without buffers).
LOCAL = {
    "Get_rank", "Get_size",
    "abandon", "add_observer", "auto_bucket_size", "average_bytes_per_call", "comm", "communicated",
    "current", "dump_operations", "finalize", "fold_on_cpu", "fold_with",
    "get_bucket_stats", "get_rank", "get_world_size", "holds",
    "in_collectives", "is_common", "is_common_on_host",
    "notify_phase", "phase",
    "reduces_within_hosts", "remove_observer", "sequence", "settings", "shares_memory", "sums",
    "total_allreduce_calls", "total_buckets", "total_bytes_sent", "unfinished",
    "world_size",
    "attach_optimizer", "broadcast_buffers", "bucket_size", "compression",
    "decisions", "full_parameters", "get_communication_stats", "load_state_dict", "no_sync", "register_comm_hook",
    "run_shards", "shard", "shards", "state_dict", "use_bucketing",
}  # fmt: skip


def backward(model: Linear) -> None:
    CrossEntropyLoss()(model(Tensor(np.ones((2, 8), np.float32))), Tensor(np.array([0, 1]))).backward()


def calls_of(comm: Communicator) -> dict[str, Callable[[], object]]:
    """Return a call of each of the Communicator's methods that need other ranks."""
    x = np.ones(6)
    return {
        "adopt": lambda: comm.memory.adopt([], list),
        "all_agree": lambda: comm.memory.all_agree(True, "all_agree"),
        "all_gather": lambda: comm.all_gather(x),
        "all_gather_async": lambda: comm.all_gather_async(x, out=np.ones(6 * comm.size)),
        "all_gather_rows_async": lambda: comm.all_gather_rows_async(np.ones(3, np.uint8)),
        "all_gather_in_place": lambda: comm.all_gather_in_place(np.ones(2 * comm.size)),
        "all_gather_in_place_init": lambda: comm.all_gather_in_place_init(np.ones(2 * comm.size)),
        "all_gather_object": lambda: comm.all_gather_object(x),
        "all_reduce": lambda: comm.all_reduce(x),
        "all_reduce_async": lambda: comm.all_reduce_async(x),
        "all_reduce_async_init": lambda: comm.all_reduce_async_init(x),
        "all_reduce_between_hosts_init": lambda: comm.all_reduce_between_hosts_init(x, np.ones(6), lambda peers: 0),
        "all_reduce_init": lambda: comm.all_reduce_init(x),
        "all_to_all": lambda: comm.all_to_all([x] * comm.size, [np.ones(6) for _ in range(comm.size)]),
        "allocate": lambda: comm.allocate(100),
        "allocate_common": lambda: comm.allocate_common(100),
        "allreduce": lambda: comm.allreduce(x, MPI.PROD),
        "barrier": comm.barrier,
        "bcast": lambda: comm.bcast(1),
        "broadcast": lambda: comm.broadcast(x),
        "broadcast_object": lambda: comm.broadcast_object(x),
        "bucketed_allreduce": lambda: comm.bucketed_allreduce([x, x]),
        "free_unused": comm.memory.free_unused,
        "gather": lambda: comm.gather(x),
        "gather_object": lambda: comm.gather_object(x),
        "merged_stats": comm.merged_stats,
        "reduce_scatter": lambda: comm.reduce_scatter(np.ones(comm.size)),
        "reduce_scatter_init": lambda: comm.reduce_scatter_init(np.ones((comm.size, comm.size)), out=np.ones(1)),
        "refuse": lambda: comm.runner.refuse("a reason"),
        "rendezvous": comm.rendezvous,
        "run_as_all_reduce": lambda: comm.run_as_all_reduce(lambda: None, nbytes=1),
        "scatter": lambda: comm.scatter([1] * comm.size),
        "scatter_object": lambda: comm.scatter_object([1] * comm.size),
        "set_timeout": lambda: comm.set_timeout(60),
        "split": lambda: comm.split(0),
        **messages_and_other_names(comm, x),
    }


def messages_and_other_names(comm: Communicator, x: np.ndarray) -> dict[str, Callable[[], object]]:
    """Return a call of each method for messages and for unequal arrays, and of each with a name of mpi4py's."""
    peer, out, ranks, of_all = (comm.rank + 1) % comm.size, np.ones(6), np.ones(comm.size), np.ones((comm.size, 6))
    return {
        "all_gather_list": lambda: comm.all_gather_list(x),
        "exscan": lambda: comm.exscan(x),
        "irecv": lambda: comm.irecv(out, peer),
        "isend": lambda: comm.isend(x, peer),
        "recv": lambda: comm.recv(out, peer),
        "reduce": lambda: comm.reduce(x),
        "scan": lambda: comm.scan(x),
        "scatter_items": lambda: comm.scatter_items([1] * comm.size, 0, ""),
        "send": lambda: comm.send(x, peer),
        "sendrecv": lambda: comm.sendrecv(x, peer),
        "Allgather": lambda: comm.Allgather(x, of_all),
        "Allgatherv": lambda: comm.Allgatherv(x, of_all),
        "Allreduce": lambda: comm.Allreduce(x, out),
        "Alltoall": lambda: comm.Alltoall(ranks, np.ones(comm.size)),
        "Alltoallv": lambda: comm.Alltoallv(ranks, np.ones(comm.size)),
        "Barrier": comm.Barrier,
        "Bcast": lambda: comm.Bcast(x),
        "Exscan": lambda: comm.Exscan(x, out),
        "Gather": lambda: comm.Gather(x, of_all),
        "Gatherv": lambda: comm.Gatherv(x, of_all),
        "Irecv": lambda: comm.Irecv(out, peer),
        "Isend": lambda: comm.Isend(x, peer),
        "Recv": lambda: comm.Recv(out, peer),
        "Reduce": lambda: comm.Reduce(x, out),
        "Reduce_scatter_block": lambda: comm.Reduce_scatter_block(ranks, np.ones(1)),
        "Scan": lambda: comm.Scan(x, out),
        "Scatter": lambda: comm.Scatter(ranks, np.ones(1)),
        "Scatterv": lambda: comm.Scatterv(ranks, np.ones(1)),
        "Send": lambda: comm.Send(x, peer),
        "Sendrecv": lambda: comm.Sendrecv(x, peer, recvbuf=out, source=peer),
        "allgather": lambda: comm.allgather(x),
    }


def calls_of_synchronizer(sync: Synchronizer, model: Linear) -> dict[str, Callable[[], object]]:
    """Return a call of each function that needs other ranks: the Synchronizer's methods and its users."""

    over_shards, local = Synchronizer(sync.comm, shards=8), Synchronizer(sync.comm, policy="local:h=1")
    others = [1] * (sync.comm.size - 1)

    def join() -> None:
        with sync.join(model, lambda: None):
            pass

    return {
        "average_parameters": lambda: sync.average_parameters(model),
        "finish_step": lambda: local.finish_step(model),
        "align_parameters": lambda: local.align_parameters(model),
        "broadcast_parameters": lambda: sync.broadcast_parameters(model),
        "bucket_plan": lambda: sync.bucket_plan(model, False),
        "check_replicas": lambda: sync.check_replicas(model),
        "deal_shards": lambda: over_shards.deal_shards([8 - len(others), *others]),
        "expect_samples": lambda: sync.expect_samples(model, 2),
        "join": join,
        "reductions": lambda: sync.models.of(model).reductions()(),
        "sync_gradients": lambda: sync.sync_gradients(model),
        "a model not seen yet": lambda: sync.sync_gradients(Linear(3, 2)),
        "clip_grad_norm": lambda: clip_grad_norm(sync, model, 1.0),
    }


def started_before(comm: Communicator, other: Communicator) -> dict[str, Callable[[], object]]:
    """Prepare and start the calls made after the end; started last, as any wait would advance them."""
    memory = comm.allocate(400).view(np.float32)
    prepared, start = comm.all_reduce_init(memory), comm.all_reduce_async_init(memory)
    handles = comm.all_reduce_async(np.ones(1000)), start(), other.all_reduce_async(np.ones(40_000))
    waits = {f"wait {number}": handle.wait for number, handle in enumerate(handles)}
    return {"prepared": prepared, "start": start, **waits}


def main() -> None:
    """Print each call's outcome after MPI.Finalize(), on rank 0 only."""
    rank = MPI.COMM_WORLD.Get_rank()
    made = {"auto": Communicator(), "mpi": Communicator(transport="mpi"), "alone": Communicator(MPI.COMM_SELF)}
    calls = {name: calls_of(comm) for name, comm in made.items()}
    model, sync = Linear(8, 4), Synchronizer(made["auto"])
    sync.broadcast_parameters(model)
    backward(model)
    sync.sync_gradients(model)
    calls["Synchronizer"] = calls_of_synchronizer(sync, model)
    calls["new"] = {"Communicator": Communicator, "of all": lambda: Communicator(MPI.COMM_WORLD)}
    dropped, finalized = Communicator(), Communicator()
    dropped.all_reduce_async(np.ones(9))
    del dropped
    finalized.finalize()
    calls["finalized before"] = calls_of(finalized)
    done = made["mpi"].all_reduce_async(np.ones(5))
    made["mpi"].barrier()

    calls["before"] = started_before(made["auto"], made["mpi"])
    MPI.Finalize()
    gc.collect()
    told = {of: {name: _error_of(call) for name, call in named.items()} for of, named in calls.items()}
    assert done.wait().tolist() == [MPI_SIZE] * 5  # it was complete
    for comm in made.values():
        comm.finalize()
        assert comm.get_bucket_stats()["total_allreduce_calls"] == comm.total_allreduce_calls
    SGD(model, lr=0.1).step()  # parameters and gradients stay where they are
    assert np.isfinite(model.weight.numpy()).all()
    with Communicator(transport="solo") as alone:
        assert alone.all_reduce(np.ones(2)).tolist() == [1, 1]
    if rank == 0:
        print(json.dumps(told))


def _error_of(call: Callable[[], object]) -> str:
    try:
        return f"no error but {call()!r}"
    except ClcommError as error:
        return str(error)


MPI_SIZE = MPI.COMM_WORLD.Get_size()
if __name__ == "__main__":
    main()
