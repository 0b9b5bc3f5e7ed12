"""Settings every test shares."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.caches import use_own_caches

use_own_caches()
for name in ("COLUMNS", "LINES"):  # of no terminal: readline sets them in pytest-xdist's workers
    os.environ.pop(name, None)

from clcomm import Communicator  # noqa: E402 - after the environment is set
from clcomm.comm.transport.mpi_runtime import world  # noqa: E402
from tests.helpers import cpu_device  # noqa: E402
from tests.leftovers import children, kill_with_descendants  # noqa: E402
from tests.outcomes import FailuresOfRank, Recorder, among  # noqa: E402
from tests.sampling import (  # noqa: E402
    MOST_CASES,
    MOST_CASES_ON_RANKS,
    TIMED_FOLDERS,
    divided,
    is_about_ranks,
    is_whole_suite,
    longest_first,
    sampled,
)

# Kernel builds and a busy machine make single examples slow: time is no measure of a test's result.
settings.register_profile(
    "clcomm", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("clcomm")


def pytest_addoption(parser):
    """Add what tests/run.py asks of a run."""
    parser.addoption("--outcomes", type=Path, help="write what failed and what was skipped to this file")
    parser.addoption("--only-listed", type=Path, help="run the tests and files of tests that this file lists")


def pytest_ignore_collect(collection_path, config):
    """Under mpiexec leave out files that are not about ranks: to import them all takes each rank many seconds."""
    with_mpi = config.getoption("--with-mpi", default=False) and is_whole_suite(config)
    if with_mpi and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if is_about_ranks(collection_path) else True
    return None


def pytest_collection_modifyitems(config, items):
    """Under mpiexec run what is about ranks alone: plain pytest runs the rest, once instead of once a rank."""
    chosen, with_mpi = items, config.getoption("--with-mpi", default=False)
    unexpected = {item.path for item in items if needs_ranks(item) < float("inf") and not is_about_ranks(item.path)}
    if unexpected:
        raise pytest.UsageError(f"{sorted(unexpected)}: expected files that tests.sampling.is_about_ranks finds")
    if with_mpi:
        chosen = [item for item in items if needs_ranks(item) <= world().Get_size()]
    if is_whole_suite(config):
        chosen = sampled(chosen, MOST_CASES_ON_RANKS if with_mpi else MOST_CASES)
        if with_mpi:
            chosen = divided(chosen, world().Get_size())
        else:
            chosen = longest_first([item for item in chosen if item.get_closest_marker("mpi") is None])
    runs_again = not with_mpi and config.pluginmanager.hasplugin("rerunfailures")  # of several ranks, one would alone
    for item in chosen:
        if item.path.parent.name in TIMED_FOLDERS:
            item.add_marker("timing")
        if runs_again and item.get_closest_marker("timing") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if listed := config.getoption("--only-listed"):
        chosen = among(chosen, set(listed.read_text().splitlines()))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def needs_ranks(item):
    """Return the ranks from which on a test runs under mpiexec; infinitely many if it is not about ranks."""
    marks = list(item.iter_markers("mpi"))
    return max((mark.kwargs.get("min_size", 1) for mark in marks), default=float("inf"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell pytest-xdist's worker, whose command line is not the user's."""
    node.workerinput["is_whole_suite"] = is_whole_suite(node.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Let fixtures know of a failure as `request.node.has_failed`."""
    report = yield
    item.has_failed = report.failed or (call.when != "setup" and item.has_failed)  # a second run begins with its setup
    return report


@pytest.fixture(
    params=[
        pytest.param("solo"),
        pytest.param("auto", marks=pytest.mark.mpi(min_size=1)),
        pytest.param("mpi", marks=pytest.mark.mpi(min_size=1)),
    ]
)
def comm(request):
    """A Communicator: alone in plain pytest; under mpiexec all ranks, with shared memory and without."""
    yield from _lent(Communicator(transport=request.param), request)


@pytest.fixture(
    params=[
        pytest.param("auto", marks=pytest.mark.mpi(min_size=2)),
        pytest.param("mpi", marks=pytest.mark.mpi(min_size=2)),
    ]
)
def several(request):
    """A Communicator of two ranks or more, with shared memory and without."""
    yield from _lent(Communicator(transport=request.param), request)


@pytest.fixture
def auto(request):
    """All ranks' Communicator, with shared memory where there is any."""
    yield from _lent(Communicator(), request)


@pytest.fixture(scope="session")
def device():
    """This rank's CPU device."""
    return cpu_device("cpu")


@pytest.fixture(scope="session")
def torch():
    """PyTorch; without it a test that asks for it is skipped, and no other of its file."""
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture(autouse=True)
def nothing_is_left_by_a_failure(request):
    """End the processes of a test that fails; what it leaves open is no failure of the test that collects it."""
    before = set(children())
    yield
    if request.node.has_failed:
        for process in set(children()) - before:
            kill_with_descendants(process)
        request.config.addinivalue_line("filterwarnings", "ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def closed_at_the_end(request):
    """Finalize what a test on several ranks leaves open, unless it is marked as one that drops its Communicators."""
    if request.node.get_closest_marker("drops_communicators") is not None:
        yield
        return
    made, create = [], Communicator.__init__

    @functools.wraps(create)
    def create_and_note(self, *args, **settings):
        create(self, *args, **settings)
        made.append(self)

    Communicator.__init__ = create_and_note
    yield
    Communicator.__init__ = create
    if not request.node.has_failed:
        for each in made:
            each.finalize()


def _lent(made, request):
    yield made
    if not request.node.has_failed:  # then the other ranks are elsewhere, and it would wait for them
        made.finalize()


@pytest.hookimpl(trylast=True)  # when pytest has its terminal reporter
def pytest_configure(config):
    """Record outcomes where they are asked for, on one rank.

    Under mpiexec let one rank print the dots and the summary, and give each rank temporary directories of its own:
    pytest's clean-up takes away its neighbours'.
    """
    if (path := config.getoption("--outcomes")) and not hasattr(config, "workerinput") and world().Get_rank() == 0:
        config.pluginmanager.register(Recorder(path))
    if config.getoption("--with-mpi", default=False):
        if world().Get_rank() > 0:
            everything = config.pluginmanager.unregister(name="terminalreporter")
            config.pluginmanager.register(FailuresOfRank(world().Get_rank(), everything), "terminalreporter")
        root = tempfile.mkdtemp(prefix="clcomm-tests-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = root


def pytest_sessionfinish(session):
    """After -x end the job: ranks that wait for this one would do so until their time limit."""
    if session.shouldfail and session.config.getoption("--with-mpi", default=False):
        atexit.register(_end_the_job)


def _end_the_job():
    time.sleep(5)  # for what other ranks print
    world().Abort(1)


def pytest_sessionstart(session):
    """Keep pytest-mpi from ending each run with pages about how MPI was built."""
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "_is_testing_mpi"):
            plugin._is_testing_mpi = False
