"""Idea: when a rank dies the others agree on who is left, and go on.

    mpiexec --with-ft ulfm -n 3 python -m examples.one_idea.elastic          # Open MPI 5

Look at: the last rank is killed at step 10, the others detect it within the next collective, and finish all 20 steps.
With another MPI a lost rank ends the job: see examples.one_idea.restart.
"""

import os
import signal

import numpy as np

from clcomm import Communicator, Synchronizer, run
from clcomm.engine import CrossEntropyLoss, Generator, Linear, Sequential, Tensor
from clcomm.optim import SGD
from clcomm.sync import elastic

STEPS, LOST_AT = 20, 10


def main() -> None:
    comm = Communicator()
    elastic.require_support()
    began_as, victim = comm.rank, comm.size - 1
    model = Sequential(Linear(32, 10, rng=Generator(0)))
    optimizer, loss_fn = SGD(model, lr=0.1), CrossEntropyLoss()
    sync = Synchronizer(comm)
    sync.broadcast_parameters(model)
    random = np.random.default_rng(began_as)
    step = 0
    while step < STEPS:
        if began_as == victim and step == LOST_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            images, labels = random.standard_normal((16, 32), np.float32), random.integers(0, 10, 16)
            loss_fn(model(Tensor(images)), Tensor(labels)).backward()
            sync.sync_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        except Exception as error:
            if not elastic.is_lost_peer(error):
                raise
            comm = elastic.survivors_of(comm)
            root = elastic.newest(comm, step)  # a rank that had completed the interrupted step, if one had
            step = comm.broadcast_object(step, root)
            model.load_state_dict(elastic.send_arrays(comm, model.state_dict(), root))
            optimizer.zero_grad()
            sync = Synchronizer(comm)
            print(f"rank {began_as} goes on as rank {comm.rank} of {comm.size} from step {step}", flush=True)
    sync.check_replicas(model)
    print(f"rank {began_as}: {step} steps, replicas alike on {comm.size} ranks", flush=True)


run(main)
