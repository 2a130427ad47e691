"""How a run of tokens becomes a sample: inputs, targets, positions and numbers of documents, beside
their definition. Torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.batch import IGNORE_INDEX
from phalanx.data.corpus import Corpus, CorpusComponent, SplitCounts
from phalanx.data.dataset import TokenizerFacts
from phalanx.data.samples import SampleWindows
from phalanx.data.tokens import TokenSequence
from phalanx.job.schema import Job
from phalanx.train.evaluation import compute_weighted_mean_loss
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.row import Difference
from phalanx.verify.trainer_errors import relative_error

WINDOWS_JUDGED = (
    "targets, positions and document numbers that are made of a run of tokens, of a few documents"
)
WEIGHTS_JUDGED = "the weights that an evaluation gives the losses of a mixture's sources"

# One of a single token, and one longer than a sample.
DOCUMENT_LENGTHS = (3, 1, 2, 9, 4, 1, 1, 6)
NUM_TOKENS_OF_SAMPLE = 7
WEIGHT_OF_SOURCE = {"a": 0.75, "b": 0.2, "c": 0.05}
TOLERANCE = 1e-12


@dataclass(frozen=True)
class _Documents:
    """A `TokenArray` in memory."""

    tokens: NDArray[np.int64]
    ends: NDArray[np.uint64]
    keys: NDArray[np.uint64]


def find_wrong_samples(job: Job) -> Iterator[Difference]:
    """The first entry of made-up samples that is another one than by definition."""
    documents = _make_documents()
    sequence = _open_sequence(documents)
    starts = np.arange(sequence.num_tokens - NUM_TOKENS_OF_SAMPLE)
    for has_masks, is_marked in ((False, True), (True, True), (True, False)):
        windows = SampleWindows(NUM_TOKENS_OF_SAMPLE, has_masks, is_marked)
        samples = windows.cut_samples(sequence, starts)
        for start in starts.tolist():
            expected = _cut_by_definition(documents, start, masks=has_masks, marked=is_marked)
            for key, numbers in expected.items():
                got = samples[key][start].tolist() if key in samples else None
                if got != numbers:
                    cause = (
                        f"the {key} of the sample from token {start} on are {got}, and by"
                        f" definition {numbers} (data.document_masks={str(has_masks).lower()},"
                        f" documents of {', '.join(map(str, DOCUMENT_LENGTHS))} tokens)"
                    )
                    yield make_difference("samples'", key, 1.0, cause)
                    return


def _make_documents() -> list[list[int]]:
    documents, token = [], 100
    for length in DOCUMENT_LENGTHS:
        documents.append(list(range(token, token + length)))
        token += length
    return documents


def _open_sequence(documents: list[list[int]]) -> TokenSequence:
    """The documents as one sequence, from two arrays."""
    arrays = []
    for part in (documents[:3], documents[3:]):
        tokens = np.array([token for document in part for token in document], np.int64)
        ends = np.cumsum([len(document) for document in part]).astype(np.uint64)
        keys = np.array([document[0] for document in part], np.uint64)
        arrays.append(_Documents(tokens, ends, keys))
    sizes = np.array([len(array.tokens) for array in arrays], np.int64)
    return TokenSequence(arrays, np.arange(2), np.zeros(2, np.int64), sizes)


def _cut_by_definition(
    documents: list[list[int]], start: int, *, masks: bool, marked: bool
) -> dict[str, list[int]]:
    """Each token's target is the one behind it; with masks positions begin at 0 with the sample and
    with each document in it, and documents are counted from 0. Where nothing marks a document's
    end, its last token has no target."""
    tokens = [(token, number) for number, each in enumerate(documents) for token in each]
    chosen = tokens[start : start + NUM_TOKENS_OF_SAMPLE + 1]
    inputs: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    ids: list[int] = []
    for (token, document), (following, next_document) in itertools.pairwise(chosen):
        is_last = document != next_document
        inputs.append(token)
        targets.append(IGNORE_INDEX if masks and not marked and is_last else following)
        before = [number for _, number in chosen[: len(positions)]]
        positions.append(before.count(document) if masks else len(before))
        ids.append(document - chosen[0][1])
    numbers = {"inputs": inputs, "targets": targets, "positions": positions}
    if masks:
        numbers["document_ids"] = ids
    return numbers


def find_wrong_source_weights(job: Job) -> Iterator[Difference]:
    """The sources of a made-up mixture that an evaluation weighs otherwise than the mixture."""
    corpus = _make_corpus()
    for name, weight in WEIGHT_OF_SOURCE.items():
        actual = corpus.weight_of_name.get(name, 0.0)
        if actual != weight:
            cause = f"the loss of source {name} weighs {actual:g}, and in the mixture {weight:g}"
            error = relative_error(actual, weight)
            yield make_difference("weight of source", name, error, cause)
            return
    losses = {name: 2.0 + number for number, name in enumerate(WEIGHT_OF_SOURCE)}
    # The last source has no held-out data, in the second case.
    for names in (list(losses), list(losses)[:2]):
        total = sum(WEIGHT_OF_SOURCE[name] for name in names)
        expected = sum(WEIGHT_OF_SOURCE[name] * losses[name] for name in names) / total
        mean = compute_weighted_mean_loss(
            {name: losses[name] for name in names}, corpus.weight_of_name
        )
        error = relative_error(mean, expected)
        if not error <= TOLERANCE:
            cause = f"the loss of {len(names)} sources is {mean:.6g}, and weighed {expected:.6g}"
            yield make_difference("loss of a mixture", "", error, cause)


def _make_corpus() -> Corpus:
    components = []
    for name, weight in WEIGHT_OF_SOURCE.items():
        component = CorpusComponent(
            source=name,
            weight=weight,
            kind="dataset",
            path=name,
            files={},
            tokenizer=TokenizerFacts(kind="bytes", digest=""),
            tokenizer_path="",
            vocab_size=257,
            end_of_document=256,
            split_by="document",
            held_out_keys=(),
            splits={"train": SplitCounts(1, 1), "held_out": SplitCounts(1, 1)},
            source_bytes=1,
            num_skipped_files=0,
        )
        components.append(component)
    return Corpus(Path(), {}, tuple(components))
