"""OpenTelemetry: what a collector receives over HTTP, decoded; one that does not answer costs a run nothing."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from clcomm.insight.exporters.figures import EPOCH, STEPS, Labels, Point
from tests.examples.test_examples import run

NEEDED = "the OpenTelemetry SDK is not installed; pip install -e '.[otlp]'"
metrics_service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason=NEEDED)
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=NEEDED)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=NEEDED)
LABELS = Labels(3, "node-1", "dp=1, tp=1")


class Collector(ThreadingHTTPServer):
    """Keeps the gauges and spans that it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.gauges: dict[tuple[int, str], float] = {}
        self.spans: list[tuple[str, dict[str, Any], float]] = []
        self.hosts: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            for resource in metrics_service.ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.hosts.add(values(resource.resource.attributes)["host.name"])
                for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                    for point in metric.gauge.data_points:
                        self.gauges[values(point.attributes)["rank"], metric.name] = point.as_double or point.as_int
            return
        assert path == "/v1/traces"
        for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                self.spans.append((span.name, values(span.attributes), seconds))


class Answer(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_points_are_received_as_gauges_and_spans(collector: Collector) -> None:
    from clcomm.insight.exporters.otlp import Otlp

    exporter = Otlp(LABELS, collector.address + "/")
    exporter.write(Point(STEPS, 20, {"speed/step_ms": 12.5, "train/loss": 0.25}, 100.0, 100.25))
    exporter.write(Point(EPOCH, 2, {"train/epoch_loss": 0.5}, 99.0, 101.0))
    exporter.close()
    assert collector.hosts == {"node-1"}
    assert collector.gauges == {
        (3, "clcomm_step_seconds"): 0.0125, (3, "clcomm_train_loss"): 0.25, (3, "clcomm_step"): 20,
        (3, "clcomm_epoch_loss"): 0.5,
    }  # fmt: skip
    about = {"rank": 3, "host": "node-1", "axis": "dp=1, tp=1"}
    assert collector.spans == [
        ("steps", {**about, "number": 20, "speed/step_ms": 12.5, "train/loss": 0.25}, 0.25),
        ("epoch", {**about, "number": 2, "train/epoch_loss": 0.5}, 2.0),
    ]


def test_a_jobs_ranks_send_theirs(collector: Collector) -> None:
    words = ("--data", "synthetic", "--model", "mlp", "--max-steps", "24", "--quiet")
    run("examples.mnist", *words, "--otlp", collector.address, ranks=2)
    for rank in range(2):
        assert collector.gauges[rank, "clcomm_step"] == 24
        kinds = [name for name, about, _ in collector.spans if about["rank"] == rank]
        assert {"steps", "evaluation"} <= set(kinds) <= {"steps", "evaluation", "epoch"}
    steps = [about["number"] for name, about, _ in collector.spans if name == "steps" and about["rank"] == 0]
    assert steps == sorted(steps) and steps[-1] == 24


def test_a_collector_that_is_not_there_ends_nothing() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    words = ("--data", "synthetic", "--model", "mlp", "--max-steps", "3", "--no-eval", "--quiet")
    run("examples.mnist", *words, "--otlp", f"http://127.0.0.1:{port}")
