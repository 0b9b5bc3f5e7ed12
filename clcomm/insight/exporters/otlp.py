"""OpenTelemetry: metrics, and spans of points and evaluations, sent to a collector as OTLP over HTTP."""

from __future__ import annotations

import logging
from typing import Any

from clcomm.insight.exporters.figures import EPOCH, FIGURES, STEP, Labels, Point

#: Seconds that the end of a run waits for a collector that does not answer.
LAST_S = 2.0


class Otlp:
    """This rank's figures as gauges, and a span for each point.

    The SDK sends both from threads of its own; a collector that does not answer costs the training nothing.

    Args:
        endpoint: the collector's address, such as http://localhost:4318.

    Needs the OpenTelemetry SDK and its exporter for OTLP over HTTP, the extra `otlp`.
    """

    every_s = 1.0

    def __init__(self, labels: Labels, endpoint: str):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # One warning a run is the exporter's own; its tracebacks, from its threads, would hide the run's lines.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._labels = labels._asdict()
        resource = Resource(
            {"service.name": "clcomm", "service.instance.id": str(labels.rank), "host.name": labels.host}
        )
        metrics = OTLPMetricExporter(f"{endpoint.rstrip('/')}/v1/metrics", timeout=LAST_S)
        spans = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=LAST_S)
        reader = PeriodicExportingMetricReader(metrics, export_interval_millis=5000, export_timeout_millis=LAST_S * 1e3)
        self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor(spans, export_timeout_millis=LAST_S * 1e3))
        meter = self._meters.get_meter("clcomm")
        self._tracer: Any = self._tracers.get_tracer("clcomm")
        self._gauges: dict[str, Any] = {
            figure.tag: (figure.scale, meter.create_gauge(figure.metric, figure.unit, figure.help))
            for figure in (*FIGURES, STEP)
        }

    def write(self, point: Point) -> None:
        figures = point.figures if point.kind == EPOCH else {**point.figures, STEP.tag: point.number}
        for tag, value in figures.items():
            scale, gauge = self._gauges[tag]
            gauge.set(value * scale, self._labels)
        about = {**self._labels, "number": point.number, **point.figures}
        span = self._tracer.start_span(point.kind, attributes=about, start_time=int(point.began_s * 1e9))
        span.end(int(point.ended_s * 1e9))

    def close(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=LAST_S * 1e3)
