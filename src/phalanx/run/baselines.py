"""The n-gram baselines of a corpus, as events."""

from __future__ import annotations

import time

from phalanx.data.corpus import Corpus
from phalanx.data.ngram import score_unigram_and_trigram
from phalanx.data.tokens import SPLITS
from phalanx.observe.events import BaselineMeasured, Event, Note

# An n-gram model of more takes longer than people wait.
MAX_TRAIN_TOKENS = 32_000_000


def compute_ngram_baseline_losses(corpus: Corpus, max_tokens: int) -> list[Event]:
    """Unigram and interpolated trigram, fitted on the training split and scored on the held-out
    tokens."""
    began = time.monotonic()
    if len(corpus.components) > 1:
        return [Note("no_baselines", {"why": "a mixture has no one n-gram model to compare with"})]
    train, held_out = (corpus.sequences(split)[0] for split in SPLITS)
    if len(train) > MAX_TRAIN_TOKENS:
        return [Note("no_baselines", {"why": f"more than {MAX_TRAIN_TOKENS:,} training tokens"})]
    assert corpus.vocab_size is not None
    scores = score_unigram_and_trigram(train, held_out, corpus.vocab_size, max_tokens=max_tokens)
    wall_s = time.monotonic() - began
    return [
        BaselineMeasured(score.name, score.loss_nats, score.num_targets, wall_s) for score in scores
    ]
