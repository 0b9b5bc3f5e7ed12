"""The native engine: tensors, automatic differentiation and modules on OpenCL devices; it knows nothing of ranks.

tensor.py is the face, autograd.py records and runs backward, kernels holds the OpenCL C that program.py builds, nn the
modules, weights other projects' files. Its optimizers are clcomm.optim. Start with tensor.py, then autograd.py.
"""

from clcomm.base.errors import ArgumentError, DeviceError
from clcomm.engine import creation, functional, nn
from clcomm.engine.autograd import Op
from clcomm.engine.device import Device, default_device, set_default_device
from clcomm.engine.flat import FlatSpace
from clcomm.engine.fusion import fused
from clcomm.engine.modes import no_grad
from clcomm.engine.nn import *  # noqa: F403 - the names in its __all__
from clcomm.engine.random_stream import RandomStream
from clcomm.engine.replay import Replay
from clcomm.engine.tensor import Tensor, from_dlpack
from clcomm.engine.timing import measure_overhead

__all__ = [
    *nn.__all__,
    "ArgumentError",
    "Device",
    "DeviceError",
    "FlatSpace",
    "Op",
    "RandomStream",
    "Replay",
    "Tensor",
    "creation",
    "default_device",
    "from_dlpack",
    "functional",
    "fused",
    "measure_overhead",
    "nn",
    "no_grad",
    "set_default_device",
]
