"""A run's figures where teams look: Prometheus, OpenTelemetry, TensorBoard, W&B.

Each is an Exporter: `write` takes a Point of the figures that `FIGURES` lists. Each needs the
extra of its name.
"""

from clcomm.insight.exporters.figures import FIGURES, EnergyMeter, Exporter, Figure, Labels, Point

__all__ = ["FIGURES", "EnergyMeter", "Exporter", "Figure", "Labels", "Point"]
