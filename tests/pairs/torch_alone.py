"""The same training in PyTorch's float64, for the settings of network "layers" that it can follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import functional as F

from tests.pairs.alone import edit_gradients, optimizer_of, pieces_of, rate_of
from tests.pairs.course import CLAMP, MAX_NORM, OVERFLOW, THAWED, Shares, samples_of, weights_of
from tests.pairs.factors import Setting
from tests.pairs.networks import TOKENS, WIDTH, network_of

State = dict[str, torch.Tensor]
#: PyTorch's optimizers, by the names of clcomm's.
_OPTIMIZERS = SimpleNamespace(**vars(torch.optim), RMSProp=torch.optim.RMSprop)


def follows(setting: Setting) -> bool:
    """Return whether this file has what the setting asks for."""
    return (
        setting["network"] == "layers"
        and setting["dropout"] == "off"
        and setting["precision"] == "float32"
        and setting["compression"] == "none"
        and setting["reduction"] in ("mean", "ring", "tree")
        and setting["checkpoint"] in ("none", "same", "rolled back")
    )


def trained(setting: Setting, initial: Mapping[str, np.ndarray], shares: Sequence[Shares]) -> dict[str, np.ndarray]:
    """Return the state after training from `initial` on each step's rows."""
    state = {name: torch.tensor(values, dtype=torch.float64) for name, values in initial.items()}
    if setting["tied"] == "on":
        state["6.weight"] = state["1.weight"]
    frozen = network_of(setting).frozen if setting["frozen"] != "off" else ()
    own = [state[name] for name in initial if "running" not in name and "num_" not in name]
    frozen_ids = {id(state[name]) for name in frozen}
    for each in own:
        each.requires_grad_(id(each) not in frozen_ids)
    parameters = list({id(each): each for each in own}.values())
    optimizer = optimizer_of(setting, parameters, _OPTIMIZERS)
    rate = rate_of(setting, optimizer, _OPTIMIZERS)
    for step, rows in enumerate(shares):
        thaws = setting["frozen"] == "thawed" and step >= THAWED
        for each in own:
            each.requires_grad_(thaws or id(each) not in frozen_ids)
        optimizer.zero_grad(set_to_none=False)
        _backward(setting, state, step, rows)
        trained = [each for each in parameters if each.requires_grad]
        for each in trained:
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
        if setting["edits"] == "gradients":
            edit_gradients(setting, trained)
        if setting["scaler"] != "overflow" or step != OVERFLOW:
            if setting["clip"] != "off":
                torch.nn.utils.clip_grad_norm_(trained, MAX_NORM)
            optimizer.step()
        with torch.no_grad():
            for each in parameters if setting["edits"] == "parameters" else ():
                each.clamp_(-CLAMP, CLAMP)
        rate.step()
    return {name: state[name].detach().numpy() for name in initial}


def _backward(setting: Setting, state: State, step: int, rows: Shares) -> None:
    weights = weights_of(setting, rows)
    active = {r: (pieces_of(setting, own), weights[r]) for r, own in enumerate(rows) if own is not None}
    for place in range(len(next(iter(active.values()))[0])):
        batches, factors, replicas = [], [], []
        for replica, (pieces, weight) in active.items():
            cut, part = pieces[place]
            batches.append([torch.tensor(each) for each in samples_of(setting, step, cut)])
            factors.append(weight * part)
            replicas.append(replica)
        if setting["norm"] == "sync":
            x = torch.cat([x for x, _ in batches]).double()
            sizes = [len(x) for x, _ in batches]
            used = torch.cat(
                [torch.full((size,), float(_uses(setting, r))) for size, r in zip(sizes, replicas, strict=True)]
            )
            parts = _forward(setting, state, x, used, True).split(sizes)
        else:
            parts = [
                _forward(setting, state, x.double(), torch.full((len(x),), float(_uses(setting, r))), r == 0)
                for (x, _), r in zip(batches, replicas, strict=True)
            ]
        losses = [
            factor * F.cross_entropy(each.flatten(0, 1), y.flatten().long())
            for each, (_, y), factor in zip(parts, batches, factors, strict=True)
        ]
        sum(losses).backward()


def _uses(setting: Setting, replica: int) -> bool:
    return {"none": True, "all ranks": False, "some ranks": replica % 2 == 0}[setting["unused"]]


def _forward(setting: Setting, s: State, x: torch.Tensor, used: torch.Tensor, keeps: bool) -> torch.Tensor:
    """x [N, TOKENS, WIDTH] -> logits; used [N]: whether a sample goes through the branch; keeps: running statistics."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), s[f"{name}.weight"], s[f"{name}.bias"])

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, s[f"{name}.weight"], s[f"{name}.bias"])

    x = linear("3", F.relu(linear("1", norm("0", x))))
    if setting["norm"] == "layer":
        x = norm("4", x)
    else:
        mean, var = (s[f"4.running_{each}"] if keeps else torch.zeros(TOKENS).double() for each in ("mean", "var"))
        x = F.batch_norm(x, mean, var, s["4.weight"], s["4.bias"], True)
        if keeps:
            s["4.num_batches_tracked"] += 1
    x = linear("6", torch.tanh(x))
    x = linear("8", torch.tanh(x) * (x * 0.1 + 1))
    x = x + linear("9.linear", x) * used[:, None, None]
    return linear("11", norm("10", x))
