"""Reads runs' files, strictly: JSON only, every field of its kind and in its range; what does not fit is refused.

A file may come from anyone: sizes are checked before anything is read, and text that could act on a terminal or a page
is not let in. Files of one run are put together; their order makes no difference.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clcomm.cores import parse_cpus
from clcomm.decision import Decision, Trial
from clcomm.errors import DataError
from clcomm.intervals import Estimate
from clcomm.report.last_steps import MOST_EVENTS, STEPS, Span, parse_span
from clcomm.report.record import COMPARISON_SCHEMA, FORMAT, SCHEMA
from clcomm.stats import CommStats, Histogram
from clcomm.sums import SUMS

MOST_BYTES = 256 << 20
_MOST_RANKS, _MOST_TEXT, _MOST_COUNT = 1 << 16, 200, 1 << 62


@dataclass(frozen=True)
class Run:
    """One run: `figures` of the whole, and the `ranks`' records, in rank order, of those whose files were there."""

    figures: dict[str, Any]
    ranks: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.figures["world_size"]

    def stats(self, ranks: Iterable[dict[str, Any]] | None = None) -> CommStats:
        """Return the stats of a mean rank of these records, by default of all."""
        return CommStats.merged((each["stats"] for each in (self.ranks if ranks is None else ranks)), self.world_size)


def read_runs(paths: Iterable[str]) -> Run:
    """Return the run that these files hold together; `problems` has a line for each file that was left out.

    The first file that can be read says which run it is. Raises DataError when no file can be read.
    """
    found: list[dict[str, Any]] = []
    ranks: dict[int, dict[str, Any]] = {}
    problems = []
    for path in paths:
        problem = _take(path, found, ranks)
        problems += [f"{path}: {problem}"] if problem else []
    if not found:
        raise DataError("; ".join(problems) or "FILE: expected the JSON of a run's --report")
    first = min(found, key=lambda document: min(record["rank"] for record in document["ranks"]))
    figures = {name: value for name, value in first.items() if name != "ranks"}
    return Run(figures, [ranks[rank] for rank in sorted(ranks)], problems)


def _take(path: str, found: list[dict[str, Any]], ranks: dict[int, dict[str, Any]]) -> str:
    """Add a file's document to those found and its records to the ranks', or return why not."""
    try:
        document = read(path)
    except DataError as error:
        return str(error)
    for name in ("run", "world_size"):
        if found and document[name] != found[0][name]:
            return f"belongs to another run: {name} is {document[name]!r}, not {found[0][name]!r}"
    for record in document["ranks"]:
        if ranks.get(record["rank"], record) != record:
            return f"rank {record['rank']} is there already, with other figures"
    found.append(document)
    ranks.update({record["rank"]: record for record in document["ranks"]})
    return ""


def read(path: str, checked: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the document of one file as `checked` returns it, by default `checked_run`.

    Raises DataError, whose text leaves out the path.
    """
    try:
        info = Path(path).stat()
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("expected a regular file")
        if info.st_size > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES >> 20} MiB, got {info.st_size >> 20}")
        with open(path, "rb") as file:
            return (checked or checked_run)(_decoded(file.read(info.st_size)))
    except OSError as error:
        raise DataError(error.strerror or "cannot be read") from None
    except RecursionError:
        raise DataError("expected the JSON of a run's --report, got something nested too deep") from None
    except ValueError as error:
        text = "".join(c if c.isprintable() else " " for c in str(error))
        raise DataError(text[:300]) from None


def parse(content: bytes) -> dict[str, Any]:
    """Return the known fields of a run's document, checked; raises ValueError that says what is wrong."""
    return checked_run(_decoded(content))


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ValueError("expected JSON text in UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON, got a file that is damaged or cut off in line {error.lineno}") from None
    if not isinstance(document, dict):
        raise ValueError("expected the JSON of a run's --report")
    return document


def checked_run(document: dict[str, Any]) -> dict[str, Any]:
    """Return the known fields of a run's document; raises ValueError that says what is wrong."""
    if document.get("format") != FORMAT:
        raise ValueError("expected the JSON of a run's --report")
    if document.get("schema") != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {_shown(document.get('schema'))}; run again to write it anew")
    checked = _fields(document, _DOCUMENT, "")
    world_size, ranks = checked["world_size"], [record["rank"] for record in checked["ranks"]]
    if not ranks or len(set(ranks)) < len(ranks) or max(ranks) >= world_size:
        raise ValueError(f"ranks: expected different ones from 0 to {world_size - 1}")
    return checked


def checked_comparison(document: dict[str, Any]) -> dict[str, Any]:
    """Return a comparison's runs, reference and variants; raises ValueError that says what is wrong."""
    if document.get("schema") != COMPARISON_SCHEMA:
        raise ValueError(f"schema: expected {COMPARISON_SCHEMA}, got {_shown(document.get('schema'))}")
    checked = _fields(document, {"reference": _text, "variants": _named(_VARIANT), "runs": _named({})}, "")
    runs = {name: checked_run(run) for name, run in document["runs"].items()}
    if not runs or runs.keys() != checked["variants"].keys() or checked["reference"] not in runs:
        raise ValueError("runs: expected one for each variant, the reference among them")
    return {**checked, "runs": runs}


# --- what each field may be: a check returns the value, or raises ValueError ---

Check = Callable[[Any, str], Any]


def _fields(value: Any, checks: Mapping[str, Check], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'file'}: expected an object, got {_shown(value)}")
    prefix = f"{where}." if where else ""
    return {name: check(value.get(name), prefix + name) for name, check in checks.items()}


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def _whole(least: int = 0, most: int = _MOST_COUNT) -> Check:
    def check(value: Any, name: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name}: expected a whole number from {least} up, got {_shown(value)}")
        return value

    return check


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e300 or not math.isfinite(value):
        raise ValueError(f"{name}: expected a number from 0 up, got {_shown(value)}")
    return float(value)


def _text(value: Any, name: str, most: int = _MOST_TEXT) -> str:
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise ValueError(f"{name}: expected at most {most} printable characters, got {_shown(value)}")
    return value


def _long_text(value: Any, name: str) -> str:
    return _text(value, name, 10 * _MOST_TEXT)


def _or_none(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


def _list(check: Check, most: int = _MOST_RANKS) -> Check:
    def check_list(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > most:
            raise ValueError(f"{name}: expected a list of at most {most}, got {_shown(value)}")
        return [check(each, f"{name}[{index}]") for index, each in enumerate(value)]

    return check_list


def _or_empty(check: Check) -> Check:
    return lambda value, name: [] if value is None else check(value, name)


def _object(**checks: Check) -> Check:
    return lambda value, name: _fields(value, checks, name)


def _row(*checks: Check) -> Check:
    def check_row(value: Any, name: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(checks):
            raise ValueError(f"{name}: expected {len(checks)} values, got {_shown(value)}")
        return [check(each, name) for check, each in zip(checks, value, strict=True)]

    return check_row


def _named(checks: Mapping[str, Check]) -> Check:
    def check_named(value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > 100:
            raise ValueError(f"{name}: expected an object of at most 100, got {_shown(value)}")
        return {_text(key, name): _fields(each, checks, f"{name}.{key}") for key, each in value.items()}

    return check_named


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected true or false, got {_shown(value)}")
    return value


def _sums(value: Any, name: str) -> str:
    if not isinstance(value, str) or value not in SUMS:
        raise ValueError(f"{name}: expected {' or '.join(SUMS)}, got {_shown(value)}")
    return value


def _cpus(value: Any, name: str) -> str:
    try:
        parse_cpus(_long_text(value, name))
    except ValueError as error:
        raise ValueError(f"{name}: {_shown(str(error))}") from None
    return value


def _seconds_by_name(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > 100:
        raise ValueError(f"{name}: expected an object of at most 100, got {_shown(value)}")
    return {_text(key, name): _number(each, f"{name}.{key}") for key, each in value.items()}


def _texts(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > 100:
        raise ValueError(f"{name}: expected an object of at most 100, got {_shown(value)}")
    return {_text(key, name): _text(each, f"{name}.{key}") for key, each in value.items()}


def _spans(value: Any, name: str) -> list[Span]:
    texts = _list(_text, STEPS * (1 + 4 * MOST_EVENTS))(value, name)
    try:
        return [parse_span(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _history(value: Any, name: str) -> dict[str, Any]:
    history = _fields(value, _HISTORY, name)
    if len({len(history[each]) for each in ("loss", "step_ms", "communication_ms")}) > 1:
        raise ValueError(f"{name}: expected as many values of loss, step_ms and communication_ms")
    return history


def _signed(value: Any, name: str) -> float:
    return -_number(-value, name) if type(value) in (int, float) and value < 0 else _number(value, name)


def _settings(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > 100:
        raise ValueError(f"{name}: expected an object of at most 100, got {_shown(value)}")
    return {_text(key, name): _text("-" if each is None else str(each), f"{name}.{key}") for key, each in value.items()}


def _estimate(value: Any, name: str) -> Estimate:
    return Estimate(**_fields(value, {"median": _number, "low": _or_none(_number), "high": _or_none(_number)}, name))


def _decision(value: Any, name: str) -> str:
    """Return a decision as the line that it prints as."""
    fields = _fields(value, _DECISION, name)
    return str(Decision(**{**fields, "evidence": tuple(Trial(**trial) for trial in fields["evidence"])}))


def _tally(value: Any, name: str) -> dict[str, Any]:
    tally = _fields(value, _TALLY, name)
    histogram = tally["histogram"]
    if not isinstance(histogram, str) or len(histogram) > 1 << 16:
        raise ValueError(f"{name}.histogram: expected text")
    try:
        counted = int(sum(Histogram.of(histogram).counts))
    except ValueError:
        raise ValueError(f"{name}.histogram: expected bins and their counts") from None
    if counted != tally["calls"]:
        raise ValueError(f"{name}.histogram: expected {tally['calls']} calls, got {counted}")
    if sum(tally[part] for part in ("wait_ns", "untold_ns", "hidden_ns")) > tally["ns"]:
        raise ValueError(f"{name}: expected wait_ns, untold_ns and hidden_ns to be parts of ns")
    return tally


def _stats(value: Any, name: str) -> dict[str, Any]:
    stats = _fields(value, _STATS, name)
    for what, count in (("tallies", 3), ("phases", 3), ("late", 1)):
        keys = [tuple(e.values())[:count] if isinstance(e, dict) else tuple(e[:count]) for e in stats[what]]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{name}.{what}: expected each entry once")
    return stats


def _refuse_constant(text: str) -> float:
    raise ValueError(f"expected finite numbers, got {text}")


_COUNT, _INDEX = _whole(), _whole(-1, 1 << 31)
_TALLY: dict[str, Check] = {
    "operation": _text, "label": _text, "bucket": _INDEX, "transport": _text, "calls": _COUNT, "nbytes": _COUNT,
    "wire_nbytes": _COUNT, "failures": _COUNT, "ns": _COUNT, "wait_ns": _COUNT, "untold_ns": _COUNT,
    "hidden_ns": _COUNT, "max_ns": _COUNT, "histogram": lambda value, name: value,
}  # fmt: skip
_STATS: dict[str, Check] = {
    "tallies": _list(_tally, 2048),
    "phases": _list(_row(_text, _text, _INDEX, _COUNT, _COUNT, _COUNT, _COUNT), 2048),
    "late": _list(_row(_whole(0, _MOST_RANKS), _whole(1), _COUNT, _COUNT)),
    "events": _row(_COUNT, _COUNT),
}
_TRIAL: dict[str, Check] = {
    "name": _text, "measured_s": _or_none(_number), "predicted_s": _or_none(_number), "steps": _COUNT,
}  # fmt: skip
_DECISION: dict[str, Check] = {
    "what": _text, "chosen": _text, "measures": _long_text, "evidence": _list(_object(**_TRIAL), 100),
    "at_step": _COUNT, "reason": lambda value, name: "" if value is None else _long_text(value, name),
}  # fmt: skip
_HISTORY: dict[str, Check] = {
    "first_step": _COUNT, "steps_a_point": _whole(1), "loss": _list(_or_none(_signed), 1024),
    "step_ms": _list(_number, 1024), "communication_ms": _list(_number, 1024),
}  # fmt: skip
_RANK: dict[str, Check] = {
    "rank": _whole(0, _MOST_RANKS), "host": _or_none(_whole(0, _MOST_RANKS)), "host_name": _or_none(_text),
    "cpus": _or_none(_cpus), "cpu_s": _or_none(_number), "core_waits_s": _or_none(_seconds_by_name),
    "kernel_step_s": _or_none(_number), "launch_step_s": _or_none(_number),
    "device": _or_none(_text), "driver": _or_none(_text), "versions": _or_none(_texts), "timeline": _or_none(_spans),
    "sums": _or_none(_sums), "device_in_caller": _or_none(_truth),
    "peak_rss_bytes": _or_none(_COUNT), "device_peak_bytes": _or_none(_COUNT), "steps": _or_none(_COUNT),
    "training_s": _or_none(_number), "data_wait_s": _or_none(_number), "step_p50_s": _or_none(_number),
    "replica_checks": _or_none(_COUNT), "replica_mismatches": _or_none(_COUNT), "stats": _stats,
}  # fmt: skip
_DOCUMENT: dict[str, Check] = {
    "run": _text, "clcomm": _or_none(_text), "date": _or_none(_text), "history": _or_none(_history),
    "world_size": _whole(1, _MOST_RANKS),
    "hosts": _or_none(_whole(1, _MOST_RANKS)), "model": _or_none(_text), "engine": _or_none(_text),
    "dataset": _or_none(_text), "batch_size": _or_none(_COUNT), "grad_accumulation": _or_none(_COUNT),
    "bucket_size": _or_none(_COUNT), "steps": _or_none(_COUNT), "images_per_s": _or_none(_number),
    "test_accuracy": _or_none(_number), "test_samples": _or_none(_COUNT), "train_loss": _or_none(_number),
    "settings": _or_none(_settings), "intervals": _or_none(_object(step_ms=_estimate, communication_ms=_estimate)),
    "overhead_share": _or_none(_number),
    "step_ms": _or_none(_object(p50=_number, p95=_number)),
    "layout": _or_none(_list(_list(_COUNT))),
    "ceilings": _or_empty(
        _list(_object(transport=_text, sums=_sums, alpha_s=_number, beta_s_per_byte=_number, median_error=_number), 100)
    ),
    "decisions": _or_empty(_list(_decision, 1000)),
    "ranks": _list(lambda value, name: _fields(value, _RANK, name)),
}  # fmt: skip
_ESTIMATES = ("step_ms", "communication_ms", "images_per_s", "step_ratio", "alone_ms", "alone_ratio")
_VARIANT: dict[str, Check] = {name: _or_none(_estimate) for name in _ESTIMATES}
