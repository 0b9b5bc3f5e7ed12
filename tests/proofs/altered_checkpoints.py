"""Drawn alterations of a series of checkpoints: none is loaded with other values than were saved in its place.

`python -m tests.proofs.altered_checkpoints CASES SEED`. Each case alters one file of a series of four, in every second
case of a signed one. It prints how many files were refused and how many had the same bits all the same, by alteration,
and the cases in which other values were loaded.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from clcomm.base.errors import CheckpointError
from clcomm.jobs.checkpoint import Checkpoint, earlier, save
from clcomm.jobs.checkpoint.manifest import write_manifest
from training.checkpoint_series import undamaged

FILES, KEY = 4, "CLCOMM_CHECKPOINT_KEY"
Members = dict[str, bytes]


class Series(NamedTuple):
    """Four files of a run, their bytes from the newest on, one of another run, and what each of the four holds."""

    folder: Path
    files: list[bytes]
    other: bytes
    held: list[str]

    @property
    def newest(self) -> Path:
        return self.folder / "run.npz"

    def restore(self) -> None:
        """Put the four files back as they were."""
        for age, data in enumerate(self.files):
            earlier(self.newest, age).write_bytes(data)


def checkpoint(step: int, draw: np.random.Generator) -> Checkpoint:
    made = Checkpoint(facts={"training": {"step": step}})
    made.add_group("parameter", {
        "fc1.weight": draw.standard_normal((3, 4)).astype(np.float32),
        "fc2.weight": draw.standard_normal((3, 4)).astype(np.float32),
        "fc2.bias": draw.standard_normal(4).astype(np.float32),
    })  # fmt: skip
    made.add_group("optimizer", {"steps": np.int64(step), "kind": np.array("SGD")})
    return made


def content(found: Checkpoint) -> str:
    """Return all that was loaded, as text: every array's name, dtype, shape and bits in order, and the facts."""
    return repr((found.facts, [(name, a.dtype.str, a.shape, a.tobytes()) for name, a in found.arrays.items()]))


def make(folder: Path, seed: int) -> Series:
    """Save a series of four, and a file of another run."""
    draw, path = np.random.default_rng(seed), folder / "run.npz"
    for step in range(FILES):
        save(path, checkpoint(step, draw), keep=FILES)
    save(folder / "other" / "run.npz", checkpoint(FILES - 1, draw), keep=FILES)
    files = [earlier(path, age).read_bytes() for age in range(FILES)]
    series = Series(folder, files, (folder / "other" / "run.npz").read_bytes(), [])
    for age in range(FILES):
        series.restore()
        for newer in range(age):
            earlier(path, newer).unlink()
        source, found = next(undamaged(path))
        assert source == earlier(path, age)
        series.held.append(content(found))
    return series


def members_of(data: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(members: Members, comment: bytes = b"") -> bytes:
    """Return an archive of these members, with right CRCs."""
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = comment
    return into.getvalue()


# --- alterations: each gets the series, the file's bytes and a draw, and returns the file's new bytes ---


def flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 9))):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flipped_member(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    name = draw.choice(list(members))
    return zipped({**members, name: flip(members[name], draw)})


def flipped_file(series: Series, data: bytes, draw: random.Random) -> bytes:
    return flip(data, draw)


def cut(series: Series, data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def swapped(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    first, second = draw.sample([name for name in members if name.endswith(".npy")], 2)
    return zipped({**members, first: members[second], second: members[first]})


def member_of_another(series: Series, data: bytes, draw: random.Random) -> bytes:
    name = draw.choice(list(members_of(data)))
    theirs = members_of(draw.choice([*series.files, series.other]))
    return zipped({**members_of(data), name: theirs[name]})


def manifest_of_another(series: Series, data: bytes, draw: random.Random) -> bytes:
    theirs = members_of(draw.choice([*series.files, series.other]))
    return zipped({**members_of(data), "manifest.json": theirs["manifest.json"], "seal": theirs["seal"]})


def changed_manifest(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    manifest = json.loads(members["manifest.json"])
    what = draw.choice(("members", "before", "keep", "name"))
    if what == "members":
        manifest["members"][draw.choice(list(manifest["members"]))] = f"{draw.getrandbits(256):064x}"
    elif what == "name":
        manifest["members"].pop(draw.choice(list(manifest["members"])))
    else:
        manifest[what] = draw.choice((None, 1, FILES, f"{draw.getrandbits(256):064x}"))
    return zipped({**members, "manifest.json": json.dumps(manifest, indent=1).encode()})


def without_member(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    members.pop(draw.choice(list(members)))
    return zipped(members)


def added_member(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    name = draw.choice(("parameter/fc3.weight.npy", "readme.txt", "parameter/", "seal.npy"))
    return zipped({**members, name: members["parameter/fc2.bias.npy"]})


def repeated_member(series: Series, data: bytes, draw: random.Random) -> bytes:
    members, into = members_of(data), io.BytesIO(data)
    name = draw.choice(list(members))
    with zipfile.ZipFile(into, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two members of one name
        archive.writestr(name, flip(members[name], draw))
    return into.getvalue()


def other_dtype(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = members_of(data)
    name = draw.choice([each for each in members if each.startswith("parameter/")])
    return zipped({**members, name: members[name].replace(b"<f4", draw.choice((b"<i4", b"<u4", b">f4")))})


def padded(series: Series, data: bytes, draw: random.Random) -> bytes:
    rubbish = draw.randbytes(draw.randrange(1, 200))
    return zipped(members_of(data), rubbish) if draw.random() < 0.5 else rubbish + data


def reordered(series: Series, data: bytes, draw: random.Random) -> bytes:
    members = list(members_of(data).items())
    draw.shuffle(members)
    return zipped(dict(members))


def of_another_run(series: Series, data: bytes, draw: random.Random) -> bytes:
    return series.other


def older(series: Series, data: bytes, draw: random.Random) -> bytes:
    """An older file under this one's name; `alter` may remove what it was copied from."""
    return draw.choice(series.files[1:])


def sealed_anew(series: Series, data: bytes, draw: random.Random) -> bytes:
    """All hashes made to fit, without the key, or with another: what only a signature can find."""
    members = members_of(data)
    name = draw.choice([each for each in members if each.endswith(".npy")])
    manifest, before = json.loads(members["manifest.json"]), os.environ[KEY]
    members[name] = members[name][:-1] + bytes([members[name][-1] ^ 1])
    into, theirs = io.BytesIO(), series.folder / "theirs"
    theirs.write_text(f"{draw.getrandbits(256):064x}")
    os.environ[KEY] = str(theirs) if draw.random() < 0.5 else ""
    try:
        with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as archive:
            for each in manifest["members"]:
                archive.writestr(each, members[each])
            digests = {each: hashlib.sha256(members[each]).hexdigest() for each in manifest["members"]}
            write_manifest(archive, digests, manifest["before"], manifest["keep"])
    finally:
        os.environ[KEY] = before
    return into.getvalue()


Alteration = Callable[[Series, bytes, random.Random], bytes]
ALTERATIONS: tuple[Alteration, ...] = (
    flipped_member, flipped_file, cut, swapped, member_of_another, manifest_of_another, changed_manifest,
    without_member, added_member, repeated_member, other_dtype, padded, reordered, of_another_run, older,
)  # fmt: skip


def alter(series: Series, alteration: Alteration, draw: random.Random) -> Path:
    """Alter one file of the series, of which those before it are gone; return its path."""
    series.restore()
    age = draw.choice((0, 0, 0, *range(1, FILES - 1)))
    changed = alteration(series, series.files[age], draw)
    for newer in range(age + 1):
        earlier(series.newest, newer).unlink()
    place = earlier(series.newest, age)
    place.write_bytes(changed)
    moved = series.files.index(changed) if changed in series.files else age
    if alteration is older and age < moved < FILES - 1 and draw.random() < 0.5:
        earlier(series.newest, moved).unlink()  # renamed; files older still are there
    return place


@contextmanager
def key_of(folder: Path, is_signed: bool) -> Iterator[None]:
    """Set the environment's key to one of this folder, or to none."""
    before = os.environ.pop(KEY, None)
    if is_signed:
        (folder / "key").write_text("0123456789abcdef" * 4)
        os.environ[KEY] = str(folder / "key")
    try:
        yield
    finally:
        os.environ.pop(KEY, None)
        if before is not None:
            os.environ[KEY] = before


def prove(cases: int, seed: int) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return how often each alteration was refused, and had the same bits; and the cases that loaded other values."""
    refused, same, wrong = Counter[str](), Counter[str](), []
    for is_signed in (False, True):
        folder = Path(tempfile.mkdtemp(prefix="altered-"))
        with key_of(folder, is_signed):
            series = make(folder, seed)
            alterations = (*ALTERATIONS, sealed_anew) if is_signed else ALTERATIONS
            for number in range(is_signed, cases, 2):
                draw = random.Random(f"{seed} {number}")
                alteration = draw.choice(alterations)
                place = alter(series, alteration, draw)
                name = alteration.__name__
                try:
                    source, found = next(undamaged(series.newest))
                except CheckpointError as error:
                    wrong += [f"case {number}, {name}: {error!r}"]  # there are undamaged ones
                    continue
                age = 0 if source == series.newest else int(source.suffix[1:])
                if content(found) != series.held[age]:
                    wrong.append(f"case {number}, {name}: {source.name} has other values")
                (same if source == place else refused)[name] += 1
        shutil.rmtree(folder)
    return refused, same, wrong


def main() -> None:
    logging.getLogger("clcomm").setLevel(logging.ERROR)
    refused, same, wrong = prove(*map(int, sys.argv[1:3]))
    print(json.dumps({"refused": refused, "same": same, "wrong": wrong}, indent=1))


if __name__ == "__main__":
    main()
