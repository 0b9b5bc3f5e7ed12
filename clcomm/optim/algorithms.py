"""The optimizers: their hyper-parameters, and each one's kernel with its arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.errors import ArgumentError
from clcomm.optim.checks import checked
from clcomm.optim.optimizer import Optimizer


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant of it, and weight decay, like torch.optim.SGD."""

    _switches = ("nesterov",)

    def __init__(
        self,
        params: Module | Iterable[Parameter],
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        checked("momentum", momentum)
        checked("weight_decay", weight_decay)
        self._buffer_names = self._buffers_for({"momentum": momentum, "nesterov": nesterov})
        super().__init__(params, lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def _buffers_for(self, hyper: Mapping[str, float]) -> tuple[str, ...]:
        if hyper["nesterov"] and not hyper["momentum"]:
            raise ArgumentError("nesterov: expected a momentum above 0 with it, got momentum 0")
        return ("velocity",) if hyper["momentum"] else ()

    def _kernel_call(self, steps: int) -> tuple[str, tuple[Any, ...]]:
        hyper = self._hyper
        if not self._buffer_names:
            return "sgd", (self._lr, hyper["weight_decay"])
        numbers = (self._lr, hyper["weight_decay"], hyper["momentum"], int(hyper["nesterov"]))
        return "sgd_momentum", (self._state["velocity"], *numbers)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay added to the gradient, like torch.optim.Adam."""

    _buffer_names = ("mean", "square")
    _limits: ClassVar = {"beta1": 1.0, "beta2": 1.0}
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
            checked(f"betas[{index}]", beta, below=self._limits[f"beta{index + 1}"])
        checked("eps", eps)
        checked("weight_decay", weight_decay)
        super().__init__(params, lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)

    def _kernel_call(self, steps: int) -> tuple[str, tuple[Any, ...]]:
        beta1, beta2, decay = self._hyper["beta1"], self._hyper["beta2"], self._hyper["weight_decay"]
        step_size = self._lr / (1.0 - beta1**steps)
        root_correction = math.sqrt(1.0 - beta2**steps)
        added, shrink = (0.0, 1.0 - self._lr * decay) if self._decoupled else (decay, 1.0)
        numbers = (beta1, beta2, self._hyper["eps"], added, shrink, step_size, root_correction)
        return "adam", (self._state["mean"], self._state["square"], *numbers)


class AdamW(Adam):
    """Adam with weight decay on the parameters themselves (Loshchilov and Hutter, 2019), like torch.optim.AdamW."""

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
    """RMSProp (Hinton's lectures, 2012), optionally with momentum and centered, like torch.optim.RMSprop."""

    _switches = ("centered",)

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
        checked("alpha", alpha)
        for name, value in (("eps", eps), ("weight_decay", weight_decay), ("momentum", momentum)):
            checked(name, value)
        self._buffer_names = self._buffers_for({"momentum": momentum, "centered": centered})
        super().__init__(
            params, lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
        )

    def _buffers_for(self, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return ("square", *["mean"] * bool(hyper["centered"]), *["velocity"] * bool(hyper["momentum"]))

    def _kernel_call(self, steps: int) -> tuple[str, tuple[Any, ...]]:
        hyper, state = self._hyper, self._state
        square = state["square"]
        buffers = (square, *[state[name] if name in self._buffer_names else square for name in ("mean", "velocity")])
        numbers = (self._lr, hyper["alpha"], hyper["eps"], hyper["weight_decay"], hyper["momentum"])
        return "rmsprop", (*buffers, *numbers, int(hyper["centered"]))
