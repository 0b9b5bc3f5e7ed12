"""Idea: a PyTorch script keeps its DistributedDataParallel; only the backend's name changes.

    mpiexec -n 2 python -m examples.one_idea.torch_ddp          # pip install 'clcomm[torch]'

Look at: two lines differ from a script for gloo, and the gradients' all-reduces are counted.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import clcomm.torch  # line 1: registers the backend

dist.init_process_group("clcomm")  # line 2: was "gloo"
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = torch.randn(20, 1)

losses: list[float] = []
for _ in range(60):
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + len(losses)))
    loss = torch.nn.functional.mse_loss(model(x), x @ truth)
    optimizer.zero_grad()
    loss.backward()  # averages the gradients
    optimizer.step()
    losses.append(loss.item())

print(f"rank {dist.get_rank()} of {dist.get_world_size()}: loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
if dist.get_rank() == 0:
    print(clcomm.torch.communicator().stats.table())
dist.destroy_process_group()
