"""Training that goes on without lost ranks: Horovod's elastic API, where MPI goes on too (Open MPI under ULFM)."""

from clcomm.horovod.elastic.running import HorovodInternalError, HostsUpdatedInterrupt, run
from clcomm.horovod.elastic.sampler import ElasticSampler
from clcomm.horovod.elastic.state import ObjectState, State, TorchState

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
