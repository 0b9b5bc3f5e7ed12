"""`python -m docs.words` counts the words of the documentation, prints its longest sentences, and fails above limits.

Counted are README.md, CONTRIBUTING.md and the pages of docs, prose and code blocks, as `wc -w` does. Not counted are
docs/reference, which is made from docstrings, and tables that a script writes: they are in tests/proofs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The words that the documentation may have.
WORDS = 40_000
#: The words that a sentence may have.
SENTENCE_WORDS = 30


def pages() -> list[Path]:
    """Return the files that are counted."""
    docs = sorted(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "reference"} & {*path.parts})
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def sentences(text: str) -> Iterator[str]:
    """Yield a page's sentences, without its code blocks and headings; a cell of a table is a text of its own."""
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--[^>]*-->|^:::.*$|^#+ .*$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *([-*+]|\d+\.|:) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(\|.*)$", lambda row: f"\n\n{row[1].replace('|', chr(10) * 2)}\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"(`+).+?\1", "Code", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)|<[^<>]+>", r"\1", text)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from filter(None, re.split(r"(?<=[.!?])[)*_\"']*\s+(?=[^a-z])", " ".join(paragraph.split())))


def length(sentence: str) -> int:
    """Return the number of a sentence's words; code in backticks is one."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def main() -> int:
    names = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages()}
    words = {name: len(text.split()) for name, text in names.items()}
    found = [(length(each), name, each) for name, text in names.items() for each in sentences(text)]
    found.sort(reverse=True)
    for name in sorted(words, key=words.__getitem__, reverse=True):
        print(f"{words[name]:7,} {name}")
    print(f"{sum(words.values()):7,} words of at most {WORDS:,}; the longest sentences:")
    print("\n".join(f"{many:7} {name}: {each}" for many, name, each in found[:10]))
    long = [(many, name, each) for many, name, each in found if many > SENTENCE_WORDS]
    wrong = [f"{name}: a sentence of {many} words, at most {SENTENCE_WORDS}: {each}" for many, name, each in long]
    if sum(words.values()) > WORDS:
        wrong.append(f"{sum(words.values()):,} words, at most {WORDS:,}: shorten, or raise WORDS in docs/words.py")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
