"""The cases: products, convolutions and whole steps, each with its floating-point operations.

M N K: a product's result is M x N and its sums run over K. B: images of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

KINDS = ("gemm", "conv", "block", "step", "memory")
#: The models' layers: inputs and outputs of the products, (channels, side, outputs) of the 3x3 convolutions.
_LINEAR = {"convnet": ((1568, 128), (128, 10)), "mlp": ((784, 128), (128, 128), (128, 10))}
_CONV = {"conv1": (1, 28, 16), "conv2": (16, 14, 32)}
#: Sides of the square products, and those that fill a GPU.
CUBES, GPU_CUBES = (512, 1024), (1024, 2048, 4096)
_TAPS = 9
#: Operations whose time is that of their memory, with the times that each reads or writes an element.
_PASSES = {"GELU": 2, "softmax": 2, "layer norm": 2, "SGD with momentum": 5, "Adam": 7}
#: Their rows and columns: 24 MiB. Two of these are beyond most CPUs' caches; the C library maps larger ones anew each
#: time, which would be measured instead.
ROWS, COLUMNS = 6144, 1024


@dataclass(frozen=True)
class Case:
    """One computation, which every system implements in its own way.

    flops: floating-point operations of one run, for the kind "memory" bytes. sizes: its sizes, for the runner. first:
    whether the input's gradient is left out. passes: "forward" or "forward+backward". Convolutions are padded by half
    their kernel.
    """

    kind: str
    name: str
    flops: float
    sizes: dict[str, int] = field(default_factory=dict)
    variant: str = ""
    passes: str = ""
    first: bool = False


def make_cases(kinds: Sequence[str], batches: Sequence[int], cubes: Sequence[int] = CUBES) -> list[Case]:
    """Return the cases of the given kinds at the given batch sizes, without duplicates."""
    makers: dict[str, Callable[[Sequence[int]], Iterator[Case]]] = {
        "gemm": partial(_products, cubes=cubes),
        "conv": _convolutions,
        "block": _blocks,
        "step": _steps,
        "memory": lambda batches: memory_cases(),
    }
    cases = {case.name: case for kind in kinds for case in makers[kind](batches)}
    return list(cases.values())


def _products(batches: Sequence[int], cubes: Sequence[int]) -> Iterator[Case]:
    for side in cubes:
        for variant in ("NN", "NT", "TN"):
            yield _product(variant, side, side, side)
    for batch in batches:
        for layers in _LINEAR.values():
            for inputs, outputs in layers:
                yield _product("NT", batch, outputs, inputs)  # y = x W^T
                yield _product("TN", outputs, inputs, batch)  # dW = dy^T x
                if inputs != 784:  # the gradient of the images is not needed
                    yield _product("NN", batch, inputs, outputs)  # dx = dy W


def _product(variant: str, m: int, n: int, k: int) -> Case:
    return Case("gemm", f"GEMM {variant} {m} x {n} x {k}", 2.0 * m * n * k, {"m": m, "n": n, "k": k}, variant)


def _conv_flops(batch: int, layer: str) -> float:
    channels, side, outputs = _CONV[layer]
    return 2.0 * batch * outputs * side * side * channels * _TAPS


def _conv_case(kind: str, batch: int, layer: str, passes: str, name: str) -> Case:
    channels, side, outputs = _CONV[layer]
    first = layer == "conv1"
    times = 1 if passes == "forward" else 2 if first else 3  # each gradient is as much work as the forward pass
    sizes = {"batch": batch, "channels": channels, "side": side, "outputs": outputs, "kernel": 3, "stride": 1}
    return Case(kind, name, times * _conv_flops(batch, layer), sizes, layer, passes, first)


def _convolutions(batches: Sequence[int]) -> Iterator[Case]:
    for batch in batches:
        for layer in _CONV:
            for passes in ("forward", "forward+backward"):
                yield _conv_case("conv", batch, layer, passes, f"{layer} {passes}, batch {batch}")


def _blocks(batches: Sequence[int]) -> Iterator[Case]:
    for batch in batches:
        for layer in _CONV:
            name = f"{layer} + ReLU + pool forward+backward, batch {batch}"
            yield _conv_case("block", batch, layer, "forward+backward", name)


def _steps(batches: Sequence[int]) -> Iterator[Case]:
    for batch in batches:
        for model, layers in _LINEAR.items():
            products = [2.0 * batch * inputs * outputs * (2 if inputs == 784 else 3) for inputs, outputs in layers]
            work = sum(products)
            if model == "convnet":
                work += 2 * _conv_flops(batch, "conv1") + 3 * _conv_flops(batch, "conv2")
            yield Case("step", f"{model} step, batch {batch}", work, {"batch": batch}, model)


def memory_cases(names: Sequence[str] = tuple(_PASSES)) -> Iterator[Case]:
    """Yield operations by the bytes that they have to read and write."""
    for name in names:
        sizes = {"rows": ROWS, "columns": COLUMNS}
        yield Case("memory", f"{name}, {ROWS} x {COLUMNS}", 4.0 * ROWS * COLUMNS * _PASSES[name], sizes, name)


def copy_of() -> Case:
    """Return a copy of as many bytes, the limit of the kind "memory"."""
    return Case("copy", f"copy of {ROWS} x {COLUMNS}", 8.0 * ROWS * COLUMNS)
