"""Dropout; its mask is computed from counters in forward and again in backward."""

from __future__ import annotations

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.ops.elementwise import mul
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.tensor import Tensor, empty, float_tensor

#: Elements whose random words are computed together, as in dropout.cl.
_GROUP = 32


class DropoutOp(Op):
    """x / (1 - p) where an element is kept, else 0; `p` is below 1."""

    keeps_columns = True

    @staticmethod
    def forward(ctx: Context, x: Tensor, *, p: float, stream: RandomStream | None) -> Tensor:
        ctx.p, ticket = p, (RandomStream.of(x.device) if stream is None else stream).ticket()
        ctx.save(ticket)
        return masked(x, ticket, p, empty(x.device, x.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ticket,) = ctx.saved
        return (masked(grad, ticket, ctx.p, ctx.out(0)),)


def masked(x: Tensor, ticket: Tensor, p: float, out: Tensor) -> Tensor:
    """Queue out = x / (1 - p) where the draw of a ticket keeps an element, else 0; return out."""
    device, size = x.device, x.numel()
    threshold = min(round(p * 2**32), 2**32 - 1)
    kernel = device.kernel("dropout", "dropout")
    device.launch(kernel, *device.grid(size), out, x, ticket, threshold, 1.0 / (1.0 - p), size, -(-size // _GROUP))
    return out


def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, stream: RandomStream | None = None) -> Tensor:
    """Return x with each element set to 0 with probability p, and divided by 1 - p else; x itself if not `training`.

    x: float32 of any shape, which the result has too.

    The mask follows from `stream`, by default the device's RandomStream: the seed, the rank, the number of draws
    before, and the element's index; it does not depend on the device. With p of 1 all elements are 0; NaN and infinity
    become NaN where they are dropped, as in PyTorch. Source: Srivastava et al., "Dropout: a simple way to prevent
    neural networks from overfitting", 2014. Raises ArgumentError unless p is from 0 to 1.
    """
    float_tensor("dropout", x)
    check_probability("dropout", p)
    if not training or p == 0:
        return x
    return mul(x, 0.0) if p == 1 else DropoutOp.apply(x, p=float(p), stream=stream)


def check_probability(name: str, p: float) -> None:
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ArgumentError(f"{name}: expected p from 0 to 1, got {p!r}")
