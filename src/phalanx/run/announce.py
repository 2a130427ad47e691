"""Lines that say what is about to happen, before it does."""

from __future__ import annotations

from phalanx.data.corpus import Component, Corpus
from phalanx.plan.explain import describe_plan
from phalanx.run.prepare import PreparedRun
from phalanx.run.resume import Resumed


def announcement(run: PreparedRun, *, ranks: str = "", resumed: Resumed | None = None) -> list[str]:
    """The lines before the first step.

    `ranks` says where they were read, if a launcher started them.

    Of a run that is continued, what changed stands last, right before the first step.
    """
    data_lines = [f"data    {line}" for line in (*_describe_data(run.corpus), *run.unverified)]
    rank_lines = [f"ranks   {ranks}"] if ranks else []
    return [
        f"run     {run.run_dir}",
        *rank_lines,
        *data_lines,
        *run.init_lines,
        *describe_plan(run.plan, of_samples=run.corpus.user is not None),
        *(resumed.lines() if resumed is not None else ()),
    ]


def _describe_data(corpus: Corpus) -> list[str]:
    """A line for each source of training data."""
    if corpus.user is not None:
        num_held_out = corpus.user.num_held_out
        held_out = f"{num_held_out:,} held out" if num_held_out else "none held out"
        return [f"{corpus.user.source}: {corpus.user.num_train:,} training samples, {held_out}"]
    is_mixture = len(corpus.components) > 1
    total_weight = sum(corpus.weights)
    return [
        _describe_component(component, component.weight / total_weight if is_mixture else None)
        for component in corpus.components
    ]


def _describe_component(component: Component, share: float | None) -> str:
    """A line about one source; `share` is its fraction of the samples of a mixture."""
    train, held_out = component.splits["train"], component.splits["held_out"]
    text = component.source
    if share is not None:
        text += f" ({share:.1%} of the samples)"
    text += f": {train.num_tokens:,} training tokens in {train.num_documents:,} documents, "
    text += f"{held_out.num_tokens:,} held out "
    if held_out.num_tokens and component.split_by == "position":
        text += "by position"
    else:
        text += f"in {held_out.num_documents if held_out.num_tokens else 0:,}"
    if component.why_split:
        text += f" ({component.why_split})"
    if component.num_skipped_files:
        text += f", {component.num_skipped_files} binary files skipped"
    return text
