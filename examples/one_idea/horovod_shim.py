"""Idea: a script for Horovod runs with one import changed.

    mpiexec -n 2 python -m examples.one_idea.horovod_shim          # pip install 'clcomm[torch]'

Look at: everything below the import is Horovod's own API; all ranks end with the same weights.
"""

import torch

import clcomm.horovod as hvd  # was: import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # other weights on each rank, until rank 0's are broadcast
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for _ in range(50):
    x = torch.randn(64, 20)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # waits for the averaged gradients

weights = hvd.allgather(model.weight.detach())
mean = hvd.allreduce(loss.detach(), name="loss")
print(f"rank {hvd.rank()} of {hvd.size()}: mean loss {mean:.4f}; same weights: {bool((weights == weights[0]).all())}")
