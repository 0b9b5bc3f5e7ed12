"""A run's forecast beside SimGrid's SMPI, which replays the forecast's traffic message by message.

    python -m tests.proofs.forecast run.json --simgrid DIR [--link 100Gbit/s,2us] [--ranks 8 64 256 1024]

DIR is where the packages libsimgrid-dev and libsimgrid3.32 of Debian, and those that they need, were unpacked with
`dpkg -x`; nothing of it is part of clcomm. Plain all-reduces and rings are SMPI's own (rdb, rab_rdb, lr). The
hierarchical one is sends and receives between a host's lanes and their peers; what ranks of a host do in common memory
is time in its trace, as SMPI has no such memory. The simulated network carries what links carry: no TCP window, no
headers, no factors.

    apt-get download libsimgrid-dev libsimgrid3.32 libboost-context1.74.0 libboost-stacktrace1.74.0 libgfortran5 \\
        libquadmath0 libns3.37 libgsl27 libgslcblas0
    for each in *.deb; do dpkg -x $each simgrid; done
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clcomm.base.console.table import TextColumn, TextTable
from clcomm.comm.costs.jobs import HIERARCHICAL, PLAIN, RING, WAYS, Job, Workload, flat_s, forecast
from clcomm.comm.costs.model import Cluster
from clcomm.insight.report.forecasting import cluster_of, parse_link, workload_of
from clcomm.insight.report.recording import read_runs
from clcomm.insight.report.run_costs import Analysis

MOST_DEVIATION = 0.1
STEPS = 1
#: What SMPI calls the algorithms.
_ITS_NAMES = {"doubling": "rdb", "halving": "rab_rdb", RING: "lr"}
_NEUTRAL = (
    "network/model:CM02", "network/TCP-gamma:0", "network/weight-S:0", "network/crosstraffic:0",
    "network/latency-factor:1", "network/bandwidth-factor:1",
)  # fmt: skip
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_FLOPS = 1e9  # of a core in a second
_PLATFORM = """<?xml version="1.0"?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><zone id="all" routing="Full">
<cluster id="hosts" prefix="h" suffix="" radical="0-{last}" speed="1Gf" core="{cores}" sharing_policy="SPLITDUPLEX"
  bw="{bandwidth!r}Bps" lat="{half!r}s" loopback_bw="{memory!r}Bps" loopback_lat="{pause!r}s"/>
</zone></platform>
"""


class Simulator:
    """SMPI in a folder of unpacked packages, whose launcher expects to be installed."""

    def __init__(self, root: Path, folder: Path):
        self._libraries, self._folder = root / _LIBRARIES, folder
        text = (root / "usr/bin/smpirun").read_text()
        self._launcher = folder / "smpirun"
        self._launcher.write_text(text.replace(f"/{_LIBRARIES}", str(self._libraries)))
        self._launcher.chmod(0o755)

    def seconds(self, job: Job, cluster: Cluster, traces: Iterator[str], algorithm: str = "default") -> float:
        """Return the seconds of the ranks' traces, each a text."""
        within = cluster.message_within(job.ranks_per_host)
        (self._folder / "platform.xml").write_text(_PLATFORM.format(
            last=job.hosts - 1, cores=job.ranks_per_host, bandwidth=1 / cluster.link.beta_s_per_byte,
            half=cluster.link.alpha_s / 2, memory=1 / (within.beta_s_per_byte or 1e-12), pause=within.alpha_s,
        ))  # fmt: skip
        hosts = "".join(f"h{rank // job.ranks_per_host}\n" for rank in range(job.ranks))
        (self._folder / "hosts").write_text(hosts)
        names = []
        for rank, text in enumerate(traces):
            names.append(str(self._folder / f"{rank}.trace"))
            Path(names[-1]).write_text(text)
        (self._folder / "traces").write_text("\n".join(names) + "\n")
        settings = [f"--cfg={each}" for each in (*_NEUTRAL, f"smpi/allreduce:{algorithm}")]
        command = [
            str(self._launcher), "-replay", "traces", "-np", str(job.ranks), "-platform", "platform.xml", "-hostfile",
            "hosts", str(self._libraries / "simgrid/smpireplaymain"), "--log=replay.thresh:critical", *settings,
        ]  # fmt: skip
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self._libraries)}
        ended = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True)
        found = re.search(r"Simulation time ([0-9.e+-]+)", ended.stdout + ended.stderr)
        if found is None:
            raise RuntimeError(f"smpirun said {(ended.stdout + ended.stderr)[-300:]!r}")
        return float(found[1])


def trace(rank: int, computes_s: float, lines: list[str]) -> str:
    """Return a rank's trace of STEPS steps."""
    step = [f"compute {computes_s * _FLOPS:.0f}", *lines]
    return "".join(f"{rank} {line}\n" for line in ["init", *STEPS * step, "finalize"])


def ring_lines(rank: int, job: Job, nbytes: int, lanes: int, shared_s: float = 0.0) -> list[str]:
    """Return a rank's messages of a ring of the ranks of its lane: hierarchical with as many as a host has ranks."""
    place, lane = divmod(rank, lanes)
    ranks = job.ranks // lanes
    after, before = ((place + by) % ranks * lanes + lane for by in (1, -1))
    block = round(nbytes / job.ranks)
    return [f"compute {shared_s * _FLOPS:.0f}", *(2 * (ranks - 1) * exchange_lines(rank, after, before, block))]


def exchange_lines(rank: int, target: int, source: int, nbytes: int) -> list[str]:
    return [f"isend {target} 0 {nbytes}", f"recv {source} 0 {nbytes}", f"wait {rank} {target} 0"]


def compare_lines(rank: int, job: Job) -> list[str]:
    """Return how each host learns what all others call, in pairs at growing distance; for a power of two of hosts."""
    host, lane = divmod(rank, job.ranks_per_host)
    peers = [(host ^ 1 << bit) * job.ranks_per_host + lane for bit in range((job.hosts - 1).bit_length())]
    return [line for peer in peers for line in exchange_lines(rank, peer, peer, 8)]


def all_reduce_lines(rank: int, job: Job, nbytes: int, way: str) -> list[str]:
    """Return an all-reduce of SMPI's, which turns to another algorithm for a ring of blocks of less than a byte."""
    return ring_lines(rank, job, nbytes, 1) if way == RING and nbytes < job.ranks else [f"allreduce {nbytes} 0"]


def simulated_s(simulator: Simulator, work: Workload, cluster: Cluster, job: Job, way: str) -> float:
    """Return the simulated seconds of a step's communication."""
    if way == HIERARCHICAL:
        first_s, second_s = (cluster.parts(nbytes, job.ranks, job.hosts).local_s for nbytes in (0, 1))

        def lines(rank: int, nbytes: int) -> list[str]:
            shared_s = first_s + (second_s - first_s) * nbytes
            return [*compare_lines(rank, job), *ring_lines(rank, job, nbytes, job.ranks_per_host, shared_s)]

        traces = (
            trace(rank, work.compute_s, [line for n in work.buckets for line in lines(rank, n)])
            for rank in range(job.ranks)
        )
        return simulator.seconds(job, cluster, traces) / STEPS - work.compute_s
    within, whole_s = cluster.message_within(job.ranks_per_host), 0.0
    for name in (RING,) if way == RING else ("doubling", "halving"):
        others = [each for each in ("doubling", "halving") if each != name and way == PLAIN]

        def seconds(algorithm: str, nbytes: int) -> float:
            return flat_s(algorithm, nbytes, job.ranks, job.ranks_per_host, within, cluster.link)

        own = [n for n in work.buckets if all(seconds(name, n) < seconds(other, n) for other in others)]
        if own:
            traces = (trace(rank, work.compute_s, [line for n in own for line in all_reduce_lines(rank, job, n, way)])
                      for rank in range(job.ranks))  # fmt: skip
            whole_s += simulator.seconds(job, cluster, traces, _ITS_NAMES[name]) / STEPS - work.compute_s
    return whole_s


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.forecast", allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--simgrid", type=Path, required=True, metavar="DIR")
    parser.add_argument("--link", default="100Gbit/s,2us")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args()
    analysis, link, rows, worst = Analysis(read_runs(options.files)), parse_link(options.link), [], 0.0
    work = workload_of(analysis, overlap=False)
    with tempfile.TemporaryDirectory(prefix="clcomm-smpi-") as folder:
        simulator = Simulator(options.simgrid.resolve(), Path(folder))
        for ranks_per_host in options.ranks_per_host:
            cluster = cluster_of(analysis, link, ranks_per_host)
            for ranks in options.ranks:
                for way in options.ways:
                    job = Job(ranks // ranks_per_host, ranks_per_host)
                    found = forecast(work, cluster, job, way)
                    seen_s = simulated_s(simulator, work, cluster, job, way)
                    off = found.communication_s / seen_s - 1
                    worst = max(worst, abs(off))
                    step = found.step_s / (work.compute_s + seen_s) - 1
                    rows.append((way, str(ranks), str(job.hosts), f"{found.communication_s * 1e3:.3f}",
                                 f"{seen_s * 1e3:.3f}", f"{off:+.1%}", f"{step:+.1%}"))  # fmt: skip
                    print(*rows[-1], file=sys.stderr)
    headings = "all-reduce", "ranks", "hosts", "forecast ms", "simulated ms", "deviation", "of the step"
    print(TextTable([TextColumn(each, right=each != "all-reduce") for each in headings], rows))
    return int(worst > MOST_DEVIATION)


if __name__ == "__main__":
    sys.exit(main())
