"""The cases in PyTorch, on one thread, or on the GPU that PyTorch has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.kernels.cases import Case
from benchmarks.kernels.worker import Runner, work
from training.engines import torch_engine, torch_gpt


def make(case: Case, synchronize: Callable[[], None]) -> Runner | None:
    """Return a runner of a case."""
    makers: dict[str, Any] = {
        "gemm": _product, "conv": _convolution, "block": _convolution, "step": _step, "attention": _attention,
        "layer norm": _layer_norm, "gpt": _gpt, "memory": _memory,
    }  # fmt: skip
    if case.kind not in makers:
        return None
    once = makers[case.kind](case)

    def run(repeats: int) -> None:
        for _ in range(repeats):
            once()
        synchronize()

    return run


def _product(case: Case) -> Any:
    m, n, k = (case.sizes[name] for name in "mnk")
    turn_a, turn_b = (letter == "T" for letter in case.variant)
    a = torch.randn(k, m).t() if turn_a else torch.randn(m, k)
    b = torch.randn(n, k).t() if turn_b else torch.randn(k, n)
    out = torch.empty(m, n)
    return lambda: torch.matmul(a, b, out=out)


def _convolution(case: Case) -> Any:
    sizes, side, kernel = case.sizes, case.sizes["side"], case.sizes["kernel"]
    needs = case.passes != "forward"
    x = torch.randn(sizes["batch"], sizes["channels"], side, side)
    x.requires_grad_(needs and not case.first)
    weight = torch.randn(sizes["outputs"], sizes["channels"], kernel, kernel, requires_grad=needs)
    bias = torch.randn(sizes["outputs"], requires_grad=needs)

    def forward() -> torch.Tensor:
        result = F.conv2d(x, weight, bias, stride=sizes["stride"], padding=kernel // 2)
        return F.max_pool2d(torch.relu(result), 2) if case.kind == "block" else result

    if not needs:
        return torch.no_grad()(forward)
    gradient = torch.randn(forward().shape)

    def forward_and_backward() -> None:
        forward().backward(gradient)
        x.grad = weight.grad = bias.grad = None

    return forward_and_backward


def _step(case: Case) -> Any:
    batch = case.sizes["batch"]
    model = torch_engine.make_module(case.variant, (1, 28, 28), 10, seed=0).to(torch.get_default_device())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10

    def once() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return once


def _attention(case: Case) -> Any:
    batch, heads, tokens, length = (case.sizes[name] for name in ("batch", "heads", "tokens", "length"))
    qkv = torch.randn(batch, tokens, 3 * heads * length, requires_grad=True)
    gradient = torch.randn(batch, tokens, heads * length)

    def forward_and_backward() -> None:
        parts = [part.view(batch, tokens, heads, length).transpose(1, 2) for part in qkv.chunk(3, -1)]
        result = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=case.variant == "causal")
        result.transpose(1, 2).reshape(gradient.shape).backward(gradient)
        qkv.grad = None

    return forward_and_backward


def _layer_norm(case: Case) -> Any:
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((rows, columns), (columns,), (columns,)))
    gradient = torch.randn(rows, columns)

    def forward_and_backward() -> None:
        F.layer_norm(x, (columns,), weight, bias).backward(gradient)
        x.grad = weight.grad = bias.grad = None

    return forward_and_backward


def _gpt(case: Case) -> Any:
    sizes: dict[str, Any] = dict(case.sizes)
    batch = sizes.pop("batch")
    model = torch_gpt.TorchGPT(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = (torch.arange(batch * sizes["context"]) * 7 % sizes["vocabulary"]).reshape(batch, sizes["context"])

    def once() -> None:
        optimizer.zero_grad()
        torch_gpt.next_token_loss(model(tokens), tokens).backward()
        optimizer.step()

    return once


def _memory(case: Case) -> Any:
    rows, columns = case.sizes["rows"], case.sizes["columns"]
    if case.variant in ("SGD with momentum", "Adam"):
        weight = torch.nn.Parameter(torch.randn(rows, columns))
        weight.grad = torch.randn(rows, columns)
        if case.variant == "Adam":
            return torch.optim.Adam([weight], 1e-6, fused=True).step
        return torch.optim.SGD([weight], 1e-6, momentum=0.9, fused=True).step
    x, scale, bias = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    ways = {
        "GELU": lambda: F.gelu(x),
        "softmax": lambda: F.softmax(x, -1),
        "layer norm": lambda: F.layer_norm(x, (columns,), scale, bias),
    }
    return torch.no_grad()(ways[case.variant])


def main() -> None:
    if not any(sys.argv[2:]):
        torch.set_num_threads(1)
        work(lambda case: make(case, lambda: None))
    elif torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        torch.set_default_device(found)
        torch.backends.cudnn.allow_tf32 = False  # as its products are by default: all of a float32
        work(lambda case: make(case, torch.accelerator.synchronize), str(found))
    else:
        work(lambda case: None)


if __name__ == "__main__":
    main()
