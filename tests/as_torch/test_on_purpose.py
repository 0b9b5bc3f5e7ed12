from pathlib import Path

from tests.as_torch.on_purpose import table


def test_the_page_has_the_table_of_what_differs_on_purpose():
    page = Path(__file__).parents[2] / "tests/proofs/edges.md"
    assert table() in page.read_text(), f"tests/proofs/edges.md: expected this table:\n{table()}"
