"""A model's layers with shapes and arithmetic, and each parameter's bucket and turn.

Arithmetic is that of matrix products and convolutions, a multiplication and an addition counting 2; what activations,
pooling and sums add is left out. It is given for one sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clcomm.text_table import TextTable


@dataclass(frozen=True)
class Layer:
    """A step of the forward pass: the shape of a sample's result, and its arithmetic, which may be unknown (None)."""

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    parameters: tuple[str, ...]
    forward_flops: int | None
    training_flops: int | None  # forward and backward


@dataclass(frozen=True)
class ParameterPlace:
    """A trained parameter, the buckets that hold it (several where it is split), and when its gradient is there.

    ready: its position among all parameters in the order in which backward completes them, from 1.
    """

    name: str
    shape: tuple[int, ...]
    size: int
    buckets: tuple[int, ...]
    ready: int


@dataclass(frozen=True)
class Summary:
    """All layers in the order of the forward pass, and all trained parameters in the model's order."""

    layers: tuple[Layer, ...]
    parameters: tuple[ParameterPlace, ...]

    @property
    def parameter_count(self) -> int:
        """Number of trained values."""
        return sum(parameter.size for parameter in self.parameters)

    def flops(self, *, training: bool) -> int | None:
        """Return a sample's arithmetic, forward or forward and backward; None where it is unknown."""
        values = [layer.training_flops if training else layer.forward_flops for layer in self.layers]
        return None if None in values else sum(value for value in values if value is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON; docs/reports.md names the fields."""
        return {"layers": [asdict(each) for each in self.layers], "parameters": [asdict(p) for p in self.parameters]}

    def table(self) -> TextTable:
        """Return it as a table, which `print` and Rich's consoles print in the width that they have."""
        from clcomm.summary.table import summary_table  # here, because it is for those who print

        return summary_table(self)
