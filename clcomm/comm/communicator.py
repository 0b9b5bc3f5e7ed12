"""The Communicator: NumPy arrays and objects between ranks, checked, timed and counted.

Each collective is one short method: check the arguments, let a transport move the data, notify the observers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import numpy as np

from clcomm.base.errors import RankNames, no_copy
from clcomm.base.host import variables
from clcomm.base.units import parse_size
from clcomm.comm.collectives.all_reduce import Plans, choose_fold
from clcomm.comm.collectives.arguments import bucket_size_by_position
from clcomm.comm.collectives.in_flight import Notifier
from clcomm.comm.collectives.memory import CommunicatorMemory
from clcomm.comm.collectives.messages import StartedMessages
from clcomm.comm.collectives.other_names import OtherNames
from clcomm.comm.collectives.runner import CollectiveRunner
from clcomm.comm.collectives.world import World
from clcomm.comm.stats.comm_stats import CommStats
from clcomm.comm.stats.events import Call, Observer, Phase, TimedPhase
from clcomm.comm.transport import mpi_runtime
from clcomm.comm.transport.mpi_runtime import Intracomm

#: In place of a bucket size: the Synchronizer looks for the fastest.
AUTO = "auto"
_DEFAULT_BUCKET_SIZE = "1MiB"

if mpi_runtime.is_one_of_several():
    from clcomm.comm.watch.exits import hook_job

    hook_job()  # now, so that a rank that fails before it has a Communicator ends the others too


class Communicator(OtherNames):
    """The ranks of a job and the collectives between them.

    Creating one is collective. A private duplicate of the MPI communicator carries its traffic.

    Args:
        comm: an mpi4py communicator; None: COMM_WORLD, or a world of one without MPI. A number is the bucket size, as
            in LizarDist.
        use_bucketing: False reduces each gradient on its own.
        bucket_size: bytes, or text such as "4MiB", by default 1 MiB: the size of one all-reduce of gradients. "auto":
            each Synchronizer finds the fastest; elsewhere it is 1 MiB.
        transport: "auto" reduces memory of `allocate` in each host's shared memory; on one host blocking all-reduces,
            broadcasts, all-gathers and reduce-scatters of other arrays pass through it, or are read from rank to rank,
            and everything else goes through MPI; "mpi" never uses shared memory; "shared" requires it, on one host.
        observers: notified of every finished collective, after `stats`.
        stall_warning_s: seconds in one collective after which a rank logs which ranks are missing; 0: never.
            CLCOMM_STALL_WARNING_S overrides it.
        timeout_s: seconds in one collective after which a rank ends the job (docs/robustness.md); 0: never.
            CLCOMM_TIMEOUT_S overrides it.
        name: what messages and tables call these ranks, such as a mesh's axis; "": they are named by number alone.

    Attributes:
        world: the ranks, and the transports between them.
        runner: runs every collective.
        notifier: notifies the observers, and counts the time in collectives.
        memory: allocates shared memory.
        messages: those from rank to rank.
        plans: of all-reduces.
        stats: the statistics of this rank's collectives.
        lifetime: its ties to the job, which end with it.

    Raises:
        ArgumentError: an argument is invalid.
        LaunchError: mpiexec belongs to another MPI.
        ResourceError: MPI has no communicators left.
        MismatchError: ranks differ in an argument, an option or a version; on every rank.
    """

    def __init__(
        self,
        comm: Intracomm | None = None,
        use_bucketing: bool = True,
        *,
        bucket_size: int | str = _DEFAULT_BUCKET_SIZE,
        transport: str = "auto",
        observers: Iterable[Observer] = (),
        stall_warning_s: float = 10.0,
        timeout_s: float = 300.0,
        name: str = "",
    ):
        from clcomm.comm.collectives.lifetime import Lifetime  # here, as an import hooks nothing
        from clcomm.comm.watch.exits import hook_job
        from clcomm.comm.watch.job import Limits

        hook_job()
        comm, bucket_size = bucket_size_by_position(comm, bucket_size, _DEFAULT_BUCKET_SIZE)
        self.auto_bucket_size = isinstance(bucket_size, str) and bucket_size == AUTO
        is_open = self.auto_bucket_size or (bucket_size == 0 and not use_bucketing)  # 0: LizarDist's, for no buckets
        self.bucket_size = parse_size(_DEFAULT_BUCKET_SIZE if is_open else bucket_size)
        self.use_bucketing = use_bucketing
        self.transport, self.name = transport, name
        self._given_observers = tuple(observers)
        variables.require_valid()
        limits = Limits.of(stall_warning_s, timeout_s)
        self.world = world = World()
        if transport != "solo":
            from clcomm.comm.collectives.connection import open_world  # here, as one rank alone needs no transports

            compared = {"bucket_size": bucket_size, "use_bucketing": bool(use_bucketing), "name": name}
            self.world = world = open_world(comm, transport, limits, compared)
        self.rank, self.size, self.cores = world.base.rank, world.base.world_size, world.cores
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.host, self.hosts = world.host, world.hosts
        #: Names these ranks in messages.
        self.name_ranks = RankNames(name, world.members())
        self.stats = CommStats(self.size, name)
        self.notifier = Notifier([self.stats, *self._given_observers])
        self.runner = CollectiveRunner(world, self.notifier, self.name_ranks)
        self.messages = StartedMessages(world, self.runner, self.notifier, self.name_ranks)
        self.plans = Plans()
        if world.staged is not None and world.shared is not None:
            among = self.local_rank, self.local_size, self.cores
            world.staged.choose_fold = partial(choose_fold, self.plans, world.shared, *among)
        self.memory = CommunicatorMemory(world, self.runner, self.plans.of.clear)
        #: Raises a collective's time-out in the program, which may catch it; None: the job ends. See Watchdog.
        self.interrupt: Callable[[str, float, Callable[[], None]], bool] | None = None
        self.lifetime = Lifetime(world, self.runner, limits, name)
        self.lifetime.begin(self)

    def set_timeout(self, timeout_s: float) -> None:
        """Set after how many seconds in one collective this rank ends the job, 0: never; also in one that runs now.

        The parts that `split` made keep theirs. CLCOMM_TIMEOUT_S overrides it. Raises ArgumentError for what is no
        number of seconds.
        """
        self.lifetime.set_timeout(timeout_s)

    @property
    def comm(self) -> Any:
        """The private duplicate of the mpi4py communicator; None without MPI, and once this one is closed."""
        return self.world.comm

    @property
    def bucket_size(self) -> int:
        """The bytes of one all-reduce of gradients; settable, for Synchronizers that are made later."""
        return self._bucket_size

    @bucket_size.setter
    def bucket_size(self, nbytes: int | str) -> None:
        self._bucket_size = parse_size(nbytes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.size

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments, without `comm`, for a Communicator of other ranks with these settings."""
        return {
            "use_bucketing": self.use_bucketing,
            "bucket_size": AUTO if self.auto_bucket_size else self.bucket_size,
            "transport": self.transport,
            "observers": self._given_observers,
            "stall_warning_s": self.lifetime.limits.stall_warning_s,
            "timeout_s": self.lifetime.limits.timeout_s,
            "name": self.name,
        }

    def __reduce__(self) -> NoReturn:
        raise no_copy("Communicator", "make another where one is needed")

    # --- parts ---

    def split(
        self, color: int | None, key: int | None = None, *, name: str = "", transport: str | None = None
    ) -> Communicator | None:
        """Return a Communicator of the ranks with the same color, with these settings and memory of its own.

        Collective. Like MPI_Comm_split (MPI 4.1, section 7.4.2). `finalize()` closes it together with this one.

        Args:
            color: the part of this rank, a number from 0 up; None: it is in none, and gets None.
            key: ranks are ordered by it, and by their rank here where it is equal; None: by their rank here.
            name: the part's. Its collectives and phases are then reported to this Communicator's observers too, its
                `stats` among them, with that name as their `part`.
            transport: the part's, such as "mpi"; None: this one's.

        Raises:
            ArgumentError: an argument is invalid; on every rank.
            ResourceError: MPI has no communicators left.
            MismatchError: the ranks of a part differ in its name.
        """
        from clcomm.comm.collectives.parts import PartEvents, SplitRequest, members_of, part_of

        wanted = SplitRequest.of(color, self.rank if key is None else key, name)
        everyone = self.runner.run_uncounted("split", self.world.allgather, wanted)
        members = members_of(everyone, self.rank, self.name_ranks)
        settings = self.settings() | {"observers": (), "name": name, "transport": transport or self.transport}
        part = part_of(Communicator, self.comm, members, self.rank, settings)
        if part is not None:
            self.lifetime.parts.add(part)
            if name:
                part.add_observer(PartEvents(self.notifier, name, members))
        self.lifetime.keep_alive()
        return part

    # --- memory ---

    @property
    def shares_memory(self) -> bool:
        """Whether `allocate` returns shared memory, as long as there is room."""
        return self.world.shared is not None

    def holds(self, array: np.ndarray) -> bool:
        """Return whether an array is in memory of `allocate` or `allocate_common`, where collectives need no copy."""
        return self.memory.holds(array)

    def allocate(self, nbytes: int, *, purpose: str = "allocate") -> np.ndarray:
        """Return a zeroed uint8 array of this rank, in shared memory where available. Collective.

        purpose: what messages call it where ranks differ in their collectives.
        """
        return self.memory.allocate(nbytes, False, purpose)

    def allocate_common(self, nbytes: int) -> np.ndarray:
        """Return a zeroed uint8 array, in memory common to all ranks of a host where available. Collective.

        As `out` of an all-reduce it makes ranks write each byte of the result once. Elsewhere it is an ordinary array.
        """
        return self.memory.allocate(nbytes, True, "allocate")

    # --- what runs, and who is notified of it ---

    @property
    def current(self) -> tuple[Call, int, float] | None:
        """The collective that this rank is in: call, sequence number, begin (perf_counter); None: in none."""
        return self.runner.current

    def unfinished(self) -> list[tuple[Call, int]]:
        """Return the collectives that this rank has begun, in the background too: call and sequence number."""
        return self.runner.unfinished()

    def dump_operations(self, folder: str) -> None:
        """Write this rank's last collectives to a folder: rank-N.json, and of several ranks trace_N for `torchfrtrace`.

        Not collective; every rank of interest calls it, for instance after a MismatchError (docs/robustness.md).

        Args:
            folder: an existing one, without such files.

        Raises:
            OutputError: a file exists or cannot be written.
        """
        self.lifetime.dump_operations(folder, self.unfinished())

    @property
    def sequence(self) -> int:
        """Number of collectives that have begun, the same on every rank between two of them."""
        return self.runner.sequence

    def add_observer(self, observer: Observer) -> None:
        """Notify an observer of collectives that finish from now on, and of phases if it has `phase_finished`."""
        self.notifier.add_observer(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Stop notifying an observer; no-op if it was never added."""
        self.notifier.remove_observer(observer)

    def notify_phase(self, phase: Phase) -> None:
        """Notify the observers that have a method `phase_finished` of a finished phase."""
        self.notifier.notify_phase(phase)

    def phase(self, name: str, label: str = "", bucket: int = -1, **figures: float) -> TimedPhase:
        """Return a context manager that reports its block as a phase: "step", "forward_backward" or any name.

        figures: shown with it in a timeline, such as step=7 and epoch=1.
        """
        return self.notifier.phase(name, label, bucket, figures)

    def communicated(self) -> float:
        """Return the seconds that this rank has spent blocked in collectives and packing for them."""
        return self.notifier.communicated()

    def in_collectives(self) -> float:
        """Return the seconds that this rank has spent blocked in collectives, without packing for them."""
        return self.notifier.in_collectives()

    def merged_stats(self) -> CommStats:
        """Return the stats of a mean rank, on every rank; collective."""
        states = self.runner.run_uncounted("merged_stats", self.world.allgather, self.stats.state())
        return CommStats.merged(states, self.size, self.name)

    # --- the end ---

    def finalize(self) -> None:
        """Free communicators, and shared memory without arrays; collective, and no other call may follow.

        Parts that `split` made are closed first. A second `finalize()` does nothing; the stats remain readable.
        Raises ArgumentError, on every rank, where one has a message on its way.
        """
        self.lifetime.finalize(self.messages.require_complete)

    def abandon(self) -> None:
        """Close the Communicator without the other ranks, after some have failed; no other call may follow.

        Ranks that block in one of its collectives get MPI's error. Its memory stays until the process ends.
        """
        self.lifetime.abandon()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.finalize()
