"""`python -m docs.check SITE` looks at the built pages: links, accessibility, contrasts; needs nothing but Python.

Links lead to pages and anchors that exist. Nothing is loaded from elsewhere. Images have a description, pages a
language, a title and one first heading, headings skip no level, ids are unique; links, buttons, heads of tables and
columns have a name, the keyboard reaches what scrolls. All colours of text have a contrast of 4.5 to 1 and more with
what is behind them, in both schemes (WCAG 2.2, level AA).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LEAST_CONTRAST = 4.5
#: The page whose heading and results a script writes.
FILLED_LATER = "search.html"
#: Elements whose text is a name, and the attributes that may name them instead.
_NAMED = {"a", "button", "th"}
#: Elements that may be wider than a narrow screen, and then scroll.
_SCROLLED = {"pre", "figure"}
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
_VOID = {"img", "input", "link", "meta", "br", "hr", "source", "path", "line", "rect", "polyline", "polygon", "circle"}


class Page(HTMLParser):
    """What the checks need of a page: its ids, links, loaded files, headings, and what is wrong in it."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.headings: list[int] = []
        self.wrong: list[str] = []
        self.title = self.language = ""
        self._open: list[tuple[str, dict[str, str]]] = []
        self._names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        if tag == "html":
            self.language = given.get("lang", "")
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag in _LOADED and _LOADED[tag] in given and given.get("rel") not in ("index", "search", "next", "prev"):
            self.loaded.append(given[_LOADED[tag]])
        if tag == "img" and not given.get("alt", "").strip():
            self.wrong.append(f"image without a description: {given.get('src')}")
        if tag == "svg" and given.get("role") == "img" and not given.get("aria-label"):
            self.wrong.append("drawing without a description")
        if tag == "input" and given.get("type") not in ("hidden", "checkbox") and not given.get("aria-label"):
            self.wrong.append(f"input without a name: {given}")
        if tag == "img":
            self._names = [name + given.get("alt", "") for name in self._names]
        if tag == "aside" and not given.get("aria-label"):
            self.wrong.append(f"column without a name: {given}")
        if given.get("role") == "heading" and "aria-level" not in given:
            self.wrong.append(f"heading without a level: {given}")
        if tag in _SCROLLED and "tabindex" not in given:
            self.wrong.append(f"{tag} that the keyboard does not reach")
        if tag in _NAMED:
            self._names.append(given.get("aria-label", "") + given.get("title", ""))
        if tag not in _VOID:
            self._open.append((tag, given))

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "title" and not any(tag == "svg" for tag, _ in self._open):
            self.title += data
        self._names = [name + data.strip() for name in self._names]

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, given = self._open.pop()
            if opened == tag:
                break
        else:
            return
        if tag in _NAMED and not self._names.pop() and given.get("aria-hidden") != "true":
            self.wrong.append(f"{tag} without a name: {given}")


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each thing that is wrong on a site."""
    files = sorted(site.rglob("*.html"))
    pages = {path.resolve(): Page(path.read_text()) for path in files}
    titles: dict[str, str] = {}
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        page.headings = page.headings or [1] * (path.name == FILLED_LATER)
        yield from (f"{name}: {text}" for text in [*page.wrong, *_structure(page), *_links(path, page, pages)])
        if page.title in titles:
            yield f"{name}: the same title as {titles[page.title]}: {page.title!r}"
        titles[page.title] = name
    for path in sorted(site.rglob("*.css")):
        found = re.findall(r"(?:url\(|@import )[\"']?(https?:[^\"')]+)", path.read_text())
        yield from (f"{path.name}: loads {address}" for address in found)
    yield from contrasts(site)


def _structure(page: Page) -> Iterator[str]:
    if not page.language:
        yield "no language"
    if not page.title.strip():
        yield "no title"
    if page.headings.count(1) != 1:
        yield f"{page.headings.count(1)} headings of the first level"
    for above, below in zip(page.headings, page.headings[1:], strict=False):
        if below > above + 1:
            yield f"a heading of level {below} below one of level {above}"
    for each in sorted({each for each in page.ids if page.ids.count(each) > 1}):
        yield f"two elements with the id {each!r}"
    yield from (f"loads {address}" for address in page.loaded if urlsplit(address).netloc)


def _links(path: Path, page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    for link in [*page.links, *page.loaded]:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        if not target.exists():
            yield f"dead link: {link}"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            yield f"dead anchor: {link}"


# --- colours ---


def contrasts(site: Path) -> Iterator[str]:
    """Yield the pairs of colours with too little contrast."""
    own = re.search(r"<style>(.*?)</style>", (site / "index.html").read_text(), re.DOTALL)
    assert own is not None
    sheets = (site / "_static" / "styles" / "furo.css").read_text() + own[1]
    code = (site / "_static" / "pygments.css").read_text()
    for scheme in ("light", "dark"):
        colours = _variables(sheets, scheme)
        page, side = colours["background-primary"], colours["background-secondary"]
        pairs = [(name, colours[name], behind) for behind in (page, side) for name in (
            "foreground-primary", "foreground-secondary", "foreground-muted", "brand-primary", "brand-content",
            "brand-visited")]  # fmt: skip
        pairs += [(f"code {name}", front, back) for name, front, back in _code(code, scheme)]
        for name, front, back in pairs:
            if contrast(front, back) < LEAST_CONTRAST:
                yield f"{scheme}: {name} {front} on {back}: a contrast of {contrast(front, back):.2f} to 1"


def _variables(sheets: str, scheme: str) -> dict[str, str]:
    """Return a scheme's colours by name, the site's own in place of the theme's."""
    selector = r"body\s*\{|:root\s*\{" if scheme == "light" else r"body\[data-theme=\"?dark\"?\]\s*\{"
    found: dict[str, str] = {}
    for selected in [r"body\s*\{", selector] if scheme == "dark" else [selector]:
        for block in re.finditer(rf"(?:^|[{{}};,]|\s)(?:{selected})([^}}]*)", sheets):
            found.update(re.findall(r"--color-([\w-]+):\s*(#[0-9a-fA-F]{3,6})", block[1]))
    return found


def _code(sheet: str, scheme: str) -> list[tuple[str, str, str]]:
    """Return the colours of code: a token's class, its colour, its background."""
    light, dark = sheet.split("@media", 1) if "@media" in sheet else (sheet, "")
    text = light if scheme == "light" else dark
    rules = re.findall(r"\.highlight(?: (\.[\w.]+))?\s*\{([^}]*)\}", text)
    base = next(body for name, body in rules if not name and "background" in body)
    back = re.search(r"background(?:-color)?:\s*(#\w+)", base)
    assert back is not None
    found = []
    for name, body in rules:
        front = re.search(r"(?<![-\w])color:\s*(#\w+)", body)
        behind = re.search(r"background-color:\s*(#\w+)", body)
        if front:
            found.append((name or "text", front[1], behind[1] if behind else back[1]))
    return found


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """Return a colour's relative luminance, 0 to 1 (WCAG 2.2)."""
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    channels = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def main() -> int:
    site = Path(sys.argv[1])
    found = list(problems(site))
    print("\n".join(found) or f"{len(list(site.rglob('*.html')))} pages: nothing is wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
