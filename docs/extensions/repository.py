"""Links that leave docs/, and pages whose text is elsewhere in the repository, so that one source serves both.

On a page of the repository, `[the program](../examples/loop.py)` leads to the file. On the site it leads to the page
that holds the same text: the changelog, RESULTS.md, or the listing of the source.

`<!-- from CHANGELOG.md -->` stands for a file's text but its title.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
#: The page of each file of Markdown outside docs/.
PAGES = {
    "README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
    "benchmarks/RESULTS.md": "benchmarks.md", "LICENSE": "index.md",
    **{f"tests/proofs/{name}.md": "proofs.md" for name in ("pairs", "faults", "ranks", "torch-suite", "matrix")},
    "tests/proofs/gradient-path.md": "life-of-a-gradient.md",
    **{f"tests/proofs/{name}.md": "ported.md" for name in ("ported", "on-purpose", "edges")},
    **{f"tests/proofs/horovod-{name}.md": "horovod.md" for name in ("tests", "variables")},
}  # fmt: skip
#: The page that lists sources.
SOURCES = "sources.md"
_LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )((?:\.\./)+[\w./-]+)(#[\w-]+)?(?=\)|$)", re.MULTILINE)
_LISTINGS = "<!-- sources -->"
_FROM = re.compile(r"<!-- from ([\w./]+) -->")


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", on_source_read)
    return {"parallel_read_safe": True}


def on_source_read(app: Any, docname: str, source: list[str]) -> None:
    """Put in a page's text from elsewhere and turn its links to the repository into links to pages."""
    for found in _FROM.finditer(source[0]):  # so that a page is read anew where that text has changed
        app.env.note_dependency(str(ROOT / found[1]))
    source[0] = page_of_site(source[0], docname)


def page_of_site(text: str, docname: str) -> str:
    """Return a page's text for the site."""
    text = _FROM.sub(lambda found: text_of(found[1]), text)
    text = text.replace(_LISTINGS, sources()) if _LISTINGS in text else text
    folder = (DOCS / docname).parent
    return outside_blocks(text, lambda part: _LINK.sub(lambda found: found[1] + _target(found, folder), part))


def sources() -> str:
    """Return the listings of all files outside docs/ to which pages link and that are no page of the site."""
    found = set()
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text()) if "_build" not in page.parts else []
        found |= {os.path.relpath(page.parent / link, ROOT) for link in links if not link.startswith("http")}
    listed = sorted(path for path in found - {*PAGES} if not path.startswith("docs/") and (ROOT / path).is_file())
    return "\n".join(f"## {path}\n\n```{{literalinclude}} ../{path}\n```\n" for path in listed)


def text_of(file: str) -> str:
    """Return a file's text without its title, with links as from docs/."""

    def from_docs(link: re.Match[str]) -> str:
        return link[0] if link[1].startswith(("#", "http")) else f"](../{link[1]})"

    text = (ROOT / file).read_text().partition("\n")[2]
    return outside_blocks(text, lambda part: re.sub(r"\]\(([^)]+)\)", from_docs, part))


def outside_blocks(text: str, change: Any) -> str:
    """Return a text with its parts outside of fenced blocks changed."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _target(link: re.Match[str], folder: Path) -> str:
    """Return where a link to a file outside docs/ leads on the site; others stay."""
    file = Path(os.path.normpath(folder / link[2]))
    anchor = link[3] or ""
    if file.is_relative_to(DOCS):
        return os.path.relpath(file, folder) + anchor
    path = file.relative_to(ROOT).as_posix()
    page = PAGES[path] + anchor if path in PAGES else f"{SOURCES}#{re.sub(r'[^a-z0-9_-]', '', path.lower())}"
    return os.path.relpath(DOCS / page, folder)
