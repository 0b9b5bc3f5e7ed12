"""The parts of parameters that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clcomm.communicator import Communicator
from clcomm.engine.parameter import Parameter

#: The label under which the Communicator's stats count gathered and broadcast parameters.
PARAMETERS = "parameters"


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter along dimension `axis`, in each of `sections` equal sections of it by itself.

    Queries, keys and values beside each other in one layer are three sections.
    """

    axis: int = 0
    sections: int = 1


class Shard:
    """Rank `comm.rank`'s part of a parameter: a `clcomm.engine.parameter.Part`."""

    def __init__(self, cut: Cut, comm: Communicator):
        self.cut, self.comm = cut, comm

    def __deepcopy__(self, memo: dict[int, object]) -> Shard:
        return self

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        axis = self.cut.axis
        return (*shape[:axis], shape[axis] * self.comm.size, *shape[axis + 1 :])

    def own(self, whole: np.ndarray) -> np.ndarray:
        axis, each = self.cut.axis, np.split(whole, self.cut.sections, self.cut.axis)
        return np.concatenate([np.split(section, self.comm.size, axis)[self.comm.rank] for section in each], axis)

    def gather(self, part: np.ndarray) -> np.ndarray:
        axis = self.cut.axis
        parts = self.comm.all_gather(np.ascontiguousarray(part), label=PARAMETERS)
        sections = zip(*(np.split(each, self.cut.sections, axis) for each in parts), strict=True)
        return np.concatenate([each for section in sections for each in section], axis)

    @property
    def ranks(self) -> int:
        return self.comm.size

    def gather_numbers(self, own: np.ndarray) -> np.ndarray:
        return self.comm.all_gather(own, label=PARAMETERS)


class Shards:
    """This rank's parameters in place of whole ones; those that several layers share stay one."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._made: dict[int, tuple[Parameter, Parameter]] = {}  # by the whole one's id, which is kept

    def of(self, whole: Parameter, cut: Cut) -> Parameter:
        """Return this rank's part of a parameter."""
        found = self._made.get(id(whole))
        if found is None:
            shard = Shard(cut, self.comm)
            part = Parameter(np.ascontiguousarray(shard.own(whole.numpy())), whole.device, whole.requires_grad)
            part.part = shard
            found = self._made[id(whole)] = whole, part
        return found[1]
