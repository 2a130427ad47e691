"""Explains an update that is not one process's although its gradients are, to the bit.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.units import plural
from phalanx.verify.compare import TraceComparison
from phalanx.verify.factors import format_factor
from phalanx.verify.trace_facts import name_weights_set


class UpdateDiagnosis:
    """Explains wrong weights after an update."""

    def __init__(self, compared: TraceComparison) -> None:
        self._compared, self._trace = compared, compared.trace

    def explain(self, name: str, step: int, ranks: Sequence[int]) -> str:
        """The cause, in words, of the wrong weights of a tensor on `ranks`, after a step."""
        if self._trace.has_no_gradient(name):
            return (
                "in one process it has no gradient and stays; here it is updated (decay, say):"
                " freeze it"
            )
        kind = name_weights_set(step)
        stays = [rank for rank in ranks if not self._compared.has_weight_moved(kind, name, rank)]
        if stays:
            return f"it is not updated on {_list_ranks(stays)}, and stays as it was: a stale part"
        stays = [rank for rank in ranks if self._compared.has_weight_partly_moved(kind, name, rank)]
        if stays:
            return (
                f"some of its elements on {_list_ranks(stays)} are not updated, and the others are:"
                " borders of shards are off, or what other ranks update does not reach the model:"
                " stale rows"
            )
        where = ""
        if 0 < len(ranks) < len(self._compared.find_ranks_holding_parameter(name)):
            where = f", only on {_list_ranks(ranks)}"
        mistake = self._describe_mistake(kind, name, ranks)
        if step > 0:
            verbs = "agrees" if step == 1 else "agree"
            agreement = f"{plural(step, 'update')} {verbs}, and then one does not"
            unknown = _describe_unknown_later_mistake(is_local=bool(where))
            return f"{agreement}{where}: {mistake or unknown}"
        if mistake:
            return (
                "the optimizer was given one process's gradients and makes another update of"
                f" them{where}: {mistake}"
            )
        if where:
            return (
                f"only on {_list_ranks(ranks)}: its part is stale, or is updated otherwise than"
                " that of the other ranks"
            )
        factors = [self._compared.find_multiple_of_reference(kind, [name], rank) for rank in ranks]
        if factors and factors[0] is not None:
            return f"the update is {format_factor(factors[0])} that of one process"
        return (
            "the optimizer was given one process's gradients and makes another update of them: its"
            " state, decay, borders of shards, or a part that is updated and does not reach the"
            " model"
        )

    def _describe_mistake(self, kind: str, name: str, ranks: Sequence[int]) -> str:
        """ "as if ..." of what the optimizers of `ranks` are found to do; "" for nothing."""
        ranks_of: dict[str, list[int]] = {}
        for rank in ranks:
            mistakes = self._compared.observations[rank].get("mistakes_of_updates", {})
            ranks_of.setdefault(mistakes.get(kind, {}).get(name, ""), []).append(rank)
        if len(ranks_of) == 1:
            words = next(iter(ranks_of))
            return f"as if {words}" if words else ""
        ranks_of.pop("", None)
        return "; ".join(
            f"on {_list_ranks(some_ranks)} as if {words}" for words, some_ranks in ranks_of.items()
        )


def _describe_unknown_later_mistake(*, is_local: bool) -> str:
    if is_local:
        return (
            "the optimizer's state there (moments, the count of steps) is not that of one process,"
            " or its part is stale"
        )
    return (
        "the optimizer's state (moments, the count of steps) or its learning rate is not that of"
        " one process, or an update is left out or made twice"
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
