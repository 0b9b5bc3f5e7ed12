"""The runtimes that one CPU's benchmark puts side by side."""

from __future__ import annotations

from pathlib import Path

from benchmarks import runtimes
from benchmarks.kernels.cases import make_cases


def test_a_further_driver_is_the_only_one_that_its_worker_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes.intel_runtime, "library", lambda: None)
    library = tmp_path / "libpocl.so.2"
    library.touch()
    with runtimes.runtimes([str(library)]) as found:
        (first, own), (name, variables) = found
        vendors = Path(variables["OCL_ICD_VENDORS"])
        assert (first, own["CLCOMM_DEVICE"], name) == (runtimes.WHEEL, "", "libpocl.so.2")
        assert [path.read_text() for path in vendors.iterdir()] == [f"{library}\n"]
        assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path)
    assert not vendors.exists()


def test_intels_runtime_is_among_them_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes.intel_runtime, "library", lambda: tmp_path)
    with runtimes.runtimes([]) as found:
        assert found[1:] == [(runtimes.INTEL, {"CLCOMM_DEVICE": "intel"})]


def test_products_are_those_that_fill_a_core():
    shown = [case.sizes for case in make_cases(["gemm"], [64], [512]) if runtimes.is_shown(case)]
    assert shown and all(sizes["m"] == sizes["k"] == 512 for sizes in shown)
