"""One sentence on whether the processes of a run's ranks are alive."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.units import plural
from phalanx.launch.positions import read_rank_states
from phalanx.observe.where_words import format_rank_list

_HALTED_STATES = ("stopped", "traced")


def describe_liveness(run_dir: Path) -> str:
    """The newest ranks of a run that are alive on this machine, by number, and those that are not.

    Says nothing of ranks on other machines but that they were not looked at.
    """
    states = read_rank_states(run_dir, sample_s=0.0)
    if not states:
        return "No rank has left its position: whether they are alive was not looked at."
    elsewhere = [rank for rank, state in states.items() if state.process.state == "unknown"]
    gone = [rank for rank, state in states.items() if state.process.state == "gone"]
    halted = [rank for rank, state in states.items() if state.process.state in _HALTED_STATES]
    if len(elsewhere) == len(states):
        return "Its ranks are not of this machine: whether they are alive was not looked at."
    num_here = len(states) - len(elsewhere)
    if len(gone) == num_here and not elsewhere:
        return (
            "No rank is alive, and no end was recorded: the run was cut off, or its ranks are"
            " being started again."
        )
    sentences = [f"{num_here - len(gone):,} of {plural(num_here, 'rank')} here are alive."]
    if halted:
        sentences.append(f"Stopped: {format_rank_list(sorted(halted))}.")
    if gone:
        sentences.append(f"Gone: {format_rank_list(sorted(gone))}.")
    if elsewhere:
        sentences.append(
            f"On other machines, not looked at: {format_rank_list(sorted(elsewhere))}."
        )
    return " ".join(sentences)
