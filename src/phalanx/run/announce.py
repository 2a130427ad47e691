"""Lines that say what is about to happen, before it does."""

from __future__ import annotations

from phalanx.data.corpus import Corpus, CorpusComponent
from phalanx.plan.described_cluster import list_cluster_keys_without_effect
from phalanx.plan.explain import describe_plan
from phalanx.run.data_counts import describe_num_held_out
from phalanx.run.elastic_layout import explain_no_smaller_layout
from phalanx.run.prepare import PreparedRun
from phalanx.run.resume import ResumedRun


def format_run_announcement(
    run: PreparedRun, *, ranks: str = "", resumed: ResumedRun | None = None
) -> list[str]:
    """The lines before the first step.

    `ranks` says where they were read, if a launcher started them.

    Of a run that is continued, what changed stands last, right before the first step.
    """
    lines = [f"run     {run.run_dir}"]
    if ranks:
        lines.append(f"ranks   {ranks}")
    else:
        lines += _list_notes_on_min_ranks(run)
    lines += _list_notes_on_cluster(run)
    for line in (*_describe_training_sources(run.corpus), *run.unverified):
        lines.append(f"data    {line}")
    lines += run.init_lines
    lines += describe_plan(run.plan, of_samples=run.corpus.user is not None)
    # Last, right before the first step: what changed must not be read over.
    if resumed is not None:
        lines += resumed.summary_lines()
    return lines


def _list_notes_on_min_ranks(run: PreparedRun) -> list[str]:
    """A line where the job allows fewer ranks, and its layout does not."""
    min_ranks, layout = run.job.resilience.min_ranks, run.plan.layout
    if min_ranks is None or min_ranks == layout.world_size:
        return []
    why = explain_no_smaller_layout(layout, min_ranks)
    return [f"ranks   the run ends if one does not come back: {why}"] if why else []


def _list_notes_on_cluster(run: PreparedRun) -> list[str]:
    """A line where keys of [cluster] say of machines what a run takes as it finds it. `phalanx
    plan` refuses them, and a run does what it would without them."""
    unread = list_cluster_keys_without_effect(run.job)
    if not unread:
        return []
    verb = "plays" if len(unread) == 1 else "play"
    return [f"cluster {' and '.join(unread)} {verb} no part: ranks run on the machines found here"]


def _describe_training_sources(corpus: Corpus) -> list[str]:
    """A line for each source of training data."""
    if corpus.user is not None:
        held_out = describe_num_held_out(corpus.user.num_held_out)
        return [f"{corpus.user.source}: {corpus.user.num_train:,} training samples, {held_out}"]
    if len(corpus.components) == 1:
        return [_describe_mixture_source(corpus.components[0], None)]
    total_weight = sum(corpus.weights)
    lines = []
    for component in corpus.components:
        lines.append(_describe_mixture_source(component, component.weight / total_weight))
    return lines


def _describe_mixture_source(component: CorpusComponent, share: float | None) -> str:
    """A line about one source; `share` is its fraction of the samples of a mixture."""
    train, held_out = component.splits["train"], component.splits["held_out"]
    text = component.source
    if share is not None:
        text += f" ({share:.1%} of the samples)"
    text += f": {train.num_tokens:,} training tokens in {train.num_documents:,} documents, "
    text += f"{held_out.num_tokens:,} held out "
    if held_out.num_tokens and component.split_by == "position":
        text += "by position"
    elif held_out.num_tokens:
        text += f"in {held_out.num_documents:,}"
    else:
        text += "in 0"
    if component.explain_held_out_choice:
        text += f" ({component.explain_held_out_choice})"
    if component.num_skipped_files:
        text += f", {component.num_skipped_files} binary files skipped"
    return text
