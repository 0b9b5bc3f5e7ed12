"""Training that goes on without lost ranks: Horovod's elastic API, where MPI goes on too (Open MPI under ULFM)."""

from clcomm.horovod.elastic.state import ElasticSampler, HostsUpdatedInterrupt, ObjectState, State, TorchState, run
from clcomm.horovod.operations import HorovodInternalError

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]
