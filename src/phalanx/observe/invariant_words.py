"""Invariants of a run (InvariantChecked) in words."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.printable import printable
from phalanx.core.units import plural
from phalanx.observe.events import InvariantChecked

DESCRIPTION_OF_INVARIANT = {
    "parameters_moved": "each parameter that had to move in an update did",
    "optimizer_parameters": "the optimizer has the parameters that the model trains",
    "replicas_equal": "ranks that hold the same weights and optimizer state hold the same bits",
    "memory_unchanged": "a rank's part of the state has the bits that its last update left",
    "unchanged_by_evaluation": "evaluations left the weights that the model trains as they were",
    "targets_counted": "the loss counted the targets of the batch",
    "expert_loads": "the loads of experts add up to the choices of the batch",
}
"""By name of an invariant: what holds if a check of it is ok."""
MAX_SHOWN_FAILURES = 3


def describe_invariant(name: str) -> str:
    """The claim of an invariant in words; its name where a later release has checked it."""
    return DESCRIPTION_OF_INVARIANT.get(name, printable(name.replace("_", " "), 60))


def describe_failed_check(event: InvariantChecked) -> str:
    """The failure in a sentence that begins with its step."""
    start = f"step {event.step}: "
    match event.name:
        case "parameters_moved":
            return (
                f"{start}the update left {_describe_failed_tensors(event)} as it was, though its"
                f" gradient had to move it, on {_describe_failed_ranks(event)}"
            )
        case "optimizer_parameters":
            return start + _describe_optimizer(event)
        case "replicas_equal":
            if len(event.ranks) > 1:
                # All that hold it, where there is no majority.
                return (
                    f"{start}{_describe_failed_tensors(event)} has not the same bits on all ranks"
                    " that hold the same part of it: those of"
                    f" {_describe_failed_ranks(event)} are not those of a majority"
                )
            return (
                f"{start}{_describe_failed_tensors(event)} has other bits on"
                f" {_describe_failed_ranks(event)} than on others that hold the same part of it"
            )
        case "memory_unchanged":
            return (
                f"{start}{_describe_failed_tensors(event)} has other bits before the next update"
                f" than after this one, on {_describe_failed_ranks(event)}"
            )
        case "unchanged_by_evaluation":
            return (
                f"{start}the evaluation after it changed {_describe_failed_tensors(event)} on"
                f" {_describe_failed_ranks(event)}: training goes on from weights that no update"
                " has made"
            )
        case "targets_counted":
            return (
                f"{start}the batch has {event.expected:,.0f} targets, and the loss counted"
                f" {event.actual:,.0f}"
            )
        case "expert_loads":
            return (
                f"{start}tokens of the batch made {event.expected:,.0f} choices of experts, and the"
                f" loads of {_describe_failed_tensors(event)} add up to {event.actual:,.0f}"
            )
    return f"{start}{describe_invariant(event.name)}: does not hold"


def _describe_optimizer(event: InvariantChecked) -> str:
    problems, sentences = [], []
    ranks = _describe_failed_ranks(event)
    # They stand before those that were removed, and these before those that were replaced.
    named_apart = {*event.removed, *event.replaced}
    missing = [name for name in event.tensors if name not in named_apart]
    num_removed, num_replaced = len(event.removed), len(event.replaced)
    if not missing and not event.removed:
        num_replaced = int(event.num_tensors)
    elif not missing:
        num_removed = int(event.num_tensors) - num_replaced
    num_missing = int(event.num_tensors) - num_removed - num_replaced
    if missing:
        problems.append(f"the optimizer does not update {_describe_names(missing, num_missing)}")
    if event.removed:
        problems.append(f"the model no longer has {_describe_names(event.removed, num_removed)}")
    if event.actual > 0:
        foreign = plural(int(event.actual), "parameter")
        if len(event.ranks) > 1:
            foreign += " (summed over ranks)"
        subject = "it" if missing and not event.removed else "the optimizer"
        problems.append(f"{subject} has {foreign} that the model does not have")
    if problems:
        *first, last = problems
        listed = f"{', '.join(first)} and {last}" if first else last
        sentences.append(f"{listed}, on {ranks}")
    if event.replaced:
        sentences.append(
            f"{_describe_names(event.replaced, num_replaced)} was replaced in its module since the"
            f" last check, on {ranks}: FSDP has put its own back, so what was put there trains no"
            " more"
        )
    return "; ".join(sentences)


def _describe_failed_tensors(event: InvariantChecked) -> str:
    return _describe_names(event.tensors, int(event.num_tensors))


def _describe_names(names: Sequence[str], num_names: int) -> str:
    shown = [printable(name, 120) for name in names[:MAX_SHOWN_FAILURES]]
    num_more = num_names - len(shown)
    if num_more > 0:
        return f"{', '.join(shown)} and {num_more} more"
    return ", ".join(shown) or "a tensor"


def _describe_failed_ranks(event: InvariantChecked) -> str:
    if not event.ranks:
        return "every rank"
    shown = ", ".join(str(int(rank)) for rank in event.ranks[:8])
    if len(event.ranks) > 8:
        shown += f" and {len(event.ranks) - 8} more"
    noun = "rank" if len(event.ranks) == 1 else "ranks"
    return f"{noun} {shown}"
