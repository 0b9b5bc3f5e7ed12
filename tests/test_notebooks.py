"""The notebooks: executed from first to last cell, kept with outputs, and free of what is not theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; pip install -e '.[notebooks]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed; pip install -e '.[notebooks]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; pip install -e '.[notebooks]'")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_small_and_holds_its_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert path.stat().st_size < 100_000 and code
    assert any(cell.outputs for cell in code) and [cell.execution_count for cell in code] == [*range(1, 1 + len(code))]
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert path.name in (ROOT / "docs" / "example-programs.md").read_text()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install -e '.[notebooks]'")
    before = set(os.listdir(path.parent))
    for name, value in (("MPLBACKEND", "Agg"), ("IPYTHONDIR", str(tmp_path)), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    told = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", ()))
    assert told and "Traceback" not in told
    assert set(os.listdir(path.parent)) == before, "it leaves files"
