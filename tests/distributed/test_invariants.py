"""Invariants of a run: a bug that is planted in a rank is told as an event with its tensors, ranks
and numbers, and runs without one tell of none."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import BATCH, SEQ_LEN
from phalanx.job.schema import Job
from phalanx.mesh.logical import get_local_tensor
from phalanx.nn.objective import causal_cross_entropy, takes_classes
from phalanx.observe.events import InvariantChecked
from phalanx.observe.invariant_words import describe_failed_check
from phalanx.observe.tail import read_recorded_events
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import ParallelModel
from phalanx.train.trainer import Trainer
from ranks import run_ranks
from second_device import CUDA, second_device
from trained import STEPS, Case, train_case

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_dim": 24,
    "balance_bias": 0.01,
}
DDP4 = Case(4, {"dp_replicate": 4})
NORM = "blocks.1.ffn_norm.weight"
FIRST_OF_TIED = "blocks.1.attention_norm.weight"


def told(folder: Path, ranks: int) -> list[InvariantChecked]:
    results = []
    for rank in range(ranks):
        for envelope in read_recorded_events(folder, InvariantChecked, rank=rank):
            assert isinstance(envelope.event, InvariantChecked)
            results.append(envelope.event)
    return results


def failures(folder: Path, ranks: int) -> dict[str, InvariantChecked]:
    """The first of each invariant."""
    failed: dict[str, InvariantChecked] = {}
    for event in told(folder, ranks):
        if not event.ok and not event.is_summary:
            failed.setdefault(event.name, event)
    return failed


# --- planted bugs ---------------------------------------------------------------------------------


def build_before_the_cut(
    before: Sequence[nn.Parameter], model: ParallelModel, job: Job
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(before, lr=1e-2)


def build_without_a_norm(
    before: Sequence[nn.Parameter], model: ParallelModel, job: Job
) -> torch.optim.Optimizer:
    optimizer = build_optimizer(model, job.optim)
    forgotten = dict(model.named_parameters())[NORM]
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p is not forgotten]
    return optimizer


def skip_a_norm_from_step_3(trainer: Trainer) -> None:
    """The optimizer has it, and leaves it as it is."""
    optimizer, step = trainer.state.optimizer, trainer.state.optimizer.step
    parameter = dict(trainer.state.model.named_parameters())[NORM]

    def step_without_it(*args: Any) -> None:
        before = parameter.detach().clone()
        step(*args)
        if trainer.state.step >= 2:
            parameter.data.copy_(before)

    optimizer.step = step_without_it  # type: ignore[method-assign, assignment]


def drift_on_rank_1(trainer: Trainer) -> None:
    """By one ulp in one element, from step 2 on."""
    update, model = trainer.state.model.update, trainer.state.model

    def update_and_drift(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        if model.mesh.rank == 1 and trainer.state.step == 1:
            weight = dict(model.module.named_parameters())[NORM]
            local = get_local_tensor(weight.detach())
            local[5] = torch.nextafter(local[5], torch.tensor(9.0))

    model.update = update_and_drift  # type: ignore[method-assign]


def flip_state_of_rank_1(trainer: Trainer, slot: str) -> None:
    """The lowest bit of one element, after the update of step 2: no weight has seen it."""
    state = trainer.state
    update, parameter = state.model.update, dict(state.model.named_parameters())[NORM]

    def update_and_flip(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        if state.model.mesh.rank == 1 and state.step == 1:
            words = get_local_tensor(optimizer.state[parameter][slot]).view(-1).view(torch.int32)
            words[len(words) // 2] ^= 1

    state.model.update = update_and_flip  # type: ignore[method-assign]


def lose_loads_of_rank_1(trainer: Trainer) -> None:
    loads = trainer.state.model._loads
    reduce = loads.reduce_counts_over_ranks

    def reduce_without_rank_1() -> None:
        if trainer.mesh.rank == 1:
            for router in loads.routers.values():
                router.load.take(4, torch.device("cpu"))  # type: ignore[operator, union-attr]
        reduce()

    loads.reduce_counts_over_ranks = reduce_without_rank_1  # type: ignore[method-assign]


def find_norm(trainer: Trainer) -> nn.Module:
    return trainer.state.model.module.get_submodule(NORM.removesuffix(".weight"))


def write_in_evaluation(trainer: Trainer) -> None:
    """All ranks alike: replicas stay equal."""

    def halve(norm: Any, _: Any) -> None:
        if not norm.training:
            with torch.no_grad():
                norm.weight.mul_(0.5)

    find_norm(trainer).register_forward_pre_hook(halve)


def write_data_in_evaluation(trainer: Trainer) -> None:
    """Past the counters of torch."""

    def add(norm: Any, _: Any) -> None:
        if not norm.training:
            norm.weight.data[3] += 1.0

    find_norm(trainer).register_forward_pre_hook(add)


def swap_in_evaluation(trainer: Trainer) -> None:
    """Other weights are put in, and the own ones back: no bug."""
    norm, kept = find_norm(trainer), list[torch.Tensor]()

    def put_in(norm: Any, _: Any) -> None:
        if not norm.training:
            kept.append(norm.weight.detach().clone())
            norm.weight.data.zero_()

    def put_back(norm: Any, *_: Any) -> None:
        if kept:
            with torch.no_grad():
                norm.weight.copy_(kept.pop())

    norm.register_forward_pre_hook(put_in)
    norm.register_forward_hook(put_back)


def replace_in_update(trainer: Trainer, step: int) -> None:
    update, model = trainer.state.model.update, trainer.state.model

    def update_and_replace(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        if trainer.state.step == step - 1:
            find_norm(trainer).weight = nn.Parameter(torch.ones(32))

    model.update = update_and_replace  # type: ignore[method-assign]


def replace_after_step_2(trainer: Trainer) -> None:
    """It is checked, and an evaluation follows."""
    replace_in_update(trainer, 2)


def replace_after_step_3(trainer: Trainer) -> None:
    replace_in_update(trainer, 3)


def replace_after_step_4(trainer: Trainer) -> None:
    replace_in_update(trainer, 4)


def freeze_in_step_4(trainer: Trainer) -> None:
    update, model = trainer.state.model.update, trainer.state.model

    def update_and_freeze(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        if trainer.state.step == 3:
            for part in (find_norm(trainer), dict(model.module.named_modules())["norm"]):
                part.weight = nn.Parameter(torch.ones(32), requires_grad=False)

    model.update = update_and_freeze  # type: ignore[method-assign]


def change_after_step_3(trainer: Trainer, change: Any) -> None:
    update, model = trainer.state.model.update, trainer.state.model

    def update_and_change(optimizer: torch.optim.Optimizer) -> None:
        update(optimizer)
        if trainer.state.step == 2:
            change(model.module)

    model.update = update_and_change  # type: ignore[method-assign]


def prune_norm_after_step_3(trainer: Trainer) -> None:
    name = NORM.removesuffix(".weight")
    change_after_step_3(trainer, lambda module: module.set_submodule(name, nn.Identity()))


def tie_norms_after_step_3(trainer: Trainer) -> None:
    change_after_step_3(trainer, tie_norms)


def tie_norms(module: nn.Module) -> None:
    """NORM becomes the second name of another."""
    first = module.get_submodule(FIRST_OF_TIED.removesuffix(".weight"))
    module.get_submodule(NORM.removesuffix(".weight")).weight = first.weight


def replace_in_forward(trainer: Trainer) -> None:
    """In each forward of step 3, in which nothing is checked."""

    def replace_weight(norm: Any, _: Any) -> None:
        if trainer.state.step == 2:
            norm.weight = nn.Parameter(torch.ones(32))

    find_norm(trainer).register_forward_pre_hook(replace_weight)


def train_spoiled(rank: int, case: Case, folder: Path, bug: Any) -> None:
    train_case(rank, case, folder, change=bug)


def train_with_optimizer(rank: int, case: Case, folder: Path, build: Any) -> None:
    train_case(rank, case, folder, optimizer=build)


def train_dropping_targets(rank: int, case: Case, folder: Path) -> None:
    """Rank 1's loss leaves the first row of each microbatch out."""
    usual = causal_cross_entropy(16)

    @takes_classes
    def objective(outputs: Any, batch: Mapping[str, torch.Tensor]) -> Any:
        targets = batch["targets"].clone()
        targets[0] = -100
        return usual(outputs, {**batch, "targets": targets})

    train_case(rank, case, folder, objective=objective if rank == 1 else usual)


def test_an_optimizer_that_was_built_before_the_cut(tmp_path: Path) -> None:
    case = Case(2, {"dp_shard": 2, "zero_stage": 3})
    run_ranks(2, train_with_optimizer, case, tmp_path, build_before_the_cut)
    failed = failures(tmp_path, 2)
    assert set(failed) == {"optimizer_parameters", "parameters_moved"}
    wrong = failed["optimizer_parameters"]
    assert (wrong.step, wrong.ranks) == (1, [0, 1])
    assert len(wrong.tensors) == 20
    assert wrong.num_tensors == 20
    # On both ranks together.
    assert wrong.actual == 2 * wrong.num_tensors


def test_a_parameter_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    run_ranks(4, train_with_optimizer, DDP4, tmp_path, build_without_a_norm)
    failed = failures(tmp_path, 4)
    assert set(failed) == {"optimizer_parameters", "parameters_moved"}
    for event in failed.values():
        assert (event.step, event.tensors, event.ranks) == (1, [NORM], [0, 1, 2, 3])


def test_a_parameter_that_is_skipped(tmp_path: Path) -> None:
    run_ranks(2, train_spoiled, Case(2, {"tp": 2}), tmp_path, skip_a_norm_from_step_3)
    failed = failures(tmp_path, 2)
    assert set(failed) == {"parameters_moved"}
    wrong = failed["parameters_moved"]
    assert (wrong.step, wrong.tensors, wrong.ranks) == (4, [NORM], [0, 1])
    summary = next(
        event for event in told(tmp_path, 2) if event.is_summary and event.name == wrong.name
    )
    assert (summary.ok, summary.num_checks, summary.num_failed) == (False, 3, 1)
    assert summary.first_failed_step == 4


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(DDP4, [1]), (Case(2, {"tp": 2}), [0, 1])],
    ids=["ddp of 4", "tp of 2, where no rank is in the minority"],
)
def test_a_replica_that_drifts_by_one_ulp(case: Case, ranks: list[int], tmp_path: Path) -> None:
    run_ranks(case.ranks, train_spoiled, case, tmp_path, drift_on_rank_1)
    failed = failures(tmp_path, case.ranks)
    assert set(failed) == {"replicas_equal"}
    wrong = failed["replicas_equal"]
    assert (wrong.step, wrong.tensors, wrong.ranks) == (2, [NORM], ranks)


# Layout, slot of AdamW, and the ranks that are named: of four replicas the odd one, else both
# holders. What one rank alone holds is compared with nothing.
FLIPPED_STATE: dict[str, tuple[Case, str, list[int]]] = {
    "ddp of 4, first moment": (DDP4, "exp_avg", [1]),
    "ddp of 4, second moment": (DDP4, "exp_avg_sq", [1]),
    "ddp of 4, count of steps": (DDP4, "step", [1]),
    "hsdp": (
        Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}),
        "exp_avg",
        [1, 3],
    ),
    "hybrid zero1": (
        Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}),
        "exp_avg_sq",
        [1, 3],
    ),
    "ddp of 2": (Case(2, {"dp_replicate": 2}), "exp_avg", [0, 1]),
    "tp of 2, whole norm": (Case(2, {"tp": 2}), "exp_avg_sq", [0, 1]),
    "zero1": (Case(2, {"dp_shard": 2, "zero_stage": 1}), "exp_avg", []),
}


def train_all_flipped(rank: int, names: Sequence[str], folder: Path) -> None:
    for name in names:
        case, slot, _ = FLIPPED_STATE[name]
        train_case(
            rank,
            case,
            folder / name,
            change=lambda trainer, slot=slot: flip_state_of_rank_1(trainer, slot),
        )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_state_of_the_optimizer_that_flips_on_one_replica(num_ranks: int, tmp_path: Path) -> None:
    names = [name for name, (case, _, _) in FLIPPED_STATE.items() if case.ranks == num_ranks]
    run_ranks(num_ranks, train_all_flipped, names, tmp_path)
    for name in names:
        ranks = FLIPPED_STATE[name][2]
        failed = failures(tmp_path / name, num_ranks)
        assert set(failed) == ({"replicas_equal"} if ranks else set()), name
        for wrong in failed.values():
            assert (wrong.step, wrong.tensors, wrong.ranks) == (
                2,
                [f"{NORM} (optimizer's state)"],
                ranks,
            ), name


class WithResiduals(torch.optim.AdamW):
    """Keeps something of its own of the first parameter, which is another on each rank. All state
    is made in the first step."""

    rank = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        first = self.param_groups[0]["params"][0]
        self.state[first]["residual"] = torch.full_like(first, self.rank)


def build_with_residuals(
    before: Sequence[nn.Parameter], model: ParallelModel, job: Job
) -> torch.optim.Optimizer:
    optimizer = WithResiduals(model.parameters(), lr=1e-2)
    optimizer.rank = model.mesh.rank
    return optimizer


def train_with_residuals(rank: int, folder: Path) -> None:
    train_case(
        rank,
        Case(2, {"dp_replicate": 2}),
        folder,
        optimizer=build_with_residuals,
        change=lambda trainer: flip_state_of_rank_1(trainer, "exp_avg"),
    )


def test_state_that_was_never_equal_hides_nothing(tmp_path: Path) -> None:
    run_ranks(2, train_with_residuals, tmp_path)
    events = [event for event in told(tmp_path, 2) if event.name == "replicas_equal"]
    (summary,) = [event for event in events if event.is_summary]
    first, second, *_ = [event for event in events if not event.ok and not event.is_summary]
    assert (first.step, first.tensors) == (1, ["embed.weight (optimizer's state)"])
    assert (second.step, second.tensors) == (2, [f"{NORM} (optimizer's state)"])
    assert "the optimizer's state of 1 block, which was not equal" in summary.not_looked_at[-1]


@dataclass(frozen=True)
class OnAllRanks:
    """A bug that both ranks have, and the invariant that fails on both, if any: first in `step`, of
    the tensor `name`, in words that contain `says`."""

    parallel: dict[str, Any]
    bug: Any = lambda trainer: None
    failing: str = ""
    step: int = 2
    says: str = ""
    name: str = NORM
    prepare: Any = lambda module: None


DDP2, ZERO3 = {"dp_replicate": 2}, {"dp_shard": 2}
MAY_LEAVE_OUT = {"dp_replicate": 2, "unused_parameters": "allow"}
CHANGED = ("unchanged_by_evaluation", 2, "the evaluation after it changed {}")
MISSING = ("optimizer_parameters", 2, "the optimizer does not update {}")
MISSING_AT_4 = (MISSING[0], 4, MISSING[2])
GONE_AT_4 = (
    MISSING[0],
    4,
    "the model no longer has {} and the optimizer has 2 parameters (summed over ranks) that the model",
)
REPLACED = ("optimizer_parameters", 4, "{} was replaced in its module since the last check")
SAME_ON_ALL_RANKS: dict[str, OnAllRanks] = {
    "ddp, evaluation writes": OnAllRanks(DDP2, write_in_evaluation, *CHANGED),
    "ddp, evaluation writes data": OnAllRanks(DDP2, write_data_in_evaluation, *CHANGED),
    "ddp, evaluation swaps": OnAllRanks(DDP2, swap_in_evaluation),
    "ddp, a tied one replaced": OnAllRanks(
        DDP2, replace_after_step_4, *MISSING_AT_4, prepare=tie_norms
    ),
    "ddp, frozen in a checked update": OnAllRanks(
        DDP2,
        freeze_in_step_4,
        "optimizer_parameters",
        4,
        "the optimizer has 4 parameters (summed over ranks) that the model",
        name="",
    ),
    "ddp, a layer pruned": OnAllRanks(MAY_LEAVE_OUT, prune_norm_after_step_3, *GONE_AT_4),
    "ddp, tied while it trains": OnAllRanks(MAY_LEAVE_OUT, tie_norms_after_step_3, *GONE_AT_4),
    "zero1, replaced in a checked update": OnAllRanks(
        {"dp_shard": 2, "zero_stage": 1}, replace_after_step_4, *MISSING_AT_4
    ),
    # What is written is gathered, and freed after the forward.
    "zero3, evaluation writes": OnAllRanks(ZERO3, write_in_evaluation),
    "zero2, replaced": OnAllRanks(
        {"dp_shard": 2, "zero_stage": 2}, replace_after_step_3, *REPLACED
    ),
    "zero3, replaced": OnAllRanks(ZERO3, replace_after_step_3, *REPLACED),
    "zero3, replaced before an evaluation": OnAllRanks(ZERO3, replace_after_step_2, *MISSING),
    "zero3, replaced in a forward": OnAllRanks(ZERO3, replace_in_forward, *REPLACED),
    "zero3, a tied one replaced": OnAllRanks(
        ZERO3, replace_after_step_3, *REPLACED, name=FIRST_OF_TIED, prepare=tie_norms
    ),
    "zero3": OnAllRanks(ZERO3),
}


def train_all_same(rank: int, folder: Path) -> None:
    for name, each in SAME_ON_ALL_RANKS.items():
        case = Case(2, each.parallel, {}, {"eval": {"every_steps": 2}})
        train_case(rank, case, folder / name, change=each.bug, evaluates=True, prepare=each.prepare)


def test_bugs_that_all_ranks_share(tmp_path: Path) -> None:
    """Replicas are equal with them."""
    run_ranks(2, train_all_same, tmp_path)
    for name, each in SAME_ON_ALL_RANKS.items():
        failed, events = failures(tmp_path / name, 2), told(tmp_path / name, 2)
        assert set(failed) == ({each.failing} if each.failing else set()), name
        of_evaluations = [
            event
            for event in events
            if event.is_summary and event.name == "unchanged_by_evaluation"
        ]
        num_failed = 2 * (each.failing == "unchanged_by_evaluation")
        assert (of_evaluations[-1].num_checks, of_evaluations[-1].num_failed) == (2, num_failed)
        is_gathered = each.parallel.get("dp_shard") == 2 and each.parallel.get("zero_stage") != 1
        assert [text.split()[0] for text in of_evaluations[-1].not_looked_at] == (
            ["gathered"] if is_gathered else []
        ), name
        for wrong in failed.values():
            assert (wrong.step, wrong.ranks) == (each.step, [0, 1]), name
            assert each.says.format(each.name) in describe_failed_check(wrong), name
            assert wrong.tensors == ([each.name] if each.name else []), name


def test_a_rank_that_drops_targets(tmp_path: Path) -> None:
    run_ranks(2, train_dropping_targets, Case(2, {"dp_replicate": 2}), tmp_path)
    failed = failures(tmp_path, 2)
    assert set(failed) == {"targets_counted"}
    wrong = failed["targets_counted"]
    assert wrong.step == 1
    assert 0 < wrong.actual < wrong.expected < BATCH * SEQ_LEN


def test_loads_that_miss_a_rank(tmp_path: Path) -> None:
    case = Case(2, {"ep": 2}, EXPERTS)
    run_ranks(2, train_spoiled, case, tmp_path, lose_loads_of_rank_1)
    failed = failures(tmp_path, 2)
    assert set(failed) == {"expert_loads"}
    wrong = failed["expert_loads"]
    assert wrong.expected == 2 * BATCH * SEQ_LEN
    assert wrong.actual == BATCH * SEQ_LEN
    assert wrong.tensors == ["blocks.0.moe.router", "blocks.1.moe.router"]


# --- runs without a bug ---------------------------------------------------------------------------

PRUNED = {"offload": "optimizer"}
CLEAN: dict[str, Case] = {
    "one": Case(),
    "one, offload": Case(1, PRUNED),
    "one, experts of a capacity": Case(1, {}, {**EXPERTS, "expert_capacity": 1.0}),
    "ddp": Case(2, {"dp_replicate": 2}),
    "ddp, tied": Case(2, {"dp_replicate": 2}, {"tie_embeddings": True}),
    "ddp, bf16": Case(2, {"dp_replicate": 2}, {}, {"precision": {"compute": "bf16"}}),
    "ddp, fp16": Case(2, {"dp_replicate": 2}, {}, {"precision": {"compute": "fp16"}}),
    "ddp, sgd": Case(
        2, {"dp_replicate": 2}, {}, {"optim": {"kind": "sgd", "lr": 0.01, "momentum": 0.9}}
    ),
    "ddp, recompute": Case(2, {"dp_replicate": 2}, {}, {"train": {"recompute": "full"}}),
    **{
        f"ddp, {hook}": Case(2, {"dp_replicate": 2, "compress": hook})
        for hook in ("bf16", "fp16", "int8", "powersgd", "topk")
    },
    "zero1": Case(2, {"dp_shard": 2, "zero_stage": 1}),
    "zero1, offload": Case(2, {"dp_shard": 2, "zero_stage": 1, **PRUNED}),
    "zero2": Case(2, {"dp_shard": 2, "zero_stage": 2}),
    "zero3": Case(2, {"dp_shard": 2, "zero_stage": 3}),
    "zero3, gradients split at once": Case(2, {"dp_shard": 2, "accumulate": "sharded"}),
    "zero3, offload": Case(2, {"dp_shard": 2, **PRUNED}),
    "zero3, small ones whole": Case(2, {"dp_shard": 2, "keep_whole_below": 64}),
    "tp": Case(2, {"tp": 2}),
    "tp without sp": Case(2, {"tp": 2, "sequence_parallel": False}),
    "cp, ring": Case(2, {"cp": 2}),
    "cp, ulysses": Case(2, {"cp": 2, "cp_attention": "ulysses"}),
    "pp, tied": Case(2, {"pp": 2}, {"tie_embeddings": True}),
    "pp, interleaved": Case(2, {"pp": 2, "schedule": "interleaved", "stage_blocks": (0, 1, 1, 0)}),
    "ep": Case(2, {"ep": 2}, EXPERTS),
    "ep over cp": Case(2, {"cp": 2, "ep": 2}, EXPERTS),
    "pp, experts": Case(2, {"pp": 2}, EXPERTS),
    "hsdp": Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}),
    "hybrid zero1": Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 1}),
    "zero3, tp": Case(4, {"dp_shard": 2, "tp": 2}),
    "zero1, tp": Case(4, {"dp_shard": 2, "tp": 2, "zero_stage": 1}),
    # More ranks than key heads: some hold the same head of a fused matrix.
    "tp of 4": Case(4, {"tp": 4}),
    "tp of 4, experts": Case(4, {"tp": 4}, EXPERTS),
    "pp, zero1, tied": Case(4, {"pp": 2, "dp_shard": 2, "zero_stage": 1}, {"tie_embeddings": True}),
    "pp, tp, tied": Case(4, {"pp": 2, "tp": 2}, {"tie_embeddings": True}),
    "pp, cp": Case(4, {"pp": 2, "cp": 2}),
    "half ep": Case(4, {"dp_shard": 4, "ep": 2}, EXPERTS),
    "ep, tp": Case(4, {"dp_shard": 2, "tp": 2, "ep": 2}, EXPERTS),
    "pp, ep": Case(4, {"pp": 2, "dp_shard": 2, "ep": 2}, EXPERTS),
}
SAMPLE = ("zero1", "zero3, offload", "tp", "pp, tied", "ep", "ddp, topk")


def train_all(rank: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    """By name of the case, why it failed: all cases of as many ranks in one start."""
    errors: dict[str, str] = {}
    for name in names:
        (folder / name).mkdir(exist_ok=True)
        try:
            train_case(rank, CLEAN[name], folder / name)
        except Exception:
            errors[name] = traceback.format_exc()
    return errors


def require_clean(names: Sequence[str], folder: Path) -> None:
    by_ranks: dict[int, list[str]] = {}
    for name in names:
        by_ranks.setdefault(CLEAN[name].ranks, []).append(name)
    for ranks, group in by_ranks.items():
        for errors in run_ranks(ranks, train_all, group, folder, deadline_s=600.0):
            assert errors == {}
        for name in group:
            require_held(name, told(folder / name, ranks))


def require_held(name: str, events: Sequence[InvariantChecked]) -> None:
    assert [event for event in events if not event.ok] == [], name
    expected = {"parameters_moved", "optimizer_parameters", "replicas_equal", "targets_counted"}
    if CLEAN[name].model.get("num_experts"):
        expected.add("expert_loads")
    assert {event.name for event in events} == expected, name
    for event in events:
        assert event.is_summary
        every_step = event.name in ("targets_counted", "expert_loads")
        # Steps 1, 2 and 4; a step that overflowed moves nothing.
        assert event.num_checks >= (STEPS if every_step else 2), (name, event)
        if event.name == "parameters_moved":
            assert not event.looked_at.startswith("0 "), (name, event)


def test_a_sample_of_clean_layouts(tmp_path: Path) -> None:
    require_clean(SAMPLE, tmp_path)


@pytest.mark.long
def test_clean_layouts(tmp_path: Path) -> None:
    require_clean(list(CLEAN), tmp_path)


def count_waits(rank: int, folder: Path, every: int) -> dict[str, int]:
    """What a step waits for, over a run on a device."""
    case = Case(1, {}, {}, {"observe": {"invariants_every": every}})
    with second_device() as waits:
        train_case(rank, case, folder, device=CUDA, change=lambda trainer: waits.take())
        return dict(waits.take())


def test_checks_wait_for_nothing_in_a_step(tmp_path: Path) -> None:
    """Counted on a device that is not there: with checks in each step a run waits as often as
    without any, but for what is read at its end."""
    (without,) = run_ranks(1, count_waits, tmp_path / "without", 0)
    (with_checks,) = run_ranks(1, count_waits, tmp_path / "with", 1)
    # Once, in the first step: which weights are finite.
    (before,) = [what for what in without if "finite_weights.py" in what]
    assert without[before] == 1
    assert sum(without.values()) == STEPS + 1
    assert {what: with_checks.get(what) for what in without} == without
    # Once each: where blocks are exchanged before the first step, and where the run is summed up.
    for what, count in with_checks.items() - without.items():
        assert count == 1, what
        assert "weight_blocks.py" in what or "invariants.py" in what
    assert len(told(tmp_path / "with", 1)) == 4


def test_nothing_is_told_without_checks(tmp_path: Path) -> None:
    case = Case(1, {}, {}, {"observe": {"invariants_every": 0}})
    run_ranks(1, train_case, case, tmp_path)
    assert told(tmp_path, 1) == []
    assert math.isnan(InvariantChecked(1, "replicas_equal", True).expected)
