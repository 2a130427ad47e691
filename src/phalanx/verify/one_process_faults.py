"""What is wrong in one process, and so in every layout: how weights are drawn, what an adapter
calls, how many digits routers and gradients keep.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.verify.diagnosis import FEW_DIGITS_CAUSE
from phalanx.verify.row import Difference
from phalanx.verify.trace_facts import AdapterFacts, Trace

ADAPTER_CAUSE = (
    "phalanx's adapter makes another call of transformers' {} than its users do: from the same"
    " weights and tokens, in one process, it gives something else; the reference computes by the"
    " adapter, and so does every layout"
)
EVALUATION_MODE_CAUSE = (
    "{} modules are in evaluation mode as phalanx builds the model for training, {} the first, and"
    " in training mode as transformers' {} is built: their dropout does nothing, in one process and"
    " in every layout"
)
LOST_DIGITS_CAUSE = (
    "in one process, too, and so in every layout, the narrow type is further from a wide one than"
    " weights that are rounded otherwise explain: it computes something else, or rounds where it"
    " should not"
)
NUMBER_CAUSE = (
    "the {} of {} is another one as phalanx builds the model for training than as transformers' {}"
    " is built from the same config.json, in one process and in every layout"
)


def iterate_one_process_faults(
    trace: Trace, observations: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """The faults that a trace has on record, in the order in which things go wrong, as differences
    of all ranks."""

    def build_difference(kind: str, name: str, error: float, cause: str) -> Difference:
        ranks, part = tuple(range(len(observations))), observations[0]["held"].get(name, "nothing")
        return Difference(kind, name, 0, error, 0, ranks, part, cause)

    for draw in trace.initial_faults or ():
        cause = f"initial weights are not drawn as declared, in one process either: {draw.words}"
        yield build_difference("initial distribution", draw.name, draw.error, cause)
    if trace.adapter is not None and trace.adapter.what:
        yield _build_adapter_difference(trace.adapter, observations)
    # The routers that round more than defined.
    for router in trace.arithmetic_faults or ():
        yield build_difference("router scores of", router.name, router.error, FEW_DIGITS_CAUSE)
    for gradient in trace.lossy_gradients or ():
        yield build_difference("narrow gradient", gradient.name, gradient.error, LOST_DIGITS_CAUSE)


def _build_adapter_difference(
    facts: AdapterFacts, observations: Sequence[Mapping[str, Any]]
) -> Difference:
    """What the adapter makes of a Hugging Face model, where it is another than that of the model's
    own class."""
    kind, name, part = "output of the adapter", facts.name, ""
    cause = ADAPTER_CAUSE.format(facts.architecture)
    if facts.what == "mode":
        kind, part = "mode", f"{int(facts.error)} modules"
        cause = EVALUATION_MODE_CAUSE.format(int(facts.error), name, facts.architecture)
    elif facts.what in ("number", "shape"):
        kind = facts.what
        cause = NUMBER_CAUSE.format(facts.what, name, facts.architecture)
    elif name:
        kind = "the adapter's gradient of"
        part = observations[0]["held"].get(name, "nothing")
    ranks = tuple(range(len(observations)))
    return Difference(kind, name, 0, facts.error, 0, ranks, part, cause)
