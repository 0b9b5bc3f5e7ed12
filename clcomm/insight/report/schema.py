"""The fields of a run's file and of a comparison's, and the values that each of them may have.

A file with any other value is refused; fields that are not listed here are left out.
"""

from __future__ import annotations

from clcomm.base.storage.field_checks import (
    MOST_ITEMS,
    Check,
    boolean,
    by_name,
    checked_fields,
    instance_of,
    list_of,
    long_text,
    number,
    object_of,
    or_empty,
    or_none,
    row_of,
    shown,
    signed_number,
    text,
    whole,
)
from clcomm.comm.costs.costfile import SUMMED_BY
from clcomm.comm.costs.estimates import Estimate
from clcomm.comm.stats.comm_stats import Histogram
from clcomm.comm.stats.cores import parse_cpus
from clcomm.comm.stats.events import Row
from clcomm.insight.report.documents import Document
from clcomm.insight.report.last_steps import MOST_SPANS, STEPS, Span, parse_span
from clcomm.insight.report.record import COMPARISON_SCHEMA, FORMAT, SCHEMA
from clcomm.sync.decision import Decision, Trial


def checked_run(document: Document) -> Document:
    """Return the known fields of a run's document; raises ValueError for one that breaks a rule."""
    if document.get("format") != FORMAT:
        raise ValueError("expected the JSON of a run's --report")
    if document.get("schema") != SCHEMA:
        got = shown(document.get("schema"))
        raise ValueError(f"schema: expected {SCHEMA}, got {got}; repeat the run to write a new file")
    checked = checked_fields(document, _DOCUMENT, "")
    world_size, ranks = checked["world_size"], [record["rank"] for record in checked["ranks"]]
    if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        raise ValueError(f"ranks: expected distinct numbers from 0 to {world_size - 1}, at least one")
    return checked


def checked_comparison(document: Document) -> Document:
    """Return a comparison's runs, reference and variants; raises ValueError for a field that breaks a rule."""
    if document.get("schema") != COMPARISON_SCHEMA:
        raise ValueError(f"schema: expected {COMPARISON_SCHEMA}, got {shown(document.get('schema'))}")
    checked = checked_fields(document, _COMPARISON, "")
    runs = {name: checked_run(run) for name, run in document["runs"].items()}
    if not runs or runs.keys() != checked["variants"].keys() or checked["reference"] not in runs:
        raise ValueError("runs: expected one for each variant, the reference among them")
    return {**checked, "runs": runs}


def _sums(value: object, name: str) -> str:
    if not isinstance(value, str) or value not in SUMMED_BY:
        raise ValueError(f"{name}: expected {' or '.join(SUMMED_BY)}, got {shown(value)}")
    return value


def _cpus(value: object, name: str) -> str:
    try:
        parse_cpus(long_text(value, name))
    except ValueError as error:
        raise ValueError(f"{name}: {shown(str(error))}") from None
    return str(value)


def _spans(value: object, name: str) -> list[Span]:
    texts = list_of(text, STEPS * (1 + MOST_SPANS))(value, name)
    try:
        return [parse_span(each) for each in texts]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _history(value: object, name: str) -> Row:
    history = checked_fields(value, _HISTORY, name)
    if len({len(history[each]) for each in ("loss", "step_ms", "communication_ms")}) > 1:
        raise ValueError(f"{name}: expected as many values of loss, step_ms and communication_ms")
    return history


def _setting(value: object, name: str) -> str:
    """Return an option's value as text, with escapes for what is not printable, such as a prompt's line break."""
    given = "-" if value is None else str(value)
    return text(given if given.isprintable() else repr(given), name)


def _tally(value: object, name: str) -> Row:
    tally = checked_fields(value, _TALLY, name)
    histogram = tally["histogram"]
    if not isinstance(histogram, str) or len(histogram) > 1 << 16:
        raise ValueError(f"{name}.histogram: expected text")
    try:
        counted = int(sum(Histogram.of(histogram).counts))
    except ValueError:
        raise ValueError(f"{name}.histogram: expected bins and their counts") from None
    if counted != tally["calls"]:
        raise ValueError(f"{name}.histogram: expected {tally['calls']} calls, got {counted}")
    if sum(tally[part] for part in ("wait_ns", "wait_unknown_ns", "hidden_ns")) > tally["ns"]:
        raise ValueError(f"{name}: expected wait_ns, wait_unknown_ns and hidden_ns to be parts of ns")
    return tally


def _stats(value: object, name: str) -> Row:
    stats = checked_fields(value, _STATS, name)
    for what, count in (("tallies", 4), ("phases", 3), ("late", 1)):
        keys = [tuple(e.values())[:count] if isinstance(e, dict) else tuple(e[:count]) for e in stats[what]]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{name}.{what}: expected each entry once")
    return stats


_COUNT, _INDEX, _estimate = whole(), whole(-1, 1 << 31), instance_of(Estimate)
_decision = instance_of(
    Decision, measures=long_text, evidence=list_of(instance_of(Trial), 100),
    reason=lambda value, name: long_text("" if value is None else value, name),
)  # fmt: skip
_TALLY: dict[str, Check] = {
    "operation": text, "label": text, "bucket": _INDEX, "part": text, "transport": text, "calls": _COUNT,
    "nbytes": _COUNT, "wire_nbytes": _COUNT, "failures": _COUNT, "ns": _COUNT, "wait_ns": _COUNT,
    "wait_unknown_ns": _COUNT, "hidden_ns": _COUNT, "max_ns": _COUNT, "histogram": lambda value, name: value,
    "ranks": _COUNT, "messages": _COUNT, "message_nbytes": _COUNT,
}  # fmt: skip
_STATS: dict[str, Check] = {
    "tallies": list_of(_tally, 2048),
    "phases": list_of(row_of(text, text, _INDEX, _COUNT, _COUNT, _COUNT, _COUNT), 2048),
    "late": list_of(row_of(whole(0, MOST_ITEMS), whole(1), _COUNT, _COUNT)),
    "events": row_of(_COUNT, _COUNT),
}
_HISTORY: dict[str, Check] = {
    "first_step": _COUNT, "steps_a_point": whole(1), "loss": list_of(or_none(signed_number), 1024),
    "step_ms": list_of(number, 1024), "communication_ms": list_of(number, 1024),
}  # fmt: skip
_COLD: dict[str, Check] = {
    "steps": _COUNT, "training_s": number, "data_wait_s": number, "core_waits_s": or_none(by_name(number)),
    "stats": _stats,
}  # fmt: skip
_RANK: dict[str, Check] = {
    "rank": whole(0, MOST_ITEMS), "host": or_none(whole(0, MOST_ITEMS)), "host_name": or_none(text),
    "cpus": or_none(_cpus), "cpu_s": or_none(number), "core_waits_s": or_none(by_name(number)),
    "kernel_step_s": or_none(number), "launch_step_s": or_none(number),
    "device": or_none(text), "driver": or_none(text), "versions": or_none(by_name(text)), "timeline": or_none(_spans),
    "sums": or_none(_sums), "device_in_caller": or_none(boolean),
    "peak_rss_bytes": or_none(_COUNT), "device_peak_bytes": or_none(_COUNT), "steps": or_none(_COUNT),
    "cold": or_none(lambda value, name: checked_fields(value, _COLD, name)),
    "start_s": or_none(by_name(number)),
    "training_s": or_none(number), "data_wait_s": or_none(number), "step_p50_s": or_none(number),
    "replica_checks": or_none(_COUNT), "replica_mismatches": or_none(_COUNT), "stats": _stats,
}  # fmt: skip
_DOCUMENT: dict[str, Check] = {
    "run": text, "clcomm": or_none(text), "date": or_none(text), "history": or_none(_history),
    "world_size": whole(1, MOST_ITEMS),
    "hosts": or_none(whole(1, MOST_ITEMS)), "model": or_none(text), "engine": or_none(text),
    "dataset": or_none(text), "batch_size": or_none(_COUNT), "grad_accumulation": or_none(_COUNT),
    "bucket_size": or_none(_COUNT), "optimizer_state_bytes": or_none(_COUNT), "steps": or_none(_COUNT),
    "epoch_steps": or_none(_COUNT), "images_per_s": or_none(number),
    "test_accuracy": or_none(number), "test_samples": or_none(_COUNT), "train_loss": or_none(number),
    "settings": or_none(by_name(_setting)),
    "intervals": or_none(object_of(step_ms=_estimate, communication_ms=_estimate)),
    "overhead_share": or_none(number),
    "step_ms": or_none(object_of(p50=number, p95=number)),
    "layout": or_none(list_of(list_of(_COUNT))),
    "pipeline": or_none(
        object_of(
            schedule=text, micro_batches=whole(1), chunks=whole(1), first_layers=list_of(_COUNT),
            parameter_bytes=list_of(_COUNT), peak_activation_bytes=list_of(_COUNT), bubble=or_none(number),
            bubble_by_formula=number,
        )
    ),
    "ceilings": or_empty(
        list_of(object_of(transport=text, sums=_sums, alpha_s=number, beta_s_per_byte=number, median_error=number), 100)
    ),
    "decisions": or_empty(list_of(lambda value, name: str(_decision(value, name)), 1000)),
    "ranks": list_of(lambda value, name: checked_fields(value, _RANK, name)),
}  # fmt: skip
_ESTIMATES = ("step_ms", "communication_ms", "images_per_s", "step_ratio", "alone_ms", "alone_ratio")
_VARIANT: dict[str, Check] = {name: or_none(_estimate) for name in _ESTIMATES}
_COMPARISON: dict[str, Check] = {
    "reference": text, "variants": by_name(object_of(**_VARIANT)), "runs": by_name(object_of()),
}  # fmt: skip
