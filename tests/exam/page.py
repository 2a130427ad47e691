"""Writes the blocks of docs/exam.md that stand between marks from the scores of an exam."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from exam.clean import CleanScore
from exam.curves import MULTIPLE, SMALLEST, CurveScore
from exam.generate import SEAMS, SIZES
from exam.plant import AXES, Plant
from exam.score import (
    ALL_LAYOUTS,
    BANDS,
    NARROW,
    OUTCOMES,
    OWN_LAYOUTS,
    UPDATE_BAND,
    VISIBLE,
    Score,
)

Sat = Sequence[tuple[Plant, Score]]
Curves = Mapping[str, CurveScore]

OF_OWN_LAYOUTS = """A plant is **found** if `phalanx verify JOB --json --layouts ... --ranks N`, with the job, the layouts and the ranks that it names, exits with 11"""
OF_ALL_LAYOUTS = """A plant is **found** if `phalanx verify JOB --json --layouts all --ranks N` (`make exam ARGS=--natural`), with the job and the ranks that it names, exits with 11"""
TYPES = ("float64", "float32", *NARROW)  # in the order in which the ladder shows them
TYPES_OF_OLD_RESULTS = ("float64", "float32")  # which do not say in which they were judged

MEANING = """ and
a row that is not to be clean differs, and its bug acted. "not run": no process reached an edited line, so nothing examined it (it counts as not
found). Tensor, rank and cause are those of the first difference of the first row; of tensor and rank 7/8 says that of the 8 plants in which some
answer would be wrong 7 have the right one (what is reduced over ranks is wrong on all of them, and an error of all gradients has no tensor). "loss" and "norm": what a comparison of losses, or of
gradient norms, would have seen{curves}
"""

OF_JUDGED_STEPS = f""" of the same six steps at a relative error of {VISIBLE:g}; as those are few, and not 20, that
errs a little to their disadvantage (`make exam ARGS=--curves` trains 20)."""

OF_TWENTY_STEPS = f""" of 20 steps
of training in the first layout of the plant, beside the same steps in one process: of the same small model on text, in float32, three
microbatches a rank and more, each process with the edited code. It shows if the curves differ by {MULTIPLE} x what those of the unchanged code
differ by (at least {SMALLEST:g} relative): more than a person sees, who does not know that figure. Blocks, chunks and buckets have
their usual sizes there, and nothing is resumed. "not trained": the run is refused or needs what no such run has."""

OF_VARIANTS = f'"loss" and "norm" are those of the judged steps here, at {VISIBLE:g}.\n'
OF_LADDER = "Variants of one factor each, on some rank: the sizes of which every variant that acted was found, by type"


def format_blocks(
    sat: Sat,
    generated: Sat,
    clean: Sequence[CleanScore],
    *,
    curves: Curves,
    about: str,
    seconds: float,
    num_plants: int,
    asked: str = OWN_LAYOUTS,
) -> dict[str, str]:
    """Name -> text of each block of the page that these results say; without clean rows or variants
    those blocks are missing. `curves`: plant -> what curves of 20 steps show; without any, losses and
    norms of the judged steps stand there. `about`: the machine and versions, in words. `num_plants`:
    those that there are, of which `sat` may be a part. `asked`: the layouts of the command, as
    `Score.asked` has them."""
    found = OF_ALL_LAYOUTS if asked == ALL_LAYOUTS else OF_OWN_LAYOUTS
    of_sat = f"{about}, {describe_asked(asked)}"
    meaning = MEANING.format(curves=OF_TWENTY_STEPS if curves else OF_JUDGED_STEPS)
    num_jobs = len({plant.job for plant, _ in sat})
    blocks = {
        "sat": f"{found}{meaning}\n{len(sat)} of {num_plants} plants sat, on {num_jobs} jobs;"
        f" {about}; {seconds / 60:.0f} minutes of runs.\n",
        "totals": "\n".join([_format_totals(sat, curves), *_format_curve_totals(curves)]),
        "plants": _format_plants(sat, curves),
    }
    if clean:
        blocks["clean"] = _format_clean(sat, clean, about)
    if generated:
        blocks["ladder"] = format_ladder(generated, about=of_sat)
        blocks["variants"] = f"{of_sat}. {OF_VARIANTS}\n{_format_plants(generated, {})}"
    return blocks


def describe_asked(asked: str) -> str:
    """Words for the layouts that the command of each result named."""
    return "in all layouts" if asked == ALL_LAYOUTS else "in the layouts that each names"


def replace_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """`page` with each block's text between its two marks; what stands around stays as it is.
    Raises ValueError for a block that the page lacks."""
    for name, text in blocks.items():
        mark = rf"(<!-- {name}: written by make exam -->\n).*?(<!-- end of {name} -->)"
        pattern = re.compile(mark, re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"the page has no block {name!r}")
        page = pattern.sub(lambda match, text=text: f"{match[1]}{text}{match[2]}", page, count=1)
    return page


def _shows_in(curves: Curves, score: Score) -> tuple[bool | None, bool | None]:
    """Whether losses and whether norms show a bug; None where they were to be trained and are
    not."""
    if not curves:
        return score.shows_in_loss, score.shows_in_norm
    curve = curves.get(score.plant)
    if curve is None or curve.message:
        return None, None
    return curve.shows_in_loss, curve.shows_in_norm


def _format_curve_totals(curves: Curves) -> list[str]:
    """How many plants the curves show at several limits, and which were not trained."""
    if not curves:
        return []
    trained = [curve for curve in curves.values() if not curve.message]
    shares = ", ".join(
        f"{limit:g}: losses {sum(not curve.loss <= limit for curve in trained)},"
        f" norms {sum(not curve.norm <= limit for curve in trained)}"
        for limit in (0.01, 0.001, 1e-4)
    )
    lines = [f"Of {len(trained)} plants that were trained, curves differ by more than {shares}.\n"]
    failed = [f"{name} ({curve.message})" for name, curve in curves.items() if curve.message]
    if failed:
        lines.append(f"Not trained: {'; '.join(failed)}.\n")
    return lines


def _format_totals(sat: Sat, curves: Curves) -> str:
    lines = [
        f"| axis | plants | {' | '.join(OUTCOMES)} | tensor | rank | cause | loss | norm |",
        f"|---|{'---:|' * (len(OUTCOMES) + 6)}",
    ]
    present = [axis for axis in AXES if any(plant.axis == axis for plant, _ in sat)]
    groups = [(axis, [pair for pair in sat if pair[0].axis == axis]) for axis in present]
    for axis, pairs in (*groups, ("**all**", sat)):
        scores = [score for _, score in pairs]
        outcomes = " | ".join(str(_count(scores, lambda s, o=o: s.outcome == o)) for o in OUTCOMES)
        of_tensor = [score for plant, score in pairs if plant.asks_tensor]
        of_rank = [score for plant, score in pairs if plant.asks_rank]
        named = " | ".join(
            (
                f"{_count(of_tensor, lambda s: s.is_found and s.tensor)}/{len(of_tensor)}",
                f"{_count(of_rank, lambda s: s.is_found and s.rank)}/{len(of_rank)}",
                str(_count(scores, lambda s: s.is_found and s.cause)),
                str(_count(scores, lambda s: bool(_shows_in(curves, s)[0]))),
                str(_count(scores, lambda s: bool(_shows_in(curves, s)[1]))),
            )
        )
        lines.append(f"| {axis} | {len(scores)} | {outcomes} | {named} |")
    return "\n".join(lines) + "\n"


def _count(scores: Iterable[Score], test: Callable[[Score], bool]) -> int:
    return sum(map(test, scores))


def _format_clean(sat: Sat, clean: Sequence[CleanScore], about: str) -> str:
    num_beside = sum(score.num_clean_rows for _, score in sat)
    wrong = [
        f"{score.plant}: {', '.join(score.false_alarms)}" for _, score in sat if score.false_alarms
    ]
    lines = [
        f"{sum(run.num_rows for run in clean)} rows of the unchanged code, over"
        f" {len({run.seed for run in clean})} seeds, had {sum(len(run.alarms) for run in clean)} alarms;"
        f" {num_beside} rows that a plant must leave alone had {len(wrong)}; {about}.",
        *(f"- {run.name}: {alarm.splitlines()[0]}" for run in clean for alarm in run.alarms),
        *(f"- {line}" for line in wrong),
    ]
    return "\n".join(lines) + "\n"


def format_narrow(sat: Sat, *, num_plants: int, about: str) -> str:
    """What rows of narrow types found of the plants, where they have any, and how wide the bands
    were."""
    with_rows = [(plant, score) for plant, score in sat if score.narrow]
    lines = [
        f"{len(sat)} of {num_plants} plants sat in these types, of which {len(with_rows)} have such rows (the others name rows of the trainer"
        f" or of a second implementation, in float64 alone); {about}.",
        f"Of the plants whose effect on a gradient in float64 is at least {BANDS} x the median band of the type (of updates,"
        f" {BANDS} x {UPDATE_BAND:g}); the others are below what the type shows. The median band of a row, over the plants: least, median, most.\n",
        "| type | found | missed | share found | below | median band |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for dtype in NARROW:
        outcomes = [score.narrow[dtype] for _, score in with_rows if dtype in score.narrow]
        found, missed, below = (outcomes.count(word) for word in ("found", "missed", "below"))
        share = f"{100 * found / (found + missed):.0f} %" if found + missed else ""
        bands = sorted(score.bands[dtype] for _, score in with_rows if dtype in score.bands)
        shown = ""
        if bands:
            cells = (bands[0], bands[len(bands) // 2], bands[-1])
            shown = ", ".join(f"{100 * band:.2g} %" for band in cells)
        lines.append(f"| {dtype} | {found} | {missed} | {share} | {below} | {shown} |")
    for dtype in NARROW:
        for word in ("missed", "below"):
            names = [plant.name for plant, score in with_rows if score.narrow.get(dtype) == word]
            if names:
                lines.append(f"\n{dtype}, {word}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def format_ladder(generated: Sat, *, about: str) -> str:
    """For each seam and type the variants of each size that were found, of those that acted."""
    judged = {dtype for _, score in generated for dtype in _list_types(score)}
    types = [dtype for dtype in TYPES if dtype in judged] + sorted(judged - set(TYPES))
    lines = [
        f"{OF_LADDER}; {about}.\n",
        f"| seam | type | {' | '.join(f'{size:g}' for size in SIZES)} | always found from |",
        f"|---|---|{'---|' * len(SIZES)}---:|",
    ]
    for seam in SEAMS:
        for dtype in types:
            cells = {size: _find_share(generated, seam, size, dtype) for size in SIZES}
            shown = " | ".join(
                f"{num_found}/{total}" if total else "" for num_found, total in cells.values()
            )
            lines.append(f"| {seam} | {dtype} | {shown} | {_find_smallest(cells)} |")
    return "\n".join(lines) + "\n"


def _find_share(generated: Sat, seam: str, size: float, dtype: str) -> tuple[int, int]:
    """(found, all) of the variants that acted and were judged in the type."""
    scores = [
        score
        for plant, score in generated
        if plant.size == size
        and plant.name.startswith(f"generated_{seam}_")
        and score.acted
        and dtype in _list_types(score)
    ]
    return sum(dtype in score.types for score in scores), len(scores)


def _list_types(score: Score) -> tuple[str, ...]:
    return score.types_judged or TYPES_OF_OLD_RESULTS


def _find_smallest(cells: Mapping[float, tuple[int, int]]) -> str:
    smallest = "nothing"
    for size, (num_found, total) in cells.items():
        if num_found < total:
            break
        if total:
            smallest = f"{size:g}"
    return smallest


def _format_plants(sat: Sat, curves: Curves) -> str:
    lines = [
        "| plant | axis | seen in | outcome | tensor | rank | cause | loss | norm | seconds |",
        "|---|---|---|---|---|---|---|---|---|---:|",
    ]
    for plant, score in sat:
        marks = [
            _mark(score.tensor if score.is_found and plant.asks_tensor else None),
            _mark(score.rank if score.is_found and plant.asks_rank else None),
            _mark(score.cause if score.is_found else None),
            *(
                "not trained" if shows is None else _mark(shows)
                for shows in _shows_in(curves, score)
            ),
        ]
        outcome = score.outcome
        if outcome == "missed" and not score.acted:
            outcome = "missed (it never came to act)"
        mistake = plant.mistake.replace("|", "\\|")
        lines.append(
            f"| {plant.name}: {mistake} | {plant.axis} | {plant.source} | {outcome} |"
            f" {' | '.join(marks)} | {score.seconds:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _mark(value: bool | None) -> str:
    if value is None:
        return ""
    return "yes" if value else "no"
