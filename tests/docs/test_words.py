"""docs/words.py counts words and finds sentences in pages made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import words

PAGE = """# A heading is no sentence. Never

One [link to it](a.md#b) and `some code here` end. Two: it goes on (1.5 GiB
and more). `Three` begins with code. **Four.** Five

```
code is no sentence. None
```
- six
- seven. Eight
| nine | ten. Eleven |
|---|---|
<details>
![a picture](x.svg)
"""


def test_sentences_are_found() -> None:
    assert list(words.sentences(PAGE)) == [
        "One link to it and Code end.", "Two: it goes on (1.5 GiB and more).", "Code begins with code.", "**Four.",
        "Five", "six", "seven.", "Eight", "nine", "ten.", "Eleven", "---", "---",
    ]  # fmt: skip
    assert [words.length(each) for each in words.sentences(PAGE)][:4] == [7, 8, 4, 1]


def test_limits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a word " * 10 + ".\n")
    (tmp_path / "CONTRIBUTING.md").write_text(2 * ("a word " * 10 + ".\n\n"))
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "WORDS", 63)
    assert words.main() == 0
    (tmp_path / "README.md").write_text("a word " * 16 + ".\n")
    assert words.main() == 1
    printed = capsys.readouterr().out
    assert "README.md: a sentence of 32 words, at most 30" in printed and "75 words, at most 63" in printed
    assert "CONTRIBUTING.md: a sentence" not in printed
