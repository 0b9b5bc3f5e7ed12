"""Tables of tuned sizes: stored and read back, ignored when invalid, and without effect on results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from clcomm.base.errors import ArgumentError, OutputError
from clcomm.engine import Tensor, autotune, tuning
from clcomm.engine import functional as F
from clcomm.engine.autotune import SizeTrial, convolution, elementwise, fastest, product
from clcomm.engine.device import Device
from clcomm.engine.tuning import Identity, Tuning
from clcomm.tools import cli

OTHER = Tuning(gemm_tile=(4, 24, 8), transpose_from=96, gemm_block=(8, 4, 16), conv_outputs=4)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """A separate cache directory for each test, not created yet."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("CLCOMM_CACHE_DIR", str(directory))
    return directory


def identity_of(device: Device) -> Identity:
    return Identity.of(device.cl_device, device.kind)


def loaded(device: Device) -> Tuning:
    return tuning.load(device.cl_device, device.kind)


def stored(device: Device) -> tuple[Path, dict]:
    path = tuning.store(OTHER, identity_of(device))
    return path, json.loads(path.read_text())


def built_in(device: Device) -> Tuning:
    return tuning.defaults(device.cl_device)


def test_without_a_table_sizes_are_the_built_in_ones(device):
    assert loaded(device) == built_in(device)
    assert not tuning.is_stored(device.cl_device, device.kind)


def test_what_is_stored_is_loaded(device, cache):
    path, table = stored(device)
    assert path.parent == cache / "tuning" and os.listdir(path.parent) == [path.name]
    names = tuning.choices(device.kind)
    assert table["choices"].keys() == names.keys()  # of this kind alone
    expected = asdict(built_in(device)) | {name: value for name, value in asdict(OTHER).items() if name in names}
    assert asdict(loaded(device)) == expected
    assert asdict(Device(device.cl_device, kind=device.kind).tuning) == expected
    assert Device(device.cl_device, kind=device.kind, tuning=Tuning()).tuning == Tuning()
    assert tuning.is_stored(device.cl_device, device.kind)
    assert tuning.forget(identity_of(device)) and not tuning.forget(identity_of(device))
    assert loaded(device) == built_in(device)


def test_a_later_table_replaces_the_first(device):
    stored(device)
    tuning.store(built_in(device), identity_of(device))
    assert loaded(device) == built_in(device)


def changed(**changes):
    return lambda table: json.dumps({**table, **changes})


def with_choice(name, value):
    return lambda table: json.dumps({**table, "choices": {name: value}})


DAMAGES = {
    "empty": lambda table: "",
    "cut short": lambda table: json.dumps(table)[:-5],
    "two tables": lambda table: json.dumps(table) * 2,
    "no table": lambda table: "[1, 2]",
    "deep": lambda table: "[" * 15_000,
    "large": lambda table: json.dumps(table) + " " * 20_000,
    "huge number": lambda table: '{"format": ' + "9" * 9_000 + "}",
    "another format": changed(format=tuning.FORMAT - 1),
    "format as text": changed(format="1"),
    "true for 1": changed(format=True),
    "another driver": changed(driver="9.9"),
    "another device": changed(device="Radeon"),
    "something more": changed(comment="x"),
    "something less": lambda table: json.dumps({k: v for k, v in table.items() if k != "kind"}),
    "choices no table": changed(choices=[1]),
    "unknown choice": with_choice("gemm_speed", 9),
    "code": with_choice("group", "__import__('os').abort()"),
    "number for a tile": with_choice("gemm_tile", 6),
    "nothing": with_choice("near_cache", None),
    "fraction": with_choice("transpose_from", 192.0),
    "not a number": with_choice("transpose_from", float("nan")),
    "not among the choices": with_choice("transpose_from", 193),
    "nested tile": with_choice("gemm_tile", [[6], [16], [8]]),
    "true for a size": with_choice("group", True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_table_is_ignored_with_one_warning(device, damage):
    path, table = stored(device)
    path.write_text(DAMAGES[damage](table))
    with pytest.warns(
        RuntimeWarning, match=r"tuning.*\.json: ignored, .*`clcomm tune-kernels` writes it again"
    ) as seen:
        assert loaded(device) == built_in(device)
    assert len(seen) == 1 and "\n" not in str(seen[0].message) and len(str(seen[0].message)) < 600


def test_bytes_that_are_no_text(device):
    path, _ = stored(device)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert loaded(device) == built_in(device)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file(device, make):
    path = identity_of(device).path
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert loaded(device) == built_in(device)


def test_only_the_first_rank_of_a_host_warns(device, monkeypatch):
    path, _ = stored(device)
    path.write_text("")
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    assert loaded(device) == built_in(device)  # warnings are errors here


def test_a_directory_that_cannot_be(device, cache):
    cache.write_text("a file")
    with pytest.raises(ArgumentError, match=r"^CLCOMM_CACHE_DIR: expected "):
        tuning.store(Tuning(), identity_of(device))


def test_a_failed_write_leaves_the_old_table_and_nothing_else(device, monkeypatch):
    path, _ = stored(device)
    before = path.read_bytes()

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        tuning.store(Tuning(), identity_of(device))
    assert os.listdir(path.parent) == [path.name] and path.read_bytes() == before


def fake_device(name="GPU", driver="1.0", platform="Maker", group=1024, lanes=1, vendor="Maker"):
    return SimpleNamespace(
        name=name, driver_version=driver, platform=SimpleNamespace(name=platform), vendor=vendor,
        max_work_group_size=group, native_vector_width_float=lanes,
    )  # fmt: skip


def test_each_device_driver_and_kind_has_a_table_of_its_own():
    devices = [
        (fake_device(), "gpu"), (fake_device(driver="2.0"), "gpu"), (fake_device(platform="Other"), "gpu"),
        (fake_device(name="../../GPU 2"), "gpu"), (fake_device(), "cpu"),
    ]  # fmt: skip
    paths = [Identity.of(*device).path for device in devices]
    assert len(set(paths)) == len(paths) and len({path.parent for path in paths}) == 1


def test_pocls_drivers_share_a_table():
    names = ("basic-AMD EPYC", "pthread-AMD EPYC", "cpu-AMD EPYC", "cpu-minimal-AMD EPYC")
    assert len({Identity.of(fake_device(name), "cpu") for name in names}) == 1


def test_a_device_with_small_groups_gets_kernels_that_fit():
    small = tuning.defaults(fake_device(group=64))
    assert small.group <= 64 and small.gemm_block[0] ** 2 <= 64
    assert tuning.defaults(fake_device(group=256)) == Tuning()


@pytest.mark.parametrize(
    ("name", "vendor", "lanes", "tile_lanes"),
    [
        ("pthread-Intel(R) Xeon(R) Platinum", "GenuineIntel", 16, 16),
        ("basic-Intel(R) Core(TM) i5", "GenuineIntel", 8, 8),
        ("pthread-AMD EPYC 9354", "AuthenticAMD", 16, 8),
        ("cpu-znver5-AMD", "AuthenticAMD", 16, 8),
        ("pthread-cortex-a72", "ARM", 4, 8),
    ],
)
def test_the_cpu_chooses_the_lanes_of_a_product(name, vendor, lanes, tile_lanes):
    chosen = tuning.defaults(fake_device(name, vendor=vendor, lanes=lanes))
    assert chosen.gemm_tile[2] == tile_lanes and chosen.gemm_tile in tuning.CHOICES["cpu"]["gemm_tile"]


def test_every_built_in_size_is_the_first_choice():
    for kind in ("cpu", "gpu"):
        assert {name: values[0] for name, values in tuning.choices(kind).items()}.items() <= asdict(Tuning()).items()


# -- the search

SMALL_WORKLOADS = {
    "gemm_tile": [product("NT", 20, 33, 65), product("TN", 70, 40, 30), product("NN", 37, 49, 600)],
    "transpose_from": [product("TN", 200, 194, 200)],
    "near_cache": [convolution(9, 3, 30, 6, ("weight_gradient",)), convolution(3, 1, 40, 6, ("weight_gradient",))],
    "conv_lanes": [convolution(19, 3, 9, 8, ("convolve", "weight_gradient"))],
    "loop_lanes": [elementwise(77)],
    "gemm_block": [product("NT", 20, 33, 65), product("TN", 130, 70, 40), product("NN", 9, 70, 50)],
    "group": [elementwise(5000)],
    "conv_outputs": [convolution(3, 3, 6, 10, ("convolve", "weight_gradient"))],
}


@pytest.mark.slow
def test_every_choice_runs_is_timed_and_gives_the_same_bits(device):
    results = list(autotune.search(device.cl_device, device.kind, rounds=1, workloads=SMALL_WORKLOADS))
    trials = [trial for _, each in results for trial in each]
    assert [(trial.name, trial.value) for trial in trials] == [
        (name, value)
        for name, values in tuning.choices(device.kind).items()
        for value in sorted(values, key=lambda value: value != getattr(built_in(device), name))
    ]
    for trial in trials:
        assert trial.problem in ("", "not again")
        assert trial.time is not None and 0 < trial.time < 1e3
    tuning.store(results[-1][0], identity_of(device))
    assert loaded(device) == results[-1][0]


def test_a_model_keeps_its_bits_with_other_sizes(device):
    def results(sizes: Tuning) -> list[bytes]:
        own = Device(device.cl_device, kind=device.kind, tuning=sizes)
        rng = np.random.default_rng(0)
        shapes = [(19, 1, 28, 28), (6, 1, 3, 3), (6,), (20, 6 * 14 * 14), (20,)]
        leaves = [Tensor(rng.standard_normal(s).astype(np.float32), own, requires_grad=True) for s in shapes]
        x, kernel, kernel_bias, weight, bias = leaves
        y = F.linear(F.flatten(F.conv_relu_pool(x, kernel, kernel_bias, padding=1), 1), weight, bias, relu=True)
        F.sum(y * y).backward()
        return [y.numpy().tobytes(), *(leaf.grad.numpy().tobytes() for leaf in leaves)]

    assert results(OTHER) == results(Tuning())
    assert results(Tuning(near_cache=40 * 1024)) == results(Tuning())
    assert results(Tuning(gemm_tile=(12, 32, 16), conv_lanes=16)) == results(Tuning())


def test_a_choice_has_to_save_time_to_be_taken():
    def chosen(*times):
        return fastest([SizeTrial("size", index, time) for index, time in enumerate(times)])

    assert chosen(1.0, 0.99, 1.5) == 0
    assert chosen(1.0, 0.9, 0.8, None) == 2
    assert chosen(1.0) == 0


def test_a_choice_that_gives_other_bits_or_does_not_run_is_out(device, monkeypatch):
    def make(own):
        if own.tuning.group == 64:
            raise MemoryError("too much")
        values = np.full(3, float(own.tuning.group), np.float32)
        return lambda: [Tensor(values if own.tuning.group == 128 else np.ones(3, np.float32), own) * 1.0]

    monkeypatch.setitem(tuning.CHOICES, "cpu" if device.is_cpu else "gpu", {"group": (256, 64, 128, 512)})
    workloads = {"group": [autotune.Workload(make, ("mul", "affine"))]}
    ((_, trials),) = autotune.search(device.cl_device, device.kind, rounds=1, workloads=workloads)
    problems = {trial.value: trial.problem for trial in trials}
    assert problems[64] == "does not run: too much" and problems[128] == "gives other bits"
    assert {trial.value for trial in trials if trial.time is None} == {64, 128}


# -- the command


def test_the_command_stores_what_later_devices_take(cache, monkeypatch, capsys):
    monkeypatch.setattr(autotune, "search", partial(autotune.search, rounds=1))  # what it finds is not the question
    cli.main(["tune-kernels"])
    out = capsys.readouterr().out
    *_, last = out.splitlines()
    (path,) = (cache / "tuning").iterdir()
    assert last == f"stored in {path}"
    assert re.search(r"gemm_tile: (6x16x8|12x32x16) 1.00", out) or "gemm_block: 16x8x8 1.00" in out
    listed = subprocess.run([sys.executable, "-m", "clcomm", "devices"], capture_output=True, text=True, timeout=120)
    assert "tuned" in listed.stdout
    cli.main(["tune-kernels", "--reset"])
    assert capsys.readouterr().out == f"{path}: deleted\n" and not path.exists()
