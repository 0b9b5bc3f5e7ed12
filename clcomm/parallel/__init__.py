"""Ranks laid out along axes, and models that are trained on one of them."""

from clcomm.parallel.data_parallel import DistributedDataParallel
from clcomm.parallel.mesh import DeviceMesh, Mesh

__all__ = ["DeviceMesh", "DistributedDataParallel", "Mesh"]
