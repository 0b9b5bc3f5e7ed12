"""Programs build without the driver's header of all functions, on drivers that allow it."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from clcomm.engine import program

COMPUTE = "__kernel void compute(__global float *out, __global const float *x) { out[0] = %s; }"


def value_of(device, monkeypatch, expression, x):
    """Return the result of a kernel with this expression for x."""
    monkeypatch.setattr(program, "source_of", lambda file: COMPUTE % expression)
    kernel = program.typed_kernel(program.build(device.context, "test", []), "compute")
    out, given = (cl.Buffer(device.context, cl.mem_flags.READ_WRITE, 4) for _ in range(2))
    cl.enqueue_copy(device.queue, given, np.float32(x))
    kernel(device.queue, (1,), (1,), out, given)
    result = np.empty(1, np.float32)
    cl.enqueue_copy(device.queue, result, out)
    return result[0]


EXPRESSIONS = {
    "exp(x[0])": np.exp, "log(x[0])": np.log, "sqrt(x[0])": np.sqrt, "sin(x[0])": np.sin,
    "fabs(-x[0])": np.abs,
    "fmax(x[0], 1.0f)": lambda x: max(x, 1), "fmin((float8)(x[0]), (float8)(1.0f)).s7": lambda x: min(x, 1),
    "min((int)x[0], 1) + max((long)x[0], 5L)": lambda x: min(int(x), 1) + max(int(x), 5),
    "isnan(x[0])": np.isnan, "get_global_size(0) + get_local_id(0)": lambda x: 1,
}  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("x", [0.75, 2.5])
def test_declared_functions_are_the_languages_own(device, monkeypatch, expression, x):
    assert value_of(device, monkeypatch, expression, x) == pytest.approx(float(EXPRESSIONS[expression](x)), rel=1e-6)


def test_a_function_that_is_not_declared_is_found_with_the_header(device, monkeypatch, capfd):
    if not program._can_skip_header(device.cl_device):
        pytest.skip("this driver's header stays")
    with pytest.warns(UserWarning, match=r"^kernels/test.cl: declare what it uses in kernels/builtins.cl"):
        assert value_of(device, monkeypatch, "cbrt(x[0])", 27.0) == 3.0


def test_both_ways_give_the_same_bits(device, monkeypatch):
    whole = value_of(device, monkeypatch, "cos(exp(x[0])) + log(x[0])", 0.3)
    monkeypatch.setattr(program, "_can_skip_header", lambda cl_device: False)
    assert value_of(device, monkeypatch, "cos(exp(x[0])) + log(x[0])", 0.3) == whole
