"""NumPy models as replicas: what is pulled, what is pushed, and the mean over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError
from clcomm.sync.adapters import adapter_of
from clcomm.sync.adapters.numpy import NumpyAdapter


class Parameter:
    def __init__(self, data, grad=None):
        self.data, self.grad = np.asarray(data), grad


class Model:
    """Any object with named_parameters() will do."""

    def __init__(self, **parameters):
        self.__dict__.update(parameters)
        self._names = list(parameters)

    def named_parameters(self):
        return [(name, getattr(self, name)) for name in self._names]


def small_model():
    return Model(w=Parameter(np.arange(6, dtype=np.float32).reshape(2, 3)), b=Parameter(np.ones(3, np.float64)))


def test_specs_come_in_the_models_order_with_shapes_and_dtypes():
    specs = adapter_of(small_model()).specs
    assert [(s.name, s.shape, s.dtype) for s in specs] == [("w", (2, 3), "float32"), ("b", (3,), "float64")]


def test_pulled_parameters_lie_in_the_flat_space_and_come_back(attach):
    model = small_model()
    space = attach(NumpyAdapter(model))
    space.adapter.pull_parameters()
    np.testing.assert_array_equal(space.layout.view(space.arrays.params, "w"), model.w.data)
    kept = model.w.data
    space.layout.view(space.arrays.params, "w")[...] = 7
    space.adapter.push_parameters()
    assert model.w.data is kept, "parameters are updated in place"
    np.testing.assert_array_equal(kept, np.full((2, 3), 7, np.float32))


def test_strided_arrays_keep_their_order_of_elements(attach):
    model = Model(w=Parameter(np.arange(6, dtype=np.float32).reshape(2, 3).T))
    model.w.grad = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    space = attach(NumpyAdapter(model))
    space.adapter.pull_parameters()
    space.adapter.pull_gradients(space.buckets[0])
    np.testing.assert_array_equal(space.layout.view(space.arrays.params, "w"), [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(space.layout.view(space.arrays.grads, "w"), [[0, 2], [4, 6], [8, 10]])
    space.adapter.push_parameters()
    np.testing.assert_array_equal(model.w.data, [[0, 3], [1, 4], [2, 5]])


def test_float16_is_float32_in_the_flat_space_and_keeps_its_bits(attach):
    values = np.array([1.5, -0.0, 6e-8, 65504, np.inf], np.float16)
    model = Model(h=Parameter(values.copy()))
    space = attach(NumpyAdapter(model))
    assert space.adapter.specs[0].dtype == "float32"
    space.adapter.pull_parameters()
    model.h.data[...] = 0
    space.adapter.push_parameters()
    assert model.h.data.dtype == np.float16
    assert model.h.data.tobytes() == values.tobytes()
    space.adapter.push_gradients(space.buckets[0])
    assert model.h.grad.dtype == np.float16


@pytest.mark.parametrize(
    "model, message",
    [
        (Model(), "at least one parameter"),
        (Model(w=Parameter(np.arange(3))), "floating-point numbers, got int64 array"),
        (Model(w=type("P", (), {"data": [1.0], "grad": None})()), "got list"),
    ],
)
def test_models_that_cannot_be_averaged_are_refused_in_one_line(model, message):
    with pytest.raises(ArgumentError, match=message) as error:
        adapter_of(model)
    assert "\n" not in str(error.value)


def test_a_gradient_of_another_shape_is_refused_by_name(attach):
    model = small_model()
    model.w.grad = np.zeros((3, 2), np.float32)
    space = attach(NumpyAdapter(model))
    with pytest.raises(ArgumentError, match=r"'w': expected shape \(2, 3\), got \(3, 2\)"):
        for bucket in space.buckets:
            space.adapter.pull_gradients(bucket)


def test_an_object_without_parameters_is_no_model():
    with pytest.raises(ArgumentError, match="got int"):
        adapter_of(3)


def test_one_rank_alone_keeps_its_gradients():
    model = small_model()
    model.w.grad = np.full((2, 3), 2.0, np.float32)
    sync = Synchronizer(Communicator())
    sync.broadcast_parameters(model)
    sync.sync_gradients(model)
    np.testing.assert_array_equal(model.w.grad, np.full((2, 3), 2.0))
    assert model.b.grad is None


@pytest.mark.mpi(min_size=1)
def test_a_models_own_extra_state_is_broadcast():
    comm = Communicator()
    model = small_model()
    model.steps = np.array([10 + comm.rank])
    model.extra_state = lambda: {"steps": model.steps.copy()}
    model.load_extra_state = lambda state: model.steps.__setitem__(slice(None), state["steps"])
    Synchronizer(comm).broadcast_parameters(model)
    assert model.steps[0] == 10
