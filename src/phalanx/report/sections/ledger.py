"""The ledger of seconds: where the whole run of each rank went, and what its communication was."""

from __future__ import annotations

from phalanx.report import formats
from phalanx.report.bars import draw_stacked_bar
from phalanx.report.facts import MAX_SHOWN_WARNINGS, RunFacts
from phalanx.report.figure import draw_legend
from phalanx.report.ledger import LEDGER_PARTS, RankLedger, list_ledger_warnings
from phalanx.report.markup import Html, build_table, build_tag

MAX_SHOWN_LEDGERS = 16
MAX_SHOWN_CALLERS = 24

UNATTRIBUTED = "unattributed"
# Parts that share a colour differ by stripes: there are more parts than colours that all can tell.
_CSS_CLASS_OF_PART = {
    "start-up": "g7",
    "data": "g0",
    "host to device": "g6 striped",
    "forward": "g1",
    "backward": "g2",
    "communication": "g3",
    "pipeline waiting": "g10",
    "optimizer": "g4",
    "checkpoint": "g5",
    "evaluation": "g6",
    "prepare and record": "g8",
    "other phases": "g8 striped",
    "steps done again": "g11",
    "restart": "g12",
    "failure": "g12 striped",
    "ending": "g7 striped",
    UNATTRIBUTED: "g9",
}


def render_ledgers(facts: RunFacts) -> Html:
    """A bar for each rank, the table behind the bars, and communication by axis and operation."""
    ledgers = choose_shown_ledgers(facts.rank_ledgers)
    lead = ledgers[0]
    full_s = max(max(each.wall_s, sum(each.parts_s.values())) for each in ledgers)
    used = list_used_parts(ledgers)
    rows = [_render_ledger_row(each, full_s) for each in ledgers]
    return build_tag(
        "div",
        build_tag(
            "h3",
            f"The whole run: {formats.format_seconds_or_missing(lead.wall_s)} of rank {lead.rank}",
        ),
        draw_legend([*used, UNATTRIBUTED], _CSS_CLASS_OF_PART),
        build_table(["rank", "seconds of the run by what they went to", UNATTRIBUTED], rows),
        build_tag("p", _describe_basis(facts, ledgers), class_="note"),
        [
            build_tag("p", text, class_="note warning")
            for text in list_ledger_warnings(facts.rank_ledgers)
            # The header says the first of all warnings.
            if text not in facts.warnings[:MAX_SHOWN_WARNINGS]
        ],
        build_tag(
            "details",
            build_tag("summary", "Data table"),
            build_table(["rank", *used, UNATTRIBUTED, "wall"], list_ledger_rows(ledgers, used)),
        ),
        _render_communication(lead),
        _render_callers(facts),
        class_="block",
    )


def choose_shown_ledgers(ledgers: list[RankLedger]) -> list[RankLedger]:
    """The first rank's, and of the others those with most that is unattributed."""
    if len(ledgers) <= MAX_SHOWN_LEDGERS:
        return ledgers
    of_other_ranks = sorted(ledgers[1:], key=lambda each: each.unattributed_s, reverse=True)
    return [
        ledgers[0],
        *sorted(of_other_ranks[: MAX_SHOWN_LEDGERS - 1], key=lambda each: each.rank),
    ]


def list_used_parts(ledgers: list[RankLedger]) -> list[str]:
    return [name for name in LEDGER_PARTS if any(each.parts_s[name] > 0 for each in ledgers)]


def list_ledger_rows(ledgers: list[RankLedger], used: list[str]) -> list[list[str]]:
    rows = []
    for each in ledgers:
        seconds = [*[each.parts_s[name] for name in used], each.unattributed_s, each.wall_s]
        rows.append([str(each.rank), *[formats.format_seconds_or_missing(s) for s in seconds]])
    return rows


def list_communication_rows(ledger: RankLedger) -> list[list[str]]:
    """By axis and operation: seconds, of a step, and the share of the wall; the largest first."""
    rows = []
    for name, seconds in sorted(ledger.communication_s.items(), key=lambda item: -item[1]):
        axis, _, operation = name.partition(": ")
        of_step_s = seconds / max(ledger.num_steps, 1)
        rows.append(
            [
                axis,
                operation,
                formats.format_seconds_or_missing(seconds),
                formats.format_milliseconds(of_step_s),
                formats.format_percent(seconds, ledger.wall_s),
            ]
        )
    return rows


def _render_ledger_row(ledger: RankLedger, full_s: float) -> list[Html | str]:
    parts_s = {**ledger.parts_s, UNATTRIBUTED: ledger.unattributed_s}
    texts = {}
    for name, seconds in parts_s.items():
        share = formats.format_percent(seconds, ledger.wall_s)
        texts[name] = f"{formats.format_seconds_or_missing(seconds)} ({share})"
    bar = draw_stacked_bar(parts_s, _CSS_CLASS_OF_PART, full_s, texts)
    return [str(ledger.rank), build_tag("div", bar, class_="bars"), texts[UNATTRIBUTED]]


def _describe_basis(facts: RunFacts, ledgers: list[RankLedger]) -> str:
    note = (
        "The wall is measured by the supervisor, the parts by each rank; what no part claims is"
        " unattributed."
    )
    if not all(each.is_supervised for each in ledgers):
        note = (
            "Where a supervisor said how long its command took, that is the wall, else (no"
            " supervisor, or one that was cut off) from the first to the last word of each rank."
            " What no part claims is unattributed."
        )
    num_hidden = len(facts.rank_ledgers) - len(ledgers)
    if num_hidden:
        note += (
            f" Shown are rank {ledgers[0].rank} and those with most that is unattributed;"
            f" {num_hidden} ranks are left out."
        )
    return note


def _render_communication(ledger: RankLedger) -> Html | None:
    rows = list_communication_rows(ledger)
    if not rows:
        return None
    head = ["axis", "operation", "seconds", "of a step", "of the run"]
    return build_tag(
        "div",
        build_tag("h3", f"What rank {ledger.rank} waited for in communication"),
        build_table(head, rows),
        build_tag(
            "p",
            "Seconds in which this rank computed nothing: transfer, and waiting for others. What"
            " goes on beside computation is not in it.",
            class_="note",
        ),
    )


def _render_callers(facts: RunFacts) -> Html | None:
    """The collectives of all ranks by the line that called them, folded up."""
    if not facts.callers:
        return None
    rows = []
    for each in facts.callers[:MAX_SHOWN_CALLERS]:
        rows.append(
            [
                each.axis,
                each.operation,
                each.caller,
                f"{each.num_calls:,}",
                formats.format_num_bytes(each.num_bytes),
                formats.format_seconds_or_missing(each.wait_s),
                formats.format_seconds_or_missing(each.most_wait_s),
            ]
        )
    head = ["group", "operation", "caller", "calls", "bytes", "waited", "longest of a rank"]
    return build_tag(
        "details",
        build_tag("summary", "Collectives by caller"),
        build_table(head, rows),
        build_tag(
            "p",
            "Of all ranks together, with those of start-up, saves and evaluations. Waited: inside"
            " of a wait in Python; what DDP waits for in C++ is in the table above alone, and on a"
            " GPU no call is timed. A group that is no axis has torch's name for it (“group 9”): of"
            " saves or traces beside training, or of your own code.",
            class_="note",
        ),
    )
