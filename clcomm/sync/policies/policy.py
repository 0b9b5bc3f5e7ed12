"""What a policy is: settings that all ranks share, and for each model the rank's part in its outer steps.

In a step of a policy ranks average no gradients. Every `h` steps comes an outer step, which makes the parameters of all
ranks alike again, or of some, from how far each rank has moved since the last one: its outer gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.layout import FlatLayout
from clcomm.comm.communicator import Communicator
from clcomm.sync.compression.quantized import checked_entry, require_known

#: The label under which the Communicator's stats count what policies send.
OUTER = "outer gradients"


class LocalSteps(ABC):
    """A rank's part in a policy for one model; making one is collective.

    Attributes:
        takes_means: whether it calls `mean`, for which there is memory from the start.

    Args:
        h: steps from one outer step to the next.
        comm: the ranks.
        model: its parameters, which are alike on all ranks.
    """

    takes_means: ClassVar[bool] = False

    def __init__(self, h: int, comm: Communicator, model: ModelParameters):
        self.h, self.comm, self.model = h, comm, model
        self.steps = 0
        self.aligned_at = -1
        nbytes = model.size * model.dtype.itemsize if self.takes_means else 0
        self._shared = comm.allocate(nbytes, purpose=OUTER).view(model.dtype) if nbytes else None

    def step_finished(self) -> None:
        """Note that this rank's optimizer has updated the parameters, and take the outer step that is due.

        Where that fails, as a rank was lost, `state` and the steps stay those of before.
        """
        self.steps += 1
        try:
            self.after_step()
        except BaseException:
            self.steps -= 1
            raise

    def after_step(self) -> None:
        """Take the outer step that is due after so many steps."""
        if self.steps % self.h == 0:
            self.outer_step()

    @abstractmethod
    def outer_step(self) -> None:
        """Exchange how far the ranks have moved, and set the parameters; collective."""

    def align(self) -> None:
        """Give all ranks the same parameters, whichever step it is; collective. Again in the same step: do nothing."""
        if self.steps != self.aligned_at:
            self.bring_forward()
            self.aligned_at = self.steps

    def bring_forward(self) -> None:
        """Take the next outer step now, unless all ranks have just taken one."""
        if self.steps % self.h:
            self.outer_step()

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the mean over the ranks of an array like the parameters, which the next call writes over; collective.

        It lies in memory that a host's ranks share, where there is some: a host then sends others as much as one rank.
        """
        assert self._shared is not None, "takes_means"
        np.copyto(self._shared, values)
        return self.comm.all_reduce(self._shared, "mean", label=OUTER)

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Return what this rank keeps beside the parameters, as flat arrays that may be written to."""

    def saved_state(self) -> dict[str, np.ndarray]:
        """Return a rank's state for a checkpoint: its own parameters too, as between outer steps ranks differ."""
        kept = {name: array.copy() for name, array in self.state().items()}
        counts = {"steps": np.array(self.steps), "aligned": np.array(self.aligned_at)}
        return kept | counts | {"parameters": self.model.read().copy()}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a `saved_state`; collective.

        Raises ArgumentError, changing nothing, for that of another model or policy.
        """
        own = self.saved_state()
        for name, array in own.items():
            checked_entry(state, name, array.dtype, array.shape)
        require_known(state, {*own})
        self.steps = int(state["steps"])
        for name, array in self.state().items():
            array[...] = state[name]
        self.model.read()
        self.model.write(state["parameters"])
        self.loaded(int(state["aligned"]))

    def loaded(self, aligned_at: int) -> None:
        """Go on from what was written to the arrays of `state`, last aligned after so many steps; collective."""
        self.aligned_at = aligned_at


@dataclass(frozen=True)
class Policy(ABC):
    """The settings of a policy, by the names that its text has; h: steps from one outer step to the next."""

    name: ClassVar[str] = ""
    h: int = 50

    @abstractmethod
    def start(self, comm: Communicator, model: ModelParameters) -> LocalSteps:
        """Return the rank's part for a model, whose parameters are alike on all ranks."""

    def __post_init__(self) -> None:
        self.require("h", self.h >= 1, "a number of steps from 1 up")

    def require(self, name: str, holds: bool, expected: str) -> None:
        """Raise ArgumentError for a setting unless it `holds`."""
        if not holds:
            raise ArgumentError(f"policy: {self.name}: {name}: expected {expected}, got {getattr(self, name):g}")

    def __str__(self) -> str:
        settings = (f"{each.name}={getattr(self, each.name):g}" for each in fields(self))
        return f"{self.name}:{','.join(settings)}"


def parse_settings(kind: type[Policy], text: str) -> Policy:
    """Return a policy of this kind with the settings of "h=50,lr=0.7"; ArgumentError for others."""
    kinds = {each.name: int if each.type == "int" else float for each in fields(kind)}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name] = kinds[name](value)
        except (KeyError, ValueError):
            wanted = ", ".join(f"{each}={value.__name__.upper()}" for each, value in kinds.items())
            raise ArgumentError(f"policy: {kind.name}: expected settings of {wanted}, got {part!r}") from None
    return kind(**found)  # type: ignore[arg-type]


# --- A model's parameters as flat arrays, whole or in fragments, for what works on them between steps. ---

_FLOATS = ("float32", "float64")


class ModelParameters:
    """A model's parameters, in one flat array of one dtype; the padding between them is zero on all ranks.

    Args:
        layout: their places in it, in bytes.
        flat: returns the array's memory, uint8, which may move.
        pull: copies the model's parameters there.
        push: copies them back.

    Raises ArgumentError for parameters that are not all float32, or all float64.
    """

    def __init__(
        self, layout: FlatLayout, flat: Callable[[], np.ndarray], pull: Callable[[], None], push: Callable[[], None]
    ):
        dtypes = sorted({spec.dtype for spec in layout.specs})
        if len(dtypes) != 1 or dtypes[0] not in _FLOATS:
            raise ArgumentError(f"policy: expected parameters that are all float32 or float64, got {', '.join(dtypes)}")
        self.dtype = np.dtype(dtypes[0])
        self._layout, self._flat, self._pull, self._push = layout, flat, pull, push
        self.size = layout.span // self.dtype.itemsize
        #: 1 for parameters, 0 for the padding between them, which stays zero.
        self.mask = np.zeros(self.size, self.dtype)
        for place in layout.ranges:
            self.mask[place.start // self.dtype.itemsize : place.stop // self.dtype.itemsize] = 1

    def read(self) -> np.ndarray:
        """Return the parameters as they are now, in memory that the model may share."""
        self._pull()
        return self._flat().view(self.dtype)

    def write(self, values: np.ndarray, part: slice = slice(None)) -> None:
        """Set a part of the parameters, which were just read."""
        self._flat().view(self.dtype)[part] = values
        self._push()

    def fragments(self, count: int) -> list[slice]:
        """Return `count` parts, or fewer of a model with fewer parameters, of whole parameters and about equal size."""
        step, item = -(-self._layout.span // count), self.dtype.itemsize
        starts = [0]
        for place in self._layout.ranges:
            if place.start >= len(starts) * step:
                starts.append(place.start)
        return [slice(a // item, b // item) for a, b in zip(starts, [*starts[1:], self._layout.span], strict=True)]
