"""Styles of a plan, one class for each way to divide a module between tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn.attention import MultiheadAttention
from clcomm.engine.nn.layers import Embedding, Linear
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.tensor_parallel.linear import ColumnParallelLinear, HeadParallelAttention, RowParallelLinear
from clcomm.parallel.tensor_parallel.sequence import SequenceForward
from clcomm.parallel.tensor_parallel.shards import Cut, Shards
from clcomm.parallel.tensor_parallel.vocabulary import VocabularyParallelEmbedding


class Style:
    """A division of a module between the ranks, applied by `parallelize_module`."""

    #: Whether the module may be within one that computes with a part of the sequence.
    fits_sequence = False

    def check(self, module: Module, ranks: int) -> None:
        """Raise ArgumentError for a module that this many ranks cannot divide."""

    def cuts(self, module: Module) -> dict[str, Cut]:
        """Return the cuts of the module's own parameters by name; others stay whole."""
        return {}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        """Return the module's replacement, or the module itself, changed."""
        return module


@dataclass(frozen=True)
class ColumnParallel(Style):
    """A Linear's outputs are divided: x [..., in] -> [..., out / ranks].

    Args:
        sections: number of adjacent sections of outputs, each divided by itself: 3 for
            queries, keys and values as `F.packed_attention` takes them.
        gather_output: whether the result is gathered: [..., out].
        sequence_axis: the dimension along which x is divided between the ranks, and gathered first, such as -2 of
            [..., tokens, in]; None: x is whole.
    """

    sections: int = 1
    gather_output: bool = False
    sequence_axis: int | None = None

    @property
    def fits_sequence(self) -> bool:  # type: ignore[override]
        return self.sequence_axis is not None

    def check(self, module: Module, ranks: int) -> None:
        linear = _require(module, Linear)
        if not isinstance(self.sections, int) or self.sections < 1:
            raise ArgumentError(f"expected sections from 1 up, got {self.sections!r}")
        if self.gather_output and self.sections > 1:
            raise ArgumentError(f"expected gather_output=False with several sections, got {self.sections} sections")
        sections = f" in {self.sections} sections" if self.sections > 1 else ""
        _require_divisible(f"outputs{sections}", linear.weight.shape[0], ranks, self.sections)

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(0, self.sections), "bias": Cut(0, self.sections)}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        weight, bias = (_divided(self, module, name, shards) for name in ("weight", "bias"))
        assert weight is not None
        return ColumnParallelLinear(weight, bias, ranks, self.sequence_axis, self.gather_output)


@dataclass(frozen=True)
class RowParallel(Style):
    """A Linear's inputs are divided: x [..., in / ranks] -> [..., out], the sum over the ranks.

    Args:
        split_input: whether x is whole: [..., in], of which each rank takes its part.
        sequence_axis: the dimension along which the result is divided between the ranks, such as -2 of
            [..., tokens, out]; None: it is whole on each.
    """

    split_input: bool = False
    sequence_axis: int | None = None

    @property
    def fits_sequence(self) -> bool:  # type: ignore[override]
        return self.sequence_axis is not None

    def check(self, module: Module, ranks: int) -> None:
        _require_divisible("inputs", _require(module, Linear).weight.shape[1], ranks)

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(1)}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        linear, weight = _require(module, Linear), _divided(self, module, "weight", shards)
        assert weight is not None
        return RowParallelLinear(weight, linear.bias, ranks, self.sequence_axis, self.split_input)


@dataclass(frozen=True)
class VocabularyParallel(Style):
    """An Embedding's rows are divided; the result is the same on all ranks."""

    def check(self, module: Module, ranks: int) -> None:
        _require_divisible("embeddings", _require(module, Embedding).weight.shape[0], ranks)

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(0)}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        weight = _divided(self, module, "weight", shards)
        assert weight is not None
        return VocabularyParallelEmbedding(weight, _require(module, Embedding).padding_idx, ranks)


@dataclass(frozen=True, init=False)
class HeadsParallel(Style):
    """An attention's heads are divided.

    A MultiheadAttention is divided as a whole. In another module numbers of heads are divided: its layers have entries
    of their own, ColumnParallel for queries, keys and values, RowParallel for the projection after them.

    Args:
        attributes: the module's attributes that are numbers of heads, such as "heads"; none for a MultiheadAttention.
        sequence_axis: of a MultiheadAttention: the dimension along which its inputs and its result are divided between
            the ranks; None: they are whole.
    """

    attributes: tuple[str, ...]
    sequence_axis: int | None

    def __init__(self, *attributes: str, sequence_axis: int | None = None):
        object.__setattr__(self, "attributes", attributes)
        object.__setattr__(self, "sequence_axis", sequence_axis)

    @property
    def fits_sequence(self) -> bool:  # type: ignore[override]
        return bool(self.attributes) or self.sequence_axis is not None

    def check(self, module: Module, ranks: int) -> None:
        if isinstance(module, MultiheadAttention):
            _require(module, MultiheadAttention)
            if self.attributes:
                given = ", ".join(self.attributes)
                raise ArgumentError(f"expected no attributes for a MultiheadAttention, got {given}")
            _require_divisible("heads", module.num_heads, ranks)
            if module.dropout or not module.batch_first:
                raise ArgumentError(
                    "expected a MultiheadAttention with batch_first=True and dropout=0.0, got "
                    f"{module.batch_first} and {module.dropout}"
                )
            return
        for name in self.attributes:
            heads = getattr(module, name, None)
            if not isinstance(heads, int) or isinstance(heads, bool):
                owner = type(module).__name__
                raise ArgumentError(f"expected {name!r} to be a number of heads in {owner}, got {heads!r}")
            _require_divisible(name, heads, ranks)

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"in_proj_weight": Cut(0, 3), "in_proj_bias": Cut(0, 3)} if _is_whole(module) else {}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        if not isinstance(module, MultiheadAttention):
            for name in self.attributes:
                setattr(module, name, getattr(module, name) // ranks.size)
            return module
        out = module.out_proj
        projection = RowParallelLinear(shards.of(out.weight, Cut(1)), out.bias, ranks, self.sequence_axis, False)
        weight, bias = (_divided(self, module, name, shards) for name in ("in_proj_weight", "in_proj_bias"))
        assert weight is not None
        return HeadParallelAttention(
            module.num_heads // ranks.size, weight, bias, projection, ranks, self.sequence_axis
        )


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A module computes with this rank's part of the sequence, such as a LayerNorm, a Dropout, or a Sequential of them.

    Parameters in it that are not divided are the same on all ranks, and their gradients are summed over them. Each
    rank's dropout draws numbers of its own. Within it ColumnParallel and RowParallel entries have a `sequence_axis`.

    Args:
        split_input: whether the input is whole, of which each rank takes its part.
        gather_output: whether the result is gathered.
        axis: the dimension that is divided, -2 of [..., tokens, width].
    """

    split_input: bool = False
    gather_output: bool = False
    axis: int = -2

    fits_sequence = True

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        module.forward = SequenceForward(module, ranks, self.axis, self.split_input, self.gather_output)  # type: ignore[method-assign]
        return module


def _is_whole(module: Module) -> bool:
    return isinstance(module, MultiheadAttention)


def _require(module: Module, kind: Any) -> Any:
    """Return the module if it computes as one of this kind; else raise ArgumentError."""
    is_plain = isinstance(module, kind) and type(module).forward is kind.forward and "forward" not in module.__dict__
    if not is_plain:
        changed = " with a forward() of its own" if isinstance(module, kind) else ""
        raise ArgumentError(f"expected a {kind.__name__}, got {type(module).__name__}{changed}")
    return module


def _require_divisible(what: str, count: int, ranks: int, sections: int = 1) -> None:
    if count % (sections * ranks):
        raise ArgumentError(f"expected {what} that {ranks} ranks divide, got {count}")


def _divided(style: Style, module: Module, name: str, shards: Shards) -> Parameter | None:
    whole = getattr(module, name)
    return None if whole is None else shards.of(whole, style.cuts(module)[name])
