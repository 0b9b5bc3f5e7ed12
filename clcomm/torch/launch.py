"""How ranks meet: by MPI, which then also gives torchrun's variables, or without it at PyTorch's store."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torch.distributed import DistStoreError

from clcomm.base.errors import LaunchError, name_ranks
from clcomm.base.host.launcher import OF_TORCH, launched_rank, local_place
from clcomm.base.host.rank_process import launch_of, rank_above
from clcomm.comm.tensors.private_torch import default_backends, rendezvous_handlers
from clcomm.comm.transport import mpi_communicators, mpi_failures, mpi_runtime
from clcomm.comm.transport.memory_comm import MemoryComm
from clcomm.comm.transport.mpi_runtime import Intracomm
from clcomm.comm.watch.job import this_job
from clcomm.jobs.launch.variables import torch_variables
from clcomm.torch.interruptions import GroupTimeoutError

_INSTEAD = "start it with `clcomm run -n N script.py` or `mpiexec -n N python script.py`"
_ENV = "env"
_PLACE, _ADDRESS = OF_TORCH[:2], OF_TORCH[4:]


def prepare_environment() -> None:
    """Set torchrun's variables that the launcher names, where they are not set, and let `env://` set the others.

    Under mpiexec, and under torchrun on one host, "clcomm" becomes the CPU's default backend, so that groups that are
    made without a backend's name, as by `init_device_mesh`, are its own. The user's own addresses stay, and torchrun's
    variables, where MPI has one rank.
    """
    if is_torchrun() and mpi_runtime.processes_without_mpi() > 1 and _is_one_node():
        default_backends["cpu"] = "clcomm"
    if mpi_runtime.processes_without_mpi() == 1 and not is_torchrun():
        size = mpi_runtime.launched_ranks()
        if size > 1:
            default_backends["cpu"] = "clcomm"
        if size > 1 or launched_rank() is None:  # else its size is not known yet, as under srun
            own = dict(zip(OF_TORCH, map(str, (launched_rank() or 0, size, *local_place())), strict=False))
            is_left_over = any(os.environ.get(name, own[name]) != own[name] for name in _PLACE)  # from another job
            os.environ.update({name: own[name] for name in own if is_left_over or name not in os.environ})
    inherited = {name: os.environ.get(name) for name in OF_TORCH}
    original: Callable[..., Any] = rendezvous_handlers[_ENV]

    def rendezvous(url: str, *arguments: Any, **options: Any) -> Any:
        _complete_environment(inherited, dict(parse_qsl(urlsplit(url).query)))
        return original(url, *arguments, **options)

    rendezvous_handlers[_ENV] = rendezvous


def _complete_environment(inherited: dict[str, str | None], given: dict[str, str]) -> None:
    """Set what is missing, and rank and world size that the program has not set, by MPI; collective under mpiexec.

    Args:
        inherited: the variables that this process had at first: where a rank has started it, and it has set no others
            since for a group of its own, LaunchError is raised.
        given: rank and world_size, from the program's arguments.

    Raises LaunchError on every rank where their places are not MPI's or they can't meet, unless at the program's own
    port.
    """
    own = {name for name, value in inherited.items() if os.environ.get(name) != value}
    if not os.environ.get("MASTER_ADDR"):
        mpi_runtime.require_no_torchrun()
    size = given.get("world_size") or os.environ.get("WORLD_SIZE", "")
    if meets_at_store(int(size) if size.isdigit() else 1):
        _require_one_node()
        return
    if not (rank_above() and own):
        from clcomm.comm.watch.exits import hook_job  # here, as an import needs none of these
        from clcomm.comm.watch.job import Limits
        from clcomm.comm.watch.startup_watchdog import StartWatch

        hook_job()  # an error is one line
        with StartWatch(Limits.of(10.0, 300.0)):
            variables = torch_variables(world := _world())
        missing = {name: value for name, value in variables.items() if not os.environ.get(name)}
        os.environ.update(missing | {name: variables[name] for name in _PLACE if name not in own})
        address = None if "MASTER_PORT" in own else tuple(os.environ[name] for name in _ADDRESS)
        if None not in (addresses := mpi_communicators.everyones(world, address)):
            require_same_world(*(int(given.get(name.lower(), os.environ[name])) for name in _PLACE))
            _require_address(world, addresses)
        inherited["MASTER_PORT"] = None  # from now on this process may listen there


def _require_address(world: Intracomm | None, addresses: list[Any]) -> None:
    """Raise LaunchError on every rank unless all have one address, where rank 0 can listen; collective."""
    problem = mpi_communicators.from_first(world, lambda: _why_silent(*addresses[0]))
    if others := sorted({":".join(each) for each in addresses if each != addresses[0]}):
        problem = f"expected rank 0's {':'.join(addresses[0])} on every rank, got {', '.join(others)} on others"
    if problem:
        raise LaunchError(f"MASTER_ADDR and MASTER_PORT: {problem}; unset them: MPI's ranks choose their own")


def _why_silent(address: str, port: str) -> str:
    """Return in words why this process cannot listen there; "": it can."""
    reason = "not its address"
    try:
        socket.create_server(("", int(port))).close()
        for family, *_, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
            with suppress(OSError):
                socket.create_server(place, family=family).close()
                return ""
    except (OSError, OverflowError, ValueError) as error:
        reason = str(error)
    return f"expected a free port of rank 0's host, got {address}:{port} ({reason})"


def _world() -> Intracomm | None:
    try:
        return mpi_runtime.world()
    except ImportError:  # no MPI: a world of one
        return None


def own_place() -> tuple[str, str, int]:
    """Return this host, what this launch is known by on it, and this rank's number."""
    world = _world()
    return socket.gethostname(), launch_of(os.getpid()), 0 if world is None else world.Get_rank()


def require_same_world(rank: int, size: int) -> None:
    """Raise LaunchError on every rank unless PyTorch's rank and world size, -1 for not given, are MPI's; collective."""
    everyone = mpi_communicators.everyones(_world(), (rank, size))
    for wanted, got in enumerate(everyone):
        if got != (wanted, len(everyone)):
            raise LaunchError(
                f"init_process_group: expected MPI's rank {wanted} of {len(everyone)}, got rank {got[0]} of {got[1]} "
                f"from its arguments or RANK and WORLD_SIZE; leave them out, and {_INSTEAD}"
            )


# --- Ranks that torchrun, multiprocessing or the user has started, without MPI, on one host. ---


def is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and mpi_runtime.launched_ranks() == 1


def meets_at_store(size: int) -> bool:
    """Return whether so many ranks meet at PyTorch's store, as no MPI has started this one."""
    if is_torchrun() or mpi_runtime.process_mpi().stand_in is not None:
        return True
    is_mpis = launched_rank() is not None or (mpi_runtime.is_running() and mpi_failures.place_in_world()[1] > 1)
    return size > 1 and not is_mpis


def world_at_store(store: Any, rank: int, size: int, timeout: timedelta, is_default: bool = True) -> MemoryComm:
    """Return a communicator of the ranks that meet at a store; collective.

    is_default: whether it stands for COMM_WORLD from now on, in place of an earlier one; else if there is none.

    Raises:
        GroupTimeoutError: not all ranks have met in time.
        LaunchError: they are on several hosts; on every rank.
    """
    meeting = Meeting(store, rank, size, timeout)
    _require_one_node()
    hosts = len({tuple(place) for place in meeting.allgather(_host())})
    if hosts > 1:
        meeting.leave()
        raise _several_hosts(f"{hosts} hosts")
    made, process = MemoryComm.of(meeting), mpi_runtime.process_mpi()
    if is_default or process.stand_in is None:
        process.stand_in = made
        process.windows_in_use.clear()  # which an earlier world's ranks of these numbers share
        this_job().communicators.dropped.clear()
    return made


def _is_one_node() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _require_one_node() -> None:
    if is_torchrun() and not _is_one_node():
        raise _several_hosts(f"{os.environ.get('LOCAL_WORLD_SIZE')} of {os.environ.get('WORLD_SIZE')} ranks here")


def _several_hosts(got: str) -> LaunchError:
    return LaunchError(
        f"init_process_group: expected all ranks on one host, got {got}; between hosts backend 'clcomm' needs MPI: "
        "start it with `clcomm run -n N -H A,B script.py` or `mpiexec -n N python script.py`"
    )


def _host() -> list[str]:
    """Return what tells this host's processes from those of others, and those of a container."""
    place = [socket.gethostname()]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            place.append(file.read())
        place.append(os.readlink("/proc/self/ns/pid"))
    return place


class Meeting:
    """Ranks that exchange values through one of PyTorch's stores, as through a communicator.

    Args:
        store: one of torch.distributed's, whose earlier meetings of as many ranks are over.
        rank: this rank's number.
        size: the number of ranks.
        timeout: for all of them to come, each time.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._turn, self._calls = (store.add("clcomm/came", 1) - 1) // size, 0

    def Get_rank(self) -> int:
        return self._rank

    def allgather(self, obj: Any) -> list[Any]:
        """Return every rank's value, which JSON has; raises GroupTimeoutError."""
        self._calls += 1
        keys = [f"clcomm/{self._turn}/{self._calls}/{other}" for other in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(obj))
        try:
            self._store.wait(keys, self._timeout)
        except DistStoreError:
            missing = [other for other, key in enumerate(keys) if not self._store.check([key])]
            raise GroupTimeoutError(
                f"group: expected {self._size} ranks at the store within {self._timeout.total_seconds():g} s, "
                f"{name_ranks(missing)} did not come"
            ) from None
        return [json.loads(self._store.get(key)) for key in keys]

    def bcast(self, obj: Any, root: int) -> Any:
        return self.allgather(obj)[root]

    def leave(self) -> None:
        """Let rank 0, with which the store may end, wait for the others, which need not wait."""
        with suppress(RuntimeError):
            if self._rank == 0:
                self.allgather(None)
            else:
                self._store.set(f"clcomm/{self._turn}/{self._calls + 1}/{self._rank}", "null")
