"""The optimizers: their hyper-parameters, and each one's kernel with its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from clcomm.errors import ArgumentError
from clcomm.optim.optimizer import Optimizer, Params


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant of it, and weight decay, like torch.optim.SGD."""

    _switches = ("nesterov",)

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        if hyper["nesterov"] and not hyper["momentum"]:
            raise ArgumentError("nesterov: expected a momentum above 0 with it, got momentum 0")
        return ("velocity",) if hyper["momentum"] else ()

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        if not hyper["momentum"]:
            return "sgd", (hyper["lr"], hyper["weight_decay"])
        numbers = (hyper["lr"], hyper["weight_decay"], hyper["momentum"], int(hyper["nesterov"]))
        return "sgd_momentum", (self._state["velocity"], *numbers)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay added to the gradient, like torch.optim.Adam."""

    _limits: ClassVar = {"beta1": 1.0, "beta2": 1.0}
    _decoupled = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return "mean", "square"

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        lr, beta1, beta2, decay = hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["weight_decay"]
        step_size = lr / (1.0 - beta1**steps)
        root_correction = math.sqrt(1.0 - beta2**steps)
        added, shrink = (0.0, 1.0 - lr * decay) if self._decoupled else (decay, 1.0)
        numbers = (beta1, beta2, hyper["eps"], added, shrink, step_size, root_correction)
        return "adam", (self._state["mean"], self._state["square"], *numbers)


class AdamW(Adam):
    """Adam with weight decay on the parameters themselves (Loshchilov and Hutter, 2019), like torch.optim.AdamW."""

    _decoupled = True

    def __init__(
        self,
        params: Params,
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
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ):
        super().__init__(
            params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered
        )

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return ("square", *["mean"] * bool(hyper["centered"]), *["velocity"] * bool(hyper["momentum"]))

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        state, names = self._state, self._buffers_for(hyper)
        square = state["square"]
        buffers = (square, *[state[name] if name in names else square for name in ("mean", "velocity")])
        numbers = (hyper["lr"], hyper["alpha"], hyper["eps"], hyper["weight_decay"], hyper["momentum"])
        return "rmsprop", (*buffers, *numbers, int(hyper["centered"]))


#: PyTorch's spelling.
RMSprop = RMSProp


class Adadelta(Optimizer):
    """Adadelta (Zeiler, 2012), like torch.optim.Adadelta."""

    def __init__(self, params: Params, lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0):
        super().__init__(params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        if hyper["rho"] > 1:
            raise ArgumentError(f"rho: expected a number from 0 to 1, got {hyper['rho']!r}")
        return "square", "moved"

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        numbers = (hyper["lr"], hyper["rho"], hyper["eps"], hyper["weight_decay"])
        return "adadelta", (self._state["square"], self._state["moved"], *numbers)


class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011), like torch.optim.Adagrad."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ):
        initial = {"initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, **initial, eps=eps)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return ("square",)

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        lr = hyper["lr"] / (1.0 + (steps - 1) * hyper["lr_decay"])
        numbers = (lr, hyper["eps"], hyper["weight_decay"], hyper["initial_accumulator_value"])
        return "adagrad", (self._state["square"], *numbers)
