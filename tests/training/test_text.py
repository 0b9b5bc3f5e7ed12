"""Texts as samples: characters and tokens, windows, the held-out end, and what is drawn from a distribution."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clcomm import Communicator
from clcomm.base.errors import DataError
from clcomm.sync.sampler import EvaluationSampler
from training.data.loader import Loader
from training.data.text import TextDataset, Vocabulary, open_text
from training.text_options import TextOptions
from training.text_session import TextSession, drawn_token


@given(st.text(min_size=1))
def test_tokens_are_places_among_the_sorted_characters(text):
    text = text.encode("utf-16", "replace").decode("utf-16")  # no halves of characters
    vocabulary = Vocabulary(text)
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert tokens.max() == len(vocabulary) - 1 == len(set(text)) - 1


@pytest.mark.parametrize("text", ["abz", "?bc", "b\N{SNOWMAN}"])
def test_unknown_characters_are_refused(text):
    with pytest.raises(DataError, match="expected characters that the model knows, got "):
        Vocabulary("abc").encode(text)


@given(length=st.integers(8, 60), context=st.integers(1, 7))
def test_windows_follow_one_another_and_labels_come_next(length, context):
    tokens = np.random.default_rng(length).integers(0, 5, length).astype(np.int32)
    dataset = TextDataset(tokens, context, Vocabulary("abcde"), "some")
    assert len(dataset) == (length - 1) // context and dataset.image_shape == (context,)
    chosen = np.arange(len(dataset))[::-1]
    for out in (None, dataset.new_batch(len(chosen))):
        inputs, labels = dataset.batch(chosen, out)
        assert inputs.dtype == labels.dtype == np.int32
        for place, window in enumerate(chosen):
            first = window * context
            np.testing.assert_array_equal(inputs[place], tokens[first : first + context])
            np.testing.assert_array_equal(labels[place], tokens[first + 1 : first + context + 1])


@pytest.fixture
def comm():
    return Communicator()


@given(length=st.integers(9, 60), kinds=st.integers(1, 5), context=st.integers(1, 7))
def test_the_loss_of_pairs_is_that_of_the_best_guess_by_the_character_before(length, kinds, context):
    tokens = np.random.default_rng(length).integers(0, kinds, length).astype(np.int32)
    dataset = TextDataset(tokens, context, Vocabulary("abcde"), "some")
    text = tokens[: len(dataset) * context].tolist()
    losses = []
    for before, after in pairwise(text):
        followers = [second for first, second in pairwise(text) if first == before]
        losses.append(-np.log(followers.count(after) / len(followers)))
    assert dataset.loss_of_pairs() == pytest.approx(np.mean(losses), abs=1e-12)


@pytest.mark.mpi(min_size=1)
def test_all_ranks_have_the_same_text(comm, tmp_path):
    path = tmp_path / "text"
    if comm.rank == 0:
        path.write_text("0123456789" * 40)
    splits = open_text(str(path), 8, comm)  # of other ranks it is another path
    assert len(splits.train) == (360 - 1) // 8 and len(splits.test) == (40 - 1) // 8
    assert len(set(comm.all_gather_object((splits.name, splits.train.images.tobytes())))) == 1
    np.testing.assert_array_equal(splits.test.images[0], np.arange(8))


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("content", [None, b"\xff\xfe\xfd", b"short"])
def test_all_ranks_refuse_what_rank_0_cannot_use(comm, tmp_path, content):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"^text "):
        open_text(str(path), 8, comm)


def test_the_default_text_is_pythons_own_and_ascii(comm):
    splits = open_text(None, 256, comm)
    assert 60 < splits.train.classes <= 127 and len(splits.train) > 4000 and len(splits.test) == (1 << 17) // 256 - 1
    tokens, _ = next(iter(Loader(splits.test, EvaluationSampler(len(splits.test), 0, 1), 4, prefetch=0)))
    assert len(splits.train.vocabulary.decode(tokens[0])) == 256


def test_a_rehearsed_step_needs_no_kernel_more(comm, tmp_path):
    if comm.size > 1:
        pytest.skip("sums over ranks are tested in test_build_together")
    (tmp_path / "text").write_text("0123456789" * 40)
    options = TextOptions(
        text=str(tmp_path / "text"), layers=1, width=8, heads=2, context=8, batch_size=2, max_steps=3, quiet=True,
        device="cpu",
    )  # fmt: skip
    session = TextSession(options, comm)
    rehearsal = session.parts.rehearse((2, session.EVALUATION_BATCH), "adamw", 1e-3, {})
    rehearsal.build(rehearsal.programs)
    rehearsal.close()
    built = set(session.parts.opencl._kernels)
    result = session.run()
    assert result.steps == 3 and np.isfinite(result.evaluation.loss)
    assert set(session.parts.opencl._kernels) == built


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_softmax(temperature):
    logits = np.float32([0, 2, 1, -50])
    chances = (np.arange(10000) + 0.5) / 10000
    counts = np.bincount([drawn_token(logits, temperature, chance) for chance in chances], minlength=4) / 10000
    powers = np.exp(logits / temperature)
    np.testing.assert_allclose(counts, powers / powers.sum(), atol=2e-4)
    assert drawn_token(logits, 0, 0.0) == drawn_token(logits, 0.0, 0.99) == 1
    assert drawn_token(logits, temperature, 1.0) == 3
