"""Scaled dot-product attention that never stores the matrix of scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops.batched_matmul import matmul
from clcomm.engine.ops.comparisons import equal_to, logical_not, masked_fill
from clcomm.engine.ops.dropout import check_probability, dropout
from clcomm.engine.ops.elementwise import add, mul
from clcomm.engine.ops.matmul import same_device
from clcomm.engine.ops.softmax import softmax
from clcomm.engine.ops.types import expand
from clcomm.engine.program import Kernel
from clcomm.engine.tensor import BOOL, FLOAT32, INT32, Shape, Tensor, empty, float_tensor

_QUERIES = 32  # of a CPU's block, as in attention_tiles.cl
_LEAST_RUN = 4  # such blocks for each CPU work-item
_MOST_LENGTH = 512  # of a key or a value: rows of them fit into any GPU's local memory, and into a CPU's stack


class Rows(NamedTuple):
    """Layout of a tensor's rows: the first element, and the strides of batches, heads and rows."""

    first: int
    batch: int
    head: int
    row: int


class Sizes(NamedTuple):
    """Numbers of batches, heads, queries and keys, and the lengths of a key and of a value."""

    batches: int
    heads: int
    queries: int
    keys: int
    head: int
    value: int


class Problem(NamedTuple):
    """One attention problem: sizes, layouts of q, k, v and the result, the scale, and the mask."""

    sizes: Sizes
    places: tuple[Rows, Rows, Rows, Rows]
    scale: float
    causal: bool
    mask: Tensor | None  # [1 or batches, 1 or heads, 1 or queries, keys]

    def arguments(self, device: Device, unused: Tensor) -> tuple[object, ...]:
        """Return the kernels' arguments from the mask on."""
        sizes, mask = self.sizes, self.mask
        steps = (0, 0, 0)
        if mask is not None:
            batches, heads, queries, keys = mask.shape
            steps = (heads * queries * keys * (batches > 1), queries * keys * (heads > 1), keys * (queries > 1))
        places = device.keep(("attention", self.places), lambda: np.array(self.places, np.int32).reshape(-1))
        return (
            unused if mask is None else mask, places, self.scale, sizes.batches * sizes.heads, sizes.heads,
            sizes.queries, sizes.keys, int(self.causal), int(mask is not None), *steps,
        )  # fmt: skip

    def kernel(self, device: Device, name: str, file: str = "attention") -> Kernel:
        """Return a kernel for these lengths: of this file on CPUs, else of attention_gpu.cl."""
        file = file if device.is_cpu else "attention_gpu"
        return device.kernel(file, name, HEAD=self.sizes.head, VALUE=self.sizes.value)

    def grid(self, device: Device, rows: int) -> tuple[tuple[int], tuple[int]]:
        """Return (global, local) size of a kernel with an item for each row, or on CPUs for some blocks of queries."""
        groups = self.sizes.batches * self.sizes.heads
        if device.is_cpu:
            units = groups * -(-rows // _QUERIES)
            return (max(1, min(units // _LEAST_RUN, 4 * device.compute_units)),), (1,)
        return (groups * -(-rows // device.row_group) * device.row_group,), (device.row_group,)


def _attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Queue the attention, and return the logarithms of the queries' sums."""
    device, sizes = out.device, problem.sizes
    logs = empty(device, (sizes.batches * sizes.heads, sizes.queries))
    grid = problem.grid(device, sizes.queries)
    device.launch(problem.kernel(device, "attend"), *grid, out, logs, q, k, v, *problem.arguments(device, q))
    return logs


def _attend_grad(problem: Problem, saved: tuple[Tensor, ...], grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Queue all gradients; `saved` are q, k, v, the result and the logarithms."""
    q, k, v, out, logs = saved
    device, sizes = grad.device, problem.sizes
    rest = (q, k, v, *problem.arguments(device, q))
    if device.is_cpu:
        grid = (max(1, min(sizes.batches * sizes.heads, 4 * device.compute_units)),), (1,)
        kernel = problem.kernel(device, "attend_grad", "attention_gradient")
        device.launch(kernel, *grid, dq, dk, dv, grad, out, logs, *rest)
        return
    products = empty(device, logs.shape)
    kernel, grid = problem.kernel(device, "attend_grad_queries"), problem.grid(device, sizes.queries)
    device.launch(kernel, *grid, dq, products, grad, out, logs, *rest)
    kernel, grid = problem.kernel(device, "attend_grad_keys"), problem.grid(device, sizes.keys)
    device.launch(kernel, *grid, dk, dv, products, grad, logs, *rest)


class Attention(Op):
    """softmax(scale q k^T + mask) v"""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, *, problem: Problem) -> Tensor:
        out = empty(q.device, (*q.shape[:-1], v.shape[-1]))
        ctx.problem = problem
        ctx.save(q, k, v, out, _attend(problem, q, k, v, out))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        outs = [ctx.out(i) if ctx.needs[i] else empty(grad.device, ctx.inputs[i].shape) for i in range(3)]
        _attend_grad(ctx.problem, ctx.saved, grad, *outs)
        return tuple([out if needed else None for out, needed in zip(outs, ctx.needs, strict=True)])


class PackedAttention(Op):
    """Attention over one tensor whose rows hold the queries, keys and values of all heads."""

    @staticmethod
    def forward(ctx: Context, qkv: Tensor, *, problem: Problem) -> Tensor:
        out = empty(qkv.device, (*qkv.shape[:-1], qkv.shape[-1] // 3))
        ctx.problem = problem
        ctx.save(qkv, qkv, qkv, out, _attend(problem, qkv, qkv, qkv, out))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dqkv = ctx.out(0)
        _attend_grad(ctx.problem, ctx.saved, grad, dqkv, dqkv, dqkv)
        return (dqkv,)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | np.ndarray | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale query key^T + mask) value as PyTorch's function: [..., queries, value length].

    The matrix of scores is never in memory: Dao et al., "FlashAttention", 2022. Sums are in an order that depends on
    the shapes alone.

    Args:
        query: float32 [..., queries, length].
        key: float32 [..., keys, length].
        value: float32 [..., keys, value length].
        attn_mask: added to the scores; of booleans or int32: nonzero where a query sees a key; its shape
            broadcasts to [..., queries, keys]. It gets no gradient. A query that sees no key gives zeros.
        dropout_p: the probability with which a weight is set to 0; above 0 the matrix of scores is in memory.
        is_causal: whether query i sees only the keys up to i; not with a mask.
        scale: of the scores; None: 1 / sqrt(length).

    Raises ArgumentError for shapes that do not fit, lengths above 512, a mask that needs a gradient, a mask beside
    `is_causal`, and a `dropout_p` that is no probability.
    """
    name = "scaled_dot_product_attention"
    check_probability(name, dropout_p)
    if dropout_p:
        _check_shapes(name, query, key, value)
        return matmul(dropout(attention_weights(query, key, attn_mask, is_causal, scale), dropout_p), value)
    before = _check_shapes(name, query, key, value)
    sizes = Sizes(
        math.prod(before[:-1]), before[-1] if before else 1, query.shape[-2], key.shape[-2], key.shape[-1],
        value.shape[-1],
    )  # fmt: skip
    problem = _problem(name, query, before, sizes, _apart(sizes), attn_mask, is_causal, scale)
    return Attention.apply(query, key, value, problem=problem)


def attention_weights(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | np.ndarray | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale query key^T + mask) [..., queries, keys]; arguments of `scaled_dot_product_attention`."""
    name, (queries, keys) = "attention_weights", (query.shape[-2], key.shape[-2])
    if attn_mask is not None and is_causal:
        raise ArgumentError(f"{name}: expected no attn_mask with is_causal; use one of the two")
    scores = mul(matmul(query, key, transpose_b=True), 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = np.tri(queries, keys, dtype=bool)
    if attn_mask is None:
        return softmax(scores, -1)
    own = attn_mask if isinstance(attn_mask, Tensor) else _uploaded(name, attn_mask, query.device)
    if own.dtype == FLOAT32:
        return softmax(add(scores, own), -1)
    return softmax(masked_fill(scores, equal_to(own, 0) if own.dtype == INT32 else logical_not(own), -math.inf), -1)


def packed_attention(
    qkv: Tensor,
    heads: int,
    attn_mask: Tensor | np.ndarray | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of `heads` heads over a sequence with itself: [..., tokens, width].

    Nothing is copied before or after it.

    Args:
        qkv: float32 [..., tokens, 3 * width], the queries of all heads beside their keys and values, as one
            Linear gives them.
        heads: their number, which divides the width.
        attn_mask: as in `scaled_dot_product_attention`; its shape broadcasts to [..., heads, tokens, tokens].
        is_causal: as there.
        scale: as there, of width / heads.

    Raises ArgumentError for shapes that do not fit, and for masks as there.
    """
    name = "packed_attention"
    if float_tensor(f"{name}: qkv", qkv).ndim < 2:
        raise ArgumentError(f"{name}: qkv: expected at least 2 dimensions, got shape {qkv.shape}")
    width = qkv.shape[-1] // 3
    if not isinstance(heads, int) or heads < 1 or qkv.shape[-1] % (3 * heads):
        raise ArgumentError(
            f"{name}: expected 3 * heads to divide the last dimension of {qkv.shape}, got heads {heads!r}"
        )
    tokens, length = qkv.shape[-2], width // heads
    sizes = Sizes(math.prod(qkv.shape[:-2]), heads, tokens, tokens, length, length)
    q, k, v = (Rows(part * width, tokens * 3 * width, length, 3 * width) for part in range(3))
    places = (q, k, v, Rows(0, tokens * width, length, width))
    before = (*qkv.shape[:-2], heads)
    problem = _problem(name, qkv, before, sizes, places, attn_mask, is_causal, scale)
    return PackedAttention.apply(qkv, problem=problem)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: int,
    attn_mask: Tensor | np.ndarray | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of `heads` heads that lie beside each other in each row: [..., queries, value width].

    Args:
        query: float32 [..., queries, width].
        key: float32 [..., keys, width].
        value: float32 [..., keys, value width].
        heads: their number, which divides both widths.
        attn_mask: as in `scaled_dot_product_attention`; its shape broadcasts to [..., heads, queries, keys].
        is_causal: as there.
        scale: as there, of width / heads.

    Raises ArgumentError for shapes that do not fit, and for masks as there.
    """
    name = "multi_head_attention"
    before = _check_shapes(name, query, key, value)
    widths = query.shape[-1], value.shape[-1]
    if not isinstance(heads, int) or heads < 1 or widths[0] % heads or widths[1] % heads:
        raise ArgumentError(f"{name}: expected heads that divide the widths {widths[0]} and {widths[1]}, got {heads!r}")
    queries, keys, length, value_length = query.shape[-2], key.shape[-2], widths[0] // heads, widths[1] // heads
    sizes = Sizes(math.prod(before), heads, queries, keys, length, value_length)

    def rows(count: int, length: int) -> Rows:
        return Rows(0, count * heads * length, length, heads * length)

    places = rows(queries, length), rows(keys, length), rows(keys, value_length), rows(queries, value_length)
    problem = _problem(name, query, (*before, heads), sizes, places, attn_mask, is_causal, scale)
    return Attention.apply(query, key, value, problem=problem)


def _check_shapes(name: str, query: Tensor, key: Tensor, value: Tensor) -> Shape:
    """Return the dimensions before the last two; raises ArgumentError unless the shapes fit."""
    for argument, x in (("query", query), ("key", key), ("value", value)):
        if float_tensor(f"{name}: {argument}", x).ndim < 2:
            raise ArgumentError(f"{name}: {argument}: expected at least 2 dimensions, got shape {x.shape}")
    same_device(name, query, key, value)
    before = query.shape[:-2]
    if key.shape[:-2] != before or value.shape[:-2] != before or key.shape[-1] != query.shape[-1]:
        raise ArgumentError(
            f"{name}: expected key [..., keys, {query.shape[-1]}] and value [..., keys, any], with the dimensions "
            f"{before} first as in query {query.shape}, got {key.shape} and {value.shape}"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ArgumentError(f"{name}: expected as many values as keys, {key.shape[-2]}, got {value.shape[-2]}")
    return before


def _apart(sizes: Sizes) -> tuple[Rows, Rows, Rows, Rows]:
    """Return the layouts of separate tensors whose heads follow one another."""

    def rows(count: int, length: int) -> Rows:
        return Rows(0, sizes.heads * count * length, count * length, length)

    q, k = rows(sizes.queries, sizes.head), rows(sizes.keys, sizes.head)
    return q, k, rows(sizes.keys, sizes.value), rows(sizes.queries, sizes.value)


def _problem(
    name: str,
    query: Tensor,
    before: Shape,
    sizes: Sizes,
    places: tuple[Rows, Rows, Rows, Rows],
    mask: Tensor | np.ndarray | None,
    is_causal: bool,
    scale: float | None,
) -> Problem:
    """Return the problem for queries with leading dimensions `before`, heads included."""
    if max(sizes.head, sizes.value) > _MOST_LENGTH:
        raise ArgumentError(
            f"{name}: expected keys and values of at most {_MOST_LENGTH} numbers, got {max(sizes.head, sizes.value)}"
        )
    if mask is not None and is_causal:
        raise ArgumentError(f"{name}: expected no attn_mask with is_causal; use one of the two")
    factor = 1.0 / math.sqrt(sizes.head) if scale is None else float(scale)
    problem = Problem(sizes, places, factor, bool(is_causal), None)
    if mask is None:
        return problem
    own = mask if isinstance(mask, Tensor) else _uploaded(name, mask, query.device)
    same_device(name, query, own)
    if own.requires_grad:
        raise ArgumentError(f"{name}: attn_mask: expected one that needs no gradient; detach() it")
    if own.dtype in (INT32, BOOL):
        flags, own = own, empty(query.device, own.shape)
        device, size = query.device, own.numel()
        device.launch(device.kernel("elementwise", "mask_of_flags"), *device.grid(size), own, flags, size)
    return problem._replace(mask=_in_four(name, own, (*(before or (1,)), sizes.queries, sizes.keys)))


def _uploaded(name: str, mask: object, device: Device) -> Tensor:
    array = np.asarray(mask)
    if array.dtype.kind not in "fb":
        raise ArgumentError(f"{name}: attn_mask: expected booleans or floats, got {array.dtype}")
    return Tensor(np.where(array, 0.0, -np.inf) if array.dtype.kind == "b" else array, device)


def _in_four(name: str, mask: Tensor, whole: Shape) -> Tensor:
    """Return a mask that broadcasts to `whole` as [1 or batches, 1 or heads, 1 or queries, keys]."""
    shape = (1,) * (len(whole) - mask.ndim) + mask.shape
    if len(shape) > len(whole) or any(n not in (1, size) for n, size in zip(shape, whole, strict=True)):
        raise ArgumentError(f"{name}: attn_mask: expected a shape that broadcasts to {whole}, got {mask.shape}")
    *outer, heads, queries, _ = shape
    if math.prod(outer) > 1:
        outer = list(whole[:-3])
    target = (*outer, heads, queries, whole[-1])
    if target != shape:
        mask = expand(mask.alias(shape), target)
    return mask.alias((math.prod(outer), heads, queries, whole[-1]))
