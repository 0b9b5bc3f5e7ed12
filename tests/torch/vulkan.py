"""Five nets on PyTorch's Vulkan device, on Mesa's software driver: as on the CPU, with equal replicas, on 1 to 4 ranks.

    python -m tests.torch.vulkan FOLDER

gets Debian's packages of the driver into a folder, which has PyPI's `torchvulkan` (`make vulkan` does both), and starts
the ranks. Nothing is installed into the system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.launch import ROOT, clean_environment, mpiexec

RANKS, STEPS, RATE = (1, 2, 3, 4), 4, 0.05
DRIVER = "mesa-vulkan-drivers"
#: Beginnings of its libraries' names: what it depends on otherwise, Python's process has already.
NEEDED = "vulkan|drm|elf|expat|llvm|wayland|x|z|edit|tinfo|bsd|md|icu|ffi|lzma"
#: A mean of this rank's and all other ranks' gradients, in float32, and of kernels that add in other orders.
TOLERANCE = 1e-5


def main(folder: Path) -> None:
    """Run the ranks; AssertionError where a net differs."""
    libraries = fetch(folder)
    (driver,) = libraries.glob("libvulkan_lvp.so")
    icd = folder / "driver.json"
    icd.write_text(json.dumps({"file_format_version": "1.0.0",
                               "ICD": {"library_path": str(driver), "api_version": "1.1.0"}}))  # fmt: skip
    paths = os.pathsep.join([str(ROOT), str(folder / "python")])
    environment = clean_environment(
        LD_LIBRARY_PATH=str(libraries), VK_DRIVER_FILES=str(icd), VK_ICD_FILENAMES=str(icd), LP_NUM_THREADS="1",
        OMP_NUM_THREADS="1", PYTHONPATH=paths,
    )  # fmt: skip
    for ranks in RANKS:
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "tests.torch.vulkan"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


def fetch(folder: Path) -> Path:
    """Unpack the driver and what it needs, once; return the folder of libraries."""
    system = folder / "system"
    if not system.exists():
        said = subprocess.run(
            ["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks",
             "--no-replaces", "--no-enhances", DRIVER], capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        kept = re.findall(rf"^lib(?:{NEEDED})[\w.+-]*$", said, re.MULTILINE)
        fresh, packages = folder / "fresh", folder / "packages"
        packages.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "-qq", "download", DRIVER, *sorted(set(kept))], cwd=packages, check=True)
        for each in packages.glob("*.deb"):
            subprocess.run(["dpkg", "-x", each, fresh], check=True)
        fresh.rename(system)
    return next(system.glob("usr/lib/*-linux-gnu"))


def nets():
    """Return five nets of different kinds, each with its input's shape."""
    from torch import nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            weights = (self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5).softmax(-1)
            return self.out(weights @ self.value(x)).mean(1)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return x + self.second(self.first(x).relu())

    return {
        "mlp": (nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), (12,)),
        "convolutions": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), (1, 8, 8)),
        "residual": (nn.Sequential(Residual(), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5)), (3, 6, 6)),
        "normed": (nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 5)), (12,)),
        "attention": (Attention(), (6, 8)),
    }


def rank() -> None:
    """Train each net on Vulkan and on the CPU, and on ranks of both, and compare."""
    import torch
    import torch.distributed as dist
    import torchvulkan  # noqa: F401 - brings the device
    from torch.nn.parallel import DistributedDataParallel as DDP

    import clcomm.torch

    dist.init_process_group("clcomm")
    own, comm = dist.get_rank(), clcomm.torch.communicator()

    def trained(name: str, device: str) -> torch.Tensor:
        torch.manual_seed(0)
        net, shape = nets()[name]
        model = DDP(net.to(device))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs = torch.randn(4, *shape, generator=torch.Generator().manual_seed(100 * own + step))
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
        return torch.cat([each.detach().cpu().reshape(-1) for each in net.parameters()])

    for name in nets():
        before = copies(comm)
        found = trained(name, "vulkan")
        packed = copies(comm) - before
        off = float((found - trained(name, "cpu")).abs().max())
        hashes = set(comm.all_gather_object(hashlib.sha256(found.numpy().tobytes()).hexdigest()))
        if own == 0:
            print(f"{comm.size} ranks, {name}: {len(hashes)} hash, {off:.1e} from the CPU, {packed} buckets copied")
        assert len(hashes) == 1 and off < TOLERANCE and (packed >= STEPS or comm.size == 1), (hashes, off, packed)
    trained("mlp", "cpu" if own % 2 else "vulkan")  # rank 0 says that they differ
    dist.destroy_process_group()


def copies(comm) -> int:
    """Return how many buckets were copied from the device."""
    phases = comm.stats.as_dict()["phases"]
    return sum(each["calls"] for each in phases if (each["phase"], each["label"]) == ("pack", "gradients"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve()) if len(sys.argv) > 1 else rank()
