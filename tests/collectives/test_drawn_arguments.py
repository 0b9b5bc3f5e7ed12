"""Collectives whose arguments differ between ranks in a drawn way: they work on all ranks, or all raise one line.

CLCOMM_ARGUMENT_CASES says how many are drawn, CLCOMM_ARGUMENT_SEED from which on.
"""

from __future__ import annotations

import os
import random
import re

import numpy as np
import pytest

from clcomm import Communicator

pytestmark = pytest.mark.mpi(min_size=2)

CASES, FIRST = (int(os.environ.get(f"CLCOMM_ARGUMENT_{name}", value)) for name, value in (("CASES", 300), ("SEED", 0)))
#: An error of clcomm's, or none.
ONE_LINE = re.compile(r"((Argument|Mismatch)Error: [^\n]+)?")
LENGTHS = 0, 1, 2, 3, 5, 6, 4000
SHAPES = [(length,) for length in LENGTHS] + [(2, 3), (3, 2), (), (6, 1)]
DTYPES = np.float32, np.float64, np.int32, np.int8


def drawn_array(draw, size):
    shape = draw.choice(SHAPES)
    if draw.random() < 0.5 and shape:
        shape = (size * shape[0], *shape[1:])
    return np.ones(shape, draw.choice(DTYPES))


def drawn_lengths(draw, size):
    return [draw.choice([0, 1, 2, 3]) for _ in range(size if draw.random() < 0.8 else size + 1)]


#: The arguments of a call, each with what draws it; a rank's own `data` may be of any shape where ranks may differ.
DRAWN = {
    "array": drawn_array,
    "out": lambda draw, size: drawn_array(draw, size) if draw.random() < 0.7 else None,
    "op": lambda draw, size: draw.choice(["sum", "max", "mean", "min", "prod", "median"]),
    "root": lambda draw, size: draw.choice([0, size - 1, size, -1, "0"]),
    "label": lambda draw, size: draw.choice(["", "a"]),
    "sends": drawn_lengths,
    "receives": drawn_lengths,
    "items": lambda draw, size: draw.choice([None, [1] * size, [1] * (size + 1), [np.ones(2)] * size]),
    "rows": lambda draw, size: draw.choice([None, [0] * size, [1] * size, [1] + [0] * (size - 1)]),
    "color": lambda draw, size: draw.choice([0, 1, None, "x"]),
    "nbytes": lambda draw, size: draw.choice([8, 64, 0, -1, 2.5]),
}


def ones(lengths):
    return [np.ones(length, np.float32) for length in lengths]


#: The collectives, with their arguments' names and the call; `c`: the Communicator.
CALLS = {
    "all_reduce": ("array op label", lambda c, a, o, n: c.all_reduce(a, o, label=n)),
    "all_reduce to out": ("array out op", lambda c, a, out, o: c.all_reduce(a, o, out=out)),
    "all_reduce_init": ("array op", lambda c, a, o: c.all_reduce_init(a, o)()),
    "all_reduce_async": ("array op label", lambda c, a, o, n: c.all_reduce_async(a, o, label=n).wait()),
    "broadcast": ("array root label", lambda c, a, r, n: c.broadcast(a, r, label=n)),
    "all_gather": ("array out", lambda c, a, out: c.all_gather(a, out=out)),
    "all_gather_async": ("array out", lambda c, a, out: c.all_gather_async(a, out=out).wait()),
    "all_gather_in_place": ("array", lambda c, a: c.all_gather_in_place(a)),
    "all_gather_in_place_init": ("array", lambda c, a: c.all_gather_in_place_init(a)()),
    "all_gather_list": ("array out", lambda c, a, out: c.all_gather_list(a, out=out)),
    "reduce_scatter": ("array op out", lambda c, a, o, out: c.reduce_scatter(a, o, out=out)),
    "reduce_scatter_init": ("array op out", lambda c, a, o, out: c.reduce_scatter_init(a, o, out=out)()),
    "all_to_all": ("sends receives", lambda c, s, r: c.all_to_all(ones(s), ones(r))),
    "gather": ("array root out", lambda c, a, r, out: c.gather(a, r, out=out)),
    "scatter": ("items root out", lambda c, i, r, out: c.scatter(i, r, out=out)),
    "reduce": ("array op root out", lambda c, a, o, r, out: c.reduce(a, o, r, out=out)),
    "scan": ("array op", lambda c, a, o: c.scan(a, o)),
    "exscan": ("array op out", lambda c, a, o, out: c.exscan(a, o, out=out)),
    "broadcast_object": ("items root", lambda c, i, r: c.broadcast_object(i, r)),
    "gather_object": ("items root", lambda c, i, r: c.gather_object(i, r)),
    "scatter_object": ("items root", lambda c, i, r: c.scatter_object(i, r)),
    "split": ("color", lambda c, color: c.split(color)),
    "allocate": ("nbytes", lambda c, nbytes: c.allocate(nbytes)),
    "Allreduce": ("array out op", lambda c, a, out, o: c.Allreduce(a, out, o)),
    "Bcast": ("array root", lambda c, a, r: c.Bcast(a, r)),
    "Allgather": ("array out", lambda c, a, out: c.Allgather(a, out)),
    "Alltoall": ("array out", lambda c, a, out: c.Alltoall(a, out)),
    "Alltoallv": (
        "sends receives",
        lambda c, s, r: c.Alltoallv([np.ones(sum(s)), s], [np.ones(sum(r)), r]),
    ),
    "Gather": ("array out root", lambda c, a, out, r: c.Gather(a, out, r)),
    "Scatter": ("array out root", lambda c, a, out, r: c.Scatter(a, out, r)),
    "Reduce": ("array out op root", lambda c, a, out, o, r: c.Reduce(a, out, o, r)),
}  # fmt: skip


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_one_rank_never_raises_alone(transport):
    with Communicator(transport=transport) as comm:
        for seed in range(FIRST, FIRST + CASES):
            draw = random.Random(f"{transport} {seed}")
            name = draw.choice(list(CALLS))
            names, call = CALLS[name]
            common = {each: DRAWN[each](draw, comm.size) for each in names.split()}
            odd, other = draw.randrange(comm.size), draw.choice(names.split())
            changed = common | {other: DRAWN[other](draw, comm.size)}
            said = ""
            try:
                call(comm, *(changed if comm.rank == odd else common).values())
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            case = seed, name, odd, common, {other: changed[other]}
            everyone = comm.comm.allgather(said)
            assert all(everyone) or not any(everyone), (case, everyone)
            assert all(map(ONE_LINE.fullmatch, everyone)), (case, everyone)
            assert comm.all_reduce(np.ones(3)).tolist() == [comm.size] * 3, case
