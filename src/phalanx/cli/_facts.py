"""What the plan's warnings need of a corpus."""

from __future__ import annotations

from phalanx.data.corpus import Corpus
from phalanx.plan.warnings import DataFacts, SourceFacts


def data_facts(corpus: Corpus) -> DataFacts:
    """Tokens of text and token ids, by source; samples of the user's own dataset."""
    if corpus.user is not None:
        return DataFacts("samples", corpus.user.num_train, corpus.user.num_held_out)
    train, held_out = (corpus.splits[split].num_tokens for split in ("train", "held_out"))
    total = sum(corpus.weights)
    sources = tuple(
        SourceFacts(name, weight / total, component.splits["train"].num_tokens)
        for name, weight, component in zip(corpus.names, corpus.weights, corpus.components, strict=True)
    )
    return DataFacts("tokens", train, held_out, sources)
