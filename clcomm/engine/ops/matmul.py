"""Products of matrices, and `linear`, x W^T + b with its three gradients.

M N K: the result is M x N and the sums run over K.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.autograd import Context, Op
from clcomm.engine.device import Device
from clcomm.engine.ops.activation import Relu
from clcomm.engine.ops.convolution_products import Grid, chosen_block
from clcomm.engine.ops.reduce import sum_over
from clcomm.engine.ops.shape import reshape
from clcomm.engine.program import Kernel
from clcomm.engine.tensor import Shape, Tensor, empty, float_tensor

if TYPE_CHECKING:
    import pyopencl as cl

_DEPTH = 512  # rows of a panel in local memory; not tunable, as it decides where long sums are split
_MOST_DOTS, _LEAST_DEPTH = 10, 64  # columns, and terms of a sum, for which lanes run along K
_BLOCK_ROWS = 384  # of A: _DEPTH terms of each are 768 KiB, beside a panel of 64 KiB
_DOT_ROWS = 16  # rows for each CPU work-item
_FEW_ROWS = range(4, 257)  # at least a short tile; above, packing panels separately costs little
_A_TRANSPOSED, _B_TRANSPOSED = 1, 2  # `transposed` in gemm.cl
_WITH_SUMS, _WITH_INPUTS, _WITH_MASK = 1, 2, 4  # `parts` in gemm.cl
_TURNED_ROWS = 64  # that one CPU work-item transposes, as in gemm.cl
_SUM_COLUMNS = 64, 16  # columns that one CPU work-item sums: lines that follow one another, or one for many cores


class MatMul(Op):
    """C[M, N] = A[M, K] B[K, N]."""

    @classmethod
    def shape_of_none(cls, x: Tensor, b: Tensor) -> Shape | None:
        return (x.shape[0], b.shape[1])

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor) -> Tensor:
        ctx.save(a, b)
        out = empty(a.device, (a.shape[0], b.shape[1]))
        multiply(a, b, out)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dA = dC B^T, dB = A^T dC."""
        a, b = ctx.saved
        da = db = None
        if ctx.needs[0]:
            da = ctx.out(0)
            multiply(grad, b, da, transpose_b=True)
        if ctx.needs[1]:
            db = ctx.out(1)
            multiply(a, grad, db, transpose_a=True)
        return da, db


class LinearOp(Op):
    """y[M, N] = x[M, K] weight[N, K]^T + bias[N], then ReLU with `relu`."""

    @classmethod
    def shape_of_none(cls, x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Shape | None:
        return (x.shape[0], weight.shape[0]) if weight.shape[1] or bias is None else None

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
        """Queue the product, with bias and ReLU fused into it."""
        out = empty(x.device, (x.shape[0], weight.shape[0]))
        multiply(x, weight, out, transpose_b=True, bias=bias, relu=relu)
        activated = out.detach() if relu else None
        ctx.save(x, weight, activated)
        ctx.mask = activated
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dy W, dW = dy^T x, db = the column sums of dy."""
        x, weight, activated = ctx.saved
        if activated is not None and not ctx.is_masked:
            grad = _masked(grad, activated)
        dx, dw, db = (ctx.out(index) if needed else None for index, needed in enumerate(ctx.needs))
        mask = ctx.mask_of(0) if dx is not None else None
        if dw is not None and _is_one_launch(dw, dx, grad):
            _all_gradients(grad, x, weight, mask, dw, db, dx)
            return dx, dw, db
        if db is not None:
            column_sums(grad, db)
        if dw is not None:
            multiply(grad, x, dw, transpose_a=True)
        if dx is not None:
            _multiply_masked(grad, weight, dx, mask)
        return dx, dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Return x[..., in] weight[out, in]^T + bias[out], followed by ReLU when `relu` is set: float32 [..., out].

    Raises ArgumentError unless the shapes fit and all are float32 tensors on one device, and for the weight of a layer
    that tensor-parallel ranks divide: only the layer itself exchanges what its gradients need.
    """
    part = getattr(weight, "part", None)
    if part is not None and part.ranks > 1:
        raise ArgumentError(
            f"linear: expected the layer to be called, such as self.fc(x), as {part.ranks} ranks divide its weight, "
            "got the weight itself"
        )
    return linear_of_part(x, weight, bias, relu=relu)


def linear_of_part(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Return the result of `linear` for a weight that is divided between ranks."""
    rows = checked_rows("linear", x, weight, bias)
    y = LinearOp.apply(rows, weight, bias, relu=relu)
    return y if x.ndim == 2 else reshape(y, (*x.shape[:-1], weight.shape[0]))


def checked_rows(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None, columns: int | None = None, remedy: str = ""
) -> Tensor:
    """Return x [..., in] as rows [*, in], to be multiplied with weight [out, in].

    Args:
        function: is named in errors.
        columns: that x has; None: as many as the weight.
        remedy: ends the error where x has others.

    Raises ArgumentError unless the shapes fit and all are float32 tensors on one device.
    """
    float_tensor(f"{function}: x", x)
    _matrix(function, "weight", weight)
    wanted = weight.shape[1] if columns is None else columns
    if not x.ndim or x.shape[-1] != wanted:
        source = f", as weight {weight.shape} has" if columns is None else ""
        raise ArgumentError(f"{function}: expected x with {wanted} columns{source}, got x {x.shape}{remedy}")
    check_bias(function, bias, weight.shape[0])
    same_device(function, x, weight, bias)
    return x if x.ndim == 2 else reshape(x, (math.prod(x.shape[:-1]), wanted))


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    relu: bool = False,
) -> None:
    """Queue out = op(a) op(b) (+ bias, then ReLU), where op may transpose; not differentiable.

    Raises ArgumentError for shapes that do not fit, as the kernels would read and write elsewhere.
    """
    _require_product(a.shape, b.shape, out.shape, transpose_a, transpose_b)
    if bias is not None and bias.numel() != out.shape[1]:
        raise ArgumentError(f"multiply: expected a bias of {out.shape[1]} elements, got {bias.numel()}")
    device = out.device
    rows, columns = out.shape
    depth = a.shape[0] if transpose_a else a.shape[1]
    if device.is_cpu:
        if transpose_b and not transpose_a and columns <= _MOST_DOTS and depth >= _LEAST_DEPTH:
            _multiply_dots(a, b, out, bias, relu, depth)
            return
        if transpose_a and min(rows, columns, depth) >= device.tuning.transpose_from:
            a, transpose_a = transposed_copy(a), False
        plain = bias is None and not relu and not transpose_b
        if plain and _has_few_rows(out, depth):
            _multiply_few_rows(a, b, out, depth, transpose_a)
            return
    transposed = _A_TRANSPOSED * transpose_a + _B_TRANSPOSED * transpose_b
    if device.is_cpu:
        kernel = _kernel(device, "gemm", bias, relu)
        global_size, local_size = _panel_grid(device.compute_units, *device.tuning.gemm_tile[:2], rows, columns)
    else:
        block = chosen_block(device.tuning.gemm_block, device.compute_units, _limits(device), rows, columns)
        kernel = device.kernel("gemm_gpu", "gemm", **block._asdict(), **_epilogue(bias, relu))
        global_size, local_size = block.grid(rows, columns)
    added = a if bias is None else bias
    device.launch(kernel, global_size, local_size, a, b, out, added, rows, columns, depth, transposed)


def multiply_batch(
    a: Tensor, b: Tensor, out: Tensor, firsts: cl.Buffer, *, transpose_a: bool = False, transpose_b: bool = False
) -> None:
    """Queue a product for each matrix of `out` [..., M, N], with the bits of `multiply`; not differentiable.

    `firsts` is a buffer with the first elements of each product's two factors in `a` and `b`.
    """
    _require_product(a.shape[-2:], b.shape[-2:], out.shape[-2:], transpose_a, transpose_b)
    device = out.device
    rows, columns = out.shape[-2:]
    count, depth = out.numel() // (rows * columns), a.shape[-2] if transpose_a else a.shape[-1]
    options = {"BATCHED": 1, **_epilogue(None, False)}
    if device.is_cpu:
        if transpose_a and min(rows, columns, depth) >= device.tuning.transpose_from:
            a, transpose_a = transposed_copy(a), False
        kernel = device.kernel("gemm", "gemm", DEPTH=_DEPTH, **options)
        units = -(-device.compute_units // count)
        global_size, local_size = _panel_grid(units, *device.tuning.gemm_tile[:2], rows, columns)
    else:
        block = chosen_block(device.tuning.gemm_block, device.compute_units, _limits(device), rows, columns, count)
        kernel = device.kernel("gemm_gpu", "gemm", **block._asdict(), **options)
        global_size, local_size = block.grid(rows, columns)
    transposed = _A_TRANSPOSED * transpose_a + _B_TRANSPOSED * transpose_b
    sizes = (*global_size, count), (*local_size, 1)
    device.launch(kernel, *sizes, a, b, out, a, rows, columns, depth, transposed, firsts)


def _require_product(a: Shape, b: Shape, out: Shape, transpose_a: bool, transpose_b: bool) -> None:
    rows, depth = a[::-1] if transpose_a else a
    terms, columns = b[::-1] if transpose_b else b
    if depth != terms or out != (rows, columns):
        turned = [" transposed" * each for each in (transpose_a, transpose_b)]
        raise ArgumentError(f"multiply: shapes {a}{turned[0]} and {b}{turned[1]} do not give {out}")


def _kernel(device: Device, name: str, bias: Tensor | None = None, relu: bool = False) -> Kernel:
    return device.kernel("gemm", name, DEPTH=_DEPTH, **_epilogue(bias, relu))


def _epilogue(bias: Tensor | None, relu: bool) -> dict[str, Any]:
    return {"HAS_BIAS": int(bias is not None), "HAS_RELU": int(relu)}


def _multiply_dots(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, relu: bool, depth: int) -> None:
    """Queue out = a b^T for a narrow result."""
    device = out.device
    rows, columns = out.shape
    kernel = device.kernel("gemm_dots", "gemm_dots", MOST_DOTS=_MOST_DOTS, **_epilogue(bias, relu))
    grid = (min(device.compute_units, -(-rows // _DOT_ROWS)),)
    device.launch(kernel, grid, (1,), a, b, out, a if bias is None else bias, rows, columns, depth)


def _has_few_rows(out: Tensor, depth: int) -> bool:
    """Return whether `_multiply_few_rows` supports a product of A, or of A^T, with B."""
    device = out.device
    rows, columns = out.shape
    return device.is_cpu and rows in _FEW_ROWS and depth <= _DEPTH and columns % device.tuning.gemm_tile[1] == 0


def _multiply_few_rows(a: Tensor, b: Tensor, out: Tensor, depth: int, transpose_a: bool) -> None:
    device = out.device
    rows, columns = out.shape
    kernel = _kernel(device, "gemm_few_rows_transposed" if transpose_a else "gemm_few_rows")
    device.launch(kernel, *_few_rows_grid(device, columns), a, b, out, rows, columns, depth)


def _few_rows_grid(device: Device, columns: int) -> tuple[tuple[int], tuple[int]]:
    return (min(columns // device.tuning.gemm_tile[1], device.compute_units),), (1,)


def _multiply_masked(a: Tensor, b: Tensor, out: Tensor, mask: Tensor | None) -> None:
    """Queue out = a b; with a mask, 0 where it is not positive or NaN."""
    if mask is None:
        multiply(a, b, out)
    else:
        product = empty(out.device, out.shape)
        multiply(a, b, product)
        _mask(product, mask, out)


def _is_one_launch(dw: Tensor, dx: Tensor | None, grad: Tensor) -> bool:
    """Return whether `_all_gradients` supports a layer of these gradients."""
    rows, outputs = grad.shape
    is_transposed = min(*dw.shape, rows) >= dw.device.tuning.transpose_from  # as `multiply` would do it
    return not is_transposed and _has_few_rows(dw, rows) and (dx is None or _has_few_rows(dx, outputs))


def _all_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mask: Tensor | None, dw: Tensor, db: Tensor | None, dx: Tensor | None
) -> None:
    """Queue all gradients of a layer in one launch."""
    device = dw.device
    rows, outputs = grad.shape
    inputs = dw.shape[1]
    parts = _WITH_SUMS * (db is not None) + _WITH_INPUTS * (dx is not None) + _WITH_MASK * (mask is not None)
    unused = dw  # for gradients that are not needed
    outs = dw, unused if db is None else db, unused if dx is None else dx
    kernel, grid = _kernel(device, "linear_gradients"), _few_rows_grid(device, inputs)
    device.launch(kernel, *grid, grad, x, weight, unused if mask is None else mask, *outs, parts, rows, inputs, outputs)


def transposed_copy(x: Tensor) -> Tensor:
    """Return the matrices of x's last two dimensions transposed."""
    device = x.device
    *batch, rows, columns = x.shape
    out = empty(device, (*batch, columns, rows))
    grid = (-(-rows // _TURNED_ROWS), x.numel() // (rows * columns))
    device.launch(_kernel(device, "transpose"), grid, (1, 1), x, out, rows, columns)
    return out


@lru_cache(maxsize=1024)
def _panel_grid(units: int, tile_rows: int, panel: int, rows: int, columns: int) -> Grid:
    """Return (global size, local size): runs of panels, and of rows, which are split to feed every core.

    Many rows are split further: _BLOCK_ROWS rows of A stay in a core's L2 cache from one panel to the next.
    """
    panels = -(-columns // panel)
    blocks = -(-rows // _BLOCK_ROWS) if panels > 1 and rows > 2 * _BLOCK_ROWS else 1
    runs = panels if blocks == 1 else min(panels, -(-4 * units // blocks))
    splits = max(blocks, min(-(-2 * units // runs), -(-rows // (4 * tile_rows))))
    rows_each = -(-rows // (splits * tile_rows)) * tile_rows
    return (runs, -(-rows // rows_each)), (1, 1)


def _limits(device: Device) -> tuple[int, int]:
    """Return the largest work-group, and the bytes of local memory."""
    return device.cl_device.max_work_group_size, device.local_bytes


def column_sums(matrix: Tensor, sums: Tensor) -> None:
    """Queue the sums of a matrix's columns."""
    device = sums.device
    if sums.numel() != matrix.shape[1]:
        raise ArgumentError(f"column_sums: expected {matrix.shape[1]} sums of {matrix.shape}, got {sums.numel()}")
    if not device.is_cpu:
        sum_over(matrix, (0,), out=sums)
        return
    rows, columns = matrix.shape
    each = _SUM_COLUMNS[columns < 2 * _SUM_COLUMNS[0] * device.compute_units]
    device.launch(_kernel(device, "column_sums"), (-(-columns // each),), (1,), matrix, sums, rows, columns, each)


def _masked(grad: Tensor, activated: Tensor) -> Tensor:
    """Return grad where ReLU's result is positive or NaN, else 0."""
    out = empty(grad.device, grad.shape)
    _mask(grad, activated, out)
    return out


def _mask(grad: Tensor, activated: Tensor, out: Tensor) -> None:
    device, size = grad.device, grad.numel()
    if device.is_cpu:  # in gemm.cl, which is built anyway
        device.launch(_kernel(device, "relu_gradient"), *device.grid(size), grad, activated, out, size)
    else:
        Relu.slope(0).launch(out, grad, activated)


def _matrix(function: str, name: str, value: Tensor) -> None:
    float_tensor(f"{function}: {name}", value)
    if len(value.shape) != 2:
        raise ArgumentError(f"{function}: {name}: expected a matrix of 2 dimensions, got shape {value.shape}")


def check_bias(function: str, bias: Tensor | None, size: int) -> None:
    """Raise ArgumentError unless `bias` is None or float32 of shape [size]."""
    if bias is not None:
        float_tensor(f"{function}: bias", bias)
        if bias.shape != (size,):
            raise ArgumentError(f"{function}: bias: expected shape ({size},), as weight has outputs, got {bias.shape}")


def same_device(function: str, *tensors: Tensor | None) -> None:
    """Raise ArgumentError unless all tensors given are on one device."""
    devices: list[Device] = [tensor.device for tensor in tensors if tensor is not None]
    for device in devices[1:]:
        if device is not devices[0]:
            raise ArgumentError(f"{function}: expected tensors on one device, got {devices[0]!r} and {device!r}")
