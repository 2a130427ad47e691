"""Scores what `phalanx verify` printed of an edited phalanx against the right answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from exam.plant import Plant

DIFFERS = 11  # the exit code of `phalanx verify` when a layout differs
VISIBLE = 1e-5  # the relative error that a comparison of two curves sees
NARROW = ("bfloat16", "float16")
BANDS = 4  # an effect of so many times the median band must be found
UPDATE_BAND = 1e-5  # of updates, which these rows make in float32
OWN_LAYOUTS, ALL_LAYOUTS = "own", "all"
OUTCOMES = ("found", "missed", "crashed", "refused", "hung", "not run")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The result of one plant.

    `outcome`: one of OUTCOMES; "not run": no process reached an edited line, so nothing was
    examined. `acted`: the condition of the bug held at least once. `tensor`, `rank` and `cause` are
    true if the first difference names the right ones. `types`: floating-point types in which it was
    found. `false_alarms`: layouts that must be clean and differ. `message`: the words printed of the
    first difference. `loss_error` and `norm_error`: of the worst row, over its steps. `asked`: the
    layouts that the command named, OWN_LAYOUTS (those of the plant) or ALL_LAYOUTS. `types_judged`:
    those in which a row was compared.
    """

    plant: str
    outcome: str
    tensor: bool = False
    rank: bool = False
    cause: bool = False
    acted: bool = False
    types: tuple[str, ...] = ()
    layouts_found: tuple[str, ...] = ()
    layouts_missed: tuple[str, ...] = ()
    false_alarms: tuple[str, ...] = ()
    num_clean_rows: int = 0
    message: str = ""
    seconds: float = 0.0
    loss_error: float = 0.0
    norm_error: float = 0.0
    narrow: Mapping[str, str] = field(default_factory=dict)
    """Narrow type -> "found", "missed", or "below": too little an effect for what the type rounds."""
    bands: Mapping[str, float] = field(default_factory=dict)
    """Narrow type -> the median band of its rows, the widest of them."""
    asked: str = OWN_LAYOUTS
    types_judged: tuple[str, ...] = ()

    @property
    def is_found(self) -> bool:
        """True if a row differs and the bug acted: else nothing is there to be found."""
        return self.outcome == "found" and self.acted

    @property
    def shows_in_loss(self) -> bool:
        """True if a comparison of losses over these steps would have shown the bug."""
        return not self.loss_error <= VISIBLE

    @property
    def shows_in_norm(self) -> bool:
        return not self.norm_error <= VISIBLE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Score:
        known = {each.name for each in fields(cls)}
        values = {key: value for key, value in body.items() if key in known}
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)


def score_rows(plant: Plant, rows: Sequence[Row], *, exit_code: int, text: str) -> Score:
    """The score of the rows that `phalanx verify` printed with `exit_code`; `text`: its errors.

    Rows of layouts that the plant does not know (those through the trainer, or beside another
    implementation) count as found where they differ.
    """
    judged = [row for row in rows if row["layout"] not in plant.clean]
    clean = [row for row in rows if row["layout"] in plant.clean]
    differing = [row for row in judged if row["first"] is not None]
    layouts_found = tuple(dict.fromkeys(row["layout"] for row in differing))
    shared: dict[str, Any] = {
        "layouts_missed": tuple(layout for layout in plant.shows if layout not in layouts_found),
        "false_alarms": tuple(
            dict.fromkeys(row["layout"] for row in clean if row["first"] is not None)
        ),
        "num_clean_rows": len(clean),
        "types_judged": tuple(
            dict.fromkeys(row["dtype"] for row in rows if not (row["refused"] or row["crashed"]))
        ),
        "loss_error": _find_worst(judged, "loss"),
        "norm_error": _find_worst(judged, "norm"),
        "narrow": {dtype: outcome for dtype in NARROW if (outcome := _judge_narrow(judged, dtype))},
        "bands": {dtype: band for dtype in NARROW if (band := _find_band(rows, dtype))},
    }
    if not differing or exit_code != DIFFERS:
        return Score(plant.name, _name_failure(judged), message=text[-500:], **shared)
    first = differing[0]["first"]
    return Score(
        plant.name,
        "found",
        tensor=plant.names_tensor(first["name"]),
        rank=plant.names_rank(first["rank"]),
        cause=plant.names_cause(first["cause"]),
        types=tuple(dict.fromkeys(row["dtype"] for row in differing)),
        layouts_found=layouts_found,
        message=f"{differing[0]['layout']} {differing[0]['dtype']}: {first['text']}: {first['cause']}",
        **shared,
    )


def add_marks(score: Score, *, is_reached: bool, acted: bool, text: str) -> Score:
    """`score`, with what processes recorded: whether one of them reached an edited line, and
    whether the bug acted. What differs although it did not is a false alarm. `text`: the errors of
    the command."""
    if not (is_reached and acted):
        # Rows of narrow types had nothing to find, either.
        score = replace(score, narrow={})
    if score.outcome == "found" and not acted:
        score = replace(
            score,
            outcome="missed",
            **dict.fromkeys(("tensor", "rank", "cause"), False),
            types=(),
            layouts_found=(),
            false_alarms=(*score.false_alarms, *score.layouts_found),
        )
    if not is_reached:
        score = replace(score, outcome="not run", message=text[-500:])
    return replace(score, acted=acted)


def _judge_narrow(rows: Sequence[Row], dtype: str) -> str:
    """How rows of a narrow type did with a bug whose effect their float64 rows measure; "" where
    there are none of both."""
    exact = {row["layout"]: row for row in rows if row["dtype"] == "float64" and row["errors"]}
    narrow = [row for row in rows if row["dtype"] == dtype and row["layout"] in exact]
    if not narrow:
        return ""
    if any(row["first"] is not None for row in narrow):
        return "found"
    for row in narrow:
        gradient, update = (
            _find_worst([exact[row["layout"]]], kind) for kind in ("gradient", "update")
        )
        if gradient >= BANDS * row["tolerance"] or update >= BANDS * UPDATE_BAND:
            return "missed"
    return "below"


def _find_band(rows: Sequence[Row], dtype: str) -> float:
    """The widest median band of the rows in a narrow type; 0 without any."""
    bands = [row["tolerance"] for row in rows if row["dtype"] == dtype and row["errors"]]
    return max(bands, default=0.0)


def _find_worst(rows: Iterable[Row], kind: str) -> float:
    """The largest error of `kind`; what is not a number counts as infinite."""
    worst = 0.0
    for row in rows:
        error = row["errors"].get(kind, 0.0)
        is_number = error is not None and error == error
        worst = max(worst, float(error) if is_number else float("inf"))
    return worst


def _name_failure(rows: Sequence[Row]) -> str:
    if not rows or any(row["crashed"] for row in rows):
        return "crashed"
    return "refused" if all(row["refused"] for row in rows) else "missed"
