"""Idea: ranks laid out along named axes; along "tp" they divide a model's layers, along "dp" its batches.

    mpiexec -n 2 python -m examples.one_idea.mesh          # or any other even number of ranks

Look at: each rank has half of every layer's weights, and the outputs are those of the whole model.
"""

import numpy as np

from clcomm import Communicator, DistributedDataParallel, Mesh
from clcomm.engine import Generator, Linear, ReLU, Sequential, Tensor
from clcomm.parallel import ColumnParallel, RowParallel, parallelize_module


def network() -> Sequential:
    weights = Generator(0)
    return Sequential(Linear(32, 64, rng=weights), ReLU(), Linear(64, 10, rng=weights))


comm = Communicator()
mesh = Mesh(comm, dp=-1, tp=2 if comm.size % 2 == 0 else 1)
model = network()
parallelize_module(model, mesh["tp"], {"0": ColumnParallel(), "2": RowParallel()})
ddp = DistributedDataParallel(model, mesh["dp"])

inputs = np.random.default_rng(mesh["dp"].rank).standard_normal((8, 32), np.float32)  # peers along tp: the same ones
outputs, whole = ddp(Tensor(inputs)), network()(Tensor(inputs))
(outputs * outputs).mean().backward()
ddp.finish_grad_sync()  # the mean along dp; along tp each rank has gradients of its own part

if comm.rank == 0:
    print(mesh)
own = sum(parameter.numel() for parameter in ddp.parameters())
alike = np.allclose(outputs.numpy(), whole.numpy(), rtol=1e-5, atol=1e-6)
print(f"rank {comm.rank} at {mesh.coordinates}: {own} of {sum(p.numel() for p in network().parameters())} parameters; "
      f"outputs of the whole model: {alike}")  # fmt: skip
