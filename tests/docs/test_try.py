"""The pages "Try it": their numbers are those of `clcomm tune --from`, and the keyboard alone works them."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from clcomm.base.errors import ArgumentError, DataError
from clcomm.comm.costs.model import Cost
from clcomm.insight.measure import what_if
from clcomm.tools import cli
from docs.extensions.try_it import STATIC, as_html
from tests.browser import END, HOME, LEFT, RIGHT, SPACE, TAB, Page, browser, needs_driver
from tests.sampling import some

BENCH = STATIC / "bench.json"
#: Each page's table among those that the command prints.
TOPICS = {"buckets": 0, "overlap": 0, "zero": 1, "pipeline": 2}
DRAWN = range(100)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    """A browser with a folder of the pages' interactive parts; `open` takes file:// addresses."""
    folder = tmp_path_factory.mktemp("try")
    for name in ("predict.js", "site.css"):
        shutil.copy(STATIC / name, folder)
    for topic in TOPICS:
        head = '<!DOCTYPE html><meta charset="utf-8"><link rel="stylesheet" href="site.css">'
        (folder / f"{topic}.html").write_text(head + as_html(topic, "predict.js"))
    with browser(folder) as opened:
        opened.folder = folder  # type: ignore[attr-defined]
        yield opened


def opened(page: Page, topic: str) -> Page:
    page.open((page.folder / f"{topic}.html").as_uri())  # type: ignore[attr-defined]
    page.wait_for("return document.querySelectorAll('.try td').length")
    return page


def cells_of(page: Page) -> list[list[str]]:
    rows = page.run(
        "return [...document.querySelectorAll('.try tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    return [[cell for cell in row if cell] for row in rows]


def predicted(command: str, capsys) -> list[list[list[str]]]:
    """Return the tables that a command of a page prints, as cells; those that are empty left out."""
    words = shlex.split(command.replace("bench.json", str(BENCH)))
    assert words[:2] == ["clcomm", "tune"] and cli.main(words[1:]) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    return [[re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]] for table in tables]


@needs_driver
@pytest.mark.parametrize("number", some(DRAWN, 8))
def test_the_pages_numbers_are_the_commands(page, number, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rng, topic = random.Random(number), list(TOPICS)[number % len(TOPICS)]
    opened(page, topic)
    inputs = page.run(
        "return [...document.querySelectorAll('input:not([type=file])')].map((i) => [i.name, i.type, i.min, i.max])"
    )
    drawn: dict[str, Any] = {
        name: rng.randint(int(least), int(most)) if kind == "range" else rng.random() < 0.5
        for name, kind, least, most in inputs
    }
    page.run(
        "for (const [name, value] of Object.entries(arguments[0])) {"
        "  const input = document.querySelector(`.try [name=${name}]`);"
        "  if (input.type === 'range') input.value = value; else input.checked = value;"
        "}"
        "document.querySelector('.try form').dispatchEvent(new Event('input'));",
        drawn,
    )
    command = page.run("return document.querySelector('.try code').textContent")
    assert all(f"--{name}" in command for name, value in drawn.items() if value is not False)
    assert cells_of(page) == predicted(command, capsys)[TOPICS[topic]], command


@needs_driver
def test_halves_are_rounded_as_python_does(page):
    values = [0.0625, 0.1875, 0.5, 1.5, 2.5, 12.25, 0.0005, 1e-9, 1023.95, 6.25, 1 / 3]
    opened(page, "zero")
    shown = page.run("return arguments[0].map((each) => [0, 1, 3].map((places) => fixed(each, places)))", values)
    assert shown == [[f"{value:.{places}f}" for places in (0, 1, 3)] for value in values]


@needs_driver
@pytest.mark.parametrize("topic", TOPICS)
def test_the_keyboard_alone_works_a_page(page, topic):
    opened(page, topic)
    names = page.run("return [...document.querySelectorAll('.try input')].map((input) => input.name || input.type)")
    before = cells_of(page)
    for name in names:
        page.press(TAB)
        focused = page.run("const e = document.activeElement; return [e.name || e.type, e.labels.length]")
        assert focused == [name, 1], "in the page's order, each with its label"
        if name == "overlap":
            page.press(SPACE)
        elif name != "file":
            page.press(END, LEFT)
            least, value, most = page.run(
                "const e = document.activeElement; return [e.min, e.value, e.max].map(Number)"
            )
            assert least < value == most - 1
            page.press(HOME, RIGHT, RIGHT)
    assert cells_of(page) != before
    assert page.run("return document.querySelector('.try [role=img]').ariaLabel.length") > 20


@needs_driver
@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_fits_a_narrow_screen(page, topic):
    opened(page, topic)
    width = page.run("document.body.style.width = '374px'; return document.querySelector('.try').scrollWidth")
    assert width <= 374, "a wider table scrolls in a box of its own"
    whole, shown = page.run("const e = document.querySelector('.try pre'); return [e.scrollWidth, e.clientWidth]")
    assert whole <= shown, "the whole command is to be seen"


#: For each page the effect that its first setting shows: the first number over the last, by column of its table.
EFFECTS = {"buckets": (3, 14.0), "overlap": (3, 1.5), "zero": (5, 10.0), "pipeline": (3, 2.0)}


@needs_driver
@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_opens_where_its_effect_shows(page, topic):
    opened(page, topic)
    column, least = EFFECTS[topic]
    rows = page.run(
        "return [...document.querySelectorAll('.try tbody tr')].map((row) => [...row.cells].map((c) => c.textContent))"
    )
    numbers = [float(row[column].split()[0]) for row in rows]
    assert numbers[0] / min(numbers) >= least or numbers[-1] / min(numbers) >= least, numbers


@needs_driver
def test_a_file_of_the_readers_own_counts(page, tmp_path):
    own = json.loads(BENCH.read_text()) | {"world_size": 4, "ranks_per_host": 4}
    opened(page, "buckets")
    before, give = (
        cells_of(page),
        (
            "const data = new DataTransfer(), input = document.querySelector('.try [type=file]');"
            "data.items.add(new File([arguments[0]], arguments[1]));"
            "input.files = data.files; input.dispatchEvent(new Event('change'));"
        ),
    )
    status = "return document.querySelector('.try [role=status]').textContent"
    page.run(give, json.dumps(own), "own.json")
    page.wait_for(f"{status}.match(/^own.json: each all-reduce costs .* \\(4 ranks, through MPI\\)/)")
    assert page.run("return document.querySelector('.try code').textContent").startswith("clcomm tune --from own.json ")
    assert [row[-1] for row in cells_of(page)[1:2]] == [before[1][-1]], "4 ranks measured, as 2 were before"
    for text, said in (("{", "wrong.json is no JSON."), ("{}", "This is no file of clcomm bench --json")):
        page.run(give, text, "wrong.json")
        page.wait_for(f"{status}.startsWith({said!r})")


@pytest.mark.parametrize("topic", TOPICS)
def test_the_answers_numbers_are_the_commands(topic, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    page = (STATIC.parent / "try" / f"{topic}.md").read_text()
    answers = re.findall(r"\n<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", page, re.DOTALL)
    assert len(answers) == len(re.findall(r"^\*\*\d\.\*\*", page, re.MULTILINE)) == 3
    for answer in answers:
        for options in re.findall(r"`(--[^`]+)`", answer):
            assert cli.main(["tune", "--from", str(BENCH), *options.split()]) == 0
        printed = capsys.readouterr().out
        for number in re.findall(r"\d+\.\d{3} ms|\d+\.\d%|\d+\.\d MiB", answer) if printed else []:
            assert number.removesuffix(" ms") in printed, number


# --- the command ---


def test_the_file_s_fit_is_the_cost():
    measured = what_if.read(str(BENCH))
    first = json.loads(BENCH.read_text())["fits"][0]
    assert measured.cost == Cost(first["alpha_s"], first["beta_s_per_byte"]) and (measured.ranks, measured.hosts) == (
        2,
        1,
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fits": []}, "fits: expected one of all_reduce or all_reduce_init; measure two sizes or more"),
        (
            {"fits": [{"operation": "all_reduce", "alpha_s": -1}]},
            "fits.alpha_s: expected finite numbers from 0 up, got -1",
        ),
        ({"fits": [3]}, ".*"),
        ({"world_size": 1}, "world_size: expected a whole number from 2 up, got 1"),
        ({"ranks_per_host": "2"}, "ranks_per_host: expected a whole number from 1 up"),
    ],
)
def test_another_file_is_one_line(tmp_path, change, said):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(BENCH.read_text()) | change))
    with pytest.raises(
        DataError, match=rf"^{re.escape(str(path))}: {said}.*; `mpiexec -n 4 clcomm bench --json .*` writes it$"
    ):
        cli.main(["tune", "--from", str(path)])
    with pytest.raises(DataError, match=r"No such file"):
        what_if.read(str(tmp_path / "none"))


def test_a_file_of_several_hosts_is_for_its_own_ranks(tmp_path, capsys):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(BENCH.read_text()) | {"world_size": 4, "ranks_per_host": 2}))
    assert cli.main(["tune", "--from", str(path)]) == 0 and "4 ranks" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match=r"--ranks: expected 4, as FILE is of 2 hosts, got 8"):
        cli.main(["tune", "--from", str(path), "--ranks", "8"])
