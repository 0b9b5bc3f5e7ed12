"""Run a setting on its ranks and on one, and tell how it came out: right, refused in one line on all ranks, wrong."""

from __future__ import annotations

import hashlib
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from clcomm import ClcommError, Communicator
from clcomm.comm.transport import mpi_communicators
from tests.helpers import cpu_device
from tests.pairs.alone import Alone
from tests.pairs.course import CLAMP, OVERFLOW, POLICIES, RESUMED, Shares, shares_of, steps_of
from tests.pairs.factors import Setting, ranks_of
from tests.pairs.networks import computing_as
from tests.pairs.ranks import Job, Records

try:
    from tests.pairs import torch_alone
except ModuleNotFoundError:  # PyTorch is no part of the tests' needs
    torch_alone = None  # type: ignore[assignment]

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
#: How far a tensor may be from one rank's, relative to how far training has moved it.
BOUND = 1e-3
_BOUNDS = {("precision", "bf16"): 0.3, ("precision", "fp16"): 0.03, ("compression", "fp16"): 0.01,
           ("compression", "bf16"): 0.05, ("compression", "int8"): 0.2, ("compression", "topk"): BOUND,
           ("compression", "powersgd"): 0.01, ("optimizer", "rmsprop"): 3e-3,
           ("network", "resnet"): 0.05}  # fmt: skip
#: ResNet's where values are rounded to 16 bits or fewer: a ReLU that then passes another of few samples moves a tensor.
#: Two such roundings are as coarse as its batch norm's weights move.
_COARSE, _COARSE_RESNET = 0.01, (0.3, 1.0)
#: RMSProp divides by the size of gradients, which makes the rounding of small ones as much larger; at most so large.
_RMSPROP, _RMSPROP_MOST = 4, 0.5
#: Of a tensor that hardly moves: so much of the movement of all together counts as its own.
_LEAST_SHARE = 0.02


@dataclass(frozen=True)
class Outcome:
    """How a setting came out; text: the line of a refusal, or what is wrong."""

    kind: str
    text: str = ""


class _RefusedState(Exception):
    """One rank does not take the ranks' checkpoint."""


class Segment:
    """What one Job has done: its steps' shares, and dropout's random numbers at its start."""

    def __init__(self, first: int, streams: dict[int, list[np.ndarray]], shares: list[Shares]):
        self.first, self.streams, self.shares = first, streams, shares


def outcome_of(setting: Setting, world: Communicator) -> Outcome:
    """Run a setting on the first of the world's ranks; every rank of the world calls it, and gets the same outcome."""
    cpu_device("cpu").has_half = cpu_device("gpu").has_half = True  # fp16 is integers' arithmetic, and runs everywhere
    report: Any = None
    is_gpu = setting["device"] == "gpu" or (setting["device"] == "mixed" and world.rank % 2 == 1)
    with _two_hosts(setting["hosts"], world.rank, ranks_of(setting)), computing_as("gpu" if is_gpu else "cpu"):
        comm = _part(world, ranks_of(setting), setting["transport"])
        if comm is not None:
            report = _trained(setting, comm)
    reports = [each for each in world.all_gather_object(report) if each is not None]
    found = world.broadcast_object(_judged(setting, reports) if world.rank == 0 else None)
    if comm is not None and found.kind != WRONG:  # all ranks are at the same place
        comm.finalize()
    return found


def _part(world: Communicator, ranks: int, transport: str) -> Communicator | None:
    world.transport = transport  # of its parts
    return world.split(0 if world.rank < ranks else None)


@contextmanager
def _two_hosts(layout: str, rank: int, ranks: int) -> Iterator[None]:
    """Within it ranks find each other on two hosts, the first half of them on one, or every other."""
    if layout == "one":
        yield
        return
    host = rank % 2 if layout == "interleaved" else 2 * rank // ranks
    real, mpi_communicators.host_of = mpi_communicators.host_of, lambda comm: comm.Split(host, comm.Get_rank())
    try:
        yield
    finally:
        mpi_communicators.host_of = real


def _trained(setting: Setting, comm: Communicator) -> Any:
    """Return what this rank has trained to; a str: the error."""
    try:
        return _train(setting, comm)
    except ClcommError as error:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return traceback.format_exc()


def _train(setting: Setting, comm: Communicator) -> dict[str, Any]:
    stop, kept = steps_of(setting), None
    assert comm.hosts == (1 if setting["hosts"] == "one" else min(2, comm.size))
    job = Job(setting, comm)
    segments = []
    first = 0
    if setting["checkpoint"] == "from one rank":
        first = RESUMED
        job.restore(comm.broadcast_object(_started_alone(setting) if comm.rank == 0 else None))
    segments.append(Segment(first, job.streams(), job.records.shares))
    if setting["checkpoint"] in ("none", "from one rank"):
        job.train(first, stop)
    else:
        job.train(0, RESUMED)
        kept = job.checkpoint()
    records = [job.records]
    if setting["checkpoint"] in ("same", "rolled back"):
        if setting["checkpoint"] == "same":
            job.close()
            job = Job(setting, comm)
        else:
            job.train(RESUMED, RESUMED + 1, Records())  # in vain
        job.restore(kept)
        records.append(Records())
        segments.append(Segment(RESUMED, job.streams(), records[-1].shares))
        job.train(RESUMED, stop, records[-1])
    state = job.state()
    names = {name for name, _ in job.model.named_parameters()}
    result = {
        "state": state if comm.rank == 0 else None,
        "bits": {name: _hash(values) for name, values in state.items() if name in names},
        **{name: [x for each in records for x in getattr(each, name)] for name in ("losses", "evaluations", "norms")},
        "replica": job.replica,
    }  # fmt: skip
    if comm.rank == 0:
        result |= {"segments": segments, "kept": kept if setting["checkpoint"] == "to one rank" else None}
    job.close()
    return result


def _started_alone(setting: Setting) -> dict[str, Any]:
    alone = _before_resuming(setting)
    return {"model": alone.model.state_dict(), "optimizer": alone.optimizers[0].state_dict(),
            "rate": alone.rates[0].state_dict()}  # fmt: skip


def _before_resuming(setting: Setting) -> Alone:
    alone = Alone(setting)
    alone.draw_as({replica: [np.array([1, 0, replica, 0, 0], np.uint32)] for replica in range(8)})
    for step in range(RESUMED):
        alone.step(step, shares_of({**setting, "scaler": "off"}, step))
    first = alone.optimizers[0].state_dict(), alone.rates[0].state_dict()
    alone.load(alone.model.state_dict(), *first)  # all replicas
    return alone


def _hash(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# --- judging ---


def _judged(setting: Setting, reports: list[Any]) -> Outcome:
    errors = [each for each in reports if isinstance(each, str)]
    if errors:
        return _refusal(errors, len(reports))
    try:
        _require_right(setting, reports)
    except _RefusedState as error:
        return Outcome(REFUSED, str(error))
    except AssertionError as error:
        return Outcome(WRONG, str(error) or "assertion")
    except Exception:
        return Outcome(WRONG, traceback.format_exc())
    return Outcome(RIGHT)


#: An error's class and the argument that it names.
_LINE = re.compile(r"\w+: \w*")


def without_numbers(text: str) -> str:
    return re.sub(r"(ranks? )?\d+(?:(?:, | and )\d+)*", "#", text)


def _refusal(errors: list[str], ranks: int) -> Outcome:
    if len(errors) < ranks:
        return Outcome(WRONG, f"{len(errors)} of {ranks} ranks raised: {errors[0]}")
    if any("\n" in each for each in errors):
        return Outcome(WRONG, next(each for each in errors if "\n" in each))
    if len({_LINE.match(each)[0] for each in errors}) > 1:  # a mesh's lines name their own ranks and stages
        return Outcome(WRONG, "ranks have different errors: " + " | ".join(sorted({*errors})))
    return Outcome(REFUSED, errors[0])


def _require_right(setting: Setting, reports: list[Any]) -> None:
    """Raise AssertionError where ranks differ from each other or from one rank's training."""
    first = reports[0]
    for rank, each in enumerate(reports):
        different = [name for name in each["bits"] if each["bits"][name] != first["bits"].get(name, each["bits"][name])]
        assert not different, f"rank {rank} has other bits than rank 0 in {different[0]}"
    if setting["edits"] == "parameters" and setting["reduction"] not in POLICIES:  # outer steps follow
        most = max(float(np.abs(each).max()) for name, each in first["state"].items() if name in first["bits"])
        assert most <= 1.001 * CLAMP, f"a parameter is {most:g}, clamped to {CLAMP}"
    bound = _bound_of(setting)
    alone, other = _alone(setting, first)
    found = first["state"] if other is None else other.model.state_dict()
    _require_close(found, alone.model.state_dict(), alone.initial, bound)
    if torch_alone is not None and torch_alone.follows(setting):
        _require_close(found, torch_alone.trained(setting, alone.initial, alone.shares), alone.initial, bound)
    begin = first["segments"][0].first if other is None else 0
    for each in reports:
        _require_close_losses(setting, each, "losses", alone.losses, begin, bound)
        if each["replica"] == 0 or setting["norm"] == "layer":  # others have running statistics of their own
            _require_close_losses(setting, each, "evaluations", alone.evaluations, begin, bound)
        norms = [norm for norm in each["norms"] if np.isfinite(norm)]  # not of a step that is skipped
        own = alone.norms[each["replica"]]
        expected = own[: len(norms)] if other is not None else own[len(own) - len(norms) :]
        assert np.allclose(norms, expected, rtol=max(1e-4, bound)), f"norms {norms}, one rank has {expected}"


def _bound_of(setting: Setting) -> float:
    bounds = {level: _BOUNDS.get(level, BOUND) for level in setting.items()}
    compression = "compression", setting["compression"]
    if setting["optimizer"] == "rmsprop" and bounds[compression] > BOUND:
        bounds[compression] = min(_RMSPROP * bounds[compression], _RMSPROP_MOST)
    if bounds.pop(("network", "resnet"), None) is None:
        return max(*bounds.values(), sum(bound for bound in bounds.values() if bound >= _COARSE))
    coarse = sum(bound >= _COARSE for bound in bounds.values())
    return (_BOUNDS["network", "resnet"], *_COARSE_RESNET)[min(coarse, 2)]


def _require_close_losses(
    setting: Setting, report: dict[str, Any], kind: str, losses: list[list[float | None]], begin: int, bound: float
) -> None:
    """Raise AssertionError unless a rank's losses from step `begin` on are those of its replica on one rank."""
    for step, loss in enumerate(report[kind], begin):
        if kind == "losses" and setting["scaler"] == "overflow" and step == OVERFLOW:
            continue
        expected = losses[step][report["replica"]]
        assert (loss is None) == (expected is None), f"step {step}: {kind} {loss}, one rank has {expected}"
        if loss is not None and expected is not None:
            is_close = abs(loss - expected) <= max(1e-4, bound * 0.1) * max(1.0, abs(expected))
            assert is_close, f"step {step}: {kind} {loss} of replica {report['replica']}, one rank has {expected}"


def _alone(setting: Setting, first: dict[str, Any]) -> tuple[Alone, Alone | None]:
    """Return one rank's training, and the one that has gone on from the ranks' checkpoint."""
    segments, stop, other = first["segments"], steps_of(setting), None
    alone = Alone(setting) if segments[0].first == 0 else _before_resuming(setting)
    shares = [each for segment in segments for each in segment.shares]
    for step in range(segments[0].first, stop):
        for segment in segments:
            if segment.first == step:
                alone.draw_as(segment.streams)
        if first["kept"] is not None and step == RESUMED:
            other = Alone(setting)
            other.draw_as(alone.stream_states())
            try:
                other.load(*(first["kept"][name] for name in ("model", "optimizer", "rate")))
            except ClcommError as error:
                raise _RefusedState(f"{type(error).__name__}: {error}") from error
        place = step - segments[0].first
        rows = shares[place] if place < len(shares) else shares_of(setting, step)
        alone.step(step, rows)
        if other is not None:
            other.step(step, rows)
    return alone, other


def _require_close(found, expected, initial, bound: float) -> None:
    assert list(found) == list(expected), f"names {list(found)}, expected {list(expected)}"
    moved = {name: _norm(expected[name], initial[name]) for name in expected}
    total = np.sqrt(sum(each**2 for name, each in moved.items() if "running" not in name and "num_b" not in name))
    worst = ("", 0.0)
    for name in expected:
        allowed = max(moved[name], _LEAST_SHARE * total, 1e-6)
        apart = _norm(found[name], expected[name])
        assert np.isfinite(apart), f"{name} is not finite"
        if apart / allowed > worst[1]:
            worst = (name, apart / allowed)
    assert worst[1] <= bound, f"{worst[0]} is {worst[1]:.1e} of its movement from one rank's, bound {bound:.0e}"


def _norm(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))
