"""JAX's arrays on several ranks: collectives within jit and grad, means in buckets, and what is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed; pip install -e '.[jax]'")

from clcomm.jax import Model, all_gather, all_reduce, broadcast, reduce_scatter, sync  # before JAX's first array  # isort: skip
import jax
import jax.numpy as jnp

from clcomm import Communicator, Synchronizer
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.sync.adapters import adapter_of
from tests.faults.launch import finish, start
from tests.helpers import one_line
from tests.numpy_models import values

ON_RANKS = pytest.mark.mpi(min_size=1)
FLOAT0 = np.zeros(3, jax.dtypes.float0)  # the gradient of whole numbers
JITS = pytest.mark.parametrize("jit", [False, True])


@pytest.fixture
def comm():
    with jax.enable_x64(False):
        yield Communicator()


def whole(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Return a rank's small whole numbers, whose sums every dtype has."""
    return (np.arange(np.prod(shape)).reshape(shape) % 3 + rank).astype(dtype)


@ON_RANKS
@JITS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "complex64"])
def test_every_collective_has_the_formula_s_values(comm, jit, dtype):
    rank, ranks = comm.rank, comm.size

    def calls(x, rows):
        tree = all_reduce({"x": x, "more": [x[:0], x[0]]}, comm=comm)
        one = all_gather(x, comm=comm), broadcast(x, ranks - 1, comm=comm)
        return tree["x"], tree["more"][1], *one, reduce_scatter(rows, comm=comm), tree["more"][0]

    x, rows = (jnp.asarray(whole(rank, shape)).astype(dtype) for shape in ((5, 2), (2 * ranks, 3)))
    got = (jax.jit(calls) if jit else calls)(x, rows)
    everyone = [whole(each, (5, 2)) for each in range(ranks)]
    block = sum(whole(each, (2 * ranks, 3)) for each in range(ranks))[2 * rank : 2 * rank + 2]
    expected = sum(everyone), sum(everyone)[0], np.stack(everyone), everyone[-1], block, np.zeros((0, 2))
    for found, wanted in zip(got, expected, strict=True):
        assert found.dtype == x.dtype and found.shape == wanted.shape
        assert (np.asarray(found.astype("complex64")) == wanted).all()


def drawn_tree(draw: np.random.Generator, rank: int, dtypes: list[str], depth: int = 3) -> object:
    """Return a tree of arrays, numbers and None: of the same structure on every rank, with each rank's values."""
    kind = draw.integers(0, 4 if depth else 2)
    if kind == 0:
        return None
    if kind == 1:
        shape = [(), (0, 2), (1,), (3, 2), (700,)][draw.integers(0, 5)]
        return whole(rank, shape, str(draw.choice(dtypes))) if shape or draw.integers(0, 2) else float(rank)
    parts = [drawn_tree(draw, rank, dtypes, depth - 1) for _ in range(draw.integers(0, 4))]
    return [parts, tuple(parts), {f"k{place}": part for place, part in enumerate(parts)}][draw.integers(0, 3)]


@ON_RANKS
@JITS
@pytest.mark.parametrize("seed", range(8))
def test_trees_of_any_form_keep_it(comm, jit, seed):
    both = ["float32", "float16"], ["float32", "int32", "complex64", "bool"]
    for function, dtypes in zip((sync, all_reduce), both, strict=True):

        def call(tree, function=function):
            return function(tree, comm=comm)

        everyone = [drawn_tree(np.random.default_rng(seed), rank, dtypes) for rank in range(comm.size)]
        found = (jax.jit(call) if jit else call)(everyone[comm.rank])
        assert jax.tree.structure(found) == jax.tree.structure(everyone[0])
        for one, *given in zip(jax.tree.leaves(found), *map(jax.tree.leaves, everyone), strict=True):
            total = np.sum([np.asarray(each, "complex128") for each in given], 0)
            total = np.asarray(
                total / comm.size if function is sync else total.astype(bool) if one.dtype == bool else total
            )
            assert one.dtype == jnp.asarray(given[0]).dtype and one.shape == total.shape
            np.testing.assert_allclose(np.asarray(one).astype("complex128"), total, rtol=1e-3)


@ON_RANKS
def test_gradients_of_whole_numbers_stay_as_they_are(comm):
    grads = {"i": FLOAT0, "w": jnp.full(2, float(comm.rank))}
    found = sync(grads, comm=comm)
    assert found["i"] is FLOAT0 and (found["w"] == (comm.size - 1) / 2).all()
    assert sync({"i": FLOAT0}, comm=comm) == {"i": FLOAT0}


@ON_RANKS
@JITS
def test_gradients_are_those_of_the_sum_of_all_ranks_losses(comm, jit):
    rank, ranks = comm.rank, comm.size
    weight = jnp.arange(1.0, 5.0)

    def loss(x):
        own = rank + 1.0
        terms = all_reduce(x, comm=comm) * weight, all_reduce(x, "mean", comm=comm) * ranks, broadcast(x, comm=comm)
        blocks = reduce_scatter(jnp.tile(x, (ranks, 1)), comm=comm)
        mean = reduce_scatter(jnp.tile(x, (ranks, 1)), "mean", comm=comm)
        rows = all_gather(x, comm=comm) * jnp.arange(ranks)[:, None]
        return own * (
            sum(each.sum() for each in (*terms, blocks, rows)) + mean.sum() * ranks + sync(x, comm=comm).sum()
        )

    total = ranks * (ranks + 1) / 2
    by_root = total if rank == 0 else 0
    expected = total * (np.arange(1, 5) + 1 + 1 + rank + 1 + 1 / ranks) + by_root
    x = jnp.ones(4) * rank
    got = (jax.jit(jax.grad(loss)) if jit else jax.grad(loss))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    value, slope = jax.jvp(lambda x: all_reduce(x * x, comm=comm), (x,), (jnp.ones(4),))
    assert (value == sum(each**2 for each in range(ranks))).all() and (slope == ranks * (ranks - 1)).all()


@ON_RANKS
@pytest.mark.parametrize("again", [False, True])
def test_gradients_through_scans_and_recomputation_equal_those_of_one_process(comm, again):
    def layer(carry, _):
        return jnp.sin(all_reduce(carry, "mean", comm=comm)), None

    def loss(x):
        return jax.lax.scan(jax.checkpoint(layer) if again else layer, x, None, length=3)[0].sum()

    def all_losses(rows):
        for _ in range(3):
            rows = jnp.broadcast_to(jnp.sin(rows.mean(0)), rows.shape)
        return rows.sum()

    rows = jnp.arange(4.0) + jnp.arange(comm.size)[:, None]
    found = jax.jit(jax.grad(loss))(rows[comm.rank])
    np.testing.assert_allclose(found, jax.grad(all_losses)(rows)[comm.rank], rtol=1e-5, atol=1e-6)


@ON_RANKS
def test_a_mean_has_the_synchronizers_bits_at_any_bucket_size(comm):
    shapes = {"w": (33, 7), "b": (7,), "h": (5, 5), "n": (3,)}
    dtypes = {"w": "float32", "b": "float32", "h": "bfloat16", "n": "float16"}
    drawn = {n: values(3, comm.rank, shape, "float32") / 1e2 for n, shape in shapes.items()}
    grads = {n: jnp.asarray(each).astype(dtypes[n]) for n, each in drawn.items()}
    model = Model(grads, grads)
    Synchronizer(comm).broadcast_parameters(model)
    Synchronizer(comm).sync_gradients(model)
    for size in (64, "300", "1MiB", None):
        for _ in range(2):
            found = jax.jit(lambda tree, size=size: sync(tree, bucket_size=size, comm=comm))(grads)
            for name, each in found.items():
                assert each.dtype == grads[name].dtype and each.tobytes() == model.grads[name].tobytes(), (name, size)
    assert grads["w"].tobytes() == drawn["w"].tobytes()  # which XLA's programs take for constant
    assert comm.size == 1 or found["w"].tobytes() != drawn["w"].tobytes()


@ON_RANKS
def test_arrays_are_reduced_where_they_lie(comm, monkeypatch):
    seen = []
    reduce = comm.all_reduce

    def watched(array, *others, out):
        seen.append((array.ctypes.data, out.ctypes.data))
        return reduce(array, *others, out=out)

    monkeypatch.setattr(comm, "all_reduce", watched)
    x = jnp.ones(1000) * comm.rank
    total = jax.jit(lambda x: all_reduce(x, comm=comm))(x)
    assert seen == [(x.unsafe_buffer_pointer(), total.unsafe_buffer_pointer())]


@ON_RANKS
def test_collectives_run_in_the_programs_order_in_loops_and_branches_too(comm):
    names = []
    comm.add_observer(type("Seen", (), {"collective_finished": lambda self, event: names.append(event.operation)})())

    @jax.jit
    def program(x):
        first = all_gather(x, comm=comm)  # which nothing needs
        second = jax.lax.fori_loop(0, 3, lambda _, y: all_reduce(y, "max", comm=comm), x)
        third = jax.lax.cond(x.sum() < 0, lambda x: all_reduce(x, comm=comm), lambda x: broadcast(x, comm=comm), x)
        heavy = jnp.linalg.inv(jnp.eye(200) + x[0])[0, 0]
        return third, all_reduce(heavy, comm=comm), second, first

    results = program(jnp.ones(8))
    assert names == ["all_gather", *["all_reduce"] * 3, "broadcast", "all_reduce"]
    assert len(set(comm.all_gather_object(np.asarray(results[0]).tobytes()))) == 1


@ON_RANKS
def test_ranks_train_as_one_does_on_the_whole_batch(comm):
    rows, ranks = 8, comm.size
    weights = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3), "b": jnp.zeros(3)}

    def loss(params, batch):
        return jnp.square(jnp.tanh(batch @ params["w"] + params["b"])).mean()

    @jax.jit
    def step(params, batch):
        grads = sync(jax.grad(loss)(params, batch), bucket_size=32, comm=comm)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

    ours = broadcast(jax.tree.map(lambda p: p + comm.rank, weights), comm=comm)
    alone = weights
    for number in range(5):
        batch = np.random.default_rng(number).standard_normal((rows * ranks, 4)).astype(np.float32)
        ours = step(ours, batch[comm.rank * rows : (comm.rank + 1) * rows])
        alone = jax.tree.map(lambda p, g: p - 0.5 * g, alone, jax.grad(loss)(alone, batch))
    for name in weights:
        np.testing.assert_allclose(ours[name], alone[name], rtol=1e-5, atol=1e-6)
        assert len(set(comm.all_gather_object(ours[name].tobytes()))) == 1


@pytest.mark.mpi(min_size=2)
@JITS
@pytest.mark.parametrize("call", [all_reduce, sync])
def test_other_shapes_on_a_rank_are_one_line_on_every_rank_and_no_hang(comm, jit, call):
    function = (jax.jit if jit else lambda f: f)(lambda x: call(x, comm=comm))
    with pytest.raises(jax.errors.JaxRuntimeError if jit else MismatchError, match="on every rank") as caught:
        function(jnp.ones(4 + (comm.rank == 1)))
    text = str(caught.value) if jit else one_line(caught)
    assert "\n" not in text and len(set(comm.all_gather_object(text))) == 1
    assert (all_reduce(jnp.ones(3), comm=comm) == comm.size).all()


@pytest.mark.parametrize(
    ("expected", "call"),
    [
        ("a dtype that JAX keeps, got float64", lambda c: all_reduce(np.ones(3), comm=c)),
        ("got float8_e4m3fn", lambda c: all_reduce(jnp.ones(3, "float8_e4m3fn"), comm=c)),
        ("got key<fry>", lambda c: broadcast(jax.random.key(0), comm=c)),
        ("an array or a tree of them, got Model", lambda c: all_gather(Model({}), comm=c)),
        ("'mean' needs a floating dtype", lambda c: all_reduce(jnp.arange(3), "mean", comm=c)),
        ("op: expected one of sum", lambda c: reduce_scatter(jnp.ones(3), "median", comm=c)),
        ("that 1 ranks divide, got shape", lambda c: reduce_scatter(jnp.ones(()), comm=c)),
        ("a rank from 0 to 0, got 3", lambda c: broadcast(jnp.ones(3), 3, comm=c)),
        ("outside of a mapped function", lambda c: jax.vmap(lambda x: all_reduce(x, comm=c))(jnp.ones((2, 2)))),
        ("op 'sum' or 'mean'", lambda c: jax.grad(lambda x: all_reduce(x, "max", comm=c))(1.0)),
        ("gradient 'a': expected float32", lambda c: sync({"a": jnp.arange(3)}, comm=c)),
        ("bucket_size", lambda c: sync(jnp.ones(3), bucket_size="many", comm=c)),
        ("leaf 'f': expected an array, got function", lambda c: adapter_of(Model({"f": lambda: 0}))),
        ("parameter 'a': expected float32", lambda c: adapter_of(Model({"a": jnp.arange(3)}))),
        ("at least one array", lambda c: adapter_of(Model({}))),
        ("grads: expected a tree like", lambda c: _synchronised(c, Model({"a": jnp.ones(3)}, {"b": jnp.ones(3)}))),
        ("got float0, which has no values", lambda c: broadcast({"a": FLOAT0}, comm=c)),
        (
            "expected float32, got complex64",
            lambda c: _synchronised(c, Model({"a": jnp.ones(3)}, {"a": jnp.ones(3) * 1j})),
        ),
        ("gradient of 'a': expected float32", lambda c: _synchronised(c, Model({"a": jnp.ones(3)}, {"a": FLOAT0}))),
        ("shape \\(3,\\), got \\(4,\\)", lambda c: _synchronised(c, Model({"a": jnp.ones(3)}, {"a": jnp.ones(4)}))),
    ],
)
def test_bad_use_is_refused_in_one_line(expected, call):
    with jax.enable_x64(False), pytest.raises(ArgumentError, match=expected) as caught:
        call(Communicator(transport="solo"))
    one_line(caught)


def _synchronised(comm: Communicator, model: Model) -> None:
    Synchronizer(comm).sync_gradients(model)


def test_a_model_of_other_shapes_needs_another_synchronizer():
    model, synchronizer = Model({"a": jnp.ones(3)}, {"a": jnp.ones(3)}), Synchronizer(Communicator(transport="solo"))
    synchronizer.sync_gradients(model)
    model.params = {"a": jnp.zeros(3)}
    synchronizer.sync_gradients(model)
    model.params = {"a": jnp.ones((3, 1))}
    with pytest.raises(ArgumentError, match=r"'a': expected shape \(3,\) and float32, got shape \(3, 1\)"):
        synchronizer.sync_gradients(model)


def test_jax_has_to_come_later_and_clcomm_alone_imports_none():
    late = "import jax; jax.numpy.ones(3); import clcomm.jax"
    ended = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True)
    assert ended.returncode and "imported before JAX's first array" in ended.stderr
    alone = "import sys, clcomm, clcomm.sync.adapters; print([each for each in sys.modules if each.startswith('jax')])"
    assert subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True).stdout == "[]\n"


DIVIDED = """
from clcomm.jax import Model, all_reduce
import jax, jax.numpy as jnp
from clcomm import Synchronizer
comm = Communicator()
by_device = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
array = jax.device_put(jnp.arange(4.0) + comm.rank, by_device)
model, sync = Model({"a": array}, {"a": array}), Synchronizer(comm)
sync.broadcast_parameters(model)
sync.sync_gradients(model)
placed = [each["a"].sharding == by_device for each in (model.params, model.grads)]
print(placed, model.params["a"].tolist(), model.grads["a"].tolist())
try:
    jax.jit(lambda x: all_reduce(x, comm=comm))(array)
except ValueError as error:
    print(str(error).splitlines())
"""


def test_arrays_divided_among_a_process_s_devices_stay_so_and_collectives_in_programs_refuse_them(tmp_path):
    path = os.pathsep.join([".", *(each for each in sys.path if each)])
    flags = "--xla_force_host_platform_device_count=2"
    ended = finish(start(tmp_path, DIVIDED, ranks=2, PYTHONPATH=path, XLA_FLAGS=flags))
    means, refusals = (ended.out.count(text) for text in (
        "[True, True] [0.0, 1.0, 2.0, 3.0] [0.5, 1.5, 2.5, 3.5]", "clcomm.jax, which take arrays of one device]']",
    ))  # fmt: skip
    assert (ended.code, means, refusals) == (0, 2, 2), ended.err


PROGRAM = """
from clcomm.jax import all_reduce, sync
import jax, jax.numpy as jnp, signal, threading
comm = Communicator()
step = jax.jit(lambda x: all_reduce(x * 2, comm=comm))
step(jnp.ones(5)).block_until_ready()
if comm.rank == 1:
    failing()
    if {case!r} == "dies":
        os._exit(7)
    if {case!r} == "leaves":
        sys.exit(0)
    if {case!r} in ("SIGTERM", "SIGINT"):
        threading.Timer(0.5, os.kill, (os.getpid(), getattr(signal, {case!r}))).start()
elif {case!r}.startswith("SIG"):
    time.sleep(60)
step(jnp.ones(5 + ({case!r} == "differs" and comm.rank == 1))).block_until_ready()
print("unreachable")
"""


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("dies", "rank 1 exited unexpectedly"),
        ("leaves", "rank 1"),
        ("differs", "rank 1 in all_reduce"),
        ("SIGTERM", "rank 1: ended by SIGTERM"),
        ("SIGINT", "rank 1: interrupted"),
    ],
)
def test_a_jit_that_a_rank_does_not_run_like_the_others_ends_the_job_in_one_line(tmp_path, case, line):
    path = os.pathsep.join([".", *(each for each in sys.path if each)])
    ended = finish(start(tmp_path, PROGRAM.format(case=case), ranks=2, PYTHONPATH=path))
    assert ended.code and len(ended.clcomm_lines()) == 1 and line in ended.err, ended.err
    assert "Traceback" not in ended.err and "unreachable" not in ended.out
