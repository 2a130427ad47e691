"""What the plan's warnings need of a corpus, or of data that was only looked at."""

from __future__ import annotations

from phalanx.data.corpus import Corpus
from phalanx.data.look import DataSummary
from phalanx.data.user_dataset import UserDatasetFacts
from phalanx.plan.warnings import DataFacts, SourceFacts


def count_tokens_and_samples(corpus: Corpus) -> DataFacts:
    """Tokens of text and token ids, by source; samples of the user's own dataset."""
    if corpus.user is not None:
        return _count_user_samples(corpus.user)
    total = sum(corpus.weights)
    sources = []
    for name, weight, component in zip(
        corpus.names, corpus.weights, corpus.components, strict=True
    ):
        sources.append(SourceFacts(name, weight / total, component.splits["train"].num_tokens))
    return DataFacts(
        "tokens",
        corpus.splits["train"].num_tokens,
        corpus.splits["held_out"].num_tokens,
        tuple(sources),
    )


def count_tokens_and_samples_of_unprepared(look: DataSummary) -> DataFacts | None:
    """The same of data that is not prepared; None of text, whose tokens nobody has counted yet."""
    if look.user is not None:
        return _count_user_samples(look.user)
    if not look.is_counted:
        return None
    total = sum(source.weight for source in look.sources)
    names = [source.source for source in look.sources]
    num_train = num_held_out = 0
    sources = []
    for number, source in enumerate(look.sources):
        name = source.source
        # Two parts of a mixture may read one source: by number they are told apart.
        if names.count(name) > 1:
            name = f"{name} #{number + 1}"
        sources.append(SourceFacts(name, source.weight / total, source.num_train or 0))
        num_train += source.num_train or 0
        num_held_out += source.num_held_out or 0
    return DataFacts("tokens", num_train, num_held_out, tuple(sources))


def _count_user_samples(user: UserDatasetFacts) -> DataFacts:
    shape = user.first_shapes.get("inputs", [])
    num_tokens = shape[0] if len(shape) == 1 else None
    return DataFacts("samples", user.num_train, user.num_held_out, sample_tokens=num_tokens)


def describe_data_sources(look: DataSummary) -> list[str]:
    """A line for each source, for people."""
    if look.user is not None:
        held_out = describe_num_held_out(look.user.num_held_out)
        return [f"data    {look.user.source}: {look.user.num_train:,} training samples, {held_out}"]
    total = sum(source.weight for source in look.sources)
    lines = []
    for source in look.sources:
        share = ""
        if len(look.sources) > 1:
            share = f" ({source.weight / total:.1%} of the samples)"
        lines.append(f"data    {source.source}{share}: {source.words}")
    return lines


def describe_num_held_out(num_samples: int) -> str:
    """The number of samples that are held out, in words."""
    if num_samples:
        return f"{num_samples:,} held out"
    return "none held out"
