"""Tied parameters: shared by layers of stages on several ranks; their gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clcomm.comm.communicator import Communicator
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor

TIED = "tied gradients"
#: The label of numbers about the whole model.
WHOLE = "whole model"


class TiedParameters:
    """This rank's parameters that other ranks share: the `Stages` of a parameter. Creating it is collective.

    After `sum_gradients` each has the sum of all its uses, with the same bits on each of its ranks: the ranks of a
    parameter begin alike and step alike. Where gradients add up over several steps of a pipeline, `begin_step` lets the
    first of a parameter's ranks keep the sum so far, and the others begin anew.

    Args:
        shared: the ranks of each shared parameter, in the same order on every rank.
        own: this rank's of them, by their place in `shared`.
    """

    def __init__(self, comm: Communicator, shared: Sequence[Sequence[int]], own: Mapping[int, Parameter]):
        self._comm = comm
        self._groups: list[tuple[Communicator, Parameter, np.ndarray, np.ndarray]] = []
        self._follows: set[int] = set()
        parts: dict[tuple[int, ...], Communicator | None] = {}
        for number, ranks in enumerate(shared):
            members = tuple(ranks)
            if members not in parts:
                color = 0 if comm.rank in members else None
                parts[members] = comm.split(color, name=f"tied {'-'.join(map(str, members))}")
            part = parts[members]
            if part is not None:
                parameter = own[number]
                mine, total = part.allocate(parameter.nbytes), part.allocate_common(parameter.nbytes)
                self._groups.append((part, parameter, mine.view(np.float32), total.view(np.float32)))
                if part.rank:
                    self._follows.add(id(parameter))

    @property
    def are_here(self) -> bool:
        return bool(self._groups)

    def begin_step(self) -> None:
        """Drop the gradients that earlier steps have summed, on all ranks of a parameter but its first."""
        for _, parameter, _, _ in self._groups:
            if not self.counts(parameter) and parameter.grad is not None:
                parameter.grad = None

    def sum_gradients(self) -> None:
        """Replace each gradient by the sum over its ranks; collective."""
        for part, parameter, mine, total in self._groups:
            gradient = parameter.grad
            if gradient is None:
                mine[...] = 0
            else:
                mine[...] = gradient.numpy().reshape(-1)
            part.all_reduce(mine, out=total, label=TIED)
            values = total.reshape(parameter.shape)
            if gradient is None:
                parameter.grad = Tensor(values, parameter.device)
            else:
                gradient.copy_from(values)

    def give_values(self) -> None:
        """Give every rank of a parameter the values of its first one; collective."""
        for part, parameter, mine, _ in self._groups:
            mine[...] = parameter.numpy().reshape(-1)
            part.broadcast(mine, label=TIED)
            parameter.copy_from(mine.reshape(parameter.shape))

    def counts(self, parameter: Parameter) -> bool:
        """Return whether a parameter counts here, and not on a rank before this one that has it too."""
        return id(parameter) not in self._follows

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        return self._comm.all_gather(own, label=WHOLE)
