"""A report as one page that needs nothing but itself: no script, no network, light or dark as the reader likes it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from clcomm.report import svg
from clcomm.report.model import Report
from clcomm.report.shapes import MOST_SHOWN, Bars, Chart, Distribution, Points, Table, colour_of

# Nothing may be fetched or run, whatever a file's texts hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def as_html(report: Report) -> str:
    """Return the report as an HTML page."""
    style = files("clcomm.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{escape(report.title)}</h1>",
        _tiles(report),
        _list(report.headline, "headline"),
        '<div class="charts">',
        *map(_chart, report.charts),
        "</div>",
        '<div class="tables">',
        *map(_table, report.tables),
        "</div>",
    ]
    if report.left_out:
        body += [
            "<section><h2>Left out</h2>",
            _list([f"{each.what}: {each.why}" for each in report.left_out]),
            "</section>",
        ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(report.title)}</title>\n<style>\n{style}</style>\n</head>\n'
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _tiles(report: Report) -> str:
    tiles = (f"<div><b>{escape(tile.value)}</b> <span>{escape(tile.caption)}</span></div>" for tile in report.tiles)
    return f'<div class="tiles">{"".join(tiles)}</div>' if report.tiles else ""


def _list(lines: list[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if kind else f"<ul>{items}</ul>"


def _table(table: Table) -> str:
    kinds = ["text" if column.kind == "text" else "number" for column in table.columns]
    heads = "".join(
        f'<th scope="col" class="{kind}">{escape(column.heading)}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = "".join(
        "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for cell, k in zip(row, kinds, strict=True)) + "</tr>\n"
        for row in table.cells()
    )
    title, note = escape(table.title), escape(" ".join(text for text in (table.note, table.left_out) if text))
    return (
        f'<section id="{escape(table.key)}"><h2>{title}</h2>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
        + (f"<p>{note}</p>" if note else "")
        + "</section>"
    )


def _chart(chart: Chart) -> str:
    if isinstance(chart, Bars):
        drawn = _bars(chart)
    else:
        assert isinstance(chart, (Distribution, Points))
        drawn = svg.distribution(chart) if isinstance(chart, Distribution) else svg.points(chart)
    note = f" <span>{escape(chart.note)}</span>" if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}{note}</figcaption>\n{drawn}</figure>"


def _bars(chart: Bars) -> str:
    longest = max(map(sum, chart.values)) or 1.0
    single = len(chart.bars) == 1
    rows = []
    for name, values in list(zip(chart.bars, chart.values, strict=True))[:MOST_SHOWN]:
        pieces = "".join(
            f'<i class="c{colour_of(part)}" style="width:{100 * value / longest:.3f}%" '
            f'title="{escape(f"{name}, {part}: {value:.3f} {chart.unit}", quote=True)}"></i>'
            for part, value in zip(chart.parts, values, strict=True)
            if value > 0
        )
        total = f"{sum(values):,.3g} {chart.unit}"
        rows.append(f'<span>{escape(name)}</span><div class="bar">{pieces}</div><span>{total}</span>')
    shares: Sequence[float | None] = chart.values[0] if single else [None] * len(chart.parts)
    legend = "".join(
        f'<li><i class="c{colour_of(part)}"></i>{escape(part)}{_share(value, longest, chart.unit)}</li>'
        for part, value in zip(chart.parts, shares, strict=True)
    )
    drawn = f'<div class="bars">{"".join(rows)}</div>'
    return drawn if len(chart.parts) == 1 else f'{drawn}<ul class="legend">{legend}</ul>'


def _share(value: float | None, whole: float, unit: str) -> str:
    return "" if value is None else f" <b>{value:,.3g} {unit}, {value / whole:.1%}</b>"
