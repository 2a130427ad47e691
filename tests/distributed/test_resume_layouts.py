"""A run continued at another world size or sharding: every bit of its state, its data in the order
it would have had, and the losses of the run that had that layout from its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    CHUNK_BYTES,
    Tensors,
    bytes_needed,
    counting_reads,
    edit_manifest,
    newest,
    restore_state,
    save_state,
)
from models import shape
from phalanx.checkpoint.reading.listing import list_checkpoints
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import CheckpointError
from phalanx.data.ledger import check_sample_records
from phalanx.job.schema import Job, Optim
from phalanx.mesh.logical import LogicalShard, count_local_shard_bytes
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.optim.build import build_optimizer
from phalanx.optim.groups import WeightDecayGroups, build_weight_decay_groups
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.train.state import TrainState
from ranks import run_ranks
from resuming import (
    SAVED,
    STEPS,
    Outcome,
    copy_run,
    counted_adamw,
    differing,
    job_for,
    new_module,
    new_state,
    plan_for,
    resume,
    train,
    whole_tensors,
    write_corpus,
)

Degrees = dict[str, int]

FEW: dict[int, dict[str, Degrees]] = {
    1: {"one": {}},
    2: {"zero1": {"dp_shard": 2, "zero_stage": 1}},
    4: {"hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3}},
}
PAIR: dict[int, dict[str, Degrees]] = {1: {"one": {}}, 3: {"ddp": {"dp_replicate": 3}}}
MANY: dict[int, dict[str, Degrees]] = {
    1: {"one": {}},
    2: {
        "ddp": {"dp_replicate": 2},
        "zero2": {"dp_shard": 2, "zero_stage": 2},
        "zero3": {"dp_shard": 2, "zero_stage": 3},
        **FEW[2],
    },
    3: {
        "ddp": {"dp_replicate": 3},
        "zero1": {"dp_shard": 3, "zero_stage": 1},
        "zero3": {"dp_shard": 3, "zero_stage": 3},
    },
    4: {
        "zero2": {"dp_shard": 4, "zero_stage": 2},
        "zero3": {"dp_shard": 4, "zero_stage": 3},
        **FEW[4],
    },
    6: {"hsdp": {"dp_replicate": 2, "dp_shard": 3, "zero_stage": 2}},
    8: {
        "hsdp": {"dp_replicate": 4, "dp_shard": 2, "zero_stage": 3},
        "zero3": {"dp_shard": 8, "zero_stage": 3},
    },
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def each(num_ranks: int, layouts: dict[str, Degrees]) -> Iterator[tuple[str, Any, Plan, Mesh]]:
    for name, degrees in layouts.items():
        plan = plan_for(num_ranks, **degrees)
        with open_mesh(plan.layout, device="cpu") as mesh:
            yield f"{name}-{num_ranks}", job_for(num_ranks, **degrees), plan, mesh


def run_straight(
    rank: int, num_ranks: int, layouts: dict[str, Degrees], root: Path, dtype: torch.dtype
) -> Any:
    """An uninterrupted run under each layout, saved on the way."""
    found = {}
    for name, job, plan, mesh in each(num_ranks, layouts):
        run_dir = copy_run(root / "empty", root / f"{dtype} {name}", mesh)
        state = new_state(mesh, job, plan, new_module(dtype))
        found[name] = train(state, job, plan, run_dir, attempt=0, look_at=(SAVED,))
    return found


def continue_all(
    rank: int,
    num_ranks: int,
    layouts: dict[str, Degrees],
    root: Path,
    dtype: torch.dtype,
    saved: dict[str, Tensors],
) -> Any:
    """Each saved run continued under each layout: (tensors not restored to the bit, the rest of
    the run)."""
    found = {}
    for name, job, plan, mesh in each(num_ranks, layouts):
        for source, reference in saved.items():
            run_dir = copy_run(
                root / f"{dtype} {source}", root / f"{dtype} {source} to {name}", mesh
            )
            state = new_state(mesh, job, plan, new_module(dtype, seed=2))
            outcome = resume(state, job, plan, run_dir)
            found[source, name] = (
                differing(outcome.whole[SAVED], reference),
                replace(outcome, whole={}),
            )
    return found


@dataclass(frozen=True)
class Campaign:
    """Straight runs and continued ones, rank 0's account of each; `wrong` names what any rank
    restored otherwise."""

    root: Path
    dtype: torch.dtype
    straight: dict[str, Outcome]
    continued: dict[tuple[str, str], Outcome]
    wrong: dict[tuple[str, str], list[str]]


def campaign(root: Path, dtype: torch.dtype, layouts: dict[int, dict[str, Degrees]]) -> Campaign:
    """One group of ranks for each world size saves, one continues what all have saved."""
    write_corpus(root)
    straight: dict[str, Outcome] = {}
    for num_ranks, some in layouts.items():
        straight |= run_ranks(num_ranks, run_straight, num_ranks, some, root, dtype)[0]
    saved = {name: outcome.whole[SAVED] for name, outcome in straight.items()}
    continued: dict[tuple[str, str], Outcome] = {}
    wrong: dict[tuple[str, str], list[str]] = {}
    for num_ranks, some in layouts.items():
        outcomes = run_ranks(
            num_ranks, continue_all, num_ranks, some, root, dtype, saved, deadline_s=1200
        )
        for pair in outcomes[0]:
            continued[pair] = outcomes[0][pair][1]
            wrong[pair] = sorted({name for outcome in outcomes for name in outcome[pair][0]})
    print(f"{len(continued)} pairs of layouts in {dtype}")
    return Campaign(root, dtype, straight, continued, wrong)


def require_all(found: Campaign, num_layouts: int) -> None:
    assert len(found.continued) == num_layouts**2
    assert {pair: wrong for pair, wrong in found.wrong.items() if wrong} == {}
    for (source, target), outcome in found.continued.items():
        reference = found.straight[target]
        for step in range(SAVED + 1, STEPS + 1):
            case = (source, target, step)
            assert outcome.losses[step] == pytest.approx(
                reference.losses[step], rel=TOLERANCE[found.dtype]
            ), case
            assert outcome.read[step] == reference.read[step], case
        assert {**outcome.facts} == {**reference.facts}
        report = check_sample_records(found.root / f"{found.dtype} {source} to {target}")
        assert (report.ok, report.num_steps, report.num_attempts) == (True, STEPS, 2), (
            source,
            target,
            report.problems,
        )
        assert report.num_samples == STEPS * 24


@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [
        pytest.param(torch.float64, FEW, id="fp64, few"),
        pytest.param(torch.float32, PAIR, id="fp32, a pair"),
        pytest.param(torch.float64, MANY, id="fp64, many", marks=pytest.mark.long),
        pytest.param(torch.float32, MANY, id="fp32, many", marks=pytest.mark.long),
    ],
)
def test_continued_under_every_layout(
    dtype: torch.dtype, layouts: dict[int, dict[str, Degrees]], tmp_path: Path
) -> None:
    """The state to the bit, the samples of the ledger, and the losses of the run that was never
    interrupted."""
    found = campaign(tmp_path, dtype, layouts)
    require_all(found, sum(map(len, layouts.values())))
    if len(found.straight) > 2:  # each layout has its own rounding, but some steps may agree
        assert len({tuple(outcome.losses.items()) for outcome in found.straight.values()}) > 1


# A larger model in bf16: nobody reads more than its part


LARGE_VOCAB = 32_771


def large_state(mesh: Mesh, plan: Plan) -> TrainState:
    """51 MB, nearly all of it an embedding of uneven rows in bf16 and its two moments."""
    with torch.device("meta"):
        module = Decoder(
            replace(shape(num_layers=1), vocab_size=LARGE_VOCAB, dim=256, ffn_dim=41)
        ).to(torch.bfloat16)
    model = parallelize(module, plan, mesh, seed=0)
    return TrainState(model, build_optimizer(model, Optim()), 0)


def pattern(shard: LogicalShard) -> torch.Tensor:
    """What a rank's storage holds if every element is a function of the tensor's name and of its
    place in the whole."""
    local = torch.zeros_like(shard.tensor)
    for box in shard.boxes:
        values = torch.full(box.size, hash_to_stable_64_bits(shard.name) % 7, dtype=torch.int64)
        for dim, (first, length) in enumerate(zip(box.global_offset, box.size, strict=True)):
            along = torch.arange(first, first + length) * (31 * dim + 1)
            values += along.view(-1, *(1,) * (len(box.size) - dim - 1))
        inside = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))
        local[inside] = (values % 251).to(local.dtype)
    return local


def save_large(rank: int, num_ranks: int, root: Path, layout: str, degrees: Degrees) -> None:
    plan = plan_for(num_ranks, **degrees)
    with open_mesh(plan.layout, device="cpu") as mesh:
        state = large_state(mesh, plan)
        for shard in state.shards().values():
            shard.tensor.copy_(pattern(shard))
        save_state(state, root / layout)


def load_large(
    rank: int, num_ranks: int, root: Path, layouts: list[str], degrees: Degrees
) -> dict[str, tuple[list[str], dict[str, int], dict[str, int], int]]:
    """By writer: what was not restored, bytes read and bytes needed by file, and this rank's
    bytes."""
    found = {}
    plan = plan_for(num_ranks, **degrees)
    with open_mesh(plan.layout, device="cpu") as mesh:
        for layout in layouts:
            state = large_state(mesh, plan)
            with counting_reads() as read:
                restore_state(state, newest(root / layout))
            shards = state.shards()
            wrong = [
                name
                for name, shard in shards.items()
                if not torch.equal(shard.tensor, pattern(shard))
            ]
            found[layout] = (
                wrong,
                read,
                bytes_needed(newest(root / layout), shards),
                count_local_shard_bytes(shards),
            )
    return found


def test_a_rank_of_a_real_model_reads_its_part_and_no_more(tmp_path: Path) -> None:
    """In bf16: those chunks of 4 MiB that hold bytes of its own, each once, whatever layout
    wrote them."""
    writers = {"one": (1, {}), "zero3": (3, {"dp_shard": 3})}
    for name, (num_ranks, degrees) in writers.items():
        run_ranks(num_ranks, save_large, num_ranks, tmp_path, name, degrees)
    outcomes = run_ranks(4, load_large, 4, tmp_path, list(writers), {"dp_shard": 4})
    for rank, outcome in enumerate(outcomes):
        for writer, (wrong, read, needed, own_bytes) in outcome.items():
            assert wrong == [], (rank, writer)
            assert read == needed, (rank, writer)
            # Its own bytes, and for each of three large tensors in each file not more than a chunk
            # at either end.
            assert sum(read.values()) <= own_bytes + 3 * len(read) * 2 * CHUNK_BYTES, (rank, writer)


def continue_over(rank: int, root: Path) -> list[str]:
    """What is said of a checkpoint of ranks that share memory, restored over this, over gloo, and
    over gloo at another layout."""
    said = []
    plan, other = plan_for(2, dp_shard=2), plan_for(2, dp_replicate=2)
    with open_mesh(plan.layout, device="cpu", collectives="shared") as mesh:
        save_state(large_state(mesh, plan), root)
        state = large_state(mesh, plan)
        restore_state(state, newest(root))
        said.append(state.other_collectives)
    for each_plan in (plan, other):
        with open_mesh(each_plan.layout, device="cpu", collectives="gloo") as mesh:
            state = large_state(mesh, each_plan)
            restore_state(state, newest(root))
            said.append(state.other_collectives)
    return said


def test_a_checkpoint_says_what_its_ranks_exchanged_tensors_through(tmp_path: Path) -> None:
    """And a resume through something else that its steps may round otherwise."""
    for same, through_gloo, elsewhere in run_ranks(2, continue_over, tmp_path):
        assert (same, elsewhere) == ("", "")
        assert "through shared memory, and these do through gloo" in through_gloo
    (entry,) = list_checkpoints(str(tmp_path)).entries
    assert entry.collectives == "shared memory"


# Optimizers of users: state that is made at the first step, numbers beside it, numbers of groups


class Counting(torch.optim.Optimizer):
    """Gradient descent whose steps shrink with counts: a plain number for each parameter and one
    of the group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["updates"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter -= group["lr"] / (state["count"] + group["updates"]) * parameter.grad


OWN: dict[str, Callable[[WeightDecayGroups, Optim], torch.optim.Optimizer]] = {
    "as docs/own-code.md shows it": lambda groups, optim: torch.optim.RMSprop(
        groups.with_decay(optim.weight_decay, auto=0.0), lr=optim.lr
    ),
    "with a start that is not zero": lambda groups, optim: torch.optim.NAdam(
        groups.parameters(), lr=optim.lr
    ),
    "counting in plain numbers": lambda groups, optim: Counting(groups.parameters()),
    "counting in groups and under names of its own": counted_adamw,
}


def own_state(mesh: Mesh, job: Job, plan: Plan, kind: str, *, seed: int) -> TrainState:
    torch.set_num_threads(1)
    model = parallelize(new_module(torch.float64, seed=seed), plan, mesh, seed=job.run.seed)
    groups = build_weight_decay_groups(model.module, model.named_parameters())
    return TrainState(model, OWN[kind](groups, job.optim), job.run.seed)


def continue_own(rank: int, num_ranks: int, root: Path, degrees: Degrees) -> dict[str, list[str]]:
    """What differs between a straight run and one that was saved and continued, by optimizer."""
    found = {}
    job, plan = job_for(num_ranks, **degrees), plan_for(num_ranks, **degrees)
    with open_mesh(plan.layout, device="cpu") as mesh:
        for kind in OWN:
            run_dir = copy_run(root / "empty", root / f"{kind} {num_ranks}", mesh)
            straight = train(
                own_state(mesh, job, plan, kind, seed=1),
                job,
                plan,
                run_dir,
                attempt=0,
                look_at=(SAVED, STEPS),
            )
            resumed = resume(own_state(mesh, job, plan, kind, seed=2), job, plan, run_dir)
            wrong = differing(resumed.whole[SAVED], straight.whole[SAVED])
            wrong += differing(resumed.whole[STEPS], straight.whole[STEPS])
            wrong += [
                f"loss of step {step}"
                for step in resumed.losses
                if resumed.losses[step] != straight.losses[step]
            ]
            found[kind] = wrong + (
                [] if resumed.facts == straight.facts else [f"{resumed.facts} {straight.facts}"]
            )
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "degrees"), [(1, {}), (2, {"dp_shard": 2})], ids=["one", "zero3"]
)
def test_an_optimizer_of_ones_own_goes_on_where_it_was(
    num_ranks: int, degrees: Degrees, tmp_path: Path
) -> None:
    """To the bit, whenever it makes its state, and whether it counts in tensors or in plain
    numbers."""
    write_corpus(tmp_path)
    for found in run_ranks(num_ranks, continue_own, num_ranks, tmp_path, degrees):
        assert found == {kind: [] for kind in OWN}


def refuse_own(rank: int, root: Path) -> tuple[str, str, bool]:
    """What is said of state that cannot be saved, and of another optimizer's; whether that one
    stayed as it was."""
    job, plan = job_for(1), plan_for(1)
    with open_mesh(plan.layout, device="cpu") as mesh:
        strange = own_state(mesh, job, plan, "counting in plain numbers", seed=1)
        strange.optimizer.state[next(strange.model.parameters())]["history"] = ["up", "down"]
        with pytest.raises(CheckpointError) as unsaved:
            save_state(strange, root / "strange")
        directory = save_state(
            own_state(mesh, job, plan, "counting in plain numbers", seed=1), root / "saved"
        )
        other = own_state(mesh, job, plan, "as docs/own-code.md shows it", seed=2)
        before = whole_tensors(other)
        with pytest.raises(CheckpointError) as unfit:
            restore_state(other, directory)
        begun = own_state(mesh, job, plan, "as docs/own-code.md shows it", seed=1)
        for parameter in begun.model.parameters():
            begun.optimizer.state[parameter]["square_avg"] = torch.ones_like(parameter)
        incomplete = save_state(begun, root / "incomplete")
        edit_manifest(incomplete, lambda body: body["tensors"].pop("lookup.weight"))
        with pytest.raises(CheckpointError):
            restore_state(other, incomplete)
        untouched = not differing(whole_tensors(other), before) and not any(
            other.optimizer.state.values()
        )
        return str(unsaved.value), str(unfit.value), untouched


def test_state_that_no_checkpoint_holds_and_other_optimizers_are_refused(tmp_path: Path) -> None:
    unsaved, unfit, untouched = run_ranks(1, refuse_own, tmp_path)[0]
    assert "Counting keeps state/lookup.weight/history = ['up', 'down']" in unsaved
    assert "it was written with the optimizer Counting, not RMSprop" in unfit
    assert untouched


class Moody(torch.optim.SGD):
    """Keeps text, from the first step on."""

    def step(self, closure: Any = None) -> Any:
        self.state["mood"] = "up"
        return super().step(closure)


def refuse_at_the_first_step(rank: int, root: Path) -> tuple[str, int]:
    """Rank 1 alone has such an optimizer."""
    job, plan = job_for(2), plan_for(2)
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = own_state(mesh, job, plan, "counting in plain numbers", seed=1).model
        kind = Moody if rank == 1 else torch.optim.SGD
        state = TrainState(model, kind(list(model.parameters()), lr=0.1), job.run.seed)
        with pytest.raises(CheckpointError) as raised:
            train(
                state,
                job,
                plan,
                copy_run(root / "empty", root / "run", mesh),
                attempt=0,
                look_at=(),
            )
        return str(raised.value), state.step


def test_state_that_no_checkpoint_holds_ends_the_run_at_its_first_step(tmp_path: Path) -> None:
    """On every rank, and long before the first save is due."""
    write_corpus(tmp_path)
    (message, step), other = run_ranks(2, refuse_at_the_first_step, tmp_path)
    assert "rank 1: Moody keeps own/mood = 'up'" in message
    assert step == 1 < SAVED
    assert other == (message, step)
