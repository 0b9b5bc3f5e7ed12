"""PyTorch's replicas whose devices may round an optimizer's step differently: compared, and made alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from weakref import ref

import torch

from clcomm.comm.tensors.arrays import bytes_of
from clcomm.comm.tensors.collectives import TensorCollectives
from clcomm.comm.tensors.step_settings import computes_with
from clcomm.sync.agreement import CHECKS
from clcomm.sync.divergence import find_differing, hashes_of_arrays, is_due

_log = logging.getLogger("clcomm")


class TorchReplicas:
    """The parameters of a model whose gradients are averaged by torch.distributed or Horovod's calls.

    Making one is collective.

    Args:
        moves: the collectives of the model's ranks.
        parameters: the trained ones by name, in the same order on every rank; they are not kept alive.

    Attributes:
        are_unlike: whether ranks compute with several kinds of device; the same on every rank.
        backward: the last one that has reached a parameter.
    """

    def __init__(self, moves: TensorCollectives, parameters: Mapping[str, torch.Tensor]):
        self._moves = moves
        self._kinds = moves.comm.all_gather_object(computes_with(parameters.values()), label=CHECKS)
        self.are_unlike, self.backward = len(set(self._kinds)) > 1, -1
        self._parameters = {name: ref(each) for name, each in parameters.items()}
        self._averaged, self._warned = 0, False

    def averaged(self) -> None:
        """Note that all ranks' gradients were averaged; where that is due, give unlike ranks the parameters of most.

        Collective then. Rank 0 logs what differs, on which ranks, and what these compute with: once as a warning.
        """
        self._averaged += 1
        if not is_due(self._averaged, 0, self.are_unlike):
            return
        parameters = {name: own for name, each in self._parameters.items() if (own := each()) is not None}
        hashes: dict[str, int] = {}
        for name, own in parameters.items():  # one by one, as each may be copied to the host
            hashes |= hashes_of_arrays({name: bytes_of(self._moves.copies.on_host(own, CHECKS))})
        found = find_differing(self._moves.comm, hashes, self._kinds)
        if found is None:
            return
        if self._moves.comm.rank == 0:
            level = logging.DEBUG if self._warned else logging.WARNING
            _log.log(level, "%s; all go on with rank %d's", found.text, found.source)
        self._warned = True
        for own in parameters.values():
            self._moves.broadcast(own.data, found.source)  # .data: a graph that is kept stays usable
