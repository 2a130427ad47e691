"""n-gram models fitted on the training split: what a network must beat on the same held-out tokens.

Torch-free.

The trigram is interpolated modified Kneser-Ney (Chen & Goodman 1999, section 3): absolute discounts
estimated from counts of counts, lower orders that count distinct contexts instead of tokens, and
the uniform distribution below.

A gram is one integer, its tokens as digits in base vocab_size, last token last: counting is
sorting, looking up is bisection, and the gram without its last token (its context) is `gram //
vocab_size`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order import count_held_out_targets
from phalanx.data.tokens import TokenSequence

Tokens = NDArray[np.integer] | TokenSequence
Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]
# A function (token [N], previous token [N], the one before [N], ...) -> probability [N].
NgramModel = Callable[..., Floats]

_CHUNK_TOKENS = 1 << 22  # at a time, as numbers of 8 bytes
# Above zero, so that no token is impossible after any context.
_MIN_DISCOUNT = 0.01


class NGramScore(NamedTuple):
    """Mean loss of one model in nats per target."""

    name: str
    loss_nats: float
    num_targets: int


def score_unigram_and_trigram(
    train_tokens: Tokens, held_out_tokens: Tokens, vocab_size: int, max_tokens: int | None = None
) -> list[NGramScore]:
    """Losses of a unigram (add-one) and an interpolated trigram on the targets that HeldOutBatches
    yields.

    Both arrays are 1-D ids below `vocab_size` and may be memory-mapped. The list is empty where
    there is no target, and has no trigram where three tokens do not fit 63 bits (a vocabulary above
    2,097,151).

    On the Python 3.11 standard library (11.3 M tokens to fit, 775,801 targets) the unigram reaches
    3.2810 and this trigram 1.8255. Measured and not kept: the same discounts over plain lower-order
    counts 1.8402; Jelinek-Mercer, with weights by EM per bucket of context counts on a part of the
    training tokens, 1.8780.
    """
    num_targets = count_held_out_targets(len(held_out_tokens), max_tokens)
    if num_targets == 0:
        return []
    models: dict[str, NgramModel] = {"unigram": fit_unigram(train_tokens, vocab_size)}
    # Three tokens are one signed integer of 64 bits.
    if vocab_size**3 < 2**63:
        models["trigram"] = fit_kneser_ney(train_tokens, vocab_size, order=3)
    scored = held_out_tokens[: num_targets + 1]
    return [
        NGramScore(name, _compute_mean_loss_nats(model, scored), num_targets)
        for name, model in models.items()
    ]


def _compute_mean_loss_nats(model: NgramModel, tokens: Tokens) -> float:
    """Nats per token of tokens[1:]; the first of these has only one token before it."""
    second = tokens[:2].astype(np.int64)
    loss = -float(np.log(model(second[1:], second[:1])).sum())
    for start in range(2, len(tokens), _CHUNK_TOKENS):
        # Two more in front: the context of the first.
        part = tokens[start - 2 : start + _CHUNK_TOKENS].astype(np.int64)
        loss -= float(np.log(model(part[2:], part[1:-1], part[:-2])).sum())
    return loss / (len(tokens) - 1)


def fit_unigram(tokens: Tokens, vocab_size: int) -> NgramModel:
    """Add-one (Laplace) frequencies; what comes before does not matter."""
    counts = count_ngrams(tokens, 1, vocab_size)
    return lambda token, *_: (counts.look_up_counts(token) + 1.0) / (len(tokens) + vocab_size)


def fit_kneser_ney(tokens: Tokens, vocab_size: int, order: int) -> NgramModel:
    """Interpolated modified Kneser-Ney of 1 to `order` tokens; the model uses as much context as
    it is given."""
    grams = count_ngrams(tokens, order, vocab_size)
    levels = [KneserNeyOrder.build(grams, vocab_size)]
    for shorter in range(order - 1, 0, -1):
        # Ones: a shorter gram counts once for each distinct token before it (Kneser-Ney).
        grams = _sum_by_key(grams.keys % vocab_size**shorter, np.ones_like(grams.counts))
        levels.insert(0, KneserNeyOrder.build(grams, vocab_size))

    def probabilities(token: Int64s, *previous: Int64s) -> Floats:
        probability, context, digit = np.full(token.shape, 1 / vocab_size), np.zeros_like(token), 1
        # Not strict: with less context than the order the longer levels are left out.
        for level, earlier in zip(levels, [*previous, None], strict=False):
            probability = level.interpolate(context * vocab_size + token, probability, vocab_size)
            if earlier is not None:
                # The next earlier token is the next higher digit.
                context, digit = context + earlier * digit, digit * vocab_size
        return probability

    return probabilities


@dataclass(frozen=True)
class NgramCounts:
    """Distinct grams in ascending order, and how often each was seen."""

    keys: Int64s
    counts: Int64s

    def look_up_counts(self, keys: Int64s) -> Int64s:
        """The count of each of `keys`, 0 where it was not seen."""
        if not self.keys.size:
            return np.zeros_like(keys)
        at, is_known = _find_indices_in_sorted(keys, self.keys)
        return np.where(is_known, self.counts[at], 0)


def count_ngrams(tokens: Tokens, order: int, vocab_size: int) -> NgramCounts:
    """All grams of `order` tokens. Memory grows with the distinct grams, not with the tokens."""
    total = NgramCounts(np.zeros(0, np.int64), np.zeros(0, np.int64))
    for start in range(0, len(tokens) - order + 1, _CHUNK_TOKENS):
        # Chunks overlap by order - 1, so that no gram is lost between them.
        part = tokens[start : start + _CHUNK_TOKENS + order - 1].astype(np.int64)
        num_grams = len(part) - order + 1
        keys = part[:num_grams].copy()
        for digit in range(1, order):
            keys *= vocab_size
            keys += part[digit : digit + num_grams]
        distinct, counts = np.unique(keys, return_counts=True)
        total = _sum_by_key(
            np.concatenate([total.keys, distinct]), np.concatenate([total.counts, counts])
        )
    return total


@dataclass(frozen=True)
class KneserNeyOrder:
    """One order of Kneser-Ney: P(token | context) = discounted(gram) / total(context) +
    weight(context) * P(shorter).

    `weight` is the discounted mass over the total, so that each context sums to one whatever the
    discounts are.
    """

    grams: Int64s
    shares: Floats  # of each gram: discounted count over its context's total
    contexts: Int64s
    weights: Floats  # of each context

    @classmethod
    def build(cls, grams: NgramCounts, vocab_size: int) -> KneserNeyOrder:
        # No more than the count itself, or a share would be negative.
        discounts = np.minimum(
            _estimate_kneser_ney_discounts(grams.counts)[np.minimum(grams.counts, 3)], grams.counts
        )
        contexts, first, sizes = np.unique(
            grams.keys // vocab_size, return_index=True, return_counts=True
        )
        if contexts.size == 0:
            return cls(grams.keys, discounts, contexts, discounts)
        totals = np.add.reduceat(grams.counts, first)
        shares = (grams.counts - discounts) / np.repeat(totals, sizes)
        return cls(grams.keys, shares, contexts, np.add.reduceat(discounts, first) / totals)

    def interpolate(self, grams: Int64s, shorter: Floats, vocab_size: int) -> Floats:
        """P of each gram's last token after its context, given P after the context shortened by
        its first token."""
        if self.contexts.size == 0:
            return shorter
        at, is_known = _find_indices_in_sorted(grams, self.grams)
        context_at, context_seen = _find_indices_in_sorted(grams // vocab_size, self.contexts)
        interpolated = np.where(is_known, self.shares[at], 0.0) + self.weights[context_at] * shorter
        return np.where(context_seen, interpolated, shorter)


def _estimate_kneser_ney_discounts(counts: Int64s) -> Floats:
    """The discounts of counts of 0, 1, 2 and 3 or more [4]: Chen & Goodman's estimate from counts
    of counts.

    Few grams leave it undefined; then the plain Kneser-Ney estimate, and 0.5 where that is
    undefined too.
    """
    n1, n2, n3, n4 = (int((counts == number).sum()) for number in (1, 2, 3, 4))
    plain = 0.5
    if n1 and n2:
        plain = n1 / (n1 + 2 * n2)
    discounts = np.full(3, plain)
    if n1 and n2 and n3 and n4:
        discounts[:] = 1 - 2 * plain * n2 / n1, 2 - 3 * plain * n3 / n2, 3 - 4 * plain * n4 / n3
    return np.concatenate([np.zeros(1), np.maximum(discounts, _MIN_DISCOUNT)])


def _sum_by_key(keys: Int64s, counts: Int64s) -> NgramCounts:
    """Distinct keys in ascending order, with the sums of their counts."""
    if keys.size == 0:
        return NgramCounts(keys, counts)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return NgramCounts(keys[first], np.add.reduceat(counts[order], first))


def _find_indices_in_sorted(keys: Int64s, ascending: Int64s) -> tuple[Int64s, NDArray[np.bool_]]:
    """Each key's index in `ascending`, and True if it is there (else the index is any valid
    one)."""
    # Beyond the last one there is no index: any other will do, for it is not equal.
    at = np.minimum(np.searchsorted(ascending, keys), max(0, ascending.size - 1))
    if not ascending.size:
        return at, np.zeros(keys.shape, np.bool_)
    return at, ascending[at] == keys
