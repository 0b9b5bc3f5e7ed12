"""The private names of PyTorch that this package uses; each is looked up by the module that imports it from here.

    from clcomm.comm.tensors.private_torch import storage_use_count

raises ArgumentError, with PyTorch's version, where a release has no such name. A release may also give one another
meaning, which the tests on backend "clcomm" find: pyproject.toml's extra `torch` has the versions that they ran with.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch

from clcomm.base.errors import ArgumentError, pip_install

#: Names here, their places in PyTorch, and their uses in this package.
NAMES = {
    "current_backward": ("torch._C._current_graph_task_id", "tell whether a backward runs"),
    "queue_callback": ("torch.autograd.Variable._execution_engine.queue_callback", "act when a backward has ended"),
    "completed_future": ("torch._C.fork", "make a future that C++ can read"),
    "storage_use_count": ("torch._C._storage_Use_Count", "count what uses a tensor's memory"),
    "tensor_use_count": ("torch.Tensor._use_count", "count what uses a tensor"),
    "storage_address": ("torch.UntypedStorage._cdata", "know a storage again"),
    "storage_of_address": ("torch.UntypedStorage._new_with_weak_ptr", "find a storage again"),
    "share_storage": ("torch.UntypedStorage._share_fd_cpu_", "move a tensor to shared memory"),
    "WeakStorage": ("torch.multiprocessing.reductions.StorageWeakRef", "keep no tensor alive"),
    "private_backend_name": ("torch._C._get_privateuse1_backend_name", "know another library's device"),
    "FrameAction": ("torch._C._dynamo.eval_frame._FrameAction", "keep torch.compile from tracing collectives"),
    "FrameStrategy": ("torch._C._dynamo.eval_frame._FrameExecStrategy", "keep torch.compile from tracing collectives"),
    "set_frame_strategy": (
        "torch._C._dynamo.eval_frame.set_code_exec_strategy", "keep torch.compile from tracing collectives",
    ),
    "backend_plugins": ("torch.distributed.Backend._plugins", "register the backend once"),
    "default_backends": ("torch.distributed.Backend.default_device_backend_map", "serve groups of no named backend"),
    "rendezvous_handlers": ("torch.distributed.rendezvous._rendezvous_handlers", "let env:// find the ranks"),
    "register_device": ("torch.distributed.ProcessGroup._register_backend", "serve a device's tensors"),
    "set_default_backend": ("torch.distributed.ProcessGroup._set_default_backend", "serve all devices by one group"),
    "compare_shapes": ("torch.distributed.utils._verify_param_shape_across_processes", "compare DDP's models"),
    "run_joined": (
        "torch.nn.parallel.DistributedDataParallel._match_all_reduce_for_bwd_pass", "serve ranks that have joined",
    ),
    "notify_join": ("torch.distributed.algorithms.join.Join.notify_join_context", "serve ranks that have not joined"),
}  # fmt: skip


def is_there(name: str) -> bool:
    return _found(NAMES[name][0]) is not None


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, purpose = NAMES[name]
    found = _found(path)
    if found is None:
        from clcomm.comm.watch.exits import hook_job

        hook_job()  # so that the error is one line: the program is still importing modules
        raise ArgumentError(
            f"PyTorch {torch.__version__}: expected {path}, to {purpose}, but this version has none; "
            f"{pip_install('torch')} brings one that was tested"
        )
    globals()[name] = found = found.__get__ if isinstance(found, types.GetSetDescriptorType) else found
    return found


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if module in sys.modules:  # whose name in its package may be a function's
        return getattr(sys.modules[module], name, None)
    rest, found = path.removeprefix("torch."), torch
    try:
        return functools.reduce(getattr, rest.split("."), found)
    except AttributeError:
        return None
