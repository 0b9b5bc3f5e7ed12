"""Insight: a run's figures become reports, timelines, forecasts and charts.

report writes, reads and explains a run's figures, trace writes a timeline, measure times collectives, summary
describes a model, exporters hand figures to dashboards, drawing renders charts. Start with report/record.py.
"""
