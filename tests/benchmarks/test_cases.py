"""The work that the kernels' cases stand for."""

from __future__ import annotations

import pytest

from benchmarks.kernels import roofline
from benchmarks.kernels.cases import KINDS, make_cases


def by_name(kind: str, batch: int) -> dict[str, float]:
    return {case.name: case.flops for case in make_cases([kind], [batch])}


def test_a_convolutions_work_is_two_for_each_weight_and_output():
    work = by_name("conv", 2)
    forward = 2 * 2 * 32 * 14 * 14 * 16 * 9
    assert work["conv2 forward, batch 2"] == forward
    assert work["conv2 forward+backward, batch 2"] == 3 * forward
    first = 2 * 2 * 16 * 28 * 28 * 1 * 9
    assert work["conv1 forward+backward, batch 2"] == 2 * first  # nobody needs the images' gradient


def test_a_steps_work_is_that_of_its_layers():
    work = by_name("step", 1)
    layers = 2 * 16 * 28 * 28 * 9 * 2 + 2 * 32 * 14 * 14 * 16 * 9 * 3 + 2 * (1568 * 128 + 128 * 10) * 3
    assert work["convnet step, batch 1"] == layers == pytest.approx(7.1e6, rel=0.01)
    assert work["mlp step, batch 1"] == 2 * (784 * 128 * 2 + (128 * 128 + 128 * 10) * 3)


def test_products_are_those_of_the_models_and_none_comes_twice():
    cases = make_cases(KINDS, [16, 64])
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    assert {"GEMM NT 64 x 128 x 1568", "GEMM TN 128 x 1568 x 64", "GEMM NN 64 x 1568 x 128"} <= set(names)
    assert "GEMM NN 64 x 784 x 128" not in names


def test_bytes_are_those_of_operands_and_results():
    found = {case.name: roofline.bytes_of(case) for case in make_cases(["gemm", "conv", "step"], [16])}
    assert found["GEMM NT 16 x 128 x 1568"] == 4 * (16 * 1568 + 1568 * 128 + 16 * 128)
    x, w, y = 16 * 16 * 14 * 14, 16 * 32 * 9, 16 * 32 * 14 * 14
    assert found["conv2 forward, batch 16"] == 4 * (x + w + y)
    assert found["conv2 forward+backward, batch 16"] == 4 * (3 * x + 3 * w + 2 * y)
    assert found["convnet step, batch 16"] == 0


def test_a_roofline_shows_each_case_below_the_roof():
    cases = make_cases(["gemm", "conv"], [16])
    points = roofline.points(cases, {case.name: 50.0 for case in cases})
    drawn = roofline.draw(points, 170.0, 25.0)
    assert drawn.count("<circle") == len(points) == len(cases)
    assert "GEMM NN 512 x 512 x 512: 50.0 GFLOP/s, 29% of the roof" in drawn
    assert "peak 170 GFLOP/s, a copy 25 GB/s" in drawn


def test_what_memory_limits_is_counted_in_bytes():
    work = by_name("memory", 1)
    assert work["GELU, 6144 x 1024"] == 2 * 4 * 6144 * 1024
    assert work["Adam, 6144 x 1024"] == 7 * 4 * 6144 * 1024
