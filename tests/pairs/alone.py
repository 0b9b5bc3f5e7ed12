"""What one rank trains to with the samples of all, which every setting has to equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clcomm import optim
from clcomm.base.flat_space.parameters import PRECISIONS
from clcomm.engine import Module, no_grad
from clcomm.engine.random_stream import RandomStream
from clcomm.sync.clipping import clip_coefficient
from tests.helpers import cpu_device
from tests.pairs.course import (
    CLAMP,
    FACTOR,
    FALL,
    GRADIENT_CLAMP,
    LOCAL_STEPS,
    MAX_NORM,
    OVERFLOW,
    THAWED,
    Shares,
    micro_batches_of,
    parts_of,
    samples_of,
    steps_of,
    weights_of,
)
from tests.pairs.factors import LOCAL, Setting, mesh_of
from tests.pairs.networks import Replicas, Slice, model_of, network_of, tensor

Gradients = dict[str, np.ndarray]


#: Class, share of the network's learning rate and other arguments of an optimizer. A large eps amplifies no rounding of
#: small gradients.
_OPTIMIZERS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "sgd": ("SGD", 1, {}),
    "nesterov": ("SGD", 1, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", 0.2, {"eps": 1e-2, "weight_decay": 0.01}),
    "adamw": ("AdamW", 0.2, {"eps": 1e-2, "amsgrad": True}),
    "rmsprop": ("RMSProp", 0.2, {"eps": 1e-2, "momentum": 0.5}),
    "adagrad": ("Adagrad", 0.2, {"eps": 1e-2, "lr_decay": 0.1}),
    "adadelta": ("Adadelta", 1, {"eps": 1e-2, "weight_decay": 0.01}),
    "radam": ("RAdam", 1, {"eps": 1e-2}),
}


def optimizer_of(setting: Setting, params: Any, library: Any = optim) -> Any:
    """Return a setting's optimizer of a library; params: a Module, or a list without groups of its own.

    With groups, biases and the like learn at twice the rate, with another weight decay.
    """
    name, share, arguments = _OPTIMIZERS[setting["optimizer"]]
    lr = network_of(setting).lr * share
    if setting["groups"] == "on":
        everything = params.parameters() if isinstance(params, Module) else params
        parts = {is_vector: [] for is_vector in (False, True)}
        for each in everything:
            parts[len(each.shape) == 1].append(each)
        own = {False: {}, True: {"lr": 2 * lr, "weight_decay": 0.02}}
        params = [{"params": part, **own[is_vector]} for is_vector, part in parts.items() if part]
    return getattr(library, name)(params, lr, **arguments)


def rate_of(setting: Setting, optimizer: Any, library: Any = optim) -> Any:
    """Return the scheduler of a setting's learning rate."""
    return library.lr_scheduler.ExponentialLR(optimizer, FALL if setting["rate"] == "falls" else 1.0)


def thaw(model: Module) -> None:
    """Train all parameters from now on."""
    for parameter in model.parameters():
        parameter.requires_grad = True


def scale_gradient(parameter: Any) -> None:
    parameter.grad.mul_(FACTOR)


def edit_gradients(setting: Setting, parameters: Iterable[Any]) -> None:
    """Change the averaged gradients; or where ranks divide them do what `scale_gradient` has done on each."""
    for parameter in {id(p): p for p in parameters if p.grad is not None}.values():
        if int(setting["zero"]) >= 2:
            scale_gradient(parameter)
        else:
            parameter.grad.clamp_(-GRADIENT_CLAMP, GRADIENT_CLAMP)


def edit_parameters(model: Module) -> None:
    with no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-CLAMP, CLAMP)


class Outer:
    """The outer steps of replicas that take steps of their own, by the papers' formulas in float64; see policies.md."""

    LR, MOMENTUM, ALPHA = 0.7, 0.9, 0.5

    def __init__(self, models: list[Module]):
        named = [model.named_parameters() for model in models]
        self._models = [{name: each for name, each in own if each.requires_grad} for own in named]
        self._anchor = self._mean()
        self._velocity = {name: 0 * values for name, values in self._anchor.items()}
        self._sent: Gradients | None = None

    def after_step(self, kind: str, steps: int) -> None:
        is_due = steps % LOCAL_STEPS == 0
        if kind == "streaming":
            if self._sent is not None:  # sent a step ago
                self._outer_step(self._sent)
                self._write(self.ALPHA)
            self._sent = self._moved() if is_due else None
        elif is_due and kind == "diloco":
            self._outer_step(self._moved())
            self._write(0.0)
        elif is_due:
            self._anchor = self._mean()
            self._write(0.0)

    def align(self) -> None:
        """Give all replicas the parameters of an outer step that is on its way."""
        if self._sent is not None:
            self._outer_step(self._sent)
            self._sent = None
            self._write(0.0)

    def _mean(self) -> Gradients:
        return {name: np.mean([own[name].numpy() for own in self._models], 0, np.float64) for name in self._models[0]}

    def _moved(self) -> Gradients:
        """Return how far the replicas have come from the anchor, on average."""
        return {name: self._anchor[name] - mean for name, mean in self._mean().items()}

    def _outer_step(self, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self._velocity[name] = self.MOMENTUM * self._velocity[name] + gradient
            self._anchor[name] = self._anchor[name] - self.LR * (gradient + self.MOMENTUM * self._velocity[name])

    def _write(self, alpha: float) -> None:
        """Give each replica the anchor, with the share `alpha` of its own parameters."""
        for own in self._models:
            for name, parameter in own.items():
                mixed = alpha * parameter.numpy() + (1 - alpha) * self._anchor[name]
                parameter.copy_from(mixed.astype(np.float32))


class Alone:
    """A setting's training on one rank, or where ranks take steps of their own one rank's simulation of all.

    Attributes:
        losses: of each step the replicas' mean losses, None of one without a batch.
        evaluations: these after the step, without dropout and the like.
        norms: of each step the gradients' norm, where it is clipped, by replica.
        shares: each step's rows.
    """

    def __init__(self, setting: Setting):
        self.setting, self.network, self.replicas = setting, network_of(setting), Replicas()
        self.is_local = setting["reduction"] in LOCAL
        count = mesh_of(setting).dp if self.is_local else 1
        self.models = [model_of(setting, self.replicas) for _ in range(count)]
        self.initial = self.models[0].state_dict()
        if setting["precision"] != "float32":
            for model in self.models:
                model.flat_space().store_in(PRECISIONS[setting["precision"]])
        self.optimizers = [optimizer_of(setting, model) for model in self.models]
        self.rates = [rate_of(setting, optimizer) for optimizer in self.optimizers]
        self.losses: list[list[float | None]] = []
        self.evaluations: list[list[float | None]] = []
        own: list[list[float]] = [[] for _ in self.models]
        self.norms = own if self.is_local else own * mesh_of(setting).dp
        self.shares: list[Shares] = []
        self.outer = Outer(self.models)

    @property
    def model(self) -> Module:
        return self.models[0]

    def draw_as(self, states: Mapping[int, list[np.ndarray]]) -> None:
        """Let dropout draw each replica's numbers; states: of its tensor-parallel ranks' streams."""
        self.replicas.streams = {replica: [_stream(each) for each in own] for replica, own in states.items()}

    def stream_states(self) -> dict[int, list[np.ndarray]]:
        return {replica: [each.state() for each in own] for replica, own in self.replicas.streams.items()}

    def load(self, state: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray], rate: Mapping) -> None:
        for own, own_rate, model in zip(self.optimizers, self.rates, self.models, strict=True):
            own.load_state_dict(optimizer)
            own_rate.load_state_dict(rate)
            model.load_state_dict(state)
        self.outer = Outer(self.models)

    def step(self, number: int, shares: Shares) -> None:
        """Train on a step's samples of all replicas."""
        self.losses.append([None] * len(shares))
        self.shares.append(shares)
        if number == THAWED and self.setting["frozen"] == "thawed":
            self.outer.align()
            for model in self.models:
                thaw(model)
            self.outer = Outer(self.models)
        if self.is_local:
            self._local_step(number, shares)
        else:
            self._joint_step(number, shares)
        if self.setting["evaluation"] == "on":
            self.evaluations.append([self._evaluated(number, replica, rows) for replica, rows in enumerate(shares)])
        if number + 1 == steps_of(self.setting):
            self.outer.align()

    def _evaluated(self, number: int, replica: int, rows: tuple[int, int] | None) -> float | None:
        if rows is None:
            return None
        model, (x, y) = self.models[replica if self.is_local else 0], samples_of(self.setting, number, rows)
        with no_grad(), self.replicas.computing([Slice(replica, 0, len(x))]):
            model.eval()
            found = self.network.loss(model(tensor(x)), tensor(y)).item()
            model.train()
        return found

    def _joint_step(self, number: int, shares: Shares) -> None:
        found = self._gradients(number, shares)
        for name, parameter in self.model.named_parameters():
            if name in found:
                parameter.grad = tensor(found[name])
        self._finish(number, self.model, self.optimizers[0], self.norms[0])

    def _local_step(self, number: int, shares: Shares) -> None:
        for replica, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            self._backward(model, number, {replica: (shares[replica], 1.0)})
            self._finish(number, model, optimizer, self.norms[replica])
        self.outer.after_step(self.setting["reduction"], number + 1)

    def _gradients(self, number: int, shares: Shares) -> Gradients:
        """Return the combination of the replicas' gradients."""
        weights = weights_of(self.setting, shares)
        active = {r: (rows, weights[r]) for r, rows in enumerate(shares) if rows is not None}
        if self.setting["reduction"] == "adasum":
            own = [self._backward(self.model, number, {r: (rows, 1.0)}) for r, (rows, _) in active.items()]
            found = {name: gradient for each in own for name, gradient in each.items()}
            return {name: _adasum([each.get(name, 0 * found[name]) for each in own]) for name in found}
        if self._is_joint():
            return self._backward(self.model, number, active)
        sums: Gradients = {}
        for replica, (rows, weight) in active.items():
            for name, gradient in self._backward(self.model, number, {replica: (rows, weight)}).items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        return sums

    def _is_joint(self) -> bool:
        """Return whether all replicas' samples are one batch: unless batch norm compares those of each replica."""
        return self.setting["norm"] != "batch"

    def _backward(self, model: Module, number: int, active: dict) -> Gradients:
        """Return the gradients of some replicas' samples in one batch; active: rows and weight by replica."""
        model.zero_grad()
        pieces = {replica: pieces_of(self.setting, rows) for replica, (rows, _) in active.items()}
        losses = dict.fromkeys(active, 0.0)
        for place in range(len(next(iter(pieces.values())))):
            arrays, slices, total = [], [], 0
            for replica in active:
                (start, stop), _ = pieces[replica][place]
                arrays.append(samples_of(self.setting, number, (start, stop)))
                slices.append(Slice(replica, total, total + stop - start))
                total += stop - start
            x, y = (np.concatenate(each) for each in zip(*arrays, strict=True))
            kept = [each.numpy() for each in model.buffers()]
            with self.replicas.computing(slices):
                logits = model(tensor(x))
                own = {each.replica: self._loss(logits, y, each) for each in slices}
                sum_of = None
                for replica, loss in own.items():
                    weighed = loss * (active[replica][1] * pieces[replica][place][1])
                    sum_of = weighed if sum_of is None else sum_of + weighed
                    losses[replica] += loss.item() * pieces[replica][place][1]
                sum_of.backward()
            if slices[0].replica != 0:  # rank 0's buffers count
                for buffer, values in zip(model.buffers(), kept, strict=True):
                    buffer.copy_from(values)
        for replica, loss in losses.items():
            self.losses[-1][replica] = loss
        found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
        if not self.is_local:
            model.zero_grad()
        return found

    def _loss(self, logits, y, rows: Slice):
        return self.network.loss(logits[rows.start : rows.stop], tensor(y[rows.start : rows.stop]))

    def _finish(self, number: int, model: Module, optimizer: optim.Optimizer, norms: list[float]) -> None:
        """Take a step with the model's gradients, unless one has overflowed."""
        if self.setting["edits"] == "gradients":
            edit_gradients(self.setting, model.parameters())
        if self.setting["scaler"] != "overflow" or number != OVERFLOW:
            if self.setting["clip"] != "off":
                self._clip(model, norms)
            optimizer.step()
        if self.setting["edits"] == "parameters":
            edit_parameters(model)
        self.rates[self.optimizers.index(optimizer)].step()
        optimizer.zero_grad()

    def _clip(self, model: Module, norms: list[float]) -> None:
        gradients = [each for each in {id(p): p for p in model.parameters()}.values() if each.grad is not None]
        values = [each.grad.numpy() for each in gradients]
        norm = float(np.sqrt(sum(float(np.square(each.astype(np.float64)).sum()) for each in values)))
        norms.append(norm)
        for parameter, each in zip(gradients, values, strict=True):
            parameter.grad = tensor((each * clip_coefficient(norm, MAX_NORM)).astype(np.float32))


def pieces_of(setting: Setting, rows: tuple[int, int]) -> list[tuple[tuple[int, int], float]]:
    """Return the rows that go through the model at once, micro-batches included, and their weights."""
    found, cuts = [], micro_batches_of(setting)
    for part in parts_of(setting, rows[1] - rows[0]):
        size = (part.stop - part.start) // cuts
        for place in range(cuts):
            start = rows[0] + part.start + place * size
            found.append(((start, start + size), part.weight / cuts))
    return found


def _adasum(vectors: list[np.ndarray]) -> np.ndarray:
    """Return the adaptive sum in float64; see clcomm.sync.hooks for its order."""
    vectors = [each.astype(np.float64) for each in vectors]
    paired = 1 << (len(vectors).bit_length() - 1)
    for place in range(len(vectors) - paired):
        vectors[place] = _pair(vectors[place], vectors[paired + place])
    vectors = vectors[:paired]
    while len(vectors) > 1:
        vectors = [_pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0].astype(np.float32)


def _pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    dot, first, second = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return a * (1 - dot / (2 * first) if first else 1) + b * (1 - dot / (2 * second) if second else 1)


def _stream(state: np.ndarray) -> RandomStream:
    stream = RandomStream(cpu_device("cpu"))
    stream.load(state)
    return stream
