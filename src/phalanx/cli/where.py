"""Say where each rank of a run is: running, stopped or dead, and who waits for whom."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._options import RunArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from phalanx.observe.rank_waits import RankState, WaitVerdict

# A damaged box may name any number of them.
MAX_RANKS = 2**20
EXAMPLE = "Example: phalanx where runs/train-20260101-120000"


def command(
    run: RunArgument,
    stacks: Annotated[
        bool,
        typer.Option(
            "--stacks", help="Ask the running ranks for their stacks, too (into their logs)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> int:
    """Say where each rank of a run is, and which rank the others wait for.

    Reads what the ranks leave behind (RUN/blackbox): it works for ranks that run, are stopped or
    are dead, also under torchrun or srun, and does not disturb them.
    """
    from phalanx.cli._json import print_errors_as_json, print_json
    from phalanx.core.errors import UsageError
    from phalanx.launch.ask_stacks import ask_for_stacks
    from phalanx.launch.positions import read_clock_of_ranks, read_rank_states
    from phalanx.observe.rank_waits import judge_ranks
    from phalanx.observe.where_words import build_where_json, format_rank_list

    with print_errors_as_json(as_json):
        run_dir = Path(run)
        states = read_rank_states(run_dir)
        if not states:
            raise UsageError(
                "no rank has left its position there",
                where=run,
                fix="give a directory that phalanx train wrote",
            )
        now_s = read_clock_of_ranks(states)
        silent_ranks = _find_silent_ranks(states)
        verdict = judge_ranks(states, now_s)
        if silent_ranks and verdict.kind == "gone" and not _is_any_alive(states):
            # Nothing is known of those that it would have kept waiting.
            verdict = replace(verdict, kind="none", culprits=())
        stacks_of: dict[int, list[str]] = {}
        if stacks:
            stacks_of = ask_for_stacks(run_dir, states)
        if as_json:
            facts = build_where_json(verdict, states, now_s)
            facts["silent_ranks"] = silent_ranks
            if stacks:
                facts["stacks"] = {str(rank): lines for rank, lines in stacks_of.items()}
            print_json("where", facts, indent=1)
            return 0
        if silent_ranks:
            print(
                f"warn    no position of {format_rank_list(silent_ranks)} is there, or it cannot be"
                " read: what is said here leaves them out",
                file=sys.stderr,
            )
        if not _is_any_alive(states):
            _print_how_run_ended(run_dir)
        _print_for_people(verdict, states, now_s, stacks_of)
    return 0


def _find_silent_ranks(states: Mapping[int, RankState]) -> list[int]:
    """The ranks of the run without a black box that can be read, by what the others' boxes say of
    their number."""
    speaking = {rank for rank, state in states.items() if state.position is not None}
    num_ranks = 0
    for state in states.values():
        header = state.position and state.position.header
        if header:
            num_ranks = max(num_ranks, min(header.world_size, MAX_RANKS))
    return sorted({*range(num_ranks), *states} - speaking)


def _is_any_alive(states: Mapping[int, RankState]) -> bool:
    """True if a rank with a position is not known to be gone."""
    return any(
        state.position is not None and state.process.state != "gone" for state in states.values()
    )


def _print_how_run_ended(run_dir: Path) -> None:
    from phalanx.report.reduce import collect_run_facts
    from phalanx.report.run_status import find_run_end, list_status_lines

    facts = collect_run_facts(run_dir)
    if find_run_end(facts) is not None:
        print(*list_status_lines(facts), sep="\n")


def _print_for_people(
    verdict: WaitVerdict,
    states: Mapping[int, RankState],
    now_s: float | None,
    stacks_of: Mapping[int, list[str]],
) -> None:
    from phalanx.observe.where_words import describe_rank, describe_waits, format_rank_list

    for sentence in describe_waits(verdict, states, now_s):
        print(sentence)
    print()
    waits = {wait.rank: wait for wait in verdict.waits}
    same: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        same.setdefault(describe_rank(state, waits.get(rank), now_s), []).append(rank)
    for text, ranks in same.items():
        print(f"{format_rank_list(ranks)}: {text}")
    for rank, lines in stacks_of.items():
        print(f"\nrank {rank}: " + ("\n".join(lines) or "no stack (its log has none)"))
