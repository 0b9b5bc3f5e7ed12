"""Training with Horovod's elastic calls and dying ranks, at the places and with the log of `elastic_log.py`.

Places: "data", "forward", "backward", "sync", "commit", "evaluate" and "checkpoint" when the phase of that name begins;
"bucket" when backward has a gradient; "recovery" when the rank goes on without others; "send" when ranks take the
newest state, at first and then.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import clcomm.horovod as hvd
from clcomm.horovod.elastic import state as running
from tests.faults import elastic_log
from tests.faults.elastic_log import at, stamp

STEPS, BATCH, LR, MOMENTUM, EVERY = 60, 4, 0.02, 0.9, 7


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what a rank trains on in a step."""
    return torch.randn(BATCH, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = (
        torch.nn.Linear(6, 300),
        torch.nn.Tanh(),
        torch.nn.Linear(300, 300),
        torch.nn.Tanh(),
        torch.nn.Linear(300, 3),
    )
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - inputs[:, :3].sin()).square().mean()


def expected(sizes: list[int]) -> dict[str, torch.Tensor]:
    """Return the parameters after steps on so many ranks, computed on one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        (sum(loss_of(model, batch(step, rank)) for rank in range(size)) / size).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def main() -> None:
    hvd.init()
    hvd.communicator().bucket_size = 256 << 10
    model = make_model()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: at("bucket"))
    sgd = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    recovered: list[bool] = []
    survivors_of, take_from = running.survivors_of, state.take_from

    def noted_recovery(comm):
        recovered.append(True)
        at("recovery")
        return survivors_of(comm)

    def noted_send(root):
        at("send")
        take_from(root)

    running.survivors_of, state.take_from = noted_recovery, noted_send

    @hvd.elastic.run
    def train(state) -> None:
        while state.step < STEPS:
            if recovered:
                recovered.clear()
                stamp("went on")
            at("data")
            inputs = batch(state.step, hvd.rank())
            optimizer.zero_grad()
            at("forward")
            loss = loss_of(model, inputs)
            at("backward")
            try:
                loss.backward()
                at("sync")
                optimizer.step()
            except Exception as error:
                assert isinstance(error, hvd.elastic.HorovodInternalError), repr(error)
                raise
            elastic_log.step_done(state.step, hvd.size())
            state.step += 1
            at("commit")
            state.commit()
            if state.step % EVERY == 0:
                at("evaluate")
                hvd.allreduce(loss.detach(), name="loss")
                at("checkpoint")
                if hvd.rank() == 0:
                    with tempfile.TemporaryDirectory() as folder:
                        torch.save(model.state_dict(), Path(folder) / "model.pt")
                hvd.barrier()

    train(state)
    elastic_log.ended({name: value.detach().numpy() for name, value in model.named_parameters()})
    os.write(1, f"ended among {hvd.size()}\n".encode())


if __name__ == "__main__":
    main()
