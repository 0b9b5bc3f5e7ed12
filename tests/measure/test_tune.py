"""`clcomm tune`: which groups are measured, what the link between hosts is, what is printed and kept."""

from __future__ import annotations

import argparse

import pytest

from clcomm import Communicator
from clcomm.base.errors import ArgumentError
from clcomm.comm.costs import costfile
from clcomm.comm.costs.model import Cost, Fit, MeasuredFit
from clcomm.comm.transport import mpi_communicators, mpi_runtime
from clcomm.engine.fold import DeviceFold
from clcomm.insight.measure import tune
from tests.helpers import cpu_device, one_line


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(["--iterations", "2", "--windows", "2", "--warmup", "0", "--max", "16KiB", *words])


def measured(transport: str, ranks: int, hosts: int, alpha_s: float, beta_s_per_byte: float) -> MeasuredFit:
    return MeasuredFit(transport, ranks, hosts, Fit(Cost(alpha_s, beta_s_per_byte), 0.0, 0.0, ((1, 1.0), (2, 2.0))))


ONE_HOST = [measured("shared", 2, 1, 1e-6, 1e-10), measured("shared", 4, 1, 3e-6, 2e-10),
            measured("mpi", 2, 1, 2e-6, 1e-9), measured("mpi", 4, 1, 6e-6, 3e-9)]  # fmt: skip


def test_on_one_host_the_link_is_a_message_of_mpi_on_the_most_ranks():
    cluster, source = tune.chosen_cluster(ONE_HOST, options())
    assert cluster.local == {2: Cost(1e-6, 1e-10), 4: Cost(3e-6, 2e-10)}
    # A ring of 4: six messages, one and a half times the size.
    assert (cluster.link.alpha_s, cluster.link.beta_s_per_byte) == pytest.approx((1e-6, 2e-9))
    assert source == "mpi on one host, 4 ranks"


def test_between_hosts_what_was_measured_there_counts():
    cluster, source = tune.chosen_cluster([*ONE_HOST, measured("mpi", 2, 2, 4e-5, 8e-9)], options())
    assert (cluster.link.alpha_s, cluster.link.beta_s_per_byte) == pytest.approx((2e-5, 8e-9))
    assert source == "mpi between 2 hosts"


def test_between_hosts_it_is_what_the_whole_job_took_beyond_a_host():
    job = measured("hierarchical", 6, 3, 8.1e-5, 4.1e-9)
    cluster, source = tune.chosen_cluster([*ONE_HOST, measured("mpi", 3, 3, 1.0, 1.0), job], options())
    # A ring of 3: four messages, four thirds of the size.
    assert (cluster.link.alpha_s, cluster.link.beta_s_per_byte) == pytest.approx((2e-5, 3e-9))
    assert cluster.all_reduce_s(1 << 20, 6, 3) == pytest.approx(job.fit.cost.seconds(1 << 20))
    assert source == "hierarchical, 6 ranks on 3 hosts"


@pytest.mark.parametrize("job", [(8.1e-5, 1e-10), (0.5e-6, 4.1e-9)])
def test_a_job_that_seems_faster_than_its_hosts_says_nothing_of_the_link(job):
    known = [*ONE_HOST, measured("mpi", 3, 3, 4e-5, 4e-9)]
    cluster, source = tune.chosen_cluster([*known, measured("hierarchical", 6, 3, *job)], options())
    assert source == "mpi between 3 hosts"
    assert cluster == tune.chosen_cluster(known, options())[0]


def test_options_replace_the_link():
    cluster, source = tune.chosen_cluster(ONE_HOST, options("--link-us", "20", "--link-gb-s", "1.25"))
    assert (cluster.link.alpha_s, cluster.link.beta_s_per_byte) == pytest.approx((2e-5, 8e-10))
    assert source == "from the options"
    assert tune.chosen_cluster(ONE_HOST, options("--link-us", "20"))[0].link.beta_s_per_byte == pytest.approx(2e-9)


def test_tensors_come_from_a_model_or_from_numbers():
    assert sum(tune.tensors_of(options())) == 827_688
    assert tune.tensors_of(options("--bytes", "1KiB", "--tensors", "3")) == (341, 341, 342)
    assert tune.tensors_of(options("--bytes", "8")) == (8,)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tensors", "8"], "--tensors: needs --bytes SIZE, their total size"),
        (["--bytes", "8", "--tensors", "9"], "tensors: expected a number from 1 to the 8 bytes, got 9"),
        (["--bytes", "none"], "--bytes: expected a positive number of bytes"),
        (["--max", "1KiB"], "--max: expected room for two sizes or more, to fit a latency and a bandwidth"),
        ([], "ranks: expected 2 or more, got 1; start it as mpiexec -n 4 clcomm tune"),
    ],
)
def test_bad_options_are_refused_in_a_line(words, problem):
    with pytest.raises(ArgumentError) as caught:
        tune.run(options(*words))
    assert one_line(caught).startswith(problem)


@pytest.mark.mpi(min_size=2)
def test_the_command_measures_groups_prints_and_keeps_the_fits(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))
    assert tune.run(options("--backward-ms", "2", "--overlap", "--sums", "numpy")) == 0
    out = capfd.readouterr().out
    with Communicator(transport="mpi") as comm:
        size, rank = comm.size, comm.rank
    if rank:
        assert out == ""
        assert costfile.load() is None
        return
    groups = sorted({2, size} | ({4} if size >= 4 else set()))
    fits = costfile.load()
    assert [(each.transport, each.ranks, each.hosts) for each in fits] == [
        (name, ranks, 1) for ranks in groups for name in ("shared", "mpi")
    ]
    assert {each.sums for each in fits} == {"numpy"}
    assert all([nbytes for nbytes, _ in each.fit.points] == [1024, 4096, 16384] for each in fits)
    lines = [line.split() for line in out.splitlines()]
    assert [int(line[0]) for line in lines if "measured" in line and line[0].isdigit()] == groups
    assert any(line[:2] == ["4096", str(-(-4096 // size))] and "extrapolated" in line for line in lines)
    assert "827,688 bytes in 8 tensors" in out
    assert "sums in shared memory: by NumPy" in out
    assert f"stored in {costfile.path_of_host()}" in out


@pytest.mark.mpi(min_size=3)
def test_several_hosts_are_measured_as_a_whole_too(capfd, tmp_path, monkeypatch):
    host = mpi_runtime.world().Get_rank() % 2
    for module in (mpi_communicators, tune):
        monkeypatch.setattr(module, "host_of", lambda comm: comm.Split(host, comm.Get_rank()))
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path))
    assert tune.run(options("--sums", "numpy")) == 0
    out = capfd.readouterr().out
    with Communicator(transport="mpi") as comm:
        size, rank = comm.size, comm.rank
    if rank == 0:
        fits = [(each.transport, each.ranks, each.hosts) for each in costfile.load()]
        assert fits[-2:] == [("mpi", 2, 2), ("hierarchical", size, 2)]
        assert [line.split()[:3] for line in out.splitlines() if line.startswith("hierarchical")] == [
            ["hierarchical", str(size), "2"]
        ]


@pytest.mark.mpi(min_size=2)
def test_groups_sum_with_the_device_where_training_does(capfd, monkeypatch):
    fold, made = DeviceFold(cpu_device("cpu")), []
    monkeypatch.setattr(tune, "agreed_fold", lambda control, sums: lambda *sum: made.append(sum) or fold(*sum))
    assert tune.run(options("--no-store")) == 0
    assert made
    with Communicator(transport="mpi") as comm:
        assert ("by each rank's own device" in capfd.readouterr().out) == (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_the_fits_need_not_be_kept(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(tmp_path / "none"))
    assert tune.run(options("--no-store", "--bytes", "64KiB", "--tensors", "4")) == 0
    assert not (tmp_path / "none").exists()
    assert "kept in" not in capfd.readouterr().out
