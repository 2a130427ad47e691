"""Which of the planned layouts wins, and the words of why each other one loses."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.units import format_bytes, format_seconds, plural
from phalanx.plan.advice.waterfall import TERM_LABELS
from phalanx.plan.search.attempts import TIE_SHARE_OF_STEP
from phalanx.plan.search.result import RankedLayout


def choose_winner(best: list[RankedLayout]) -> tuple[RankedLayout, list[RankedLayout]]:
    """(the winner, the others in order): the fastest, or one within TIE_SHARE_OF_STEP with fewer
    mechanisms."""
    if any(ranked.step_s is None for ranked in best):
        ordered = sorted(best, key=lambda ranked: ranked.num_mechanisms)
        return ordered[0], ordered[1:]
    ordered = sorted(best, key=lambda ranked: ranked.step_s or 0.0)
    fastest = ordered[0].step_s or 0.0
    tied = [
        ranked for ranked in ordered if (ranked.step_s or 0.0) <= (1 + TIE_SHARE_OF_STEP) * fastest
    ]
    winner = min(tied, key=_simplicity_sort_key)
    return winner, [ranked for ranked in ordered if ranked is not winner]


def _simplicity_sort_key(ranked: RankedLayout) -> tuple[int, int]:
    """Smaller is simpler: mechanisms, then ranks over which a copy of the model is spread."""
    layout = ranked.layout
    spread = layout.tp * layout.pp * layout.cp
    if ranked.zero_stage > 0:
        spread *= layout.dp_shard
    return ranked.num_mechanisms, spread


def explain_why_winner(winner: RankedLayout, ranked: Sequence[RankedLayout]) -> str:
    """Why `winner` is the first of `ranked`: it is the fastest, or a tie with it and simpler."""
    times = [layout.step_s for layout in ranked if layout.step_s is not None]
    if winner.step_s is None:
        return "the fewest mechanisms"
    # In parts of the winner's step, as `explain_why_slower` has it.
    faster = 1 - min(times) / winner.step_s
    if faster <= 0:
        return "the fastest"
    # Of ties the simplest wins, and of equally simple ones that whose shards are closest together.
    return f"a tie with the fastest (it is {_format_lead(faster)} faster), and as simple or simpler"


def _format_lead(share: float) -> str:
    text = f"{share:.1%}"
    return "less than 0.1%" if text == "0.0%" else text


def explain_why_slower(other: RankedLayout, winner: RankedLayout) -> str:
    """The term by which `other` loses to `winner`, in words."""
    if other.time is None or winner.time is None:
        extra = other.num_mechanisms - winner.num_mechanisms
        if extra > 0:
            return f"{plural(extra, 'mechanism')} more, and nothing says that it is faster"
        size = format_bytes(other.memory.total_bytes)
        return f"as simple; needs {size} where the winner needs" + (
            f" {format_bytes(winner.memory.total_bytes)}"
        )
    slower_s = other.time.total_s - winner.time.total_s
    differences = {
        term: seconds - winner.time.terms[term] for term, seconds in other.time.terms.items()
    }
    term = max(differences, key=lambda name: differences[name])
    # As where the winner's time goes.
    label = TERM_LABELS.get(term, term)
    if slower_s < 0:
        faster = f"{_format_lead(-slower_s / winner.time.total_s)} faster, which is a tie"
        return f"{faster}; {_explain_why_less_simple(other, winner)}"
    if slower_s <= TIE_SHARE_OF_STEP * winner.time.total_s:
        return f"{slower_s / winner.time.total_s:+.1%} of the step, most of it {label}"
    return f"{label}: {format_seconds(differences[term])} more"


def _explain_why_less_simple(other: RankedLayout, winner: RankedLayout) -> str:
    """What the winner of a tie has fewer of than `other`, which is faster."""
    extra = other.num_mechanisms - winner.num_mechanisms
    if extra > 0:
        return f"{plural(extra, 'mechanism')} more"
    (_, spread), (_, spread_of_winner) = map(_simplicity_sort_key, (other, winner))
    return f"a copy spread over {plural(spread, 'rank')}, not {spread_of_winner}"
