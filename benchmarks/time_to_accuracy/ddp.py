"""PyTorch DDP's side over gloo: one process a rank, placed by RANK, WORLD_SIZE and STORE."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.time_to_accuracy import course
from training.data.open_data import open_data
from training.engines import torch_engine


def main() -> None:
    options = course.worker_options()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size
    )
    splits = open_data(options.data, None, lambda line: None)
    loader, test_loader = course.loaders(options, splits, rank, size)
    train = splits.train
    module = torch_engine.make_module(options.model, train.image_shape, train.classes, course.SEED)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=course.LR, momentum=course.MOMENTUM)

    def step(images: np.ndarray, labels: np.ndarray, lr: float) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels).long())
        loss.backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()

    def accuracy() -> float:
        with torch.no_grad():
            correct = sum(
                course.count_correct(module(torch.from_numpy(images)).numpy(), labels) for images, labels in test_loader
            )
        total = torch.tensor([correct], dtype=torch.float64)
        torch.distributed.all_reduce(total)
        return float(total[0]) / course.test_size(splits)

    result = course.train(options, loader, step, accuracy)
    if rank == 0:
        course.report(result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
