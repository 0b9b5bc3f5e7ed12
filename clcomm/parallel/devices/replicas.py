"""Replicas of a model's parameters, one on each device of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.base.flat_space.parameters import Beginnings
from clcomm.base.host.arrays import aligned_zeros
from clcomm.comm.transport.reduction import prepared_reduction
from clcomm.engine.device import Device
from clcomm.engine.flat import FlatSpace, space_of
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.replay import Replay
from clcomm.engine.tensor import Tensor
from clcomm.optim import Optimizer
from clcomm.parallel.devices import collectives
from clcomm.sync.model_ranks import apply_weight, weight_of
from clcomm.sync.synchronizer import Synchronizer

T = TypeVar("T")
#: What makes a tensor one of another replica: its memory, its device, and the state of its gradient.
_PLACE = ("buffer", "device", "_grad", "_hooks", "_requires_grad")


class Replicas(list[list[Parameter]]):
    """The parameters on each device: a list for each, all in the same order.

    Attributes:
        devices: of each list.
        model: the module whose own parameters the first list has; None: what was replicated were parameters alone.
        synchronizer: averages gradients over ranks; None: there are no others.
    """

    def __init__(
        self,
        lists: Iterable[list[Parameter]],
        model: Module | None = None,
        synchronizer: Synchronizer | None = None,
    ):
        super().__init__(lists)
        self.model, self.synchronizer = model, synchronizer
        self.devices: list[Device] = [parameters[0].device for parameters in self]
        self._buffers: list[list[Tensor]] = [[] for _ in self]
        if model is not None:
            own = list(model.buffers())
            self._buffers = [own, *([Tensor(each, device) for each in own] for device in self.devices[1:])]
        #: The flat space of each device, of one layout.
        self.spaces = _spaces(self, model)
        #: What averages the gradients.
        self.mean = GradientMean(self.spaces, model, synchronizer)
        self._revision = -1  # of the first device, when its parameters were last compared with the others
        #: Of each device, where netcl's words made them.
        self.optimizers: list[Optimizer] | None = None
        #: Of each device, the function of the latest recorded steps, and their Replay.
        self.recorded: dict[int, tuple[object, Replay]] = {}

    @staticmethod
    def checked(given: object) -> Replicas:
        """Return what was given; raises ArgumentError unless it is what prepare_replicas returns."""
        if not isinstance(given, Replicas):
            raise ArgumentError(
                f"param_replicas: expected what prepare_replicas returned, got {type(given).__name__}; "
                "call prepare_replicas(model.parameters(), queues)"
            )
        return given

    @contextmanager
    def standing_in(self, index: int) -> Iterator[list[Parameter]]:
        """Let the model's own parameters and buffers be those of device `index` within a block.

        So a model computes on that device, whatever way its code has to its parameters. Yields these parameters.
        """
        own = [*self[0], *self._buffers[0]]
        kept = [_place_of(tensor) for tensor in own]
        if index:
            for tensor, other in zip(own, [*self[index], *self._buffers[index]], strict=True):
                _move(tensor, _place_of(other))
        try:
            yield self[0]
        finally:
            for tensor, place in zip(own, kept, strict=True):
                _move(tensor, place)

    def require_unchanged(self) -> None:
        """Let parameters that were frozen on the first device be so on all.

        Raises ArgumentError for one that became trainable, and where a DistributedOptimizer divides the parameters.
        """
        revision = self.devices[0].revision
        if revision == self._revision:
            return
        for index, parameter in enumerate(self[0]):
            if parameter.requires_grad and space_of(parameter) is not self.spaces[0]:
                raise ArgumentError(
                    f"params[{index}]: expected requires_grad as it was in prepare_replicas, got it set; "
                    "unfreeze before prepare_replicas"
                )
            for other in self[1:]:
                other[index].requires_grad = parameter.requires_grad
        if self.synchronizer is not None and self.synchronizer.models.of(self.model).sharded_update is not None:
            raise ArgumentError(
                "optimizers: expected none that is a DistributedOptimizer with several devices, got one; "
                "give it the optimizers themselves"
            )
        self._revision = self.devices[0].revision

    def copy_first(self) -> None:
        """Give every device the first one's trained parameters."""
        values = np.empty(self.spaces[0].layout.span, np.uint8)
        self.devices[0].read(self.spaces[0].params, values)
        for device, space in zip(self.devices[1:], self.spaces[1:], strict=True):
            device.write(space.params, values)
            space.note_write()

    @property
    def is_mixed(self) -> bool:
        """Whether the devices' kernels may round differently: their drivers or their names are not the same."""
        return len({(device.driver, device.name, device.kind) for device in self.devices}) > 1


def replicate_params(params: Module | Iterable[Parameter], queues: Sequence[Device]) -> Replicas:
    """Return copies of the parameters on each device; raises ArgumentError for no parameters or no devices."""
    parameters, devices = _parameters(params), _devices(queues)
    return Replicas([[_copy(each, device) for each in parameters] for device in devices])


def prepare_replicas(
    params: Module | Iterable[Parameter], queues: Sequence[Device], synchronizer: Synchronizer | None = None
) -> Replicas:
    """Return the model's own parameters, which have to be on the first device, and copies on each other one.

    Each list gets a flat space and its device's random numbers for dropout. After training the model has the result.

    Args:
        params: a module, or its parameters where it has no buffers such as batch norm's running statistics.
        queues: Devices, such as those of a DeviceManager; several Devices may be of one OpenCL device.
        synchronizer: of this rank's model, for ranks that have several devices each: every rank gets rank 0's
            parameters and buffers, and gradients are averaged over the ranks too. Then `params` is a module.

    Raises:
        ArgumentError: no parameters, no devices, or parameters on another device than the first.
    """
    parameters, devices = _parameters(params), _devices(queues)
    model = params if isinstance(params, Module) else None
    for index, parameter in enumerate(parameters):
        if parameter.device is not devices[0]:
            raise ArgumentError(
                f"params[{index}]: expected it on the first of the queues, {devices[0]}, got {parameter.device}; "
                "build the model on queues[0]"
            )
    if synchronizer is not None:
        if model is None:
            raise ArgumentError("params: expected the module with a synchronizer, got its parameters")
        synchronizer.broadcast_parameters(model)
    copies = [[_copy(each, device) for each in parameters] for device in devices[1:]]
    replicas = Replicas([parameters, *copies], model, synchronizer)
    _draw_other_numbers(devices, synchronizer)
    return replicas


def sync_grads(param_replicas: Replicas, samples: Sequence[float] | None = None) -> None:
    """Replace the gradients on each device by their mean over the devices, and over the ranks with a synchronizer.

    A missing gradient counts as zero. samples: how many samples each device's gradient is the mean of; the result is
    then the mean over all samples. None: equally many. Raises ArgumentError for other numbers of them.
    """
    replicas = Replicas.checked(param_replicas)
    if samples is not None and (len(samples) != len(replicas) or any(not 0 <= each < np.inf for each in samples)):
        raise ArgumentError(f"samples: expected a number from 0 up for each of {len(replicas)} devices, got {samples}")
    replicas.require_unchanged()
    replicas.mean.run(samples)


def broadcast_params(
    src_params: Sequence[Parameter] | None, dst_param_groups: Sequence[Sequence[Parameter]], root: int = 0
) -> None:
    """Give every group of parameters the values of `src_params`; None: of group `root`.

    Raises ArgumentError for groups of other lengths or shapes.
    """
    if not isinstance(root, int) or not 0 <= root < len(dst_param_groups):
        raise ArgumentError(f"root: expected 0 to {len(dst_param_groups) - 1}, the index of a group, got {root!r}")
    source = dst_param_groups[root] if src_params is None else src_params
    for number, group in enumerate(dst_param_groups):
        if len(group) != len(source):
            raise ArgumentError(
                f"dst_param_groups[{number}]: expected {len(source)} parameters as the source has, got {len(group)}"
            )
    for index, values in enumerate(source):
        others = [group[index] for group in dst_param_groups if group[index] is not values]
        collectives.broadcast([values, *others])


def _parameters(params: Module | Iterable[Parameter]) -> list[Parameter]:
    return _each_one("params", params.parameters() if isinstance(params, Module) else params, Parameter)


def _devices(queues: Sequence[Device]) -> list[Device]:
    found = _each_one("queues", queues, Device, "; see DeviceManager")
    for index, each in enumerate(found):
        if any(each is other for other in found[:index]):
            raise ArgumentError(
                f"queues[{index}]: expected each Device once, got {each} twice; for two queues on a device make two "
                "Devices, as DeviceManager does for a name given twice"
            )
    return found


def _each_one(name: str, given: Iterable[object], kind: type[T], remedy: str = "") -> list[T]:
    """Return what was given as a list; ArgumentError unless all are of a kind, and there is one at least."""
    found = []
    for index, each in enumerate(given):
        if not isinstance(each, kind):
            raise ArgumentError(f"{name}[{index}]: expected a {kind.__name__}, got {type(each).__name__}{remedy}")
        found.append(each)
    if not found:
        raise ArgumentError(f"{name}: expected at least one {kind.__name__}, got none")
    return found


def _copy(parameter: Parameter, device: Device) -> Parameter:
    return Parameter(parameter.numpy(), device, parameter.requires_grad)


def _spaces(lists: Sequence[list[Parameter]], model: Module | None) -> list[FlatSpace]:
    """Return a flat space for each list: the first list's own, and new ones of its layout."""
    own = lists[0]
    first = FlatSpace.holding((str(i), p) for i, p in enumerate(own)) if model is None else model.flat_space()
    index_of = {id(parameter): index for index, parameter in enumerate(own)}
    if any(id(parameter) not in index_of for parameter in first.parameters):
        raise ArgumentError("params: some of the model's are missing; give all of its parameters together")
    places = zip(first.layout.ranges, first.parameters, strict=True)
    named = [(place.name, index_of[id(parameter)]) for place, parameter in places][::-1]  # in the model's order
    return [first, *(FlatSpace([(name, copies[index]) for name, index in named]) for copies in lists[1:])]


def _draw_other_numbers(devices: Sequence[Device], synchronizer: Synchronizer | None) -> None:
    """Let the devices of all ranks draw different random numbers; the first ones draw their ranks'."""
    rank, size = (0, 1) if synchronizer is None else (synchronizer.comm.rank, synchronizer.comm.size)
    for index, device in enumerate(devices[1:], 1):
        RandomStream.of(device).stand_for(index * size + rank)


def _place_of(tensor: Tensor) -> dict[str, Any]:
    names = (*_PLACE, "slot") if isinstance(tensor, Parameter) else _PLACE
    return {name: getattr(tensor, name) for name in names}


def _move(tensor: Tensor, place: dict[str, object]) -> None:
    for name, value in place.items():
        setattr(tensor, name, value)


# --- The mean of the gradients of replicas on several devices of one process, and of those of all ranks. ---


class GradientMean:
    """Replaces the gradients in flat spaces by their mean: over the devices in their order, then over the ranks.

    The flat spaces move onto host arrays. The mean has one array, which all devices that compute in the host's memory
    read in place, as ranks of a host do.

    Args:
        spaces: one of each device, of one layout.
        model: the module whose flat space is the first.
        synchronizer: averages over ranks; None: there are no others.
    """

    def __init__(self, spaces: Sequence[FlatSpace], model: object = None, synchronizer: Synchronizer | None = None):
        self._spaces, self._model, self._synchronizer = tuple(spaces), model, synchronizer
        first, span = spaces[0], spaces[0].layout.span
        if synchronizer is None:
            # The mean has memory of its own: other devices may still read it when the first one's next backward writes.
            self._grads, self._mean = aligned_zeros(span), aligned_zeros(span)
            first.rebind(aligned_zeros(span), self._grads, self._mean)
        else:
            arrays = synchronizer.models.of(model).space.arrays
            self._grads, self._mean = arrays.grads, arrays.reduced
        rows = [self._grads]
        for space in spaces[1:]:
            rows.append(aligned_zeros(span))
            space.rebind(aligned_zeros(span), rows[-1], self._mean)
        self._names, self._beginnings = {each.name for each in first.layout.ranges}, Beginnings(first.layout.ranges)
        self._rows = [row.view(np.float32) for row in rows]
        total = self._rows[0] if synchronizer is not None else self._mean.view(np.float32)
        self._fold: Callable[[], None] = prepared_reduction(self._rows, total, "mean")

    def run(self, samples: Sequence[float] | None) -> None:
        """Average; a gradient that only some devices have counts as zero on the others.

        samples: how many each device's gradient is the mean of; None: equally many.
        """
        first, *others = self._spaces
        if not first.reduces_into(self._mean):
            raise ArgumentError(
                "param_replicas: expected the first device's gradients where prepare_replicas put them, got them moved "
                "by another Synchronizer; give that to prepare_replicas"
            )
        for space in self._spaces:
            space.moves.pull(0, space.layout.span)
        for row, weight in zip(self._rows, _weights(samples, len(self._rows)), strict=True):
            apply_weight(row, weight)
        if others or self._synchronizer is None:
            self._fold()
        if self._synchronizer is None:
            first.moves.push(0, first.layout.span)
        else:
            first.moves.push_own(self._names - self._beginnings.missing(self._grads))
            total = sum(samples) if samples is not None else len(self._rows)
            self._synchronizer.sync_gradients(self._model, samples=total)
        for space in others:
            space.moves.push(0, space.layout.span)


def _weights(samples: Sequence[float] | None, count: int) -> list[float]:
    """Return the factors that make the mean over devices the mean over samples: 1.0 where all have equally many."""
    if samples is None:
        return [1.0] * count
    return [weight_of(each, count, sum(samples)) for each in samples]
