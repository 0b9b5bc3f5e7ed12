"""Styles of a plan, one class for each way to divide a module between tensor-parallel ranks."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from clcomm.base.errors import ArgumentError
from clcomm.engine.nn.attention import MultiheadAttention
from clcomm.engine.nn.layers import Dropout, Embedding, Linear
from clcomm.engine.nn.module import Module
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.tensor_parallel.linear import (
    ColumnParallelLinear,
    DividedLayer,
    HeadParallelAttention,
    RowParallelLinear,
)
from clcomm.parallel.tensor_parallel.sequence import SequenceForward
from clcomm.parallel.tensor_parallel.shards import Cut, Shards
from clcomm.parallel.tensor_parallel.vocabulary import VocabularyParallelEmbedding


class Style:
    """A division of a module between the ranks, applied by `parallelize_module`."""

    #: The modules that it divides, what the ranks divide of their weight, and the module that takes their place.
    kind: ClassVar[Any] = None
    counted: ClassVar[str]
    divided: ClassVar[type[DividedLayer]]
    sequence_axis: int | None = None

    @property
    def fits_sequence(self) -> bool:
        """Whether the module may be within one that computes with a part of the sequence."""
        return self.sequence_axis is not None

    def check(self, module: Module, ranks: int) -> None:
        """Raise ArgumentError for a module that this many ranks cannot divide."""
        if self.kind is not None:
            _require(module, self.kind)
            axis, sections = self.cuts(module)["weight"]
            words = f" in {sections} sections" if sections > 1 else ""
            _require_divisible(self.counted + words, module._parameters["weight"].shape[axis], ranks, sections)

    def cuts(self, module: Module) -> dict[str, Cut]:
        """Return the cuts of the module's own parameters by name; others stay whole."""
        return {}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        """Return the module's replacement, or the module itself, changed."""
        return module if self.kind is None else self._divided(module, shards, ranks)

    def _divided(self, module: Module, shards: Shards, ranks: Exchange) -> Any:
        """Return the module in its divided form, with this rank's parts of its parameters."""
        layer: Any = self.divided.__new__(self.divided)
        vars(layer).update(vars(copy(module)))
        for name, cut in self.cuts(module).items():
            if name in module._parameters:
                setattr(layer, name, shards.of(module._parameters[name], cut))
        layer.ranks, layer.division = ranks, self
        return layer


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

    kind, counted, divided = Linear, "outputs", ColumnParallelLinear

    sections: int = 1
    gather_output: bool = False
    sequence_axis: int | None = None

    def check(self, module: Module, ranks: int) -> None:
        if not isinstance(self.sections, int) or self.sections < 1:
            raise ArgumentError(f"expected sections from 1 up, got {self.sections!r}")
        if self.gather_output and self.sections > 1:
            raise ArgumentError(f"expected gather_output=False with several sections, got {self.sections} sections")
        super().check(module, ranks)

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(0, self.sections), "bias": Cut(0, self.sections)}


@dataclass(frozen=True)
class RowParallel(Style):
    """A Linear's inputs are divided: x [..., in / ranks] -> [..., out], the sum over the ranks.

    Args:
        split_input: whether x is whole: [..., in], of which each rank takes its part.
        sequence_axis: the dimension along which the result is divided between the ranks, such as -2 of
            [..., tokens, out]; None: it is whole on each.
    """

    kind, counted, divided = Linear, "inputs", RowParallelLinear

    split_input: bool = False
    sequence_axis: int | None = None

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(1)}


@dataclass(frozen=True)
class VocabularyParallel(Style):
    """An Embedding's rows are divided; the result is the same on all ranks."""

    kind, counted, divided = Embedding, "embeddings", VocabularyParallelEmbedding

    def cuts(self, module: Module) -> dict[str, Cut]:
        return {"weight": Cut(0)}


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

    divided = HeadParallelAttention

    attributes: tuple[str, ...]
    sequence_axis: int | None

    def __init__(self, *attributes: str, sequence_axis: int | None = None):
        object.__setattr__(self, "attributes", attributes)
        object.__setattr__(self, "sequence_axis", sequence_axis)

    @property
    def fits_sequence(self) -> bool:
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
        if not isinstance(module, MultiheadAttention):
            return {}
        return {"in_proj_weight": Cut(0, 3), "in_proj_bias": Cut(0, 3)}

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        divided, attributes = module, self.attributes
        if isinstance(module, MultiheadAttention):
            divided, attributes = self._divided(module, shards, ranks), ("num_heads",)
            out = RowParallel(sequence_axis=self.sequence_axis)
            divided.out_proj = out.applied(module.out_proj, shards, ranks)
        for name in attributes:
            setattr(divided, name, getattr(module, name) // ranks.size)
        return divided


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

    @property
    def fits_sequence(self) -> bool:
        return True

    def applied(self, module: Module, shards: Shards, ranks: Exchange) -> Module:
        module.forward = SequenceForward(module, ranks, self.axis, self.split_input, self.gather_output)  # type: ignore[method-assign]
        for _, inner in module.named_modules():
            if isinstance(inner, Dropout) and ranks.size > 1:
                inner.stream = ranks.own_stream
        return module


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
