"""Optimizers with PyTorch's formulas and defaults: one kernel launch a step, over all parameters at once.

A parameter without a gradient counts as one with a gradient of zeros, as it does between ranks; only a step without any
gradient at all does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from clcomm.engine.flat import FlatSpace
from clcomm.engine.grad_slot import NONE
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.errors import ArgumentError

#: Bytes of an element: parameters and state are float32.
_ITEM = 4


class Optimizer:
    """Base of the optimizers: hyper-parameters, state in flat device buffers, and one kernel over the flat space.

    `params` is a Module, or an iterable of Parameters that share a flat space or have none yet. `lr` can be set at any
    time. Raises ArgumentError for a hyper-parameter outside its range.
    """

    #: Names of the state buffers that the hyper-parameters call for.
    _buffer_names: tuple[str, ...] = ()

    def __init__(self, params: Module | Iterable[Parameter], lr: float, **hyper: float):
        self.space = _space_of(params)
        self._hyper = {name: float(value) for name, value in hyper.items()}
        self.lr = lr
        self.steps = 0
        self._start, self._stop = 0, self._span
        self._own_params: tuple[Any, Any] = (None, None)

    @property
    def _span(self) -> int:
        return self.space.layout.span // _ITEM

    @property
    def _count(self) -> int:
        return self._stop - self._start

    @cached_property
    def _state(self) -> dict[str, Any]:
        """The state buffers, zero; made at first use, when it is known for which elements."""
        zeros = np.zeros(max(self._count, 1), np.float32)  # no OpenCL buffer is empty
        return {name: self.space.device.upload(zeros) for name in self._buffer_names}

    @property
    def state_nbytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return len(self._buffer_names) * self._count * _ITEM

    def restrict(self, start: int, stop: int) -> None:
        """Update elements [start, stop) of the flat space alone from now on, with state for them alone.

        For who reduces gradients to such a range: `update_range` takes the place of `step`. Call it before the first
        step; ArgumentError later, or for a range outside the flat space or not aligned as the layout's slots.
        """
        multiple = self.space.layout.alignment // _ITEM
        if not 0 <= start <= stop <= self._span or start % multiple or stop % multiple:
            raise ArgumentError(
                f"range: expected multiples of {multiple} within [0, {self._span}], got [{start}, {stop})"
            )
        if "_state" in self.__dict__:
            raise ArgumentError("range: expected to be chosen before the first step and before a state is loaded")
        self._start, self._stop = start, stop

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = _checked("lr", value)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.space.zero_grad()

    def step(self) -> None:
        """Update the parameters with their gradients, the averaged ones after a synchronisation."""
        if self._count != self._span:
            raise ArgumentError("step: this optimizer updates a part of the parameters; step its DistributedOptimizer")
        self.space.device.on_host(self._update)  # its numbers change from step to step

    def _update(self) -> None:
        space = self.space
        if all(slot.state == NONE for slot in space.slots):
            return
        space.complete_grads()
        self.update_range(space.current_grads)

    def update_range(self, gradients: Any) -> None:
        """Take a step on the optimizer's range, with a buffer of the gradients of just that range."""
        self.steps += 1
        device, count = self.space.device, self._count
        if not count:
            return
        name, arguments = self._kernel_call()
        kernel = device.kernel("optim", name)
        device.launch(kernel, *device.grid(count), self._params(), gradients, *arguments, count)

    def _params(self) -> Any:
        whole, part = self._own_params
        if whole is not self.space.params:
            whole = part = self.space.params
            if self._count != self._span:
                part = whole.get_sub_region(self._start * _ITEM, self._count * _ITEM)
            self._own_params = whole, part
        return part

    def _kernel_call(self) -> tuple[str, tuple[Any, ...]]:
        """Return the kernel's name and its arguments between the gradients and the count."""
        raise TypeError(f"{type(self).__name__} defines no step")

    # -- checkpoints

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the flat state buffers."""
        return self._buffer_names

    def settings(self) -> dict[str, Any]:
        """Return kind, step count and hyper-parameters by name."""
        return {"kind": type(self).__name__, "steps": self.steps, "lr": self._lr, **self._hyper}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return kind, step count, hyper-parameters (arrays without dimensions) and the flat state buffers.

        With a range the buffers are those of the range; `load_state_dict` takes whole ones.
        """
        state = {name: np.array(value) for name, value in self.settings().items()}
        for name, buffer in self._state.items():
            state[name] = np.empty(self._count, np.float32)
            if self._count:
                self.space.device.read(buffer, state[name])
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a `state_dict()`; raises ArgumentError, changing nothing, if it is another optimizer's."""
        kind = str(state["kind"]) if "kind" in state else "none"
        if kind != type(self).__name__:
            raise ArgumentError(f"state_dict: expected the state of {type(self).__name__}, got {kind}")
        expected = {"kind", "steps", "lr", *self._hyper, *self._state}
        if set(state) != expected:
            raise ArgumentError(f"state_dict: expected the entries {sorted(expected)}, got {sorted(state)}")
        for name in ("steps", "lr", *self._hyper):
            if np.shape(state[name]) != ():
                raise ArgumentError(f"state_dict[{name!r}]: expected one number, got {np.size(state[name])}")
        for name in self._state:
            if np.shape(state[name]) != (self._span,):
                raise ArgumentError(f"state_dict[{name!r}]: expected {self._span} values, got {np.shape(state[name])}")
        for name, buffer in self._state.items():
            if self._count:
                own = np.ascontiguousarray(state[name][self._start : self._stop], np.float32)
                self.space.device.write(buffer, own)
        self.steps = int(state["steps"])
        self.lr = float(state["lr"])
        self._hyper = {name: float(state[name]) for name in self._hyper}


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant of it, and weight decay, as torch.optim.SGD."""

    def __init__(
        self,
        params: Module | Iterable[Parameter],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        _checked("momentum", momentum)
        _checked("weight_decay", weight_decay)
        if nesterov and not momentum:
            raise ArgumentError("nesterov: expected a momentum above 0 with it, got momentum 0")
        self._buffer_names = ("velocity",) if momentum else ()
        super().__init__(params, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def _kernel_call(self) -> tuple[str, tuple[Any, ...]]:
        hyper = self._hyper
        if not self._state:
            return "sgd", (self._lr, hyper["weight_decay"])
        numbers = (self._lr, hyper["weight_decay"], hyper["momentum"], int(hyper["nesterov"]))
        return "sgd_momentum", (self._state["velocity"], *numbers)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay added to the gradient, as torch.optim.Adam."""

    _buffer_names = ("mean", "square")
    _decoupled = False

    def __init__(
        self,
        params: Module | Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        for index, beta in enumerate(betas):
            _checked(f"betas[{index}]", beta, below=1.0)
        _checked("eps", eps)
        _checked("weight_decay", weight_decay)
        super().__init__(params, lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)

    def _kernel_call(self) -> tuple[str, tuple[Any, ...]]:
        beta1, beta2, decay = self._hyper["beta1"], self._hyper["beta2"], self._hyper["weight_decay"]
        step_size = self._lr / (1.0 - beta1**self.steps)
        root_correction = math.sqrt(1.0 - beta2**self.steps)
        added, shrink = (0.0, 1.0 - self._lr * decay) if self._decoupled else (decay, 1.0)
        numbers = (beta1, beta2, self._hyper["eps"], added, shrink, step_size, root_correction)
        return "adam", (self._state["mean"], self._state["square"], *numbers)


class AdamW(Adam):
    """Adam with weight decay on the parameters themselves (Loshchilov and Hutter, 2019), as torch.optim.AdamW."""

    _decoupled = True

    def __init__(
        self,
        params: Module | Iterable[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, lr, betas, eps, weight_decay)


class RMSProp(Optimizer):
    """RMSProp (Hinton's lectures, 2012), optionally with momentum and centered, as torch.optim.RMSprop."""

    def __init__(
        self,
        params: Module | Iterable[Parameter],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ):
        _checked("alpha", alpha)
        for name, value in (("eps", eps), ("weight_decay", weight_decay), ("momentum", momentum)):
            _checked(name, value)
        self._buffer_names = ("square", *["mean"] * bool(centered), *["velocity"] * bool(momentum))
        super().__init__(
            params, lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
        )

    def _kernel_call(self) -> tuple[str, tuple[Any, ...]]:
        hyper, state = self._hyper, self._state
        square = state["square"]
        buffers = (square, state.get("mean", square), state.get("velocity", square))
        numbers = (self._lr, hyper["alpha"], hyper["eps"], hyper["weight_decay"], hyper["momentum"])
        return "rmsprop", (*buffers, *numbers, int(hyper["centered"]))


def _checked(name: str, value: float, below: float = math.inf) -> float:
    if not isinstance(value, (int, float, np.floating, np.integer)) or not 0.0 <= value < below:
        limit = "a number of at least 0" if below == math.inf else f"a number from 0 to below {below:g}"
        raise ArgumentError(f"{name}: expected {limit}, got {value!r}")
    return float(value)


def _space_of(params: Module | Iterable[Parameter]) -> FlatSpace:
    if isinstance(params, Module):
        return params.flat_space()
    parameters = [parameter for parameter in params if parameter.requires_grad]
    return FlatSpace.containing(parameters) or FlatSpace.of(parameters)
