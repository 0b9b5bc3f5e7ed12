"""Open a dataset on all ranks: rank 0 chooses it, one rank of each host reads it, all ranks raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from clcomm.base.errors import ClcommError, DataError, name_ranks
from training.data.choose import Choice, choose, load
from training.data.datasets import Splits
from training.data.shared_splits import adopt, open_publication

if TYPE_CHECKING:
    from clcomm.comm.communicator import Communicator
    from training.data.shared_splits import Publication


def open_data(
    spec: str, comm: Communicator | None = None, report: Callable[[str], object] = print, *, with_test: bool = True,
    meanwhile: Callable[[], object] = lambda: None,
) -> Splits:  # fmt: skip
    """Return the training and test set that `spec` names; collective where `comm` is given.

    Rank 0 finds the files or downloads them. The last rank of each host reads them, and the others use its memory.

    Args:
        spec: "auto", "mnist", "fashion-mnist", "digits", "synthetic" or a directory of IDX files with MNIST's names.
        comm: the ranks; None: this process alone.
        report: receives, on rank 0, a line on the data and on a download.
        with_test: False: a test set that has its own files is not read.
        meanwhile: is called on ranks that wait for another one to read the files.

    Raises:
        DataError: the data is missing or damaged, or a rank cannot read it or reads other data; on every rank.
    """
    choice = _decided_by_rank_0(lambda: choose(spec, report), comm)
    if comm is None or comm.size == 1:
        splits = load(choice, with_test)
    else:
        splits = _load_everywhere(choice, comm, with_test, meanwhile)
    if comm is None or comm.rank == 0:
        report(choice.note)
    return splits


def _decided_by_rank_0(decide: Callable[[], Choice], comm: Communicator | None) -> Choice:
    if comm is None:
        return decide()
    outcome: Choice | DataError | None = None
    if comm.rank == 0:
        try:
            outcome = decide()
        except (ClcommError, OSError) as error:
            outcome = DataError(str(error))  # without its cause, which may not pickle
    outcome = comm.broadcast_object(outcome, root=0)
    if isinstance(outcome, DataError):
        raise outcome
    assert isinstance(outcome, Choice)
    return outcome


@dataclass(frozen=True)
class _Attempt:
    """The outcome of loading on this rank: splits, or a failure; neither if it was not tried."""

    splits: Splits | None = None
    failure: str | None = None

    @classmethod
    def at(cls, read: Callable[[], Splits]) -> _Attempt:
        try:
            return cls(read())
        except (ClcommError, OSError, MemoryError) as error:
            return cls(failure=str(error) or type(error).__name__)

    @property
    def fingerprint(self) -> tuple[object, ...] | None:
        """The shape, the type and a hash of each array of images and labels; None without splits."""
        if self.splits is None:
            return None
        parts: list[object] = []
        for split in (self.splits.train, self.splits.test):
            for array in () if split is None else (split.images, split.labels):
                parts += [
                    array.shape,
                    array.dtype.str,
                    hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest(),
                ]
        return tuple(parts)


def _load_everywhere(choice: Choice, comm: Communicator, with_test: bool, meanwhile: Callable[[], object]) -> Splits:
    """Load on the last rank of each host, share its memory with the others, and compare what the ranks have.

    The last, as rank 0 comes late: it has a console to make, and it chose the files. A rank that cannot map that memory
    reads the files itself. A failure or a difference on one rank is raised on all.
    """
    is_reader = comm.local_rank == comm.local_size - 1
    publication = open_publication() if is_reader and comm.local_size > 1 else None
    try:
        return _load_and_share(choice, comm, with_test, meanwhile, is_reader, publication)
    finally:
        if publication is not None:
            publication.close()


def _load_and_share(
    choice: Choice, comm: Communicator, with_test: bool, meanwhile: Callable[[], object], is_reader: bool,
    publication: Publication | None,
) -> Splits:  # fmt: skip
    attempt, notice, has_read = _Attempt(), None, is_reader
    if is_reader:
        memory = (publication.allocate,) if publication else ()
        attempt = _Attempt.at(lambda: load(choice, with_test, *memory))
        if attempt.splits is not None and publication is not None:
            with suppress(OSError):  # without a notice the others read the files too
                notice = publication.publish(attempt.splits)
    else:
        meanwhile()
    comm.rendezvous()
    tried = comm.all_gather_object((is_reader, attempt.failure, notice))
    _stop_at_failure({rank: failure for rank, (has_tried, failure, _) in enumerate(tried) if has_tried}, comm.size)
    if attempt.splits is None or notice is not None:
        shared = adopt([notice for _, _, notice in tried if notice is not None])
        has_read = has_read or shared is None
        attempt = _Attempt.at(lambda: load(choice, with_test)) if shared is None else _Attempt(shared)
    reports = comm.all_gather_object((attempt.failure, has_read))
    _stop_at_failure({rank: failure for rank, (failure, _) in enumerate(reports)}, comm.size)
    readers = [rank for rank, (_, reads) in enumerate(reports) if reads]
    differing = _differing(comm, attempt, readers) if len(readers) > 1 else []
    if differing:
        raise DataError(
            f"data: {name_ranks(differing)} of {comm.size} read other data than rank {readers[0]} from "
            f"{choice.directory or choice.name}; put the same files on every host"
        )
    assert attempt.splits is not None
    return attempt.splits


def _differing(comm: Communicator, attempt: _Attempt, readers: Sequence[int]) -> list[int]:
    """Return which of the ranks that read the files themselves have other data than the first of them; collective.

    All of the data is hashed before the ranks meet, so that no rank waits in a collective meanwhile.
    """
    own = attempt.fingerprint if comm.rank in readers else None
    comm.rendezvous()
    found = comm.all_gather_object(own)
    return [rank for rank in readers if found[rank] != found[readers[0]]]


def _stop_at_failure(outcomes: dict[int, str | None], size: int) -> None:
    """Raise DataError, the same on every rank, if a rank failed; `outcomes` has each rank's failure, None for none."""
    failed = [rank for rank, failure in outcomes.items() if failure is not None]
    if not failed:
        return
    text = str(outcomes[failed[0]])
    if len(set(outcomes.values())) == 1:
        raise DataError(text)
    raise DataError(
        f"data: {name_ranks(failed)} of {size} cannot read what rank 0 chose: {text}; put the files at the "
        f"same path on every host"
    )
