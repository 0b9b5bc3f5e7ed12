"""accelerate on backend "clcomm": docs/pytorch-ddp.md shows the lines that differ."""

import torch
import torch.distributed as dist
from accelerate import Accelerator

import clcomm.torch  # noqa: F401 - registers the backend

dist.init_process_group("clcomm")
accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for inputs, labels in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()

losses = accelerator.gather(loss.detach().reshape(1))
accelerator.print(f"{accelerator.num_processes} processes, losses {losses.tolist()}")
dist.destroy_process_group()
