"""Prometheus: its own client parses what is scraped and what node exporter would read; of jobs, each rank's."""

from __future__ import annotations

import socket
import urllib.request
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from clcomm.base.console.option_types import place
from clcomm.base.errors import ArgumentError
from clcomm.insight.exporters.figures import EPOCH, EVALUATION, FIGURES, STEP, STEPS, Labels, Point
from tests.examples.test_examples import run
from tests.helpers import one_line

NEEDED = "prometheus_client is not installed; pip install -e '.[prometheus]'"
parser = pytest.importorskip("prometheus_client.parser", reason=NEEDED)
LABELS = Labels(3, "node-1", "dp=1, tp=1")


def free_ports() -> int:
    """Return a port that is free, and so is the one after it."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def parsed(text: str) -> dict[str, tuple[float, dict[str, str]]]:
    """Return each sample's value and labels; a metric of several samples is an error here."""
    families = list(parser.text_string_to_metric_families(text))
    assert all(family.type == "gauge" and family.documentation and len(family.samples) == 1 for family in families)
    return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_points_are_scraped_and_written_for_node_exporter(tmp_path: Path) -> None:
    from clcomm.insight.exporters.prometheus import Prometheus

    port = free_ports()
    exporter = Prometheus(LABELS, port, tmp_path)
    try:
        assert parsed(scraped(port)) == {}
        exporter.write(Point(STEPS, 20, {"speed/step_ms": 12.5, "train/loss": float("nan")}, 0, 1))
        exporter.write(Point(EVALUATION, 20, {"test/accuracy": 0.75}, 1, 2))
        exporter.write(Point(EPOCH, 1, {"train/epoch_loss": 0.5}, 0, 2))
        found = parsed(scraped(port))
    finally:
        exporter.close()
    assert parsed((tmp_path / "clcomm-rank-3.prom").read_text()).keys() == found.keys()
    assert {name: value for name, (value, _) in found.items() if value == value} == {
        "clcomm_step_seconds": 0.0125, "clcomm_test_accuracy_ratio": 0.75, "clcomm_epoch_loss": 0.5, "clcomm_step": 20,
    }  # fmt: skip
    assert all(labels == {"rank": "3", "host": "node-1", "axis": "dp=1, tp=1"} for _, labels in found.values())
    with pytest.raises(OSError):
        scraped(port)


def test_a_taken_port_is_one_line() -> None:
    from clcomm.insight.exporters.prometheus import Prometheus

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError) as caught:
            Prometheus(LABELS, port)
    assert one_line(caught) == (
        f"--metrics-port: expected a free port for each rank of a host, got 127.0.0.1:{port} for rank 3: Address "
        "already in use; choose another"
    )


@pytest.mark.parametrize(("address", "others"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_other_addresses_of_the_host_answer_where_they_were_asked_for(address: str, others: bool) -> None:
    from clcomm.insight.exporters.prometheus import Prometheus

    port = free_ports()
    exporter = Prometheus(LABELS, port, address=address)
    try:
        with socket.socket() as asking:
            assert (asking.connect_ex(("127.0.0.2", port)) == 0) == others
    finally:
        exporter.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [("9400", "127.0.0.1:9400"), (9400, "127.0.0.1:9400"), ("0.0.0.0:80", "0.0.0.0:80"), ("[::]:9400", ":::9400"),
     (":::9400", ":::9400"), ("node-1:1", "node-1:1"), ("node-1", None), ("0", None), ("a:65536", None), ("a:", None)],
)  # fmt: skip
def test_a_port_has_an_address(given: object, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(ArgumentTypeError):
            place(given)
    else:
        assert place(given) == expected


def test_each_rank_of_a_job_has_its_figures(tmp_path: Path) -> None:
    port = free_ports()
    run(
        "examples.mnist", "--data", "synthetic", "--model", "mlp", "--max-steps", "24", "--quiet",
        "--metrics-port", str(port), "--metrics-textfile", str(tmp_path), ranks=2,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clcomm-rank-0.prom", "clcomm-rank-1.prom"]
    known = {figure.metric for figure in (*FIGURES, STEP)}
    for rank in range(2):
        found = parsed((tmp_path / f"clcomm-rank-{rank}.prom").read_text())
        perhaps = {name for name in known if name.endswith("_joules")}  # where the machine has a counter
        perhaps.add("clcomm_epoch_loss")  # no epoch ends in 24 steps
        assert known - perhaps <= found.keys() <= known, rank
        assert found["clcomm_step"][0] == 24
        assert found["clcomm_step_seconds"][0] > 0 and 0 <= found["clcomm_communication_ratio"][0] <= 1
        assert {(labels["rank"], labels["axis"]) for _, labels in found.values()} == {(f"{rank}", f"dp={rank}")}
