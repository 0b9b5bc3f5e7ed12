"""Mistakes of a beginner's first programs, and a part of the line that each of them is to be told.

A mistake is Python code that runs after PREAMBLE, on every rank, in its own namespace; `comm` are the ranks.
"""

from __future__ import annotations

PREAMBLE = """
import numpy as np
from clcomm import Communicator, Synchronizer, clip_grad_norm
from clcomm.sync.distributed_optimizer import DistributedOptimizer
from clcomm.engine import CrossEntropyLoss, Linear, MSELoss, Parameter, ReLU, Replay, Sequential, Tensor, nn
from clcomm.engine import functional as F
from clcomm.engine.nn import Generator
from clcomm.optim import SGD, Adam
from clcomm.parallel import DistributedDataParallel, Mesh
from clcomm.parallel.loss_scaling import GradScaler
from clcomm.sync.sampler import DistributedSampler

sync = Synchronizer(comm)
model = Sequential(Linear(4, 5, rng=Generator(1)), ReLU(), Linear(5, 3, rng=Generator(2)))
x, labels = Tensor(np.ones((2, 4))), Tensor([0, 2])

def begun():
    sync.broadcast_parameters(model)
"""

NATIVE = [
    # the Communicator
    ("Communicator(bucket_size=0)", "bucket_size: expected"),
    ("Communicator(bucket_size='large')", "bucket_size"),
    ("Communicator(bucket_size='-1MiB')", "bucket_size"),
    ("Communicator(transport='infiniband')", "transport: expected"),
    ("Communicator(comm='world')", "comm"),
    ("comm.all_reduce([1, 2, 3])", "array: expected a NumPy array, got list"),
    ("comm.all_reduce(3.0)", "array: expected a NumPy array, got float"),
    ("comm.all_reduce(model)", "array: expected a NumPy array, got Sequential"),
    ("comm.all_reduce(np.ones(3), 'average')", "op"),
    ("comm.all_reduce(np.array(['a', 'b']))", "array"),
    ("comm.all_reduce(np.ones(3), out=np.ones(2))", "out"),
    ("comm.all_reduce(np.ones(3), out=np.ones(3, np.float32))", "out"),
    ("comm.broadcast(np.ones(3), root=9)", "root"),
    ("comm.broadcast(np.ones(3), root='0')", "root"),
    ("comm.broadcast([1.0], root=0)", "array: expected a NumPy array, got list"),
    ("comm.all_gather((1, 2))", "array: expected a NumPy array, got tuple"),
    ("comm.reduce_scatter([1, 2])", "array: expected a NumPy array, got list"),
    ("comm.bucket_size = -1", "bucket_size"),
    ("other = Communicator(); other.finalize(); other.all_reduce(np.ones(2))", "Communicator"),
    # the Synchronizer
    ("Synchronizer(None)", "comm: expected a Communicator, got NoneType"),
    ("Synchronizer(Communicator)", "comm: expected a Communicator, got Communicator"),
    ("Synchronizer(model)", "comm: expected a Communicator, got Sequential"),
    ("Synchronizer(comm, bucket_size='x')", "bucket_size"),
    ("Synchronizer(comm, first_bucket_size=0)", "bucket_size"),
    ("Synchronizer(comm, overlap='yes')", "overlap"),
    ("Synchronizer(comm, compression='zip')", "compression"),
    ("Synchronizer(comm, compression='topk:2')", "topk"),
    ("Synchronizer(comm, compression='fp16', algorithm='ring')", "algorithm"),
    ("Synchronizer(comm, zero=5)", "zero: expected a stage of ZeRO"),
    ("Synchronizer(comm, zero=2, split_tensors=True)", "split_tensors"),
    ("Synchronizer(comm, precision='int4')", "precision"),
    ("Synchronizer(comm, check_replicas_every=-1)", "check_replicas_every"),
    ("Synchronizer(comm, on_divergence='ignore')", "on_divergence"),
    ("Synchronizer(comm, algorithm='butterfly')", "algorithm"),
    ("Synchronizer(comm, combination='sum')", "combination"),
    ("sync.broadcast_parameters(None)", "model: expected"),
    ("sync.broadcast_parameters(Linear)", "model: expected a model, got the class Linear; make one: Linear(...)"),
    ("sync.broadcast_parameters(model.parameters())", "model: expected"),
    ("sync.broadcast_parameters([np.ones(3)])", "model: expected"),
    ("sync.sync_gradients(None)", "model: expected"),
    ("sync.sync_gradients(Sequential)", "model: expected a model, got the class Sequential"),
    ("sync.broadcast_parameters(model, root=9)", "root"),
    ("sync.register_comm_hook('fp16')", "hook"),
    ("sync.sync_gradients(model, samples=-1)", "samples"),
    ("s = Synchronizer(comm, overlap=True); s.sync_gradients(model, samples=2)", "samples: expected None with overlap"),
    ("s = Synchronizer(comm, combination='adasum'); s.sync_gradients(model, samples=2)", "samples"),
    ("with sync.join(model, print):\n  with sync.join(model, print): pass", "join: expected to be entered once"),
    ("with sync.join(model, print): sync.sync_gradients(model)", "samples: expected this rank's number"),
    ("sync.models.space_of(model.flat_space())", "call broadcast_parameters(model) first"),
    (
        "for p in model.parameters(): p.requires_grad = False\nsync.broadcast_parameters(model)",
        "expected at least one trainable parameter, got none",
    ),
    ("begun(); model[0].weight = Linear(4, 5).weight; sync.sync_gradients(model)", "make a new Synchronizer"),
    ("begun(); model[0].weight.requires_grad = False; sync.sync_gradients(model)", "requires_grad"),
    ("import copy; copy.deepcopy(sync)", "Synchronizer: expected to stay in its process"),
    ("import pickle; pickle.dumps(comm)", "Communicator: expected to stay in its process"),
    # the engine
    ("Linear(0, 3)", "in_features"),
    ("Linear('4', 3)", "in_features"),
    ("Linear(4, -1)", "out_features"),
    ("model(np.ones((2, 4)))", "expected a Tensor, got ndarray"),
    ("model([[1, 2, 3, 4]])", "expected a Tensor, got list"),
    ("model(Tensor(np.ones((2, 5))))", "5"),
    ("model(labels)", "expected a float32 tensor, got int32"),
    ("Tensor('text')", "Tensor: expected numbers"),
    ("Parameter([])", "Parameter: expected one element or more"),
    ("Tensor([2**40])", "integers must fit int32"),
    ("Tensor([1, 2], requires_grad=True)", "requires_grad: expected a float32 tensor"),
    ("x.item()", "item: expected a tensor of one element"),
    ("x.backward()", "backward"),
    ("model(x).backward()", "backward"),
    ("loss = CrossEntropyLoss()(model(x), labels); loss.backward(); loss.backward()", "backward"),
    ("CrossEntropyLoss()(model(x), Tensor([0.0, 2.0]))", "expected int32 targets, got float32"),
    ("CrossEntropyLoss()(model(x), [0.5, 1.5])", "expected integer targets"),
    ("CrossEntropyLoss()(model(x), [0, 3])", "targets must be 0 to 2, got 3"),
    ("CrossEntropyLoss()(model(x), Tensor([0, 3]))", "targets must be 0 to 2, got 3"),
    ("CrossEntropyLoss()(model(x), Tensor([-1, 0]))", "targets must be 0 to 2, got -1"),
    ("y = Tensor(np.array([0, 9], np.int32), copy=False); CrossEntropyLoss()(model(x), y).item()", "0 to 2, got 9"),
    ("CrossEntropyLoss()(model(x), [0, 1, 2])", "expected 2 targets"),
    ("CrossEntropyLoss(reduction='average')(model(x), labels)", "reduction"),
    ("CrossEntropyLoss(label_smoothing=2)(model(x), labels)", "label_smoothing"),
    ("MSELoss()(model(x), Tensor(np.ones((2, 4))))", "two tensors of one shape"),
    ("MSELoss()(model(x), np.ones((2, 3)))", "expected a Tensor, got ndarray"),
    ("nn.Conv2d(3, 8, 0)", "kernel_size"),
    ("nn.Conv2d(3, 8, 3)(Tensor(np.ones((1, 1, 8, 8))))", "conv2d"),
    ("nn.Conv2d(3, 8, 3)(Tensor(np.ones((8, 8))))", "conv2d"),
    ("nn.MaxPool2d(9)(Tensor(np.ones((1, 1, 4, 4))))", "pool"),
    ("nn.Dropout(1.5)", "p"),
    ("nn.BatchNorm2d(3)(Tensor(np.ones((2, 4, 5, 5))))", "BatchNorm2d: expected x of 4 dimensions with 3 channels"),
    ("nn.Embedding(5, 2)(Tensor([5]))", "embedding: expected indices from 0 to 4, got 5"),
    ("nn.Embedding(5, 2)(Tensor([0.5]))", "embedding: expected int32 indices"),
    ("x.reshape(3, 3)", "reshape"),
    ("x @ Tensor(np.ones((3, 2)))", "matmul"),
    ("x + Tensor(np.ones((2, 3)))", "shape"),
    ("x.copy_from(np.ones(3))", "copy_from: expected an array of shape"),
    ("Sequential(Linear, ReLU)", "Sequential"),
    ("Tensor(np.ones(2), 'gpu:99')", "gpu:99"),
    ("Tensor(np.ones(2), 'warp drive')", "warp drive"),
    ("model.load_state_dict({})", "state_dict"),
    ("model.load_state_dict({k: v[:1] for k, v in model.state_dict().items()})", "expected (5, 4), got (1, 4)"),
    ("Replay(lambda: None)()", "Replay: expected at least one Tensor"),
    # optimizers and the rest
    ("SGD(model.parameters, lr=0.1)", "params: expected parameters, got the method parameters; call it"),
    ("SGD(Linear, lr=0.1)", "params: expected a model, got the class Linear"),
    ("SGD(None, lr=0.1)", "params: expected a Module or an iterable of Parameters, got NoneType"),
    ("SGD(3, lr=0.1)", "params: expected a Module or an iterable of Parameters, got int"),
    ("SGD([], lr=0.1)", "param"),
    ("SGD(model, lr=-1)", "lr: expected a number of at least 0"),
    ("SGD(model, lr='fast')", "lr: expected a number of at least 0"),
    ("SGD(model, lr=float('nan'))", "lr: expected a number of at least 0"),
    ("SGD(model, lr=0.1, momentum=-0.5)", "momentum"),
    ("Adam(model, lr=0.1, betas=(2.0, 0.9))", "beta"),
    ("SGD(model, lr=0.1).lr = -1", "lr: expected a number of at least 0"),
    ("SGD(model, lr=0.1).load_state_dict({})", "state_dict"),
    ("DistributedOptimizer('sgd', sync)", "optimizer: expected one of clcomm.optim"),
    ("DistributedOptimizer(SGD(model, lr=0.1), Synchronizer(comm, compression='fp16'))", "without compression"),
    ("clip_grad_norm(sync, model, -1)", "max_norm"),
    ("GradScaler(sync, init_scale=-1)", "scale"),
    ("DistributedDataParallel(model, None)", "comm"),
    ("DistributedDataParallel(Linear, comm)", "model: expected a model, got the class Linear"),
    ("Mesh(comm, dp=7)", "7"),
    ("DistributedSampler(0, 0, 1)", "length"),
    ("DistributedSampler(10, 5, 2)", "rank"),
    ("DistributedSampler('data', 0, 1)", "length"),
]

#: Mistakes that need a second rank to be one.
OF_SEVERAL = [
    ("other = Linear(4, 3, rng=Generator(comm.rank)); sync.sync_gradients(other)", "call broadcast_parameters(model)"),
    ("sync.broadcast_parameters(Linear(4, 3 + comm.rank))", "build the same model on every rank"),
    ("comm.all_reduce(np.ones(3 + comm.rank))", "all_reduce"),
    ("comm.all_reduce(np.ones(3, np.float32 if comm.rank else np.float64))", "all_reduce"),
    ("comm.broadcast(np.ones(3), root=comm.rank)", "broadcast"),
    ("comm.all_reduce(np.ones(3)) if comm.rank else comm.broadcast(np.ones(3))", "all_reduce"),
    ("Synchronizer(comm, zero=1 + comm.rank % 2).sync_gradients(model)", "give every rank the same settings"),
    ("begun(); model[0].weight.copy_from(np.full((5, 4), comm.rank)); sync.sync_gradients(model)",
     "call broadcast_parameters(model)"),
]  # fmt: skip

OF_PYTORCH = [
    ("Synchronizer(None)", "comm: expected a Communicator, got NoneType"),
    ("sync.broadcast_parameters(torch.nn.Linear)", "model: expected a model, got the class Linear"),
    ("sync.broadcast_parameters(net.parameters())", "model: expected"),
    ("sync.broadcast_parameters(torch.ones(3))", "model: expected"),
    ("sync.sync_gradients(torch.nn.ReLU())", "requires_grad"),
    ("comm.all_reduce(net.weight)", "array: expected a tensor in the host's memory that can be shared"),
    ("comm.all_reduce(torch.ones(3, device='meta'))", "array: expected a tensor in the host's memory"),
    ("Synchronizer(comm, precision='bf16').broadcast_parameters(net)", "precision: expected float32"),
    ("SGD(net, lr=0.1)", "param"),
    ("SGD(net.parameters(), lr=0.1)", "param"),
    ("DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), sync)", "expected one of clcomm.optim"),
    ("DistributedDataParallel(net, comm, zero=2)", "zero"),
    ("for p in net.parameters(): p.requires_grad = False\nsync.broadcast_parameters(net)", "requires_grad"),
    ("sync.broadcast_parameters(net); net.weight = torch.nn.Parameter(torch.ones(3, 4)); sync.sync_gradients(net)",
     "make a new Synchronizer"),
    ("sync.broadcast_parameters(torch.nn.LazyLinear(3))", "lazy"),
    ("sync.broadcast_parameters(torch.nn.Linear(4, 3, device='meta'))", "meta"),
    ("model(torch.ones(2, 4))", "expected a Tensor"),
]  # fmt: skip

OF_PYTORCH_AND_SEVERAL = [
    ("torch.manual_seed(comm.rank); sync.sync_gradients(torch.nn.Linear(4, 3))", "call broadcast_parameters(model)"),
    ("sync.broadcast_parameters(torch.nn.Linear(4, 3 + comm.rank))", "build the same model on every rank"),
]
