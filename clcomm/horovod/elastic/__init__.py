"""Training that goes on without lost ranks: Horovod's elastic API, where MPI goes on too (Open MPI under ULFM)."""

from clcomm.horovod.elastic.running import HostsUpdatedInterrupt, run
from clcomm.horovod.elastic.sampler import ElasticSampler
from clcomm.horovod.elastic.state import ObjectState, State, TorchState
from clcomm.horovod.lost_ranks import HorovodInternalError

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
