"""This project's side: `mpiexec -n 4 python -m benchmarks.time_to_accuracy.native`."""

from __future__ import annotations

import numpy as np

from benchmarks.time_to_accuracy import course
from clcomm.comm.communicator import Communicator
from clcomm.comm.watch import run
from clcomm.sync.synchronizer import Synchronizer
from training.data.open_data import open_data
from training.engines.build_together import build_together
from training.engines.parts import Placement, build_parts


def main() -> None:
    options = course.worker_options()
    comm = Communicator()
    splits = open_data(options.data, comm, lambda line: None)
    loader, test_loader = course.loaders(options, splits, comm.rank, comm.size)
    place = Placement(None, comm.local_rank, comm.local_size, comm.cores)
    train = splits.train
    parts = build_parts("native", options.model, train.image_shape, train.classes, course.SEED, place)
    settings = {"momentum": course.MOMENTUM}
    assert parts.opencl is not None and parts.rehearse is not None
    sizes, rehearse = (options.batch_size, course.EVALUATION_BATCH), parts.rehearse
    what = repr((options.model, train.image_shape, train.classes, sizes, settings, comm.size))
    build_together(comm, parts.opencl, lambda: rehearse(sizes, "sgd", course.LR, settings, comm.size, comm.size), what)
    optimizer = parts.make_optimizer("sgd", course.LR, **settings)
    sync = Synchronizer(comm)
    sync.broadcast_parameters(parts.model)

    def step(images: np.ndarray, labels: np.ndarray, lr: float) -> None:
        parts.forward_backward(*parts.prepare(images, labels), 1.0)
        sync.sync_gradients(parts.model)
        optimizer.lr = lr
        optimizer.step()
        optimizer.zero_grad()

    def accuracy() -> float:
        correct = sum(course.count_correct(parts.predict(images), labels) for images, labels in test_loader)
        return float(comm.all_reduce(np.array([correct], np.float64))[0]) / course.test_size(splits)

    result = course.train(options, loader, step, accuracy)
    if comm.rank == 0:
        course.report(result)


if __name__ == "__main__":
    run(main)
