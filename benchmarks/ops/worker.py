"""A worker of one library, `torch` or `clcomm`, on one thread: forward and backward of a case, again and again."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.ops import chains
from benchmarks.ops.cases import CASES, REPLAYED, SIZES, shape_of
from benchmarks.workers import serve


def prepare(library: str) -> Any:
    """Return the library as `torch`, limited to one core."""
    if library == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        return torch
    from clcomm.engine import Device, set_default_device

    set_default_device(Device.select(cores=1))
    return importlib.import_module("clcomm.as_torch")


def make(torch: Any, name: str, size: str, way: str) -> Callable[[int], None]:
    """Return a function that runs forward and backward so many times, and ends when they are done."""
    torch.manual_seed(0)
    kind, make_case = CASES[name]
    shape = shape_of(kind, SIZES[size])
    function = make_case(torch, shape)
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.rand(*shape))
    model.layer = getattr(function, "layer", None)
    ours = torch.__name__ != "torch"
    if ours:
        model.flat_space()  # a Replay wants gradients in one
    x, leaves = model.x, list(model.parameters())
    result = function(x)
    given = torch.rand(*result.shape) if result.shape else torch.ones(1)
    above = (lambda given: given) if result.shape else (lambda given: None)

    def once(given: Any) -> None:
        function(x).backward(above(given))

    run: Callable[[Any], object] = once
    if ours and way == REPLAYED:
        from clcomm.engine import Replay

        run = Replay(once)
    return _repeated(lambda: run(given), leaves, _finish_of(ours))


def make_chain(torch: Any, name: str, size: str, way: str) -> Callable[[int], None]:
    """Return a function that runs forward and backward of a chain so many times, with all gradients."""
    torch.manual_seed(0)
    function, others = chains.CHAINS[name]
    shape = chains.SIZES[size] // chains.COLUMNS, chains.COLUMNS
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.rand(*shape))
    for number, kind in enumerate(others):
        values = torch.rand(chains.COLUMNS) if kind == "row" else torch.rand(*shape)
        setattr(model, f"other{number}", torch.nn.Parameter(values))
    leaves = list(model.parameters())

    def chain(*tensors: Any) -> Any:
        return function(torch, *tensors)

    ours, given = torch.__name__ != "torch", torch.rand(*shape)
    if ours:
        from clcomm.engine import Replay, fused

        model.flat_space()
        whole: Any = fused(chain) if way == chains.FUSED else chain
        run: Callable[[Any], object] = Replay(lambda given: whole(*leaves).backward(given))
    else:
        whole = torch.compile(chain) if way == chains.COMPILED else chain

        def run(given: Any) -> None:
            whole(*leaves).backward(given)

    return _repeated(lambda: run(given), leaves, _finish_of(ours))


def _finish_of(ours: bool) -> Callable[[], object]:
    if not ours:
        return lambda: None
    from clcomm.engine import default_device

    return default_device().finish


def _repeated(once: Callable[[], object], leaves: list[Any], finish: Callable[[], Any]) -> Callable[[int], None]:
    def several(repeats: int) -> None:
        for _ in range(repeats):
            once()
            for leaf in leaves:
                leaf.grad = None
        finish()

    return several


def main() -> None:
    torch, current = prepare(sys.argv[2]), dict[Any, Any]()

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        case, way = (request["name"], request["size"]), request["way"]
        if current.get("case") != case:  # the previous case releases its memory first
            current.clear()
            current["case"] = case
        run = current[way] = current.get(way) or (make if case[0] in CASES else make_chain)(torch, *case, way)
        wall, cpu = time.perf_counter(), time.process_time()
        run(request["repeats"])
        return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}

    serve(sys.argv[1], 0, handle)


if __name__ == "__main__":
    main()
