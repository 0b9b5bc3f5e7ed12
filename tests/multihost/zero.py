"""A rank of the test: trains models in every stage of ZeRO on several hosts, and compares with plain data parallelism.

Rank 0 prints as JSON whether all ranks found the same bits, and the bytes that a rank has.
"""

from __future__ import annotations

import json
import sys

from clcomm import Communicator
from tests.caches import use_own_caches
from tests.zero.jobs import STAGES, ZeroJob


def main(models: list[str]) -> None:
    use_own_caches()
    comm = Communicator()
    found: dict[str, list[object]] = {}
    for kind in models:
        plain = ZeroJob(comm, kind, 0).run(4)
        for stage in STAGES:
            job = ZeroJob(comm, kind, stage, bucket_size="4KiB")
            state = job.run(4)
            same = all(state[name].tobytes() == plain[name].tobytes() for name in plain)
            alike = all(comm.all_gather_object(same))
            units = len(job.sync.bucket_plan(job.model))
            found[f"{kind} {stage}"] = [alike, job.model.flat_space().layout.span, units, *job.optimizer.memory()]
    if comm.rank == 0:
        print(json.dumps(found))
    comm.finalize()


if __name__ == "__main__":
    main(sys.argv[1:])
