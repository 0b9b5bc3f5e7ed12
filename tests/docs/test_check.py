"""docs/check.py finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import check
from docs.extensions import accessible, excerpts

THEME = "body{--color-foreground-primary:#000;--color-background-primary:#fff;--color-background-secondary:#f8f9fb}"
DARK = (
    "@media not print{body[data-theme=dark]{--color-foreground-primary:#ddd;--color-background-primary:#111;"
    "--color-background-secondary:#222}}"
)
OWN = "".join(f"--color-{name}: {{0}};" for name in (
    "foreground-secondary", "foreground-muted", "brand-primary", "brand-content", "brand-visited"))  # fmt: skip
PAGE = """<html lang="en"><head><title>{title}</title><style>
body {{ {light} }} @media not print {{ body[data-theme="dark"] {{ {dark} }} }}</style></head>
<body><h1>Head</h1>{body}</body></html>"""
CODE = ".highlight { background: #fefefe; color: #111 }\n.highlight .k { color: #00407a }\n"
CODE += '@media not print { body[data-theme="dark"] .highlight { background: #222; color: #eee }'
CODE += ' body[data-theme="dark"] .highlight .k { color: #9cf } }'


def site(folder: Path, body: str = "", muted: str = "#333", keyword: str = "#00407a") -> Path:
    (folder / "_static" / "styles").mkdir(parents=True)
    (folder / "_static" / "styles" / "furo.css").write_text(THEME + DARK)
    (folder / "_static" / "pygments.css").write_text(CODE.replace("#00407a", keyword))
    colours = {"light": OWN.format(muted), "dark": OWN.format("#ccc")}
    (folder / "index.html").write_text(PAGE.format(title="One", body=body, **colours))
    (folder / "two.html").write_text(PAGE.format(title="Two", body='<h2 id="there">x</h2>', **colours))
    return folder


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('<a href="two.html#there">two</a> <img src="_static/pygments.css" alt="rules">', []),
        ('<a href="gone.html">x</a>', ["dead link: gone.html"]),
        ('<a href="two.html#gone">x</a>', ["dead anchor: two.html#gone"]),
        ('<a href="https://example.org/gone">x</a>', []),
        ('<script src="https://example.org/a.js"></script>', ["loads https://example.org/a.js"]),
        ('<img src="_static/pygments.css" alt="">', ["image without a description: _static/pygments.css"]),
        ('<svg role="img"></svg>', ["drawing without a description"]),
        ('<a href="two.html"><b></b></a>', ["a without a name: {'href': 'two.html'}"]),
        ('<a href="two.html"><img src="_static/pygments.css" alt="x"></a><button aria-label="b"></button>', []),
        ("<table><tr><th><p></p></th><th>x</th></tr></table>", ["th without a name: {}"]),
        ("<aside>x</aside>", ["column without a name: {}"]),
        ('<p role="heading">x</p>', ["heading without a level: {'role': 'heading'}"]),
        ("<pre>x</pre>", ["pre that the keyboard does not reach"]),
        ("<h3>x</h3>", ["a heading of level 3 below one of level 1"]),
        ("<h1>x</h1>", ["2 headings of the first level"]),
        ('<p id="a"></p><p id="a"></p>', ["two elements with the id 'a'"]),
        ('<input name="q">', ["input without a name: {'name': 'q'}"]),
    ],
)  # fmt: skip
def test_what_is_wrong_on_a_page_is_found(body: str, found: list[str], tmp_path: Path) -> None:
    assert list(check.problems(site(tmp_path, body))) == [f"index.html: {text}" for text in found]


def test_the_theme_s_pages_are_mended(tmp_path: Path) -> None:
    body = (
        '<aside class="sidebar-drawer"><p class="caption" role="heading">x</p></aside><aside class="toc-drawer no-toc">'
        '</aside><pre>x</pre><figure class="drawing"></figure><table><tr><th class="head"><p></p></th></tr></table>'
    )
    mended = accessible.mended(body)
    assert len(list(check.problems(site(tmp_path / "before", body)))) == 6
    assert list(check.problems(site(tmp_path / "after", mended))) == []
    assert accessible.mended(mended) == mended


def test_paths_may_be_broken_after_points_and_slashes() -> None:
    page = '<span class="pre">docs/a_b.md</span> <span class="pre">a.</span> docs/x'
    mended = accessible.mended(page)
    assert mended == '<span class="pre">docs/<wbr>a_b.<wbr>md</span> <span class="pre">a.</span> docs/x'
    assert accessible.mended(mended) == mended


def test_excerpts_are_a_page_s_words() -> None:
    main = "<h1>A &amp; <code>b</code></h1>\n<svg><text>c</text></svg>d"
    assert excerpts.text_of(f'<nav>x</nav><article role="main" id="m">{main}</article>e') == "A & b d"


def test_signatures_become_lines() -> None:
    signature = "<dt>f(\n<dl>\n<dd><em>a</em>,</dd>\n<dd><em>b</em>,</dd>\n</dl>\n)</dt>"
    lines = '<span class="argument"><em>a</em>,</span>\n<span class="argument"><em>b</em>,</span>\n'
    assert accessible.mended(signature) == f"<dt>f(\n{lines}\n)</dt>"
    assert accessible.mended("<dl>\n<dt>a</dt>\n<dd>b</dd>\n</dl>") == "<dl>\n<dt>a</dt>\n<dd>b</dd>\n</dl>"


def test_faint_colours_are_found(tmp_path: Path) -> None:
    found = list(check.problems(site(tmp_path, muted="#999", keyword="#aaa")))
    assert len(found) == 11 and all("light: " in line for line in found)
    assert any("code .k #aaa on #fefefe" in line for line in found)


@pytest.mark.parametrize(("one", "other", "ratio"), [("#000", "#ffffff", 21.0), ("#777", "#fff", 4.48)])
def test_contrasts_are_those_of_wcag(one: str, other: str, ratio: float) -> None:
    assert check.contrast(one, other) == check.contrast(other, one) == pytest.approx(ratio, abs=0.01)
