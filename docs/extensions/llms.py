"""llms.txt, the list of pages for language models: the repository's, with links to the site's copies of the sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def for_site(text: str) -> str:
    """Return llms.txt with its links to docs/*.md as links to the site's plain copies."""
    return re.sub(r"\]\(docs/([\w/-]+\.md)\)", r"](_sources/\1.txt)", text)


def setup(app: Any) -> dict[str, Any]:
    def on_finished(app: Any, exception: Exception | None) -> None:
        if exception is None and app.builder.format == "html":
            (Path(app.outdir) / "llms.txt").write_text(for_site((ROOT / "llms.txt").read_text()))

    app.connect("build-finished", on_finished)
    return {"parallel_read_safe": True}
