"""Policies: the course of every rank as one process computes it for all, with numbers of its own for the codes."""

from __future__ import annotations

import math
import statistics
from contextlib import nullcontext

import numpy as np
import pytest

from clcomm import Communicator, DistributedDataParallel, GradScaler, Synchronizer, clip_grad_norm
from clcomm.base.errors import ArgumentError, MismatchError
from clcomm.optim import Adam
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.sync.policies import codes
from clcomm.sync.policies.choose import partner_of
from tests.helpers import Recorder, one_line
from tests.sync.test_local_sgd import backward, network

STEPS = 13
POLICIES = [
    "local:h=3", "diloco:h=4", "diloco:h=1,lr=1,momentum=0", "streaming:h=4,fragments=3,delay=2,bits=32,alpha=0.25",
    "streaming:h=4,fragments=2,delay=0,bits=4,alpha=0", "sparseloco:h=3,share=0.1,bits=2",
    "sparseloco:h=4,share=1,bits=3", "noloco:h=2,seed=3",
]  # fmt: skip


def settings_of(policy):
    name, _, rest = policy.partition(":")
    return name, {key: float(value) for key, value in (part.split("=") for part in rest.split(","))}


def train(comm, policy, steps=STEPS, state=None):
    """Return model, Synchronizer and optimizer after so many steps of this rank."""
    model, sync = network(), Synchronizer(comm, policy=policy)
    sync.broadcast_parameters(model)
    optimizer = Adam(model, 0.01)
    for step in range(steps):
        one_step(comm, model, sync, optimizer, step)
    return model, sync, optimizer


def one_step(comm, model, sync, optimizer, step):
    with sync.no_sync():
        backward(model, comm.rank, 2 * step)
        sync.sync_gradients(model)
    backward(model, comm.rank, 2 * step + 1)
    sync.sync_gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    sync.finish_step(model)


def partners(ranks, seed, turn):
    """Return each rank's partner: a permutation drawn from seed and turn, in which neighbours are pairs."""
    order = np.random.default_rng([seed, turn]).permutation(ranks)
    found = list(range(ranks))
    for first, second in zip(order[::2], order[1::2], strict=False):
        found[first], found[second] = second, first
    return found


class Simulated:
    """All ranks of NoLoCo in one process: local steps of real optimizers, outer steps in float64 by its formulas."""

    def __init__(self, ranks):
        self.models = [network() for _ in range(ranks)]
        self.optimizers = [Adam(model, 0.01) for model in self.models]
        self.names = list(self.models[0].state_dict())
        self.anchors = [self.read(rank) for rank in range(ranks)]
        self.velocity = [dict.fromkeys(self.names, 0.0) for _ in range(ranks)]

    def read(self, rank):
        return {name: value.astype(np.float64) for name, value in self.models[rank].state_dict().items()}

    def write(self, rank, values):
        self.models[rank].load_state_dict({name: value.astype(np.float32) for name, value in values.items()})

    def run(self, steps):
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                backward(model, rank, 2 * step)
                backward(model, rank, 2 * step + 1)
                optimizer.step()
                optimizer.zero_grad()
            if (step + 1) % 2 == 0:
                self.outer_step((step + 1) // 2)

    def gradients(self):
        return [
            {name: self.anchors[rank][name] - own[name] for name in self.names}
            for rank, own in enumerate(map(self.read, range(len(self.models))))
        ]

    def outer_step(self, turn):
        gradients, before = self.gradients(), [dict(each) for each in self.anchors]
        for rank in range(len(self.models)):
            other = partners(len(self.models), 3, int(turn))[rank]
            for name in self.names:
                mean = (gradients[rank][name] + gradients[other][name]) / 2
                anchor = (before[rank][name] + before[other][name]) / 2
                self.velocity[rank][name] = 0.5 * self.velocity[rank][name] - 0.7 * mean - (before[rank][name] - anchor)
                self.anchors[rank][name] = before[rank][name] + self.velocity[rank][name]
            self.write(rank, self.anchors[rank])


def flat_of(model):
    """Return a model's parameters at their places in the flat space, and the elements at which each begins."""
    layout, state = model.flat_space().layout, model.state_dict()
    flat = np.zeros(layout.span // 4, np.float32)
    for place in layout.ranges:
        flat[place.start // 4 : place.stop // 4] = state[place.name].ravel()
    return flat


def put(model, flat):
    layout = model.flat_space().layout
    model.load_state_dict({place.name: layout.view(flat.view(np.uint8), place.name) for place in layout.ranges})


def own_step(models, optimizers, step):
    for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()


def fitted_sizes(sizes):
    """Return the two means that 41 sizes, the largest first, are divided between, nearest to each."""
    low, high = statistics.fmean(sizes[20:]), statistics.fmean(sizes[:20])
    for _ in range(4):
        high, low = (
            statistics.fmean(part) if part else mean
            for mean, part in (
                (high, [size for size in sizes if size > (low + high) / 2]),
                (low, [size for size in sizes if size <= (low + high) / 2]),
            )
        )
    return low, high


def test_sparseloco_sends_the_largest_in_two_bits_and_keeps_the_rest(comm):
    """Number by number: 41 of each 4,096, at the nearer of two sizes; 0.95 of what was not sent is added later."""
    models = [network() for _ in range(comm.size)]
    optimizers, anchor = [Adam(model, 0.01) for model in models], flat_of(models[0])
    unsent = [np.zeros_like(anchor) for _ in models]
    for step in range(9):
        own_step(models, optimizers, step)
        if step % 3 < 2:
            continue
        total = np.zeros_like(anchor)
        for rank, model in enumerate(models):
            unsent[rank] = np.float32(0.95) * unsent[rank] + (anchor - flat_of(model))
            for start in range(0, len(anchor), 4096):
                chunk = unsent[rank][start : start + 4096]
                chosen = sorted(range(len(chunk)), key=lambda at, chunk=chunk: -abs(chunk[at]))[:41]
                sizes = fitted_sizes([abs(float(chunk[at])) for at in chosen])
                for at in chosen:
                    size = min(sizes, key=lambda size: abs(size - abs(chunk[at])))
                    if chunk[at]:
                        total[start + at] += np.float32(math.copysign(size, chunk[at]))
                        chunk[at] -= np.float32(math.copysign(size, chunk[at]))
        anchor -= total / np.float32(comm.size)
        for model in models:
            put(model, anchor)
    ours = flat_of(train(comm, "sparseloco:h=3,share=0.01", 9)[0])
    near = np.abs(ours - anchor) <= 1e-5
    assert near.mean() > 0.998, near.mean()  # at the border of two levels a number may be at either
    assert np.abs(anchor - flat_of(network())).max() > 0.01


def test_the_course_of_pairs_is_that_of_one_process(comm):
    model = train(comm, "noloco:h=2,seed=3")[0]
    simulated = Simulated(comm.size)
    simulated.run(STEPS)
    expected = simulated.read(comm.rank)
    for name, value in model.state_dict().items():
        assert np.abs(value - expected[name]).max() <= 2e-5 * max(1.0, np.abs(expected[name]).max()), name


def test_pairs_change_from_turn_to_turn_and_with_the_seed():
    for ranks in range(1, 8):
        drawn = [tuple(partner_of(rank, ranks, 5, turn) for rank in range(ranks)) for turn in range(40)]
        for pairs in drawn:
            assert all(pairs[pairs[rank]] == rank for rank in range(ranks))
            assert sum(pairs[rank] == rank for rank in range(ranks)) == ranks % 2
        others = {rank: {pairs[rank] for pairs in drawn} - {rank} for rank in range(ranks)}
        assert all(len(met) == ranks - 1 for met in others.values()), "each rank meets every other"
        seeded = [tuple(partner_of(rank, ranks, 6, turn) for rank in range(ranks)) for turn in range(40)]
        assert (seeded != drawn) == (ranks > 2)


def test_a_wrapped_model_takes_the_same_steps(comm):
    plain = train(comm, "diloco:h=2", 4)[0].state_dict()
    model = network()
    ddp = DistributedDataParallel(model, comm, policy="diloco:h=2")
    optimizer = Adam(model, 0.01)
    for step in range(4):
        with ddp.no_sync():
            backward(ddp, comm.rank, 2 * step)
            ddp.finish_grad_sync()
        backward(ddp, comm.rank, 2 * step + 1)
        ddp.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()
        ddp.finish_step()
    ddp.align_parameters()
    assert all(value.tobytes() == plain[name].tobytes() for name, value in model.state_dict().items())


def test_one_fragment_without_delay_is_diloco(comm):
    ours = train(comm, "streaming:h=4,fragments=1,delay=0,bits=32,alpha=0")[0].state_dict()
    theirs = train(comm, "diloco:h=4")[0].state_dict()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_are_alike_after_an_outer_step_of_all(comm, policy):
    model, sync, _ = train(comm, policy)
    sync.align_parameters(model)
    everyone = comm.all_gather_object({name: value.tobytes() for name, value in model.state_dict().items()})
    assert all(each == everyone[0] for each in everyone)
    sync.align_parameters(model)  # before an evaluation and at the end: the second does nothing
    assert {name: value.tobytes() for name, value in model.state_dict().items()} == everyone[0]
    space = sync.models.of(model).space
    padding = space.arrays.params.copy()
    for place in space.layout.ranges:
        padding[place.start : place.stop] = 0
    assert padding.size > space.layout.nbytes
    assert not padding.any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_goes_on_from_its_state(comm, policy):
    """A rank's parameters, what its policy keeps and what is on its way, at any step; optimizers keep their state."""
    whole = train(comm, policy)[0].state_dict()
    for stop in (0, 5, 6):
        _, sync, optimizer = first = train(comm, policy, stop)
        state, moments = sync.state_dict(first[0]), optimizer.state_dict()
        model, sync, optimizer = train(comm, policy, 0)
        optimizer.load_state_dict(moments)
        sync.load_state_dict(model, state)
        for step in range(stop, STEPS):
            one_step(comm, model, sync, optimizer, step)
        assert all(value.tobytes() == whole[name].tobytes() for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("policy", "row_nbytes"),
    [("diloco:h=6", 4 * 4096), ("streaming:h=6,fragments=1,delay=0", 4 + 2048), ("sparseloco:h=6", 8 + 185 + 31)],
)
def test_bytes_on_the_wire(comm, policy, row_nbytes):
    """In 13 steps of two outer ones: all numbers, 4 bits each, or of 123 in 4,096 their place, 12 bits, and 2 bits."""
    recorder = Recorder()
    comm.add_observer(recorder)
    model = train(comm, policy)[0]
    comm.remove_observer(recorder)
    sent = [event for event in recorder.events if event.label == "outer gradients"]
    span, ranks = model.flat_space().layout.span, 1 if policy.startswith("diloco") else comm.size
    whole = span if policy.startswith("diloco") else -(-span // (4 * 4096)) * row_nbytes
    assert [event.nbytes for event in sent] == [ranks * whole] * 2


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 12, 16])
def test_codes_survive_packing(bits):
    drawn = np.random.default_rng(bits).integers(0, 1 << bits, (3, 37), dtype=np.uint16)
    assert (codes.unpack(codes.pack(drawn, bits), bits, 37) == drawn).all()
    assert codes.pack(drawn, bits).shape == (3, -(-37 * bits // 8))


def test_codes_are_near_their_numbers():
    rows = codes.rows_of(np.random.default_rng(1).standard_normal(10_000))
    rows[1, :5] = 0, -0.0, np.abs(rows[1]).max(), -np.abs(rows[1]).max(), 1e-30
    near = codes.from_powers(*codes.to_powers(rows))
    kept = np.abs(rows) > np.abs(rows).max(1, keepdims=True) / 64
    assert (np.abs(near / np.where(kept, rows, 1) - 1)[kept] <= 2**0.5 - 1 + 1e-6).all()
    assert np.abs(near - rows)[~kept].max() <= np.abs(rows).max() / 64
    assert near[1, :3].tolist() == [0, 0, rows[1, 2]]
    fitted = codes.from_levels(*codes.to_levels(np.float32([[3, -3, 1, -1, 1, 0]]), 2))
    assert fitted.tolist() == [[3, -3, 0.75, -0.75, 0.75, 0.75]]
    for bits, least in ((1, 0.3634), (2, 0.1175), (3, 0.03454)):  # a normal distribution's squared error (Max, 1960)
        levels = codes.from_levels(*codes.to_levels(rows[:2], bits))
        assert np.square(levels - rows[:2]).mean() < 1.3 * least
    assert np.abs(codes.from_levels(*codes.to_levels(rows[:2], 8)) - rows[:2]).mean() < 0.01
    assert not codes.from_powers(*codes.to_powers(np.zeros((2, 4096), np.float32))).any()
    assert not codes.from_levels(*codes.to_levels(np.zeros((2, 4096), np.float32), 2)).any()


@pytest.mark.parametrize("count", [1, 123, 4095, 4096])
def test_the_largest_numbers_of_rows_are_those_of_a_stable_sort(count: int) -> None:
    numbers = np.random.default_rng(0).standard_normal((3, 4096), np.float32)
    numbers[1] = np.round(numbers[1] * 2)  # many of the same size
    numbers[2] = 0
    sorted_places = np.argsort(-np.abs(numbers), axis=1, kind="stable")[:, :count]
    assert (codes.largest(numbers, count) == np.sort(sorted_places, axis=1)).all()


@pytest.mark.parametrize("count", [1, 41, 341, 342, 4095, 4096])
def test_places_survive_packing(count):
    drawn = np.random.default_rng(count).permuted(np.tile(np.arange(4096), (3, 1)), axis=1)[:, :count]
    places = np.sort(drawn, axis=1)
    packed = codes.pack_places(places)
    assert packed.shape == (3, codes.place_bytes(count)) and packed.shape[1] <= 512
    assert (codes.unpack_places(packed, count) == places).all()
    assert not codes.from_powers(*codes.to_powers(np.zeros((2, 4096), np.float32))).any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dilco", "policy: expected none or one of local, diloco, streaming, sparseloco, noloco"),
        ("diloco:h=0", "policy: diloco: h: expected a number of steps from 1 up, got 0"),
        ("diloco:h=two", "policy: diloco: expected settings of h=INT, lr=FLOAT, momentum=FLOAT, got 'h=two'"),
        ("streaming:bits=3", "policy: streaming: bits: expected 4 or 32, got 3"),
        ("streaming:h=4,delay=4", "policy: streaming: delay: expected a number of steps from 0 to below h, got 4"),
        ("sparseloco:share=2", "policy: sparseloco: share: expected a share above 0, to 1, got 2"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(Communicator(transport="solo"), policy=text)
    assert one_line(caught).startswith(message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": True}, "overlap: expected False with policy='diloco', got True"),
        ({"shards": 4}, "shards: expected None with policy='diloco', got 4"),
        ({"check_finite": True}, "check_finite: expected False with policy='diloco', got True"),
        ({"precision": "bf16"}, "precision: expected float32 with policy='diloco', got bf16"),
        ({"compression": "fp16"}, "hook: expected none, no compression, algorithm or combination with policy='diloco'"),
    ],
)
def test_what_works_on_gradients_is_refused(settings, message):
    with pytest.raises(ArgumentError) as caught:
        Synchronizer(Communicator(transport="solo"), policy="diloco", **settings)
    assert one_line(caught).startswith(message)


def test_forgotten_calls_are_named(comm):
    model, sync, _ = train(comm, "diloco:h=2", 0)
    with pytest.raises(ArgumentError, match=r"^finish_step: expected sync_gradients\(model\) before it"):
        sync.finish_step(model)
    backward(model, comm.rank, 0)
    sync.sync_gradients(model)
    with pytest.raises(ArgumentError, match=r"^sync_gradients: expected finish_step\(model\) after the optimizer's"):
        sync.sync_gradients(model)
    with pytest.raises(ArgumentError, match=r"^samples: expected None with policy='diloco'"):
        sync.sync_gradients(model, samples=3)


def test_what_looks_at_the_mean_gradients_is_refused(comm):
    model, sync, optimizer = train(comm, "diloco:h=2", 0)
    done = nullcontext()
    for use in (lambda: GradScaler(sync), lambda: clip_grad_norm(sync, model, 1.0), lambda: sync.join(model, print)):
        with pytest.raises(ArgumentError, match="with policy='diloco', under which ranks take steps"), use() or done:
            pass
    with pytest.raises(ArgumentError, match=r"^sync: expected no DistributedOptimizer with policy='diloco'"):
        DistributedOptimizer(optimizer, sync)


def test_ranks_of_other_policies_are_refused_on_every_rank(several):
    with pytest.raises(MismatchError, match="Synchronizer: expected the same on every rank"):
        train(several, f"diloco:h={2 + several.rank}", 0)
