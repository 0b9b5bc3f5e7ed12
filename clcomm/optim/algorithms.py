"""The optimizers: their hyper-parameters, and each one's kernel with its arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.optim.optimizer import Optimizer, Params


class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant of it, and weight decay, like torch.optim.SGD."""

    _switches = ("nesterov", "maximize")
    _later = ("dampening", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ):
        own = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, lr=lr, **own, dampening=dampening, maximize=maximize)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        if hyper["nesterov"] and not hyper["momentum"]:
            raise ArgumentError("nesterov: expected a momentum above 0 with it, got momentum 0")
        if hyper["nesterov"] and hyper["dampening"]:
            raise ArgumentError(f"dampening: expected 0 with nesterov, got {hyper['dampening']!r}")
        return ("velocity",) if hyper["momentum"] else ()

    @classmethod
    def require_change(cls, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        if after["dampening"] and after["momentum"] and not before["momentum"]:
            raise ArgumentError("momentum: expected one above 0 from the beginning with dampening, got it set later")

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        if not hyper["momentum"]:
            return "sgd", (hyper["lr"], hyper["weight_decay"])
        damped = steps > 1 and hyper["dampening"]
        share = 1.0 - damped if damped else 1.0  # the same object each time: no argument of the kernel is set again
        numbers = (hyper["lr"], hyper["weight_decay"], hyper["momentum"], share, int(hyper["nesterov"]))
        return "sgd_momentum", (self._state["velocity"], *numbers)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015) with weight decay added to the gradient, like torch.optim.Adam.

    With `amsgrad` the largest mean of squares so far divides a step (Reddi et al., 2018).
    """

    _limits: ClassVar = {"beta1": 1.0, "beta2": 1.0}
    _switches = ("amsgrad", "maximize")
    _later = ("amsgrad", "maximize")
    _decoupled = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ):
        own = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, lr=lr, **own, amsgrad=amsgrad, maximize=maximize)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return ("mean", "square", *["largest"] * bool(hyper["amsgrad"]))

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        lr, beta1, beta2, decay = hyper["lr"], hyper["beta1"], hyper["beta2"], hyper["weight_decay"]
        step_size = lr / (1.0 - beta1**steps)
        root_correction = math.sqrt(1.0 - beta2**steps)
        added, shrink = (0.0, 1.0 - lr * decay) if self._decoupled else (decay, 1.0)
        numbers = (beta1, beta2, hyper["eps"], added, shrink, step_size, root_correction)
        amsgrad, mean, square = int(hyper["amsgrad"]), self._state["mean"], self._state["square"]
        return "adam", (mean, square, self._state["largest"] if amsgrad else square, amsgrad, *numbers)


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
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


class RAdam(Optimizer):
    """Adam with a rectified variance of the first steps (Liu et al., 2020), like torch.optim.RAdam."""

    _limits: ClassVar = Adam._limits
    _switches = _later = ("decoupled_weight_decay", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
    ):
        own = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        decoupled = {"decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, lr=lr, **own, **decoupled, maximize=maximize)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return "mean", "square"

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        beta1, beta2, decay = hyper["beta1"], hyper["beta2"], hyper["weight_decay"]
        step_size, eps, divisor = hyper["lr"] / (1.0 - beta1**steps), 1.0, math.inf  # divides by 0 + 1
        longest, power = 2.0 / (1.0 - beta2) - 1.0, beta2**steps
        length = longest - 2.0 * steps * power / (1.0 - power)
        if length > 5.0:
            known = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
            step_size, eps, divisor = step_size * math.sqrt(known * (1.0 - power)), hyper["eps"], 1.0
        added, shrink = (0.0, 1.0 - hyper["lr"] * decay) if hyper["decoupled_weight_decay"] else (decay, 1.0)
        mean, square = self._state["mean"], self._state["square"]
        return "adam", (mean, square, square, 0, beta1, beta2, eps, added, shrink, step_size, divisor)


class RMSProp(Optimizer):
    """RMSProp (Hinton's lectures, 2012), optionally with momentum and centered, like torch.optim.RMSprop."""

    _switches = ("centered", "maximize")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
    ):
        own = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
        super().__init__(params, lr=lr, **own, maximize=maximize)

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

    def __init__(
        self,
        params: Params,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, lr=lr, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize)

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
        *,
        maximize: bool = False,
    ):
        own = {"lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        initial = {"initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, lr=lr, **own, **initial, maximize=maximize)

    @classmethod
    def _buffers_for(cls, hyper: Mapping[str, float]) -> tuple[str, ...]:
        return ("square",)

    def _kernel_call(self, hyper: Mapping[str, float], steps: int) -> tuple[str, tuple[object, ...]]:
        lr = hyper["lr"] / (1.0 + (steps - 1) * hyper["lr_decay"])
        numbers = (lr, hyper["eps"], hyper["weight_decay"], hyper["initial_accumulator_value"])
        return "adagrad", (self._state["square"], *numbers)
