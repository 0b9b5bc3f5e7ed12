"""Training on two hosts, made of network namespaces: the bits of the documented order, whatever the bucket size."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.faults.matrix import run_case
from tests.faults.pace import Pace
from tests.multihost.cable import Link
from tests.multihost.host_cases import SAMPLE, host_cases
from tests.multihost.two_hosts import ROOT, TwoHosts, environment
from tests.sampling import some
from tests.trace import rules
from tests.zero.jobs import MODELS

HUNG_S = 90


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "total", "expected"),
    [
        ((2, 2), None, [[0, 1], [2, 3]]),
        ((2, 1), None, [[0, 1], [2]]),
        ((1, 3), None, [[0], [1, 2, 3]]),
        ((1, 1), 4, [[0, 2], [1, 3]]),
    ],
    ids=["2+2", "2+1", "1+3", "alternating"],
)
def test_training_has_the_bits_of_the_documented_order(two_hosts: TwoHosts, ranks, total, expected):
    command = two_hosts.command(ranks, ["-m", "mpi4py", "-m", "tests.multihost.train"], total)
    before = two_hosts.bytes_received()
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["hosts"] == expected
    assert found["transports"] == ["hierarchical"]
    assert found["in_documented_order"] == [True] * 5
    assert found["joins"] and found["clips"]
    assert found["in_rank_order_through_mpi"]
    assert found["ranks_agree"]
    # With a host of one rank first, (r0) + (r1 + r2 + r3) differs from rank order as any other does; with it last it is
    # rank order itself: (r0 + r1) + (r2).
    assert found["orders_differ"] == (expected != [[0, 1], [2]])
    gradient_bytes = 4 * (64 * 300 + 300 + 300 * 10 + 10)
    assert two_hosts.bytes_received() - before > 30 * gradient_bytes, "six runs of five steps went by another way"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)], ids=["2+2", "2+1"])
def test_every_stage_of_zero_has_the_bits_of_plain_data_parallelism(two_hosts: TwoHosts, ranks):
    """And divides the parameters between all ranks of all hosts in stage 3; tests/zero has every model on one host."""
    command = two_hosts.command(ranks, ["-m", "mpi4py", "-m", "tests.multihost.zero", *some(MODELS, 1)])
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode == 0, ended.stderr
    for name, (alike, whole, units, parameters, gradients, state, _) in json.loads(ended.stdout).items():
        stage, part = int(name[-1]), whole / sum(ranks) + units * 512
        assert alike, name
        assert state <= 3 * part  # of AMSGrad; whole it would be at least 2 * whole
        assert (gradients <= part) == (stage > 1), name
        assert (parameters <= part) == (stage > 2), name


@pytest.mark.slow
def test_compression_saves_on_the_cable(two_hosts: TwoHosts):
    """Two hosts send each other half of the gradients twice, so each receives as much as the gradients are."""
    command = two_hosts.command((2, 2), ["-m", "tests.multihost.compressed"])
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode == 0, ended.stderr
    shares = json.loads(ended.stdout)
    expected = {"none": 1, "fp16": 0.5, "bf16": 0.5, "int8": 0.254, "powersgd:4": 4 * (512 + 256) / (512 * 256)}
    for scheme, share in expected.items():  # headers and rendezvous come on top, and a step more or less
        assert share * 0.94 <= shares[scheme] <= share * 1.2 + 0.02, shares


def test_another_hosts_clock_is_measured(two_hosts: TwoHosts, tmp_path):
    arguments = ["--data", "synthetic", "--model", "mlp", "--max-steps", "3", "--no-eval", "--quiet", "--trace"]
    command = two_hosts.command((2, 2), ["-m", "examples.mnist", *arguments, str(tmp_path / "trace.json")])
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode == 0, ended.stderr
    ranks = rules.load(tmp_path / "trace.json")["otherData"]["ranks"]
    names = [rank["host"] for rank in ranks]
    assert names[0] == names[1] != names[2] == names[3]
    for rank in ranks:
        for reading in rank["clocks"]:  # both hosts are one machine, so the truth is 0
            assert abs(reading["measured_ns"]) <= reading["measured_uncertainty_ns"]
            assert abs(reading["offset_ns"]) <= reading["uncertainty_ns"]
            assert (reading["uncertainty_ns"] > 0) == (rank["rank"] >= 2)
    for first, second in zip(ranks[2]["clocks"], ranks[3]["clocks"], strict=True):
        assert first["offset_ns"] == second["offset_ns"]  # one clock: the more certain of its ranks' measurements


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (
            (2, 2),
            r"rank 3 \(stopped by SIGSTOP or a debugger, was in no collective but at multihost/late.py:\d+ in main",
        ),
        ((1, 1), r"rank 1 \(no rank on its host answers\)"),
    ],
    ids=["its neighbour answers", "no rank answers"],
)
def test_a_rank_of_the_other_host_that_does_not_come_is_named(two_hosts: TwoHosts, tmp_path, ranks, told):
    command = two_hosts.command(ranks, ["-m", "tests.multihost.late"])
    dumps = {"CLCOMM_DUMP_DIR": str(tmp_path)}
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment(), **dumps}, capture_output=True, text=True, timeout=HUNG_S
    )
    assert ended.returncode == 124, ended.stderr
    waits = r"^clcomm: rank [02] has waited [\d.]+ s in all_reduce 'late' #2 \(sum of 4 float64[^;]*; missing: .*"
    for end in ("; after 2.5 s the job ends$", "; the limit is 2.5 s, the job ends; what each rank did last is in "):
        assert re.search(f"{waits}{told}[^;]*{end}", ended.stderr, re.MULTILINE), ended.stderr
    written = {path.name for path in tmp_path.glob("clcomm-dump-*/rank-*.json")}
    assert written == {f"rank-{rank}.json" for rank in range(sum(ranks) - 1)}, "all but the one that is stopped"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_on_the_other_host_ends_as_it_has_to(two_hosts: TwoHosts, tmp_path, name):
    (case,) = [case for case in host_cases() if case.name == name]
    with Pace() as pace:
        outcome = run_case(case, tmp_path, pace)
    assert outcome.problems == [], outcome.output


def test_a_rank_that_leaves_while_the_other_host_waits_for_it_ends_the_job(two_hosts: TwoHosts):
    command = two_hosts.command((1, 1), ["-m", "tests.multihost.late", "leaves"])
    waits = {"CLCOMM_STALL_WARNING_S": "60", "CLCOMM_TIMEOUT_S": "0"}
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment(), **waits}, capture_output=True, text=True, timeout=HUNG_S
    )
    assert ended.returncode == 1, ended.stderr
    assert "clcomm: rank 1: left while rank 0 waits for it in all_reduce 'late' #2 (" in ended.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("code", [0, 7])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)], ids=["1+1", "2+2"])
def test_a_rank_that_exits_by_itself_ends_the_job_on_both_hosts(two_hosts: TwoHosts, ranks, code):
    """No time-out does it: there is none."""
    command = two_hosts.command(ranks, ["-m", "tests.multihost.late", "exits", str(code)])
    waits = {"CLCOMM_STALL_WARNING_S": "60", "CLCOMM_TIMEOUT_S": "0"}
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment(), **waits}, capture_output=True, text=True, timeout=HUNG_S
    )
    assert ended.returncode != 0, ended.stderr
    told = f"clcomm: rank {sum(ranks) - 1} exited unexpectedly with exit code {code}\n"
    assert ended.stderr.count(told) == ended.stderr.count("clcomm:") == 1, ended.stderr


# --- a cable with a delay and a rate ---


def test_a_cable_has_the_delay_and_the_rate_it_was_made_with(two_hosts: TwoHosts):
    with TwoHosts(Link(delay_ms=15, rate_mbit=100)) as hosts:
        assert hosts.cable.how.startswith("15 ms each way, 100 Mbit/s, by ")
        command = hosts.command((1, 1), ["-m", "tests.multihost.far"])
        ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode == 0, ended.stderr
    least_s = {int(nbytes): seconds for nbytes, seconds in json.loads(ended.stdout).items()}
    assert least_s[8] >= 2 * 0.015
    assert least_s[1 << 20] >= 2 * (0.015 + 8 * (1 << 20) / 100e6)


@pytest.mark.slow
def test_bucket_sizes_are_measured_on_two_hosts_with_a_delay(two_hosts: TwoHosts):
    arguments = ["--hosts", "1", "1", "--delay-ms", "0.2", "--rate-mbit", "1000", "--model", "mlp"]
    quick = ["--windows", "1", "--window-s", "0.001"]
    command = [sys.executable, "-m", "benchmarks.bucket_sizes", *arguments, *quick]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=HUNG_S)
    assert ended.returncode in (0, 1), ended.stderr  # 1: a bar was missed, on a machine that may be busy
    assert "between the hosts: 0.2 ms each way, 1000 Mbit/s, by " in ended.stdout
    assert "mlp: auto to the best of 12 sizes" in ended.stdout
