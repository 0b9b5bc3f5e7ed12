"""Recurrent layers and cells, with PyTorch's parameters. T N C: steps, sequences, values of a step."""

from __future__ import annotations

import math
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine import functional as F
from clcomm.engine.device import Device
from clcomm.engine.nn.init import Generator, uniform_values
from clcomm.engine.nn.layers import require_positive
from clcomm.engine.nn.module import Module
from clcomm.engine.nn.utils.rnn import PackedSequence
from clcomm.engine.ops.dropout import check_probability
from clcomm.engine.ops.recurrent import CELLS, Cell, recurrent
from clcomm.engine.parameter import Parameter
from clcomm.engine.tensor import Tensor, float_tensor

_ENDINGS = ("", "_reverse")


class _Weights(Module):
    """The parameters of recurrent cells, all uniform within 1 / sqrt(hidden_size), as PyTorch's."""

    _cell: Cell
    hidden_size: int
    bias: bool

    def _add(self, inputs: int, ending: str, bias: bool, device: Device | str | None, rng: Generator | None) -> None:
        size = self.hidden_size
        shapes = {"weight_ih": (inputs,), "weight_hh": (size,), **({"bias_ih": (), "bias_hh": ()} if bias else {})}
        for name, rest in shapes.items():
            values = uniform_values((self._cell.gates * size, *rest), 1 / math.sqrt(size), rng)
            setattr(self, name + ending, Parameter(values, device))

    def _named(self, kind: str, ending: str) -> list[Tensor]:
        return [getattr(self, f"{kind}_{part}{ending}") for part in ("ih", "hh")]

    def _run(self, x: Tensor, ending: str, states: list[Tensor] | None, **named: Any) -> Tensor:
        biases = self._named("bias", ending) if self.bias else None
        return recurrent(x, self._named("weight", ending), biases, states, self._cell, **named)

    def _states(self, hx: Any, shape: tuple[int, ...]) -> list[Tensor] | None:
        """Return the given states, checked, of this shape."""
        if hx is None:
            return None
        given = list(hx) if isinstance(hx, (tuple, list)) else [hx]
        name = type(self).__name__
        if len(given) != self._cell.states:
            raise ArgumentError(f"{name}: hx: expected {self._cell.states} states, got {len(given)}")
        for each in given:
            if float_tensor(f"{name}: hx", each).shape != shape:
                raise ArgumentError(f"{name}: hx: expected shape {shape}, got {each.shape}")
        return given


class _Layers(_Weights):
    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int, bias: bool, batch_first: bool, dropout: float,
        bidirectional: bool, device: Device | str | None, rng: Generator | None,
    ):  # fmt: skip
        require_positive(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        for name, flag in (("bias", bias), ("batch_first", batch_first), ("bidirectional", bidirectional)):
            if not isinstance(flag, bool):
                raise ArgumentError(f"{type(self).__name__}: {name}: expected True or False, got {flag!r}")
        check_probability(type(self).__name__, dropout)
        self.input_size, self.hidden_size, self.num_layers, self.bias = input_size, hidden_size, num_layers, bias
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        for layer in range(num_layers):
            for ending in self._directions:
                inputs = hidden_size * len(self._directions) if layer else input_size
                self._add(inputs, f"_l{layer}{ending}", bias, device, rng)

    @property
    def _directions(self) -> tuple[str, ...]:
        return _ENDINGS[: 1 + self.bidirectional]

    def flatten_parameters(self) -> None:
        """Do nothing: parameters lie in one block anyway."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Return (results [T, N, directions * H], last states [layers * directions, N, H]), as PyTorch's layer.

        Args:
            input: float32 [T, N, C], [N, T, C] with `batch_first`, [T, C], or a PackedSequence, as results then are.
            hx: states before the first step; of an LSTM a pair (h, c). None: zeros.

        Raises ArgumentError for shapes that do not fit.
        """
        if isinstance(input, PackedSequence):
            y, last = self._sequences(input.padded, hx, input.lengths_on_device())
            return PackedSequence(y, input.lengths), last
        x, name = float_tensor(type(self).__name__, input), type(self).__name__
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ArgumentError(
                f"{name}: expected 2 or 3 dimensions, the last of {self.input_size}, got shape {x.shape}"
            )
        if x.ndim == 2:
            one = hx if hx is None else self._each(hx, lambda state: F.unsqueeze(state, 1))
            y, last = self._sequences(F.unsqueeze(x, 1), one, None)
            return F.squeeze(y, 1), self._each(last, lambda state: F.squeeze(state, 1))
        y, last = self._sequences(F.swap_dimensions(x, 0, 1) if self.batch_first else x, hx, None)
        return F.swap_dimensions(y, 0, 1) if self.batch_first else y, last

    @staticmethod
    def _each(states: Any, change: Any) -> Any:
        return tuple(change(each) for each in states) if isinstance(states, tuple) else change(states)

    def _sequences(self, x: Tensor, hx: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
        steps, rows = x.shape[:2]
        directions = len(self._directions)
        given = self._states(hx, (self.num_layers * directions, rows, self.hidden_size))
        last: list[list[Tensor]] = [[] for _ in range(self._cell.states)]
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            parts = []
            for direction, ending in enumerate(self._directions):
                states = None if given is None else [each[layer * directions + direction] for each in given]
                out = self._run(x, f"_l{layer}{ending}", states, lengths=lengths, reverse=direction == 1)
                parts.append(out[:steps])
                for number, kept in enumerate(last):
                    kept.append(out[steps + number])
            x = F.concat(parts, -1) if directions > 1 else parts[0]
        final = tuple(F.stack(each) for each in last)
        return x, final if len(final) > 1 else final[0]


class RNN(_Layers):
    """h = tanh(W_ih x + b_ih + W_hh h + b_hh) at each step, or ReLU of it: (results, last states), as PyTorch's.

    Parameters are named as PyTorch's: `weight_ih_l0`, `weight_hh_l0`, `bias_ih_l0`, `bias_hh_l0` and so on, and
    `weight_ih_l0_reverse`.

    Args:
        input_size: values of a step.
        hidden_size: of the state.
        num_layers: each of which takes the one before's results.
        nonlinearity: "tanh" or "relu".
        bias: whether there are biases.
        batch_first: sequences are [N, T, C]; states are [layers * directions, N, H] either way.
        dropout: between layers.
        bidirectional: a second layer runs from the end; results are concatenated.
        device: where its parameters are; by default `default_device()`.
        rng: the source of the initial values; by default the one that `manual_seed` seeds.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, *,
        device: Device | str | None = None, rng: Generator | None = None,
    ):  # fmt: skip
        self.nonlinearity, self._cell = nonlinearity, _plain_cell(nonlinearity)
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, rng)


class LSTM(_Layers):
    """Long short-term memory: (results, (last h, last c)), with PyTorch's order of gates; arguments as of RNN.

    Source: Hochreiter and Schmidhuber, "Long short-term memory", 1997.
    """

    _cell = CELLS["lstm"]

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, *, device: Device | str | None = None,
        rng: Generator | None = None,
    ):  # fmt: skip
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, rng)


class GRU(LSTM):
    """Gated recurrent units: (results, last states), with PyTorch's formulas; arguments as of RNN.

    Source: Cho et al., "Learning phrase representations using RNN encoder-decoder for statistical machine
    translation", 2014.
    """

    _cell = CELLS["gru"]


class _OneStep(_Weights):
    def __init__(
        self, input_size: int, hidden_size: int, bias: bool, device: Device | str | None, rng: Generator | None
    ):
        require_positive(input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self._add(input_size, "", bias, device, rng)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the states after one step: h [N, H], of an LSTMCell (h, c).

        Args:
            input: float32 [N, C] or [C].
            hx: the states before, [N, H] or [H]; of an LSTMCell a pair. None: zeros.
        """
        x, name = float_tensor(type(self).__name__, input), type(self).__name__
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            raise ArgumentError(
                f"{name}: expected 1 or 2 dimensions, the last of {self.input_size}, got shape {x.shape}"
            )
        shape = (*x.shape[:-1], self.hidden_size)
        rows = x.numel() // self.input_size
        states = self._states(hx, shape)
        if states is not None:
            states = [F.reshape(each, (rows, self.hidden_size)) for each in states]
        out = self._run(F.reshape(x, (1, rows, self.input_size)), "", states)
        last = tuple(F.reshape(out[1 + number], shape) for number in range(self._cell.states))
        return last if len(last) > 1 else last[0]


class RNNCell(_OneStep):
    """One step of RNN, with the parameters `weight_ih`, `weight_hh`, `bias_ih` and `bias_hh`."""

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh", *,
        device: Device | str | None = None, rng: Generator | None = None,
    ):  # fmt: skip
        self.nonlinearity, self._cell = nonlinearity, _plain_cell(nonlinearity)
        super().__init__(input_size, hidden_size, bias, device, rng)


class LSTMCell(_OneStep):
    """One step of LSTM: (h, c)."""

    _cell = CELLS["lstm"]

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, *, device: Device | str | None = None,
        rng: Generator | None = None,
    ):  # fmt: skip
        super().__init__(input_size, hidden_size, bias, device, rng)


class GRUCell(LSTMCell):
    """One step of GRU."""

    _cell = CELLS["gru"]


def _plain_cell(nonlinearity: str) -> Cell:
    if nonlinearity not in ("tanh", "relu"):
        raise ArgumentError(f"nonlinearity: expected 'tanh' or 'relu', got {nonlinearity!r}")
    return CELLS[nonlinearity]
