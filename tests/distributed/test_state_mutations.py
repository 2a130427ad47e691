"""Every piece of state in a checkpoint is needed: what a resume must give is lost if any one of
them is.

The pieces are those found in a real checkpoint. Each is dropped, and each is set back to what a new
process begins with; then the tests of resuming below must notice. One that notices nothing is a
piece that nobody needs, or a hole in the tests.
"""

from __future__ import annotations

import itertools
import runpy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoints import edit_manifest, newest, restore_state, save_state
from phalanx.checkpoint.manifest import read_manifest
from phalanx.core.errors import CheckpointError
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.train.state import TrainState
from ranks import run_ranks
from resuming import (
    SAVED,
    STEPS,
    Outcome,
    copy_run,
    differing,
    job_for,
    new_module,
    new_state,
    plan_for,
    resume,
    train,
    write_corpus,
)

READER = Path(__file__).parents[2] / "docs" / "read_checkpoint.py"
TOKENIZER = "00aa"
JOB, PLAN = job_for(1, optimizer="resuming:counted_adamw"), plan_for(1)
Damage = Callable[[Path], None]


def new_process(mesh: Mesh, *, tokenizer: str = TOKENIZER) -> TrainState:
    """A state as a process has it before it restores: other weights than any run has, and
    dropout."""
    return new_state(
        mesh, JOB, PLAN, new_module(torch.float32, dropout=0.2, seed=2), tokenizer=tokenizer
    )


@dataclass(frozen=True)
class Workshop:
    """A run that nothing happened to, and what its checkpoint makes of a new process."""

    root: Path
    mesh: Mesh
    straight: Outcome

    def lost(self, damage: Damage) -> list[str]:
        """The first thing that a resume no longer gives when `damage` was done to its run; empty
        if none is missed."""
        run_dir = copy_run(self.root / "straight", self.root / "damaged", self.mesh)
        try:
            damage(run_dir)
            return list(itertools.islice(self._lost(run_dir), 1))
        finally:
            shutil.rmtree(run_dir)

    def _lost(self, run_dir: Path) -> Iterator[str]:
        state = new_process(self.mesh)
        saved = newest(run_dir)
        try:
            outcome = resume(state, JOB, PLAN, run_dir)
        except CheckpointError as error:
            yield f"refused: {error}"
            return
        for what in ("losses", "norms", "read"):
            rest = {
                step: value for step, value in getattr(self.straight, what).items() if step > SAVED
            }
            if getattr(outcome, what) != rest:
                yield what
        if outcome.facts != self.straight.facts:
            yield "facts"
        yield from differing(outcome.whole.get(STEPS, {}), self.straight.whole[STEPS])
        other_seed = new_process(self.mesh)
        other_seed.seed += 1
        for name, other in (
            ("seed", other_seed),
            ("tokenizer", new_process(self.mesh, tokenizer="00bb")),
        ):
            if not _refuses(other, saved):
                yield f"protection from another {name}"
        if state.other_cpu or not _says_another_cpu(new_process(self.mesh), saved):
            yield "the kind of CPU"
        yield from self._unreadable(saved)

    def _unreadable(self, saved: Path) -> Iterator[str]:
        """Names of the module that somebody with the format's description alone no longer finds."""
        found = runpy.run_path(str(READER))["read_tensors"](saved)
        for name, tensor in new_module(torch.float32).state_dict().items():
            if name not in found or list(found[name].shape) != list(tensor.shape):
                yield f"{name} for readers"


def _refuses(state: TrainState, saved: Path) -> bool:
    try:
        restore_state(state, saved)
    except CheckpointError:
        return True
    return False


def _says_another_cpu(state: TrainState, saved: Path) -> bool:
    """What a resume on another kind of CPU would say: this machine has only one."""
    with mock.patch("phalanx.train.state.describe_cpu_for_equal_bits", return_value="another kind"):
        restore_state(state, saved)
    return "another kind" in state.other_cpu


def drop(part: str, key: str, run_dir: Path) -> None:
    edit_manifest(newest(run_dir), lambda body: body[part].pop(key))


def reset_tensor(state: TrainState, fresh: TrainState, name: str, run_dir: Path) -> None:
    """What the checkpoint has of one tensor becomes what a new process has; zeros where that is
    the same."""
    restore_state(state, newest(run_dir))
    target, begun = state.shards()[name].tensor, fresh.shards()
    source = begun[name].tensor if name in begun else target
    if torch.equal(target, source):
        source = torch.zeros_like(source)
    assert not torch.equal(target, source), name
    target.copy_(source)
    shutil.rmtree(newest(run_dir))
    save_state(state, run_dir)


def change_fact(
    path: tuple[str, ...], change: Callable[[dict[str, Any], str], Any], run_dir: Path
) -> None:
    """Change the fact that these keys lead to."""

    def at(body: dict[str, Any]) -> None:
        holder = body["facts"]
        for key in path[:-1]:
            holder = holder[key]
        change(holder, path[-1])

    edit_manifest(newest(run_dir), at)


def reset(holder: dict[str, Any], key: str) -> None:
    """A number becomes 0, a text empty: what a TrainState begins with."""
    assert holder[key], f"{key} is {holder[key]!r} already: resetting it shows nothing"
    holder[key] = type(holder[key])()


def leaves(facts: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from leaves(value, *path, key)
        else:
            yield (*path, key)


def damages(checkpoint: Path, mesh: Mesh, left_out: str) -> Iterator[tuple[str, Damage]]:
    """Every mutation, by what a checkpoint holds, but those of tensors with `left_out` in their
    names."""
    manifest = read_manifest(checkpoint)
    state, fresh = new_process(mesh), new_process(mesh)
    for name in manifest.tensors:
        if left_out and left_out in name:
            continue
        yield f"drop tensor {name}", partial(drop, "tensors", name)
        yield f"reset tensor {name}", partial(reset_tensor, state, fresh, name)
    for key in manifest.facts:
        yield f"drop fact {key}", partial(drop, "facts", key)
    for path in leaves(manifest.facts):
        yield f"drop leaf {' '.join(path)}", partial(change_fact, path, dict.pop)
        yield f"reset fact {' '.join(path)}", partial(change_fact, path, reset)
    for name in manifest.aliases:
        yield f"drop alias {name}", partial(drop, "aliases", name)


def mutate(rank: int, root: Path, left_out: str) -> dict[str, list[str]]:
    with open_mesh(PLAN.layout, device="cpu") as mesh:
        state = new_state(
            mesh, JOB, PLAN, new_module(torch.float32, dropout=0.2), tokenizer=TOKENIZER
        )
        run_dir = copy_run(root / "empty", root / "straight", mesh)
        straight = train(state, JOB, PLAN, run_dir, attempt=0, look_at=(STEPS,))
        workshop = Workshop(root, mesh, straight)
        found = {"nothing": workshop.lost(lambda run_dir: None)}
        return found | {
            name: workshop.lost(damage) for name, damage in damages(newest(run_dir), mesh, left_out)
        }


@pytest.fixture(
    scope="module",
    # The second block is the first one again.
    params=[
        pytest.param("blocks.1.", id="one block"),
        pytest.param("", id="all", marks=pytest.mark.long),
    ],
)
def lost(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[str]]:
    root = tmp_path_factory.mktemp("mutations")
    write_corpus(root)
    return dict(run_ranks(1, mutate, root, request.param, deadline_s=300)[0])


def test_nothing_is_lost_where_nothing_was_changed(lost: dict[str, list[str]]) -> None:
    """The reference: a new process at another place of its random numbers, with other weights,
    goes on to the bit."""
    assert lost["nothing"] == []


def test_every_key_of_the_state_is_needed(lost: dict[str, list[str]]) -> None:
    survived = [name for name, missing in lost.items() if name != "nothing" and not missing]
    print(f"{len(lost) - 1} mutations of a checkpoint")
    assert survived == []


def test_what_is_not_there_is_never_made_up(lost: dict[str, list[str]]) -> None:
    """A tensor or a fact that was dropped is refused, never begun anew.

    What an optimizer makes at its first step is noticed by what follows (as numbers are): before it
    nobody can know of it.
    """
    made_later = ("drop tensor optim/group/", "drop tensor optim/own/")
    informs = ("drop fact cpu_kind",)  # older checkpoints do not say it, and no step depends on it
    for name, missing in lost.items():
        if name.startswith(("drop tensor", "drop fact")) and not name.startswith(
            (*made_later, *informs)
        ):
            assert missing[0].startswith("refused"), name


def test_the_mutations_reach_every_kind_of_state(lost: dict[str, list[str]]) -> None:
    kinds = (
        "exp_avg",
        "exp_avg_sq",
        "/step",
        "running_var",
        "scale",
        "frozen.weight",
        "lookup.weight",
        "samples_seen",
    )
    for kind in (
        *kinds,
        "tokens_seen",
        "fact step",
        "seed",
        "tokenizer",
        "optimizer kind",
        "leaf optimizer numbers group/1/updates",
        "tensor optim/group/0/pace",
        "fact optimizer numbers group/0/recent",
        "fact optimizer numbers group/0/span tuple",
        "tensor optim/own/whole/seen",
        "fact optimizer numbers own/whole/count",
        "fact optimizer numbers own/tally",
        "tensor optim/own/beat",
        "alias out.weight",
    ):
        assert any(name.endswith(kind) for name in lost), kind
