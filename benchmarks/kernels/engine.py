"""The cases in this project's engine, on one thread: one core's share of the CPU, or on the device that is named.

Products and steps are replayed, as in the Trainer: a product counts with the cost of a launch within a step, without
the Python that chose the launch when the step was recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kernels import peak
from benchmarks.kernels.cases import Case
from benchmarks.kernels.worker import Runner, work
from clcomm import optim
from clcomm.engine import CrossEntropyLoss, Device, Linear, Replay, Tensor, no_grad
from clcomm.engine import functional as F
from clcomm.engine.ops.matmul import multiply
from models import GPT, MLP, ConvNet
from models.gpt import next_token_loss

_TOGETHER = (64, 8)  # products per replay, whose own Python takes some 3 us


def make(device: Device, case: Case) -> Runner | None:
    """Return a runner of a case."""
    if case.kind == "peak":
        return peak.make_runner(device)
    makers: dict[str, Any] = {
        "gemm": _product, "conv": _convolution, "block": _convolution, "step": _step, "attention": _attention,
        "layer norm": _layer_norm, "gpt": _gpt, "memory": _memory, "copy": _copy,
    }  # fmt: skip
    several = makers[case.kind](device, case)

    def run(repeats: int) -> None:
        several(repeats)
        device.finish()

    return run


def _random(device: Device, *shape: int, needs: bool = False) -> Tensor:
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Tensor(values, device, requires_grad=needs)


def _product(device: Device, case: Case) -> Any:
    m, n, k = (case.sizes[name] for name in "mnk")
    turn_a, turn_b = (letter == "T" for letter in case.variant)
    a = _random(device, *((k, m) if turn_a else (m, k)))
    b = _random(device, *((n, k) if turn_b else (k, n)))
    out = _random(device, m, n)

    def products(batch: Tensor, count: int) -> None:
        for left in [batch, *[a] * (count - 1)][:count]:  # as in a step, where only the first one reads uploaded data
            multiply(left, b, out, transpose_a=turn_a, transpose_b=turn_b)

    replay = Replay(products)

    def several(repeats: int) -> None:
        for together in _TOGETHER:
            for _ in range(repeats // together):
                replay(a, together)
            repeats %= together
        products(a, repeats)

    return several


def _convolution(device: Device, case: Case) -> Any:
    sizes, side, kernel = case.sizes, case.sizes["side"], case.sizes["kernel"]
    needs = case.passes != "forward"
    x = _random(device, sizes["batch"], sizes["channels"], side, side, needs=needs and not case.first)
    weight = _random(device, sizes["outputs"], sizes["channels"], kernel, kernel, needs=needs)
    bias = _random(device, sizes["outputs"], needs=needs)

    def forward() -> Tensor:
        if case.kind == "block":
            return F.conv_relu_pool(x, weight, bias, padding=kernel // 2)
        return F.conv2d(x, weight, bias, stride=sizes["stride"], padding=kernel // 2)

    if not needs:
        return _each(no_grad()(forward))
    gradient = _random(device, *forward().shape)

    def forward_and_backward() -> None:
        forward().backward(gradient)
        x.grad = weight.grad = bias.grad = None

    return _each(forward_and_backward)


def _step(device: Device, case: Case) -> Any:
    batch = case.sizes["batch"]
    model = ConvNet(device=device, seed=0) if case.variant == "convnet" else MLP(device=device, seed=0)
    optimizer, loss_fn = optim.SGD(model, lr=0.01), CrossEntropyLoss()
    x = _random(device, batch, 1, 28, 28)
    y = Tensor((np.arange(batch) % 10).astype(np.int32), device)

    def forward_and_backward(x: Tensor, y: Tensor) -> None:
        loss_fn(model(x), y).backward()

    replay = Replay(forward_and_backward)

    def once() -> None:
        replay(x, y)
        optimizer.step()
        optimizer.zero_grad()

    return _each(once)


def _attention(device: Device, case: Case) -> Any:
    batch, heads, tokens, length = (case.sizes[name] for name in ("batch", "heads", "tokens", "length"))
    qkv = _random(device, batch, tokens, 3 * heads * length, needs=True)
    gradient = _random(device, batch, tokens, heads * length)

    def forward_and_backward() -> None:
        F.packed_attention(qkv, heads, is_causal=case.variant == "causal").backward(gradient)
        qkv.grad = None

    return _each(forward_and_backward)


def _layer_norm(device: Device, case: Case) -> Any:
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    x, weight, bias = (_random(device, *shape, needs=True) for shape in ((rows, columns), (columns,), (columns,)))
    gradient = _random(device, rows, columns)

    def forward_and_backward() -> None:
        F.layer_norm(x, columns, weight, bias).backward(gradient)
        x.grad = weight.grad = bias.grad = None

    return _each(forward_and_backward)


def _gpt(device: Device, case: Case) -> Any:
    sizes: dict[str, Any] = dict(case.sizes)
    batch = sizes.pop("batch")
    model = GPT(**sizes, device=device, seed=0)
    optimizer = optim.AdamW(model, lr=1e-3)
    shape, count = (batch, sizes["context"]), batch * sizes["context"]
    tokens = Tensor((np.arange(count) * 7 % sizes["vocabulary"]).astype(np.int32).reshape(shape), device)
    replay = Replay(lambda x, y: next_token_loss(model(x), y).backward())

    def once() -> None:
        replay(tokens, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return _each(once)


def _memory(device: Device, case: Case) -> Any:
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    if case.variant in ("SGD with momentum", "Adam"):
        layer = Linear(columns, rows, bias=False, device=device)
        layer.weight.grad = _random(device, rows, columns)
        sgd = case.variant != "Adam"
        return _each((optim.SGD(layer, 1e-6, momentum=0.9) if sgd else optim.Adam(layer, 1e-6)).step)
    x, weight, bias = _random(device, rows, columns), _random(device, columns), _random(device, columns)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "GELU": F.gelu,
        "softmax": F.softmax,
        "layer norm": lambda x: F.layer_norm(x, columns, weight, bias),
    }
    replay = Replay(no_grad()(ways[case.variant]))
    return _each(lambda: replay(x))


def _copy(device: Device, case: Case) -> Any:
    source = np.ones(int(case.flops) // 8, np.float32)
    target = np.zeros_like(source)
    return _each(lambda: np.copyto(target, source))


def _each(once: Callable[[], object]) -> Runner:
    """Return a function that repeats a call."""

    def several(repeats: int) -> None:
        for _ in range(repeats):
            once()

    return several


def main() -> None:
    spec, as_gpu = sys.argv[2:] or ("", "")
    device = Device.select(spec) if spec else Device.select(cores=1)
    if as_gpu and device.is_cpu:
        device = Device(device.cl_device, kind="gpu")
    name = f"{device.name}, {device.driver}" + (" as a GPU" if as_gpu else "")
    work(lambda case: make(device, case), name)


if __name__ == "__main__":
    main()
