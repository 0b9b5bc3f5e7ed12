"""Charts of `clcomm bench`; needs matplotlib, which is an extra."""

from __future__ import annotations

from typing import Any

from clcomm.storage.files import replacing, unwritable

_LEGEND_COLUMNS = 4
#: The number of colours through which lines cycle, and the line styles, one for each cycle.
_COLORS, _STYLES = 10, ("-", "--", ":")


def draw_bench(document: dict[str, Any], path: str) -> None:
    """Draw median times and bus bandwidths by size, log-log, a line for each operation and transport.

    A band shows the range from the fastest call to the 99th percentile. With one rank, where nothing crosses a link,
    only times are drawn. `document` is the content of --json's file. Raises ArgumentError if `path` cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"axes.grid": True, "grid.alpha": 0.3, "font.size": 10}):
        figure = Figure(figsize=(12, 6), layout="constrained")
        crosses_links = any(row["busbw_gb_s"] > 0 for row in document["rows"])
        times, *bandwidths = figure.subplots(1, 1 + crosses_links, squeeze=False)[0]
        for index, ((operation, transport), rows) in enumerate(_lines(document["rows"]).items()):
            style = {"marker": "o", "markersize": 4, "color": f"C{index}", "linestyle": _STYLES[index // _COLORS % 3]}
            sizes = [row["bytes"] for row in rows]
            times.plot(sizes, [row["p50_us"] for row in rows], label=f"{operation}, {transport}", **style)
            low, high = [row["min_us"] for row in rows], [row["p99_us"] for row in rows]
            times.fill_between(sizes, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
            rates = [row["busbw_gb_s"] for row in rows]
            if all(rate > 0 for rate in rates):
                bandwidths[0].plot(sizes, rates, **style)
        _label(times, "time of a call (us): median, band from min to p99", document["rows"])
        for axes in bandwidths:
            _label(axes, "bus bandwidth (GB/s, 10^9 bytes)", document["rows"])
        figure.legend(loc="outside lower center", ncols=_LEGEND_COLUMNS)
        ranks = document["world_size"]
        figure.suptitle("1 rank" if ranks == 1 else f"{ranks} ranks, {document['ranks_per_host']} a host")
        try:
            with replacing(path) as file:
                figure.savefig(file, dpi=120, format="png")
        except OSError as error:
            raise unwritable("--plot", path, error) from None


def _lines(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["operation"], row["transport"]), []).append(row)
    return lines


def _label(axes: Any, what: str, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"size ({rows[0]['dtype']} array, bytes)")
    axes.set_ylabel(what)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=16))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: _short(nbytes)))
    low, high = axes.get_ylim()
    decades_alone = high > 100 * low
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades_alone else (1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter("")


def _short(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:g} {unit}"
        nbytes /= 1024
    return f"{nbytes:g} GiB"
