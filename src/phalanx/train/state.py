"""TrainState: exactly the content of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.all_ranks import run_on_all_ranks_or_raise
from phalanx.checkpoint.facts import DATA_FACT
from phalanx.checkpoint.folder import CheckpointFolder, convert_path_to_folder
from phalanx.checkpoint.manifest import COMPRESSION_TENSOR_PREFIX, Manifest
from phalanx.checkpoint.ownership.fencing_token import FencingToken
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.stores.protocol import Store
from phalanx.checkpoint.writing.write import RankSnapshot, WrittenCheckpoint, write_checkpoint
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.cpu_kind import describe_cpu_for_equal_bits
from phalanx.mesh.logical import LogicalShard
from phalanx.optim.build import list_optimizer_shards
from phalanx.optim.state import (
    RestoreState,
    UndoRestore,
    build_restore_functions,
    collect_parameterless_tensors,
    collect_trained_numbers,
    copy_group_values,
    make_missing_slots,
)
from phalanx.parallel.loss_scale import require_valid_loss_scale_state
from phalanx.parallel.model import ParallelModel
from phalanx.train.finite_weights import FiniteWeights, describe_broken_weights
from phalanx.train.step_statistics import StepStatistics

# Among the facts of a run in fp16.
LOSS_SCALE_FACT = "loss_scale"
# Among the facts of a run on CPUs since checkpoints say it.
CPU_KIND_FACT = "cpu_kind"
# Checkpoints of earlier versions, and of other precisions and devices, do not have them.
OPTIONAL_FACTS = {LOSS_SCALE_FACT, CPU_KIND_FACT, DATA_FACT}


@dataclass
class TrainState:
    """Steps done, tokens seen, and the tensors that training changes.

    The schedule and all randomness are functions of (seed, step), and the data cursor is
    `samples_seen`: one number each, at any layout.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer
    seed: int
    tokenizer: str = ""
    """Digest of the tokenizer of the data; empty if there is none, or it is not known."""
    step: int = 0
    tokens_seen: int = 0
    samples_seen: int = 0
    saved_step: int = 0
    """The step of the newest checkpoint when it was restored; 0 without one."""
    lost_reduction: str = ""
    """The reason why `restore` left the state of compressed gradients in the checkpoint; empty if
    it did not."""
    other_cpu: str = ""
    """The reason why steps after `restore` may round otherwise than on the machine before; empty if
    the CPUs are of one kind."""
    other_collectives: str = ""
    """The reason why steps after `restore` may round otherwise at the same layout: ranks exchange
    tensors through something else; empty if they do not, or the layout is another one."""
    data_digest: str = ""
    """Digest of the data that it is trained on; empty if it is not known."""

    def __post_init__(self) -> None:
        # As built: of the values of groups a checkpoint holds those that training has changed.
        self._built = copy_group_values(self.optimizer)
        self._marks: list[Any] | None = None
        self._is_updating = False
        self._statistics = StepStatistics(self.model)
        self.finite_weights = FiniteWeights(self.model)

    def begin_step(self) -> None:
        """Note what forward and backward of a step may change besides gradients."""
        self.finite_weights.remember(is_beginning=self.step == 0)
        self._marks = self._mark_what_steps_change()
        self._statistics.hold()

    def undo_forward(self) -> None:
        """Give statistics of batches the values of before the step: it is left out."""
        self._statistics.restore()

    @property
    def why_step_is_done_once(self) -> str:
        """The reason why this rank cannot do the step once more as if it were the first time; empty
        if it can."""
        return self.model.why_step_is_done_once or self._statistics.why_not_restorable

    def begin_update(self) -> None:
        """From here to `end_update` the state changes from that of one step to that of the next:
        after an error in between some of it is of each."""
        self._is_updating = True

    def end_update(self) -> None:
        self._is_updating, self._marks = False, None

    @property
    def is_whole(self) -> bool:
        """True if all of it is of one step, `step`: an error has left no part of it changed."""
        if self._is_updating:
            return False
        return self._marks is None or self._marks == self._mark_what_steps_change()

    def _mark_what_steps_change(self) -> list[Any]:
        """Marks of what steps change besides the update: statistics of batches, state of compressed
        gradients, the loss scale. They are equal later if none of that has changed."""
        tensors = list(self.model.persistent_buffers())
        if self.model.compression is not None:
            tensors += self.model.compression.list_state_tensors()
        marks: list[Any] = [(id(tensor), tensor._version) for tensor in tensors]
        if self.model.loss_scale is not None:
            marks.append(self.model.loss_scale.state_to_save())
        return marks

    def shards(self) -> dict[str, LogicalShard]:
        """Every tensor of the state by its full-model name."""
        model = self.model.shards()
        mesh = self.model.mesh
        named = list(self.model.named_parameters())
        rank, num_ranks = mesh.stage_rank_and_size
        slots = list_optimizer_shards(
            self.optimizer,
            named,
            self.model.trained_shards(),
            rank=rank,
            world_size=num_ranks,
            copies=self.model.copies,
        )
        tensors = collect_parameterless_tensors(
            self.optimizer, named, rank=mesh.rank, world_size=mesh.world_size
        )
        compression = self.model.compression
        unsent = (
            {} if compression is None else compression.collect_state_shards(model, self.model.mesh)
        )
        return model | slots | tensors | unsent

    def facts(self) -> dict[str, Any]:
        """The part of the state besides tensors, as far as this rank knows it.

        Raises CheckpointError for an optimizer with values that cannot be saved.
        """
        numbers = collect_trained_numbers(
            self.optimizer, self.model.named_parameters(), self._built
        )
        scale = self.model.loss_scale
        facts: dict[str, Any] = {
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "samples_seen": self.samples_seen,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
            "optimizer": {"kind": type(self.optimizer).__name__, "numbers": numbers},
        }
        if scale is not None:
            facts[LOSS_SCALE_FACT] = scale.state_to_save()
        if self.data_digest:
            facts[DATA_FACT] = self.data_digest
        if self.model.mesh.device.type == "cpu":
            facts[CPU_KIND_FACT] = describe_cpu_for_equal_bits()
        return facts

    def snapshot(self) -> RankSnapshot:
        """The content of a checkpoint of this step. Its tensors are those of training.

        Raises CheckpointError if this rank's part of the weights is not finite: no step is ever
        applied to them, and the checkpoint would take the place of one from which training goes on.
        """
        names = self.finite_weights.list_broken()
        if names:
            raise CheckpointError(
                f"{describe_broken_weights(names)} after step {self.step}: they are not saved",
                fix="continue from a checkpoint of before, with a lower optim.lr",
            )
        return RankSnapshot(self.step, self.shards(), self.model.aliases(), self.facts())

    def save(
        self,
        store: Store,
        *,
        job_digest: str,
        phases: PhaseTimer,
        before_commit: Callable[[], None] = lambda: None,
        fencing_token: FencingToken | None = None,
        incremental: bool = True,
    ) -> WrittenCheckpoint:
        """Write the checkpoint of this step. Collective; raises CheckpointError.

        `before_commit` is called when every rank's part is written, before there is a checkpoint.
        """
        with run_on_all_ranks_or_raise(self.model.mesh, store.url, "taking the state"):
            snapshot = self.snapshot()
        return write_checkpoint(
            store,
            snapshot,
            job_digest=job_digest,
            group=self.model.mesh,
            phases=phases,
            before_commit=before_commit,
            fencing_token=fencing_token,
            incremental=incremental,
        )

    def restore(self, folder: CheckpointFolder | Path, *, phases: PhaseTimer) -> None:
        """Continue from a checkpoint.

        Collective; raises CheckpointError with the state untouched.
        """
        where = convert_path_to_folder(folder).url
        shards = self.shards()
        restores: list[RestoreState] = []
        undos: list[UndoRestore] = []

        def require(manifest: Manifest) -> Manifest:
            self._require_matching_run_facts(manifest, where)
            named = list(self.model.named_parameters())
            elsewhere: Container[str] = ()
            if self.model.mesh.layout.pp > 1:
                # The manifest also has parameters of other stages, which this rank leaves alone.
                elsewhere = manifest.tensors
            numbers = manifest.facts["optimizer"].get("numbers", {})
            restores.extend(
                build_restore_functions(self.optimizer, named, numbers, elsewhere=elsewhere)
            )
            full_shapes = {name: shard.global_shape for name, shard in shards.items()}
            undos.extend(make_missing_slots(self.optimizer, named, manifest.tensors, full_shapes))
            # Again: `make_missing_slots` has made tensors of the optimizer, to be read, too.
            shards.update(self.shards())
            return self._drop_compression_state_of_other_layout(manifest, shards)

        try:
            manifest = load_checkpoint_into_shards(
                folder, shards, group=self.model.mesh, phases=phases, require=require
            )
        except CheckpointError:
            # The state stays as it was: the caller may try the checkpoint before.
            for undo in undos:
                undo()
            raise
        # Only now that all is read, on all ranks: a checkpoint that is refused changes nothing.
        self.finish_restoring(manifest.facts, restores)
        self.saved_step = self.step
        self.other_cpu = self._explain_other_cpu_kind(manifest.facts.get(CPU_KIND_FACT))
        self.other_collectives = self._explain_other_collectives(manifest)

    def finish_restoring(self, facts: Mapping[str, Any], restores: Sequence[RestoreState]) -> None:
        """Continue from `facts`, now that the tensors are those of that step; `restores` set the
        optimizer's numbers."""
        for restore_value in restores:
            restore_value()
        self.model.refresh()
        if self.model.loss_scale is not None and LOSS_SCALE_FACT in facts:
            self.model.loss_scale.load_saved_state(facts[LOSS_SCALE_FACT])
        self.step, self.tokens_seen = int(facts["step"]), int(facts["tokens_seen"])
        self.samples_seen = int(facts["samples_seen"])

    def _explain_other_cpu_kind(self, then: object) -> str:
        """The reason why steps after a checkpoint that was written on the CPU kind `then` may round
        otherwise; empty if the kinds are equal.

        Empty as well if the checkpoint has no kind, or training is not on CPUs.
        """
        now = self.facts().get(CPU_KIND_FACT)
        if now is None or not isinstance(then, str) or then == now:
            return ""
        return (
            f"the checkpoint was written on {then}, and this is {now}: the weights are equal, "
            "but the steps from here may round otherwise than an uninterrupted run's"
        )

    def _explain_other_collectives(self, manifest: Manifest) -> str:
        """The reason why steps after a checkpoint may round otherwise at the layout that wrote it;
        empty if tensors are exchanged through the same, or the checkpoint does not say."""
        mesh = self.model.mesh
        then, now = manifest.collectives, mesh.describe_collectives()
        if not then or then == now or manifest.layout != mesh.layout.to_json():
            return ""
        return (
            f"the checkpoint was written by ranks that exchange tensors through {then}, and these"
            f" do through {now}: the weights are equal, but the steps from here may round"
            " otherwise than an uninterrupted run's"
        )

    def _drop_compression_state_of_other_layout(
        self, manifest: Manifest, shards: dict[str, LogicalShard]
    ) -> Manifest:
        """Leave the state of compressed gradients in the checkpoint unless it is this layout's.

        What was not sent yet belongs to the ranks that kept it: other ranks, or another
        compression, begin anew. Removes from `shards` what is not to be loaded; returns the
        manifest without it.
        """
        expected, stored = {}, {}
        for name, shard in shards.items():
            if name.startswith(COMPRESSION_TENSOR_PREFIX):
                expected[name] = shard.global_shape
        for name, tensor in manifest.tensors.items():
            if name.startswith(COMPRESSION_TENSOR_PREFIX):
                stored[name] = tensor.shape
        self.lost_reduction = ""
        # A stage of a pipeline expects a part of what is stored.
        is_stage = self.model.mesh.layout.pp > 1 and len(expected) > 0
        if expected == stored or (is_stage and expected.items() <= stored.items()):
            return manifest
        for name in expected:
            del shards[name]
        if stored:
            self.lost_reduction = (
                "what gradients had not sent yet was of other ranks, or of another compression"
            )
        return manifest.drop_tensors_by_prefix(COMPRESSION_TENSOR_PREFIX)

    def _require_matching_run_facts(self, manifest: Manifest, where: str) -> None:
        # Before the facts are read by name below.
        missing = sorted(set(self.facts()) - set(manifest.facts) - OPTIONAL_FACTS)
        if missing:
            raise CheckpointError(f"it does not say {', '.join(missing)}", where=where)
        if LOSS_SCALE_FACT in manifest.facts:
            require_valid_loss_scale_state(manifest.facts[LOSS_SCALE_FACT], where)
        seed = manifest.facts["seed"]
        if seed != self.seed:
            raise CheckpointError(
                f"it was written with run.seed {seed}, not {self.seed}", where=where
            )
        kind, own_kind = manifest.facts["optimizer"].get("kind"), type(self.optimizer).__name__
        if kind != own_kind:
            raise CheckpointError(
                f"it was written with the optimizer {kind}, not {own_kind}", where=where
            )
        tokenizer = manifest.facts["tokenizer"]
        # Empty: there is none, or it is not known.
        if tokenizer and self.tokenizer and tokenizer != self.tokenizer:
            raise CheckpointError(
                f"it was trained on tokens of tokenizer {tokenizer}, and the data is of"
                f" {self.tokenizer}",
                where=where,
                fix="give it the data it was trained on, or start a new run",
            )
