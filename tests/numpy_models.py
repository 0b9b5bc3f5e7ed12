"""Models of plain arrays for tests, with gradients that any rank can compute for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from clcomm.sync.adapters.adapter import OnComplete
from clcomm.sync.adapters.numpy import NumpyAdapter


class Parameter:
    """An array and its gradient."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.grad: np.ndarray | None = None


class Model:
    """Named arrays, and what is not trained in `state`."""

    def __init__(self, parameters: Iterable[tuple[str, np.ndarray]], state: dict[str, np.ndarray] | None = None):
        self.parameters = {name: Parameter(data) for name, data in parameters}
        self.state = state or {}

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return list(self.parameters.items())

    def extra_state(self) -> dict[str, np.ndarray]:
        return {name: array.copy() for name, array in self.state.items()}

    def load_extra_state(self, state: dict[str, np.ndarray]) -> None:
        self.state = {name: array.copy() for name, array in state.items()}

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]

    def bits(self) -> list[bytes]:
        """Return each parameter's bytes."""
        return [p.data.tobytes() for p in self.parameters.values()]

    def gradient_bits(self) -> list[bytes | None]:
        """Return each gradient's bytes, None where it has none."""
        return [None if p.grad is None else p.grad.tobytes() for p in self.parameters.values()]


class TellingModel(Model):
    """A model whose backward notifies watchers of each complete gradient, so that overlap can start its bucket."""

    def __init__(self, parameters: Iterable[tuple[str, np.ndarray]]):
        super().__init__(parameters)
        self.watchers: list[OnComplete] = []

    def as_adapter(self) -> NumpyAdapter:
        return _NotifyingAdapter(self)

    def backward(self, gradients: dict[str, np.ndarray | None]) -> None:
        """Take copies of the gradients in the order given; None: this backward leaves the parameter out."""
        for parameter in self.parameters.values():
            parameter.grad = None
        for name, gradient in gradients.items():
            if gradient is not None:
                self[name].grad = gradient.copy()
                for action in [complete(name) for complete in self.watchers]:
                    if action is not None:
                        action()


class _NotifyingAdapter(NumpyAdapter):
    def watch_gradients(self, complete: OnComplete, begins: Callable[[], None] | None = None) -> Callable[[], None]:
        self._model.watchers.append(complete)
        return lambda: self._model.watchers.remove(complete)


def values(seed: int, rank: int, shape: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Return random numbers of very different sizes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng([seed, rank])
    drawn = rng.standard_normal(tuple(shape)) * 10.0 ** rng.integers(-3, 3, tuple(shape))
    return np.asarray(drawn).astype(dtype)


def small_model(rank: int = 0) -> Model:
    """Return a model of three parameters whose values differ by rank."""
    shapes = {"w1": (5, 7), "b1": (7,), "w2": (7, 300)}
    return Model((name, values(n, rank, shape)) for n, (name, shape) in enumerate(shapes.items()))


def set_gradients(model: Model, rank: int, seed: int = 100, missing: Sequence[str] = ()) -> None:
    """Give each parameter the gradient that `gradient_of` knows, or none."""
    for n, (name, parameter) in enumerate(model.parameters.items()):
        gradient = values(seed + n, rank, parameter.data.shape, str(parameter.data.dtype))
        parameter.grad = None if name in missing else gradient
