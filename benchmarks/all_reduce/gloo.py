"""PyTorch's all-reduce over gloo, in place."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed

from benchmarks.all_reduce.in_place import place, serve_in_place


def main() -> None:
    directory, rank, ranks = place()
    torch.set_num_threads(1)
    store = f"file://{Path(directory, 'store')}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    serve_in_place(torch.distributed.all_reduce)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
