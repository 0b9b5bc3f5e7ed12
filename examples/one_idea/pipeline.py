"""Idea: each rank has some of the layers, and works on one micro-batch while the next rank works on the one before.

    mpiexec -n 2 python -m examples.one_idea.pipeline

Look at: the schedule as a picture ("F2" is the forward of micro-batch 2, "B2" its backward), and the loss, which falls.
"""

import numpy as np
from sklearn.datasets import load_digits

from clcomm import Communicator
from clcomm.engine import CrossEntropyLoss, Generator, Linear, ReLU, Sequential
from clcomm.optim import SGD
from clcomm.parallel.pipeline import Pipeline

images, labels = load_digits(return_X_y=True)
images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)

comm = Communicator()
weights = Generator(0)
layers = [Linear(64, 64, rng=weights), ReLU(), Linear(64, 64, rng=weights), ReLU()]
layers += [Linear(64, 64, rng=weights), ReLU(), Linear(64, 10, rng=weights)]
pipeline = Pipeline(Sequential(*layers), comm, loss=CrossEntropyLoss(), micro_batches=4)
del layers  # the other stages' parameters are freed with their last reference
optimizer = SGD(pipeline.module.parameters(), lr=0.1, momentum=0.9)

losses: list[float] = []
for start in 6 * [*range(0, 1600, 80)]:
    losses.append(pipeline.step(images[start : start + 80], labels[start : start + 80]))
    optimizer.step()
    optimizer.zero_grad()

own = sum(parameter.numel() for parameter in pipeline.module.parameters())
print(f"rank {comm.rank}: stage of {own} parameters, loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")
if comm.rank == 0:
    print(pipeline.schedule.drawing())
