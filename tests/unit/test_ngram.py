"""The n-gram baseline is a probability distribution, equals a slow reference, and scores what
the network scores."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.batch import IGNORE_INDEX
from phalanx.data import ngram
from phalanx.data.loader import HeldOutBatches
from phalanx.data.ngram import fit_kneser_ney, fit_unigram, score_unigram_and_trigram
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import SampleWindows
from phalanx.data.tokens import SPLITS
from phalanx.job.schema import Data


def markov_tokens(num_tokens: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Tokens that mostly repeat the one two before, so that a trigram has something to learn."""
    rng = np.random.default_rng(seed)
    tokens = rng.geometric(0.3, num_tokens) % vocab_size
    for at in range(2, num_tokens):
        if rng.random() < 0.6:
            tokens[at] = (tokens[at - 2] * 3 + tokens[at - 1]) % vocab_size
    return tokens.astype(np.uint16)


class SlowKneserNey:
    """Chen & Goodman 1999, equations 24 to 26, with dictionaries and no thought for speed."""

    def __init__(self, tokens: list[int], vocab_size: int, order: int = 3) -> None:
        self.vocab_size = vocab_size
        grams = Counter(tuple(tokens[at : at + order]) for at in range(len(tokens) - order + 1))
        self.counts = {order: grams}
        for shorter in range(order - 1, 0, -1):
            self.counts[shorter] = Counter(gram[1:] for gram in self.counts[shorter + 1])
        self.discounts = {length: self._estimate(grams) for length, grams in self.counts.items()}
        self.followers: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        for length in self.counts:
            for gram in self.counts[length]:
                self.followers[gram[:-1]].append(gram)

    @staticmethod
    def _estimate(grams: Counter[tuple[int, ...]]) -> list[float]:
        n1, n2, n3, n4 = (
            sum(count == number for count in grams.values()) for number in (1, 2, 3, 4)
        )
        y = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
        if not (n1 and n2 and n3 and n4):
            return [y] * 3
        return [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        shorter = self.probability(token, context[1:]) if context else 1 / self.vocab_size
        seen = self.followers.get(context)
        if not seen:
            return shorter
        counts = self.counts[len(context) + 1]
        total = sum(counts[gram] for gram in seen)
        taken = {gram: self._discount(counts[gram], len(gram)) for gram in seen}
        own = counts.get((*context, token), 0) - taken.get((*context, token), 0.0)
        return own / total + sum(taken.values()) / total * shorter

    def _discount(self, count: int, length: int) -> float:
        return min(count, max(0.01, self.discounts[length][min(count, 3) - 1]))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 5, 60, 3_000])
def test_probabilities_sum_to_one_after_any_context(num_tokens: int) -> None:
    vocab_size = 7
    tokens = markov_tokens(num_tokens, vocab_size - 2)  # tokens 5 and 6 are never seen
    every_token = np.arange(vocab_size)
    for model in (fit_unigram(tokens, vocab_size), fit_kneser_ney(tokens, vocab_size, order=3)):
        for before, previous in itertools.product(range(vocab_size), repeat=2):
            probabilities = model(
                every_token, np.full(vocab_size, previous), np.full(vocab_size, before)
            )
            assert probabilities.min() > 0
            assert probabilities.sum() == pytest.approx(1, abs=1e-12)
            assert model(every_token, np.full(vocab_size, previous)).sum() == pytest.approx(
                1, abs=1e-12
            )


@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(40, 5), (3_000, 6), (5_000, 300)])
def test_losses_equal_a_slow_reference(num_tokens: int, vocab_size: int) -> None:
    train, held_out = (
        markov_tokens(num_tokens, vocab_size - 1),
        markov_tokens(300, vocab_size, seed=1),
    )
    slow = SlowKneserNey(train.tolist(), vocab_size)
    text = held_out.tolist()
    trigram = (
        -sum(
            math.log(slow.probability(text[at], tuple(text[max(0, at - 2) : at])))
            for at in range(1, 300)
        )
        / 299
    )
    seen = Counter(train.tolist())
    unigram = (
        -sum(math.log((seen[token] + 1) / (num_tokens + vocab_size)) for token in text[1:]) / 299
    )
    scores = score_unigram_and_trigram(train, held_out, vocab_size)
    assert [(score.name, score.num_targets) for score in scores] == [
        ("unigram", 299),
        ("trigram", 299),
    ]
    assert [score.loss_nats for score in scores] == pytest.approx([unigram, trigram], abs=1e-12)


def test_structure_is_learnt_and_noise_is_not() -> None:
    noise = np.random.default_rng(0).integers(0, 16, 60_000)
    unigram, trigram = score_unigram_and_trigram(noise[:50_000], noise[50_000:], 16)
    assert unigram.loss_nats == pytest.approx(math.log(16), abs=0.01)
    assert trigram.loss_nats == pytest.approx(
        math.log(16), abs=0.06
    )  # 4,096 grams were seen 12 times each
    unigram, trigram = score_unigram_and_trigram(
        markov_tokens(50_000, 16), markov_tokens(5_000, 16, seed=1), 16
    )
    assert trigram.loss_nats < unigram.loss_nats - 0.5


def test_counting_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, held_out = markov_tokens(5_000, 20), markov_tokens(1_000, 20, seed=1)
    whole = score_unigram_and_trigram(train, held_out, 20)
    monkeypatch.setattr(ngram, "_CHUNK_TOKENS", 7)
    for piecewise, at_once in zip(
        score_unigram_and_trigram(train, held_out, 20), whole, strict=True
    ):
        assert piecewise.loss_nats == pytest.approx(at_once.loss_nats, abs=1e-12)


def test_a_large_vocabulary_needs_no_table() -> None:
    train = np.random.default_rng(0).integers(0, 2_000_000, 20_000)
    unigram, trigram = score_unigram_and_trigram(train, train[:5_000], 2_000_000)
    assert unigram.loss_nats == pytest.approx(math.log(2_020_000 / 2), abs=0.05)
    assert 0 < trigram.loss_nats < unigram.loss_nats
    assert [score.name for score in score_unigram_and_trigram(train, train, 3_000_000)] == [
        "unigram"
    ]


@pytest.mark.parametrize("max_tokens", [None, 1, 100, 10**6])
def test_the_targets_are_those_of_the_held_out_batches(
    tmp_path: Path, max_tokens: int | None
) -> None:
    np.save(tmp_path / "ids.npy", markov_tokens(2_000, 9))
    data = Data(source=str(tmp_path / "ids.npy"), held_out_fraction=0.3, seq_len=16)
    corpus = prepare_corpus(data, tmp_path / "data", vocab_size=None)
    train, held_out = (corpus.sequences(split)[0] for split in SPLITS)
    batches = HeldOutBatches(held_out, SampleWindows(16), 2, 1, 0, max_tokens)
    targets = np.concatenate(
        [batch["targets"][batch["targets"] != IGNORE_INDEX].numpy() for batch in batches]
    )
    unigram, trigram = score_unigram_and_trigram(train, held_out, corpus.vocab_size, max_tokens)
    assert unigram.num_targets == trigram.num_targets == targets.size == batches.num_targets
    model = fit_unigram(train, corpus.vocab_size)
    assert unigram.loss_nats == pytest.approx(-np.log(model(targets)).mean(), abs=1e-12)


@pytest.mark.parametrize(("num_held_out", "max_tokens"), [(0, None), (1, None), (50, 0)])
def test_no_targets_give_no_scores(num_held_out: int, max_tokens: int | None) -> None:
    assert (
        score_unigram_and_trigram(
            markov_tokens(100, 5), markov_tokens(num_held_out, 5), 5, max_tokens
        )
        == []
    )
