"""Runs through the trainer equal a second loop, and bugs of the training loop are found with their
cause."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exam.plant import load_plant
from exam.sit import MODULES

from models import CPU
from phalanx.data.prepare import prepare_corpus
from phalanx.job.costs import ModelCosts
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.mesh.mesh import open_mesh
from phalanx.plan.layout import Layout
from phalanx.verify.row import Row
from phalanx.verify.trainer_cases import (
    LINKED_FILES,
    NUM_STEPS,
    RESUMED_ELSEWHERE,
    TrainerCase,
    list_trainer_case_names,
    make_trainer_cases,
    make_trainer_job,
)
from phalanx.verify.trainer_row import TrainerRowContext, compare_trainer_run
from phalanx.verify.verified_job import make_verified_job, shrink_job
from planted import plant_bug
from plants import some
from ranks import run_ranks

DECODER = {"data": {"seq_len": 16}}


def make_job(sections: dict[str, Any], num_ranks: int, num_blocks: int) -> Job:
    job = Job.model_validate(sections)
    if not job.model.is_foreign:
        job, _ = shrink_job(job, num_blocks=num_blocks)
    return make_trainer_job(make_verified_job(job, num_ranks))


def judge_cases(
    rank: int,
    num_ranks: int,
    sections: dict[str, Any],
    directory: str,
    only: Sequence[str],
    plant: str,
    num_blocks: int,
    shape: ModelCosts | None,
) -> list[dict[str, Any]]:
    if plant:
        plant_bug(plant)
    job = make_job(sections, num_ranks, num_blocks)
    cases = make_trainer_cases(job, num_ranks=num_ranks, cluster=CPU, shape=shape)
    rows = []
    data_dir: Path | None = None
    if "source" in sections["data"]:
        folder = Path(directory) / f"data-{rank}"
        data_dir = prepare_corpus(job.data, folder, vocab_size=None).directory
    with open_mesh(Layout(dp_replicate=num_ranks), device="cpu") as mesh:
        place = TrainerRowContext(mesh, Path(directory), data_dir, "small")
        for case in cases:
            if isinstance(case, TrainerCase) and (not only or case.name in only):
                rows.append(compare_trainer_run(job, case, place).to_json())
    return rows


def rows_of(
    *only: str,
    num_ranks: int = 2,
    sections: dict[str, Any] | None = None,
    plant: str = "",
    references: Path | None = None,
    num_blocks: int = 2,
) -> dict[str, Row]:
    """The rows of rank 0; `references`: a folder in which those of the second loop stay."""
    with tempfile.TemporaryDirectory() as directory:
        if references is not None:
            references = references / f"{num_blocks} blocks"
            references.mkdir(exist_ok=True)
            shutil.copytree(references, directory, dirs_exist_ok=True)
        sections = sections or DECODER
        # Here once, and not by each rank.
        shape = measure_foreign_shape(make_job(sections, num_ranks, num_blocks))
        what = (sections, directory, only, plant, num_blocks, shape)
        results = run_ranks(num_ranks, judge_cases, num_ranks, *what)
        if references is not None:
            for folder in Path(directory).glob("trainer-reference-*"):
                shutil.copytree(folder, references / folder.name, dirs_exist_ok=True)
    return {body["layout"]: Row.from_json(body) for body in results[0]}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        # Under ddp the job that clips nothing is judged below, and under zero3 one that takes its
        # weights from a checkpoint in test_verify_taken_weights.
        (2, ("pp2-1f1b",)),
        pytest.param(
            2,
            (
                *("ddp", "tp2", "zero1", "zero3", "zero1-offload-optimizer"),
                *("loss-scale", "ddp-powersgd"),
            ),
            marks=pytest.mark.long,
        ),
        pytest.param(4, (), marks=pytest.mark.long),
    ],
)
def test_the_trainer_equals_the_second_loop(
    num_ranks: int, names: tuple[str, ...], references: Path
) -> None:
    expected = [f"trainer-{name}" for name in names] or list_trainer_case_names(num_ranks)
    # The jobs of the others are of two ranks.
    kept = references if num_ranks == 2 else None
    rows = rows_of(*expected, num_ranks=num_ranks, references=kept)
    assert set(rows) == set(expected)
    assert {name: row.first for name, row in rows.items() if row.ok is not True} == {}
    compressed = rows.pop("trainer-ddp-powersgd", None)
    if compressed is not None:
        assert RESUMED_ELSEWHERE in compressed.not_judged
        kinds = ("loss", "weight", "optim", "evaluation", "rate", "compression")
        assert set(compressed.errors) == set(kinds)
    for row in rows.values():
        check_all_is_judged(row)


def check_all_is_judged(row: Row) -> None:
    """Each kind of number, both resumes, and steps that are clipped and that are not."""
    kinds = ("loss", "norm", "gradient", "weight", "optim", "evaluation", "rate")
    assert set(row.errors) == set(kinds), row.layout
    assert {RESUMED_ELSEWHERE, LINKED_FILES} <= set(row.judged)
    # Something was compared: sums in another order round otherwise.
    assert 0 < row.errors["gradient"] < 1e-12
    assert [line for line in row.not_judged if "clip" in line] == [], "both kinds of steps"


WITH_DROPOUT, WITH_BATCHNORM, WITH_STEM, WITH_GAIN = (
    {"model": {"kind": f"exam_models:{name}"}, "data": {"seq_len": 16}}
    for name in ("WithDropout", "WithBatchNorm", "WithStem", "WithGain")
)


def test_a_layout_is_judged_though_the_next_one_refuses_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(MODULES)
    rows = rows_of("trainer-zero1", "trainer-pp2-1f1b", sections=WITH_STEM)
    assert "the blocks" in rows["trainer-pp2-1f1b"].refused
    row = rows["trainer-zero1"]
    assert row.ok, row.first or row.refused
    assert RESUMED_ELSEWHERE not in row.judged
    (line,) = (line for line in row.not_judged if line.startswith(RESUMED_ELSEWHERE))
    assert "pp2-1f1b refuses the module" in line


DATA_PARALLEL = ("trainer-ddp", "trainer-zero3")


@pytest.mark.parametrize(
    ("sections", "names"),
    [
        pytest.param(WITH_BATCHNORM, ("trainer-zero3",), id="batchnorm"),
        pytest.param(WITH_BATCHNORM, DATA_PARALLEL, id="batchnorm, all", marks=pytest.mark.long),
        pytest.param(WITH_DROPOUT, DATA_PARALLEL, id="dropout", marks=pytest.mark.long),
        pytest.param(
            WITH_GAIN, DATA_PARALLEL, id="parameter-without-dimensions", marks=pytest.mark.long
        ),
        pytest.param(
            {**DECODER, "optim": {"kind": "sgd", "schedule": "wsd", "weight_decay": 0.1}},
            DATA_PARALLEL,
            id="sgd",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {**DECODER, "optim": {"schedule": "linear"}, "model": {"tie_embeddings": True}},
            DATA_PARALLEL,
            id="tied",
            marks=pytest.mark.long,
        ),
    ],
)
def test_other_jobs_equal_the_second_loop(
    sections: dict[str, Any], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(MODULES)
    rows = rows_of(*names, sections=sections)
    assert len(rows) == len(names)
    assert {name: row.first for name, row in rows.items() if row.ok is not True} == {}


@pytest.mark.long
def test_a_balance_loss_in_stages_that_clip_nothing_equals_the_second_loop() -> None:
    sections = {**DECODER, "model": {"preset": "small-mixtral"}, "optim": {"clip_norm": None}}
    (row,) = rows_of("trainer-pp2-1f1b", sections=sections).values()
    assert row.ok, row.first


def test_a_buffer_of_own_rows_is_the_reason_of_the_loss_that_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(MODULES)
    sections = {"model": {"kind": "exam_models:WithMovingScale"}, "data": {"seq_len": 16}}
    (row,) = rows_of("trainer-ddp", sections=sections).values()
    assert row.first is not None
    assert (row.first.what, row.first.step) == ("loss", 0)
    assert row.first.cause.startswith("the forward changes the buffer scale by what it makes of")


def test_an_optimizer_without_a_second_version_is_refused() -> None:
    job = {**DECODER, "optim": {"kind": "user_code:adam"}}
    (row,) = rows_of("trainer-ddp", sections=job).values()
    assert row.ok is None
    assert "user_code:adam is not written out a second time" in row.refused


def test_samples_without_targets_are_refused_as_by_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(MODULES)
    source = {"source": "exam_models:tokens_alone", "args": {"size": 16}}
    sections = {"model": {"kind": "exam_models:WithGain"}, "data": {"seq_len": 16, **source}}
    (row,) = rows_of("trainer-ddp", sections=sections).values()
    assert row.refused == "the module alone, in one process in float64: KeyError: 'targets'"


@pytest.mark.parametrize(
    ("overrides", "plant", "case", "what"),
    [
        (
            {"optim": {"clip_norm": None}},
            *("no_clip_norm_clips_to_one", "ddp", "gradient"),
        ),
        pytest.param(
            {"precision": {"compute": "fp16", "loss_scale": 1024.0}},
            *("fixed_loss_scale_adapts", "loss-scale", "loss scale"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_a_job_fixes_is_judged_as_it_says(
    overrides: dict[str, Any], plant: str, case: str, what: str, tmp_path: Path
) -> None:
    one_block: dict[str, Any] = {
        "sections": {**DECODER, **overrides},
        "references": tmp_path,
        "num_blocks": 1,
    }
    (row,) = rows_of(f"trainer-{case}", **one_block).values()
    assert row.ok, row.first
    assert ("clipping" in row.judged) == ("optim" not in overrides)
    assert not any("loss_scale_initial" in line for line in row.not_judged)
    (row,) = rows_of(f"trainer-{case}", plant=plant, **one_block).values()
    assert row.first is not None, "equal"
    assert row.first.what == what
    assert load_plant(plant).names_cause(row.first.cause), row.first.cause


# (plant, the case in which it is looked for, what differs, the step in which it shows). Those of
# `make test`, each 13th: a resume, a loss scale, an evaluation.
PLANTS = [
    ("second_moments_not_restored", "ddp", "optimizer state exp_avg_sq of", 5),
    ("skipped_step_is_applied", "zero3", "update", 3),
    ("clip_norm_not_handed_on", "ddp", "gradient", 1),
    ("schedule_ends_a_step_late", "ddp", "learning rate", 5),
    ("guarded_step_counts_no_skip", "ddp", "optimizer state step of", 3),
    ("skipped_gradients_stay", "zero3", "gradient", 3),
    ("step_restored_one_short", "ddp", "step", 5),
    ("loss_scale_not_restored", "loss-scale", "loss scale", 8),
    ("rate_of_the_step_before", "ddp", "learning rate", 1),
    ("gradients_never_cleared", "ddp", "gradient", 1),
    ("only_one_group_gets_the_rate", "zero3", "learning rate", 1),
    ("step_reads_last_steps_data", "ddp", "data", 2),
    ("infinite_norm_is_finite", "ddp", "skipped step", 4),
    ("overflow_keeps_the_scale", "loss-scale", "loss scale", 5),
    ("stops_to_update_at_step_4", "zero3", "update", 5),
    ("update_doubled_at_step_5", "ddp", "update", 5),
    ("first_moments_saved_of_a_copy", "zero3", "optimizer state exp_avg of", 5),
    ("momentum_of_rank_1_is_lost", "tp2", "optimizer state exp_avg of", 2),
    ("all_decays_when_sharded", "zero3", "weight of the optimizer", 1),
    ("moments_swapped_in_stages", "pp2-1f1b", "optimizer state exp_avg of", 1),
    ("adamw_never_counts_when_sharded", "zero3", "weight of the optimizer", 2),
    ("infinite_loss_is_applied", "zero3", "skipped step", 9),
    ("source_without_targets_weighs", "ddp", "evaluation loss", 3),
    ("repeated_step_adds_to_the_first_try", "zero3", "gradient norm", 8),
    ("large_blocks_linked_without_digest", "zero3", "optimizer state exp_avg of", 7),
    ("second_background_save_is_the_first", "zero3", "read weight", 9),
    ("evaluation_takes_one_batch_of_a_source", "ddp", "evaluation's targets", 3),
    ("norms_of_updates_and_weights_change_places", "ddp", "recorded update", 1),
    ("exports_put_pieces_at_the_begin", "zero3", "read weight", 10),
    ("each_source_is_told_the_loss_of_all", "ddp", "evaluation loss of a source", 3),
    ("long_blocks_repeat_their_first_rows", "ddp", "optimizer state exp_avg of", 3),
    ("recorded_loss_is_divided_by_microbatches", "ddp", "recorded loss", 1),
    ("no_clipping_where_no_target_is_masked", "ddp", "gradient", 5),
    ("exports_choose_the_oldest_checkpoint", "ddp", "checkpoint", 10),
    ("replicas_write_their_first_rows", "ddp", "optimizer state exp_avg of", 5),
    ("recorded_rate_is_the_next_steps", "ddp", "recorded learning rate", 1),
    ("pipelines_drop_the_last_batches_of_an_evaluation", "pp2-1f1b", "evaluation's targets", 3),
    ("recorded_norm_is_the_clipped_one", "ddp", "recorded gradient norm", 1),
    ("norms_of_blocks_count_each_replica", "ddp", "recorded update", 1),
    ("weights_that_are_infinite_are_saved", "ddp", "weight", 10),
    ("corruption_is_found_where_none_is", "ddp", "run", 1),
    ("runs_save_nothing_at_their_end", "ddp", "checkpoints", 10),
    ("saves_due_while_one_is_in_flight_are_lost", "ddp", "checkpoints", 10),
    ("guards_are_asked_and_ignored", "ddp", "update", 3),
]


# Those of `make test` show in a model of one block, too.
OF_ONE_BLOCK = (
    "second_moments_not_restored",
    "overflow_keeps_the_scale",
    "evaluation_takes_one_batch_of_a_source",
)


@pytest.mark.parametrize("bug", some(PLANTS, every=13), ids=lambda bug: bug[0])
def test_a_bug_of_the_training_loop_is_found(
    bug: tuple[str, str, str, int], references: Path
) -> None:
    plant, case, what, step = bug
    (row,) = rows_of(
        f"trainer-{case}",
        plant=plant,
        references=references,
        num_blocks=1 if plant in OF_ONE_BLOCK else 2,
    ).values()
    first = row.first
    assert first is not None, "equal"
    assert (first.what, first.step + 1) == (what, step), str(first)
    assert load_plant(plant).names_cause(first.cause), first.cause
    assert load_plant(plant).names_tensor(first.name), first.name
    if case == "loss-scale":
        (line,) = (line for line in row.not_judged if "loss_scale_initial" in line)
        assert "begins at 1024 and doubles after 2 good steps" in line
        assert any("a smaller loss scale answers it" in line for line in row.not_judged)


@pytest.mark.parametrize(
    ("bug", "kind", "what"),
    [
        pytest.param(
            "step_of_a_dropout_is_not_handed_on",
            *("WithDropout", "loss"),
            marks=pytest.mark.long,
        ),
        ("evaluation_leaves_its_mode", "WithDropout", "mode"),
        pytest.param(
            "evaluation_moves_statistics",
            *("WithBatchNorm", "buffer"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "running_mean_of_all_is_a_tenth",
            *("WithAveragingBatchNorm", "buffer"),
            marks=pytest.mark.long,
        ),
        ("counters_are_in_no_checkpoint", "WithAveragingBatchNorm", "buffer"),
    ],
)
def test_a_bug_that_only_some_modules_show_is_found(
    bug: str, kind: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(MODULES)
    sections = {"model": {"kind": f"exam_models:{kind}"}, "data": {"seq_len": 16}}
    (row,) = rows_of("trainer-ddp", sections=sections, plant=bug).values()
    assert row.first is not None
    assert row.first.what == what, str(row.first)
    assert load_plant(bug).names_cause(row.first.cause), row.first.cause
    assert row.first.step < NUM_STEPS


@pytest.mark.long
def test_moments_of_experts_that_ranks_share_out_are_restored() -> None:
    sections = {"model": {"preset": "small-mixtral"}, **DECODER}
    case, plant = "trainer-zero3-ep2", "expert_moments_restored_into_a_copy"
    assert rows_of(case, sections=sections)[case].first is None
    first = rows_of(case, sections=sections, plant=plant)[case].first
    assert first is not None, "equal"
    assert load_plant(plant).names_cause(first.cause), first.cause
    assert load_plant(plant).names_tensor(first.name), first.name
