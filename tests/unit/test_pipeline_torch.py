"""Schedules by name are torch's own, action by action; the reference is what torch's classes
list or do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.core.errors import LayoutError
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.schedule import Schedule, load_schedule_csv, save_schedule_csv

SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI = {
    "interleaved": ("ScheduleInterleaved1F1B", (2, 3)),
    "interleaved-zero-bubble": ("ScheduleInterleavedZeroBubble", (1, 2, 3)),
    "zb-v": ("ScheduleZBVZeroBubble", (2,)),
    "dualpipe-v": ("ScheduleDualPipeV", (2,)),
}


class RecordingStage:
    """Stands where a stage does and writes down what a schedule tells it to do; it has nothing
    to send."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages, self.is_last = index, num_stages, index == num_stages - 1
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: object) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: []


def stages_of(num_ranks: int, stages_per_rank: int, rank: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank,
            group_size=num_ranks,
            group_rank=rank,
            stage_index=rank + turn * num_ranks,
            is_last=False,
            submod=None,
        )
        for turn in range(stages_per_rank)
    ]


def flat(actions: list[Any]) -> Iterator[str]:
    """Without bubbles; an overlapped pair as two, in the order in which torch runs it."""
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            yield str(part)


def rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize("name", list(SINGLE))
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches"), [(1, 1), (1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 9)]
)
def test_one_stage_per_rank(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Against what torch's class does when it runs.

    What 1F1B lists for the last rank begins at F1; it is not run.
    """
    ours = rows(generate_schedule(name, num_ranks, num_microbatches))
    for rank in range(num_ranks):
        stage = RecordingStage(rank, num_ranks)
        schedule = getattr(torch_schedules, SINGLE[name])(stage, num_microbatches)
        schedule._initialize_stage = lambda *args, **keywords: None
        schedule._step_microbatches()
        assert ours[rank] == stage.done


@pytest.mark.parametrize("name", list(MULTI))
def test_several_stages_per_rank(name: str) -> None:
    """Every size that torch's class takes is legal here, and every one it refuses is refused."""
    kind, per_rank = MULTI[name]
    compared = 0
    for stages_per_rank in per_rank:
        for num_ranks in (1, 2, 3, 4, 5):
            for num_microbatches in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16):
                stages = stages_of(num_ranks, stages_per_rank, 0)
                try:
                    theirs = getattr(torch_schedules, kind)(stages, num_microbatches)
                except ValueError:
                    with pytest.raises(LayoutError, match="nearest"):
                        generate_schedule(name, num_ranks, num_microbatches, stages_per_rank)
                    continue
                ours = generate_schedule(name, num_ranks, num_microbatches, stages_per_rank)
                listed = [list(flat(theirs.pipeline_order[rank])) for rank in range(num_ranks)]
                assert rows(ours) == listed, (stages_per_rank, num_ranks, num_microbatches)
                assert dict(enumerate(ours.rank_of_stage)) == theirs.stage_index_to_group_rank
                compared += 1
    assert compared >= 25


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "stages_per_rank"),
    [
        ("gpipe", 4, 6, 1),
        ("1f1b", 4, 6, 1),
        (
            "1f1b",
            4,
            2,
            1,
        ),  # fewer microbatches than ranks: torch's class refuses it, its runtime does not
        ("interleaved", 4, 10, 2),
        ("interleaved-zero-bubble", 3, 6, 2),
        ("interleaved-zero-bubble", 4, 8, 1),
        ("zb-v", 4, 3, 2),
        ("zb-v", 3, 9, 2),
        ("dualpipe-v", 3, 7, 2),
    ],
)
def test_torchs_runtime_reads_our_files(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, tmp_path: Path
) -> None:
    """It adds sends and receives to them, and its own simulation of those ends."""
    ours = generate_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    path = tmp_path / "own.csv"
    save_schedule_csv(ours, path)
    stages = stages_of(num_ranks, stages_per_rank, 0)
    runtime = torch_schedules._PipelineScheduleRuntime(stages, num_microbatches)
    runtime._load_csv(str(path), format="compute_only")
    assert [list(flat(runtime.pipeline_order[rank])) for rank in range(num_ranks)] == rows(ours)
    assert runtime.stage_index_to_group_rank == dict(enumerate(ours.rank_of_stage))
    lowered = runtime.pipeline_order_with_comms
    gathers = ("UNSHARD", "RESHARD", "REDUCE_GRAD")  # torch's simulation does not know them
    for rank in lowered:
        lowered[rank] = [
            action for action in lowered[rank] if action.computation_type.value not in gathers
        ]
    assert any("SEND_B" in str(action) for action in lowered[num_ranks - 1])
    runtime._simulate()


def test_we_read_torchs_files(tmp_path: Path) -> None:
    """With its bubbles, and its overlapped pairs as two actions."""
    theirs = torch_schedules.ScheduleDualPipeV(stages_of(2, 2, 0), 5)
    path = tmp_path / "dualpipe.csv"
    theirs._dump_csv(str(path), format="compute_only")
    assert "OVERLAP_F_B" in path.read_text()
    ours = load_schedule_csv(path)
    assert rows(ours) == rows(generate_schedule("dualpipe-v", 2, 5))
    assert (ours.placement, ours.num_microbatches) == ("v", 5)
    theirs = torch_schedules.ScheduleInterleaved1F1B(stages_of(2, 2, 0), 4)
    theirs._dump_csv(str(path), format="compute_only")
    assert ",," in path.read_text()
    assert load_schedule_csv(path).actions == generate_schedule("interleaved", 2, 4, 2).actions
