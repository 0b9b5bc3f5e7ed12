"""A text as tokens, a number for each character, and windows of it as samples.

Legend: N windows, T tokens of a window, B windows of a batch.
"""

from __future__ import annotations

import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path

import numpy as np

from clcomm.base.errors import DataError
from clcomm.base.host.arrays import aligned_empty
from clcomm.comm.communicator import Communicator
from training.data.datasets import ArrayDataset, Splits

#: The share of a text that is held out, at its end, and the most tokens of that.
_HELD_OUT, _MOST_HELD_OUT = 0.1, 1 << 17


class Vocabulary:
    """The characters of a text in their order; a token is a character's place among them."""

    def __init__(self, text: str):
        self.characters = "".join(sorted(set(text)))
        self._codes = np.array([ord(each) for each in self.characters], np.uint32)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32, of a text of these characters alone; raises DataError for another one."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        tokens = np.minimum(np.searchsorted(self._codes, codes), len(self) - 1).astype(np.int32)
        unknown = codes != self._codes[tokens]
        if unknown.any():
            raise DataError(f"text: expected characters that the model knows, got {chr(codes[unknown][0])!r}")
        return tokens

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens."""
        return "".join(self.characters[token] for token in tokens)


class TextDataset(ArrayDataset):
    """Windows of T tokens that follow one another in a text; labels are the tokens that come next."""

    def __init__(self, tokens: np.ndarray, context: int, vocabulary: Vocabulary, name: str):
        count = (len(tokens) - 1) // context
        self.vocabulary, self.name, self.classes = vocabulary, name, len(vocabulary)
        self.images = tokens[: count * context].reshape(count, context)
        self.labels = tokens[1 : count * context + 1].reshape(count, context)

    def loss_of_pairs(self) -> float:
        """Return the loss, in nats a token, of guessing each token from the one before it by this text's own pairs."""
        tokens = self.images.ravel().astype(np.int64)
        counts = (
            np.unique(each, return_counts=True)[1] for each in (tokens[:-1], tokens[:-1] * self.classes + tokens[1:])
        )
        of_one, of_two = (float(found @ np.log(found)) for found in counts)
        return (of_one - of_two) / (len(tokens) - 1)

    def new_batch(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return memory for a batch, uninitialised: tokens and labels, int32 (size, T)."""
        shape = (size, self.images.shape[1])
        return aligned_empty(shape, np.int32), aligned_empty(shape, np.int32)

    def batch(
        self, indices: np.ndarray, out: tuple[np.ndarray, np.ndarray] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and labels, int32 (B, T), in fresh arrays or in those of `out`."""
        tokens, labels = self.new_batch(len(indices)) if out is None else out
        self.images.take(indices, axis=0, out=tokens)
        self.labels.take(indices, axis=0, out=labels)
        return tokens, labels


def open_text(path: str | None, context: int, comm: Communicator) -> Splits:
    """Return windows of a text for training, and of its end for evaluation; collective.

    Rank 0 reads the file and sends it to the others. The end is a tenth of the text, at most 131,072 characters.

    Args:
        path: of a text in UTF-8; None: the sources of the Python that runs.
        context: tokens of a window.

    Raises DataError, on every rank, for a file that cannot be read, and for one without a window for training and one
    for evaluation on each rank.
    """
    outcome: tuple[str, str] | DataError | None = None
    if comm.rank == 0:
        try:
            outcome = _python_sources() if path is None else (Path(path).name, Path(path).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            outcome = DataError(f"text {path}: {getattr(error, 'strerror', None) or error}")
    outcome = comm.broadcast_object(outcome, root=0, label="text")
    if isinstance(outcome, DataError):
        raise outcome
    assert outcome is not None
    label, text = outcome
    held_out = min(int(len(text) * _HELD_OUT), _MOST_HELD_OUT)
    least = context + 1
    if held_out < least or len(text) - held_out < comm.size * least:
        raise DataError(f"text {label}: expected at least {10 * least * comm.size:,} characters, got {len(text):,}")
    vocabulary = Vocabulary(text)
    tokens = vocabulary.encode(text)
    name = f"{label} {blake2b(text.encode(), digest_size=4).hexdigest()}"
    train, test = (TextDataset(part, context, vocabulary, name) for part in (tokens[:-held_out], tokens[-held_out:]))
    return Splits(train, test, default_epochs=1)


def _python_sources() -> tuple[str, str]:
    """Return the name and the text of the standard library's modules, without its packages, as ASCII."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(2, "found no sources of Python's standard library; name a --text FILE")
    parts = [path.read_bytes().decode("ascii", "replace").replace("\N{REPLACEMENT CHARACTER}", "?") for path in files]
    return f"Python {sys.version_info.major}.{sys.version_info.minor} library", "\n".join(parts)
