"""From rows to a line each, to tables, and to the verdict.

Nothing here knows a number that was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_check.cases import BARE, CEILING, FP8, PHALANX, SYSTEMS
from gpu_check.children import MEASURED, PARTIAL, Row

AIM = 0.75  # of the ceiling
TRAINERS = tuple(system.name for system in SYSTEMS if system.is_trainer)
SAME_LOSS = (
    0.02  # relative: trainers round differently, and a different model or batch is further away
)
GIB = 2**30
COLUMNS = (
    "system",
    "tokens/s",
    "extremes",
    "of the ceiling",
    "÷ bare",
    "peak GiB",
    "planned",
    "first step s",
    "",
)


def row_of(rows: Sequence[Row], name: str) -> Row:
    return next((row for row in rows if row["system"] == name), {})


def ceiling_of(rows: Sequence[Row]) -> float | None:
    """FLOP/s."""
    value = row_of(rows, CEILING).get("square_flops_per_s")
    return None if value is None else float(value)


def share_of_ceiling(rows: Sequence[Row], row: Row) -> float | None:
    """Model FLOP/s of a trainer over the ceiling."""
    ceiling, flops = ceiling_of(rows), row_of(rows, CEILING).get("flops_per_token")
    if ceiling is None or flops is None or "tokens_per_s" not in row:
        return None
    return float(row["tokens_per_s"]) * flops / ceiling


def ratio(rows: Sequence[Row], a: str, b: str) -> float | None:
    """Tokens/s of `a` over those of `b`; None unless both were measured."""
    ours, theirs = (row_of(rows, name).get("tokens_per_s") for name in (a, b))
    return None if ours is None or theirs is None else float(ours) / float(theirs)


def line(rows: Sequence[Row], row: Row) -> str:
    """What is printed when a system is done."""
    text = f"{row['system']}: {facts(rows, row)}"
    if row["status"] != MEASURED:
        text += f"{'; ' if facts(rows, row) else ''}{row['status']}: {row['why']}"
    return f"{text} [{row['wall_s']:.0f} s]"


def facts(rows: Sequence[Row], row: Row) -> str:
    parts = []
    if "device" in row:
        parts.append(f"{row['device']}, torch {row['torch']}")
    if "square_flops_per_s" in row:
        parts.append(
            f"{row['square_flops_per_s'] / 1e12:,.4g} TFLOP/s in bf16 (width {row['square']:,})"
        )
    if "model_flops_per_s" in row:
        parts.append(f"{row['model_flops_per_s'] / 1e12:,.4g} in the model's own products")
    if "tokens_per_s" in row:
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    share = share_of_ceiling(rows, row) if row["system"] != FP8 else None
    if share is not None:
        parts.append(f"{share:.1%} of the ceiling")
    if "peak_bytes" in row:
        planned = f" (planned {row['planned_bytes'] / GIB:.1f})" if "planned_bytes" in row else ""
        parts.append(f"peak {row['peak_bytes'] / GIB:.1f} GiB{planned}")
    if "parity" in row:
        wrong = [name for name, found in row["parity"].items() if not found["agrees"]]
        parts.append(f"wrong: {', '.join(wrong)}" if wrong else f"{len(row['parity'])} cases agree")
    return ", ".join(parts)


def speed_table(rows: Sequence[Row]) -> list[list[str]]:
    """Header, and a line for each trainer that had its turn."""
    lines = [list(COLUMNS)]
    for row in rows:
        if row["system"] not in TRAINERS:
            continue
        share = share_of_ceiling(rows, row) if row["system"] != FP8 else None
        low, high = row.get("extremes", (None, None))
        status = "" if row["status"] == MEASURED else f"{row['status']}: {row['why']}"
        lines.append(
            [
                row["system"],
                _number(row.get("tokens_per_s"), ",.0f"),
                "" if low is None else f"{low:,.0f} to {high:,.0f}",
                _number(share, ".1%"),
                _number(ratio(rows, row["system"], BARE), ".3f"),
                _number(_gib(row.get("peak_bytes")), ".1f"),
                _number(_gib(row.get("planned_bytes")), ".1f"),
                _number(row.get("first_step_s"), ".1f"),
                status,
            ]
        )
    return lines


def parity_table(rows: Sequence[Row]) -> list[list[str]]:
    lines = [["kernel", "worst tensor", "error", "limit", ""]]
    for row in rows:
        for name, found in row.get("parity", {}).items():
            agrees = "agrees" if found["agrees"] else "DIFFERS"
            numbers = [f"{found['error']:.2e}", f"{found['limit']:.2e}"]
            lines.append([f"{row['system']}: {name}", found["worst"], *numbers, agrees])
        if row["system"] not in (*TRAINERS, CEILING) and row["status"] != MEASURED:
            lines.append([row["system"], "", "", "", f"{row['status']}: {row['why']}"])
    return lines


def verdict(rows: Sequence[Row]) -> list[str]:
    """The aims, each reached or not, or not measured."""
    ours = row_of(rows, PHALANX)
    share = share_of_ceiling(rows, ours)
    how = (
        "not measured"
        if share is None
        else f"{'reached' if share >= AIM else 'NOT reached'}: {share:.1%}"
    )
    lines = [f"at least {AIM:.0%} of the measured matmul ceiling: {how}"]
    for name in TRAINERS:
        if name in (PHALANX, FP8):
            continue
        found = ratio(rows, PHALANX, name)
        how = (
            "not measured"
            if found is None
            else f"{'reached' if found > 1 else 'NOT reached'}: {found:.3f} of it"
        )
        lines.append(f"ahead of {name}: {how}")
    lines += _losses(rows)
    lines += [
        f"{row['system']}:"
        f" {'agrees with its reference' if row['agrees'] else 'DIFFERS from its reference'}"
        for row in rows
        if "agrees" in row
    ]
    return lines


def _losses(rows: Sequence[Row]) -> list[str]:
    """Trainers that train the same end at the same loss; where one does not, its speed says
    nothing."""
    ours = row_of(rows, PHALANX).get("losses")
    others = [
        row
        for row in rows
        if row["system"] in TRAINERS and row["system"] != PHALANX and "losses" in row
    ]
    if ours is None or not others:
        return []
    apart = [
        f"{row['system']} {row['losses'][0]:.4f} to {row['losses'][1]:.4f}"
        for row in others
        if any(abs(a - b) > SAME_LOSS * abs(b) for a, b in zip(row["losses"], ours, strict=True))
    ]
    span = f"{ours[0]:.4f} to {ours[1]:.4f}"
    if apart:
        return [f"losses DIFFER from phalanx's {span}: {'; '.join(apart)}"]
    return [
        f"losses of {', '.join(row['system'] for row in others)} are phalanx's, {span}, to"
        f" {SAME_LOSS:.0%}"
    ]


def is_right(rows: Sequence[Row]) -> bool:
    """phalanx trained, and no kernel that was compared differs. Aims are said, not demanded."""
    return row_of(rows, PHALANX).get("status") in (MEASURED, PARTIAL) and all(
        row.get("agrees", True) for row in rows
    )


def as_text(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, len(line) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    header, *rest = lines
    rule = ["---", *["---:"] * (len(header) - 2), "---"]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rest))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _gib(value: float | None) -> float | None:
    return None if value is None else value / GIB
