"""What the plan's warnings need of a corpus, or of data that was only looked at."""

from __future__ import annotations

from phalanx.data.corpus import Corpus
from phalanx.data.look import DataLook
from phalanx.plan.warnings import DataFacts, SourceFacts


def count_data(corpus: Corpus) -> DataFacts:
    """Tokens of text and token ids, by source; samples of the user's own dataset."""
    if corpus.user is not None:
        return DataFacts("samples", corpus.user.num_train, corpus.user.num_held_out)
    train, held_out = (corpus.splits[split].num_tokens for split in ("train", "held_out"))
    total = sum(corpus.weights)
    sources = tuple(
        SourceFacts(name, weight / total, component.splits["train"].num_tokens)
        for name, weight, component in zip(
            corpus.names, corpus.weights, corpus.components, strict=True
        )
    )
    return DataFacts("tokens", train, held_out, sources)


def count_looked_data(look: DataLook) -> DataFacts | None:
    """The same of data that is not prepared; None of text, whose tokens nobody has counted yet."""
    if look.user is not None:
        return DataFacts("samples", look.user.num_train, look.user.num_held_out)
    if not look.is_counted:
        return None
    total = sum(source.weight for source in look.sources)
    train, held_out = (
        sum(getattr(source, name) or 0 for source in look.sources)
        for name in ("num_train", "num_held_out")
    )
    names = [source.source for source in look.sources]
    sources = tuple(
        SourceFacts(
            name if names.count(name) == 1 else f"{name} #{number + 1}",
            source.weight / total,
            source.num_train or 0,
        )
        for number, (name, source) in enumerate(zip(names, look.sources, strict=True))
    )
    return DataFacts("tokens", train, held_out, sources)


def describe_look(look: DataLook) -> list[str]:
    """A line for each source, for people."""
    if look.user is not None:
        held_out = (
            f"{look.user.num_held_out:,} held out" if look.user.num_held_out else "none held out"
        )
        return [f"data    {look.user.source}: {look.user.num_train:,} training samples, {held_out}"]
    total = sum(source.weight for source in look.sources)
    several = len(look.sources) > 1
    return [
        "data   "
        f" {source.source}{f' ({source.weight / total:.1%} of the samples)' if several else ''}:"
        f" {source.words}"
        for source in look.sources
    ]
