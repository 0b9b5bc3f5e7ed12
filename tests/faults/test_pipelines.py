"""A rank of a pipeline that dies, leaves or never comes: the job ends, and says what the others waited for."""

from __future__ import annotations

import re

import pytest

from tests.faults.launch import END_S, job

PIPELINE = """
import signal
import numpy as np
from clcomm.engine import CrossEntropyLoss, Linear, Sequential, Tensor
from clcomm.parallel.pipeline import Pipeline

class Odd(Linear):
    def forward(self, x):
        if calls.pop() == 0:
            failing()
            {does}
        return super().forward(x)

def main():
    comm = Communicator(stall_warning_s=0.5, timeout_s=3.0, transport={transport!r})
    pipeline = Pipeline(Sequential(Linear(4, 4), Odd(4, 4), Linear(4, 4)), comm, loss=CrossEntropyLoss(),
                        micro_batches=6)
    x, y = np.zeros((6, 4), np.float32), np.zeros(6, np.int32)
    pipeline.step(x, y)
    comm.rendezvous()
    for step in range(4):
        pipeline.step(x, y)
        calls.append(-1)

calls = [*range(15), *[-1] * 7]  # a call for the shapes, six for the first step; it fails in the second or third
run(main)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize(
    "does",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(3)", "raise ArgumentError('odd: planted')"],
)
def test_a_rank_that_ends_ends_all(tmp_path, does, transport):
    ended = job(tmp_path, PIPELINE.format(does=does, transport=transport))
    assert ended.code != 0
    assert ended.after_failing_s < END_S
    if "raise" in does:
        assert ended.clcomm_lines()[-1] == "clcomm: rank 1: odd: planted"


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_rank_that_never_comes_is_named_with_what_is_missing_from_it(tmp_path, transport):
    ended = job(tmp_path, PIPELINE.format(does="time.sleep(60)", transport=transport), CLCOMM_DUMP_DIR=str(tmp_path))
    assert ended.code == 124
    waits = (
        r"rank 0 has waited [\d.]+ s in recv 'activation gradients of stage 0, micro-batch \d, from rank 1' #\d+,",
        r"rank 2 has waited [\d.]+ s in recv 'activations of stage 1, micro-batch \d, from rank 1' #\d+,",
        r"rank 0 has waited [\d.]+ s in send 'activations of stage 0, micro-batch \d, to rank 1' #\d+,",
    )
    told = [line for line in ended.clcomm_lines() if any(re.search(each, line) for each in waits)]
    assert told, ended.err
    assert all(re.search(r"rank 1 \(in no collective but at \S+job\.py:\d+ in forward", line) for line in told), told
    assert any("the limit is 3 s, the job ends" in line for line in told)


LEAVES = """
import numpy as np
from clcomm.engine import CrossEntropyLoss, Linear, Sequential
from clcomm.parallel.pipeline import Pipeline

def main():
    comm = Communicator(stall_warning_s=0, timeout_s=0, transport={transport!r})
    pipeline = Pipeline(Sequential(*(Linear(4, 4) for _ in range(3))), comm, loss=CrossEntropyLoss(), micro_batches=6)
    x, y = np.zeros((6, 4), np.float32), np.zeros(6, np.int32)
    for step in range(3):
        pipeline.step(x, y)
    if comm.rank == 1:
        failing()
        return
    pipeline.step(x, y)

run(main)
"""


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_a_rank_that_leaves_before_the_others_next_step_ends_all(tmp_path, transport):
    ended = job(tmp_path, LEAVES.format(transport=transport).replace("timeout_s=0", "timeout_s=20"))
    assert ended.code != 0
    assert "left while rank" in ended.err
