"""The ledger proves that samples were read exactly once, over restarts too, and finds every
fault planted in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.core.errors import DataError
from phalanx.core.files import write_json_atomically
from phalanx.data.ledger import check_sample_records
from phalanx.data.loader import RankBatchShare, TrainBatches
from phalanx.data.prepare import prepare_corpus
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Data, Job, Observe, Run
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished, RunStarted, SamplesRead

SEED = 3


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has its data and has read none of it."""
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"document {number} " * 9)
    run = tmp_path / "run"
    data = Data(source=str(tmp_path / "texts"), seq_len=8, held_out_fraction=0.1)
    prepare_corpus(data, run / "data", vocab_size=None)
    write_json_atomically(
        run / "job.json",
        Job(run=Run(seed=SEED), data=data, observe=Observe(samples=True)).to_json(),
    )
    return run


def read(
    run: Path,
    attempt: int,
    steps: Sequence[int],
    *,
    ranks: int = 2,
    batch: int = 8,
    seed: int = SEED,
    only: Sequence[int] | None = None,
    changed: Callable[[SamplesRead], SamplesRead | None] = lambda event: event,
) -> None:
    """Do what the ranks of an attempt do: read the steps, and say so.

    It continues where `steps` begin.
    """
    before = steps[0] - 1
    for rank in range(ranks) if only is None else only:
        share = RankBatchShare(
            batch,
            batch // ranks,
            ranks,
            rank,
            done_steps=before,
            done_samples=DONE.get(before, before * 8),
        )
        batches = TrainBatches(
            SampleSpec(str(run / "data"), 8, seed), share, prefetch=False, keep_record=True
        )
        bus = Bus(rank=rank, attempt=attempt, run_dir=run)
        if rank == 0:
            bus.emit(RunStarted("train", "", ranks, before, 99, "cpu", {}))
        for step in steps:
            batches.step_microbatches(step)
            for event in batches.record(step):
                if (said := changed(event)) is not None:
                    bus.emit(said)
        bus.close()


DONE = {10: 80}


def test_a_straight_run(run_dir: Path) -> None:
    read(run_dir, 0, range(1, 11))
    report = check_sample_records(run_dir)
    assert report.problems == ()
    assert (report.num_samples, report.num_steps, report.num_attempts, report.num_compared) == (
        80,
        10,
        1,
        20,
    )
    assert report.lines() == [
        "80 samples in 10 steps, each exactly once (checksums as the tokens say)"
    ]
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_steps_that_a_restart_did_again_count_once(run_dir: Path) -> None:
    read(run_dir, 0, range(1, 9))
    read(run_dir, 0, range(9, 10), only=[1])  # killed before rank 0 had said it
    read(run_dir, 1, range(6, 11))
    report = check_sample_records(run_dir)
    assert report.problems == ()
    assert (report.num_samples, report.num_steps, report.num_attempts) == (80, 10, 2)
    assert "over 2 attempts, each exactly once" in report.lines()[0]


def test_a_resumed_run_may_have_other_ranks_and_another_batch_size(run_dir: Path) -> None:
    read(run_dir, 0, range(1, 14))  # steps 11 to 13 were lost: nothing was saved after step 10
    read(run_dir, 1, range(11, 13), ranks=4, batch=12)
    report = check_sample_records(run_dir)
    assert report.problems == ()
    assert (report.num_samples, report.num_steps) == (80 + 24, 12)


def test_the_newest_step_may_be_cut_off_by_a_kill(run_dir: Path) -> None:
    read(run_dir, 0, range(1, 5))
    read(run_dir, 0, range(5, 6), only=[1])
    report = check_sample_records(run_dir)
    assert (report.problems, report.num_steps, report.num_samples) == ((), 4, 32)


def at(
    step: int, rank: int, change: Callable[[SamplesRead], SamplesRead | None]
) -> Callable[[SamplesRead], object]:
    def changed(event: SamplesRead) -> SamplesRead | None:
        return change(event) if (event.step, event.data_parallel_rank) == (step, rank) else event

    return changed


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (at(4, 1, lambda event: None), ["step 4: rank 1 has no record"]),
        (at(4, 1, lambda event: replace(event, ranges=[28, 31])), ["step 5: sample 31 is missing"]),
        (
            at(4, 1, lambda event: replace(event, ranges=[24, 28])),
            ["step 4: samples 24 to 27 are repeated"],
        ),
        (
            at(4, 1, lambda event: replace(event, ranges=[12, 16])),
            ["step 4: samples 12 to 15 are repeated"],
        ),
        (at(4, 0, lambda event: replace(event, ranges=[25, 28])), ["step 4: sample 24 is missing"]),
        (
            at(4, 1, lambda event: replace(event, xxh3="0" * 16)),
            ["step 4: what rank 1 was given is not what the order of samples says"],
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(
    run_dir: Path, fault: Callable[..., object], said: list[str]
) -> None:
    read(run_dir, 0, range(1, 11), changed=fault)
    report = check_sample_records(run_dir)
    assert not report.ok
    for problem in said:
        assert problem in report.problems
    assert len(report.lines()) > 1


def test_a_run_with_a_wrong_order_is_found(run_dir: Path) -> None:
    """It reads as many samples as it says, and others."""
    read(run_dir, 0, range(1, 4), seed=SEED + 1)
    report = check_sample_records(run_dir)
    assert len(report.problems) == 6
    assert "what rank 0 was given is not what the order of samples says" in report.problems[0]


def test_what_is_read_again_must_be_the_same(run_dir: Path) -> None:
    read(run_dir, 0, range(1, 9), changed=at(7, 1, lambda event: replace(event, xxh3="0" * 16)))
    read(run_dir, 1, range(6, 11))
    (problem,) = check_sample_records(run_dir).problems
    assert problem == "step 7: attempt 0 and attempt 1 read other content as samples 52 to 55"


def test_steps_before_the_record_was_kept_are_said_to_be_missing(run_dir: Path) -> None:
    read(run_dir, 1, range(6, 8))
    problems = check_sample_records(run_dir).problems
    assert problems[0] == "steps 1 to 5: no rank has a record"
    assert "step 6: samples 0 to 39 are missing" in problems


def test_no_record_and_no_run_are_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"observe\.samples=true"):
        check_sample_records(run_dir)
    with pytest.raises(DataError, match="no such directory"):
        check_sample_records(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"ranges": [8, 12, 99]}, "no pairs of sample numbers"),
        ({"ranges": [2**62, 2**62 + 4]}, "no pairs of sample numbers"),
        ({"ranges": [0, 10**15]}, "empty or absurdly long"),
        ({"step": 10**12}, "the attempt has steps 1 to 99"),
        ({"step": 2.5}, "the attempt has steps 1 to 99"),
        ({"step": 0}, "the attempt has steps 1 to 99"),
        (
            {"data_parallel_size": 10**12},
            "of 1000000000000 data-parallel ranks, and there are 2 ranks",
        ),
        ({"data_parallel_rank": 2}, "of 2 data-parallel ranks"),
    ],
)
def test_a_damaged_record_is_a_problem_that_is_named(
    run_dir: Path, damage: dict[str, object], said: str
) -> None:
    read(run_dir, 0, range(1, 4), changed=at(2, 0, lambda event: replace(event, **damage)))
    report = check_sample_records(run_dir)
    assert said in report.problems[0]
    assert f"step {damage.get('step', 2)}: rank" in report.problems[0]
    assert "step 2: rank 0 has no record" in report.problems
    assert np.isfinite(report.num_samples)


def test_a_far_step_is_one_gap_where_no_start_of_the_attempt_is_on_record(run_dir: Path) -> None:
    far = at(2, 1, lambda event: replace(event, step=10**12))
    read(
        run_dir, 0, range(1, 4), ranks=2, only=[1], changed=far
    )  # rank 0, which says how it began, wrote nothing
    problems = check_sample_records(run_dir).problems
    assert "steps 4 to 999999999999: no rank has a record" in problems
    assert len(problems) < 8


def test_a_step_that_claims_other_numbers_of_samples_is_named_and_not_read(run_dir: Path) -> None:
    read(
        run_dir,
        0,
        range(1, 4),
        changed=at(3, 1, lambda event: replace(event, ranges=[20, 20 + 2**24])),
    )
    assert check_sample_records(run_dir).problems == (
        "step 3: rank 1 read 16777216 samples, and 4 in other steps",
    )


def test_steps_that_the_run_finished_and_nobody_recorded_are_missing(run_dir: Path) -> None:
    """Event files that were cut off leave less than what the run's end says."""
    read(run_dir, 0, range(1, 5))
    bus = Bus(rank=-1, run_dir=run_dir)
    bus.emit(RunFinished("finished", 0, 6, 1.0))
    assert check_sample_records(run_dir).problems == (
        "steps 5 to 6: not every rank has a record, and the run finished them",
    )
    # A later command goes on from an earlier step, and has no end.
    read(run_dir, 1, range(4, 5))
    bus.close()
    assert check_sample_records(run_dir).ok


@pytest.mark.parametrize(
    "change",
    [{"data": 7}, {"data": {"seq_len": 1e300}}, {"run": {"seed": "x"}}, {"run": None}],
)
def test_a_job_that_does_not_say_the_order_is_refused_by_its_file(
    run_dir: Path, change: dict[str, object]
) -> None:
    read(run_dir, 0, range(1, 3))
    path = run_dir / "job.json"
    job = json.loads(path.read_text())
    for section, values in change.items():
        job[section] = {**job[section], **values} if isinstance(values, dict) else values
    path.write_text(json.dumps(job))
    with pytest.raises(DataError, match=r"job\.json: the order of samples cannot be checked"):
        check_sample_records(run_dir)
