"""The waterfall, the memory bars and the rules of a plan as lines of a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.advice.decision_tables import TableAnswer
from phalanx.plan.advice.rule import RuleVerdict
from phalanx.plan.advice.waterfall import WaterfallRow, list_memory_phases

MIN_WIDTH, MAX_WIDTH = 40, 110
MIN_BAR_WIDTH = 12
# One letter for each category: a bar is read without colours, too.
CATEGORY_LETTERS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "loss": "L",
    "communication": "C",
    "compression": "X",
    "allocator": "F",
    "staging": "S",
}
# Those that `print_coloured` lets through.
_CATEGORY_COLOURS = {"P": "34", "G": "32", "O": "35", "A": "36", "L": "31", "C": "33"}
_STATE_SIGNS = {"fails": "✗", "tight": "!", "unknown": "?", "holds": "✓"}
_STATE_COLOURS = {"fails": "31", "tight": "33", "unknown": "2", "holds": "32"}


@dataclass(frozen=True)
class TerminalStyle:
    """The look of lines: their width, whether bars are drawn (on terminals only), and in colour."""

    width: int = 80
    has_bars: bool = False
    has_colour: bool = False

    @property
    def line_width(self) -> int:
        return min(max(self.width, MIN_WIDTH), MAX_WIDTH)

    def paint(self, text: str, code: str) -> str:
        if not self.has_colour:
            return text
        return f"\033[{code}m{text}\033[0m"


def draw_waterfall(rows: Sequence[WaterfallRow], style: TerminalStyle) -> list[str]:
    """A line for each term: seconds, share, and (on terminals) a bar that begins where the term
    before it ends."""
    if not rows:
        return []
    name_width = max(len(row.name) for row in rows)
    end_s = max(row.start_s + row.seconds for row in rows)
    bar_width = style.line_width - name_width - 24
    lines = []
    for row in rows:
        line = f"  {row.name:<{name_width}}  {_format_term_ms(row.seconds):>9}  {row.share:>6.1%}"
        if style.has_bars and bar_width >= MIN_BAR_WIDTH and row.seconds > 0:
            line += f"  {_draw_waterfall_bar(row, end_s, bar_width, style)}"
        lines.append(line.rstrip())
    return lines


def _format_term_ms(seconds: float) -> str:
    """Milliseconds, so that terms can be compared at a glance."""
    if abs(seconds) >= 0.1:
        return f"{1e3 * seconds:,.0f} ms"
    return f"{1e3 * seconds:.2f} ms"


def _draw_waterfall_bar(row: WaterfallRow, end_s: float, width: int, style: TerminalStyle) -> str:
    start = round(width * row.start_s / end_s)
    stop = max(start + 1, round(width * (row.start_s + row.seconds) / end_s))
    start = min(start, width - 1)
    code = "36"
    if row.term == "ideal":
        code = "32"
    return " " * start + style.paint("█" * (min(stop, width) - start), code)


def draw_memory_bars(
    categories: Mapping[str, float],
    capacity_bytes: float,
    style: TerminalStyle,
    phases: Mapping[str, Mapping[str, float]] | None = None,
) -> list[str]:
    """A line for each phase of a step: its bytes, of those that a rank may fill, and a bar.

    Arguments as of `list_memory_phases`.
    """
    phases = list_memory_phases(categories, phases)
    name_width = max(len(name) for name in phases)
    largest = max(capacity_bytes, *(sum(parts.values()) for parts in phases.values()))
    bar_width = style.line_width - name_width - 28
    lines: list[str] = []
    shown: set[str] = set()
    for phase, parts in phases.items():
        total = sum(parts.values())
        share = ""
        if capacity_bytes > 0:
            share = f"{total / capacity_bytes:.0%}"
        line = f"  {phase:<{name_width}}  {format_bytes(total):>10}  {share:>5}"
        if style.has_bars and bar_width >= MIN_BAR_WIDTH and largest > 0:
            line += (
                f"  {_draw_stacked_memory_bar(parts, capacity_bytes, largest, bar_width, style)}"
            )
            shown.update(parts)
        lines.append(line.rstrip())
    if shown:
        key = ", ".join(f"{CATEGORY_LETTERS.get(name, '·')} {name}" for name in sorted(shown))
        lines += wrap_lines(f"{key}; | what a rank may fill", "  ", style)
    return lines


def _draw_stacked_memory_bar(
    parts: Mapping[str, float],
    capacity_bytes: float,
    largest: float,
    width: int,
    style: TerminalStyle,
) -> str:
    text, position, done = "", 0, 0.0
    for category, size in parts.items():
        done += size
        end = round((width - 1) * done / largest)
        letter = CATEGORY_LETTERS.get(category, "·")
        text += style.paint(letter * (end - position), _CATEGORY_COLOURS.get(letter, "37"))
        position = end
    limit = round((width - 1) * capacity_bytes / largest)
    if position <= limit:
        text += "·" * (limit - position)
        text += "|"
    return text


def format_rule_verdicts(
    verdicts: Sequence[RuleVerdict], style: TerminalStyle, *, shows_all: bool
) -> list[str]:
    """The rules that do not hold, with value, consequence and remedy; with `shows_all` every rule
    that applies, with its evidence and what is often said and is not so."""
    lines = []
    for verdict in verdicts:
        if verdict.state != "fails" and not shows_all:
            continue
        lines += _format_verdict_headline(verdict, style)
        if verdict.state == "holds" and not shows_all:
            continue
        lines += wrap_lines(f"{verdict.consequence}.", "    ", style)
        if verdict.remedy and verdict.state in ("fails", "tight"):
            lines += wrap_lines(f"try {verdict.remedy}", "    ", style)
        if shows_all and verdict.correction:
            lines += wrap_lines(f"often said otherwise: {verdict.correction}", "    ", style)
    num_others = sum(verdict.state != "fails" for verdict in verdicts)
    if not shows_all and num_others:
        which = f"all {num_others}"
        if lines:
            which = f"{num_others} other"
        lines.append(f"  {which} rules hold or could not be judged: --rules shows all")
    return lines


def _format_verdict_headline(verdict: RuleVerdict, style: TerminalStyle) -> list[str]:
    sign = _STATE_SIGNS[verdict.state]
    lines = wrap_lines(f"{sign} {verdict.title}: {verdict.comparison}", "  ", style)
    # After wrapping, which would count the colours' characters.
    lines[0] = lines[0].replace(sign, style.paint(sign, _STATE_COLOURS[verdict.state]), 1)
    return lines


def format_table_answers(answers: Sequence[TableAnswer], style: TerminalStyle) -> list[str]:
    """The answers of the field's decision tables as lines, beside the plan: heuristics, and
    labelled as such."""
    lines = ["decision tables of the field (heuristics, nothing is decided by them)"]
    for answer in answers:
        verdict = "agrees"
        if answer.agrees is None:
            verdict = "has no row for this"
        elif not answer.agrees:
            verdict = f"differs: {answer.differences}"
        lines += wrap_lines(f"{answer.table}: {answer.says} ({verdict})", "  ", style)
    return lines


def format_step_interval(step_s: float, low_s: float, high_s: float) -> str:
    """'18.4 s (80 % interval 17.3 s to 19.6 s)'."""
    interval = f"{format_seconds(low_s)} to {format_seconds(high_s)}"
    return f"{format_seconds(step_s)} (80 % interval {interval})"


def wrap_lines(text: str, indent: str, style: TerminalStyle) -> list[str]:
    """The text in lines of the terminal's width."""
    return wrap(
        text,
        style.line_width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
