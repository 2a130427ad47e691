"""Write logical tensors as a checkpoint: every rank writes only blocks of its own, all ranks agree
on the outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import xxhash

from phalanx.checkpoint.all_ranks import CollectiveGroup, run_on_all_ranks_or_raise
from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.manifest import (
    Manifest,
    StoredPiece,
    StoredTensorPieces,
    require_valid_aliases,
)
from phalanx.checkpoint.ownership.fencing_token import FencingToken
from phalanx.checkpoint.ownership.store_owner import require_still_owner_of_run_and_store
from phalanx.checkpoint.reading.verify import is_tiled_by_pieces
from phalanx.checkpoint.shard_file import SAFETENSORS_DTYPE_OF_TORCH_DTYPE, Bytes
from phalanx.checkpoint.stores.protocol import Draft, Store
from phalanx.checkpoint.writing.incremental import (
    BlockToSave,
    ReusableCheckpoint,
    open_checkpoint_for_reuse,
    write_or_reuse_blocks,
)
from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.logical import Box, LogicalShard


@dataclass(frozen=True)
class RankSnapshot:
    """The content of the checkpoint of `step`, as one rank has it.

    `shards` are logical tensors by full-model name, `aliases` the names that are tied to one of
    them, `facts` what the manifest says besides. The tensors may be those of training.
    """

    step: int
    shards: Mapping[str, LogicalShard]
    aliases: Mapping[str, str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class WrittenCheckpoint:
    """A committed checkpoint. `num_bytes`: all bytes of its tensors; `num_new_bytes`: those that
    had to be written for it."""

    folder: CheckpointFolder
    num_bytes: int
    num_new_bytes: int

    @property
    def url(self) -> str:
        return self.folder.url


def write_checkpoint(
    store: Store,
    snapshot: RankSnapshot,
    *,
    job_digest: str,
    group: CollectiveGroup,
    phases: PhaseTimer,
    before_commit: Callable[[], None] = lambda: None,
    fencing_token: FencingToken | None = None,
    incremental: bool = True,
) -> WrittenCheckpoint:
    """Write `snapshot` into `store` as a checkpoint. Collective.

    Its shards are those of this rank, or what `select_blocks_to_write` made of them: nothing else
    is read. `before_commit` is called when every rank's part is written, before there is a
    checkpoint. Its facts may differ between stages of a pipeline in what they know of: the manifest
    has all of them, and of a fact that several know the first rank's value.

    With `incremental`, blocks that the checkpoint before holds already are linked to it, or copied
    by the store.

    Files are written and made durable in a draft, the manifest last; committing it is one
    operation. If any rank fails, every rank raises CheckpointError and nothing is left but the
    checkpoints that were there before.
    """
    with phases("ckpt_stage"):
        draft, previous_name = _begin_draft_on_all_ranks(
            store, snapshot.step, group, fencing_token, incremental=incremental
        )
    try:
        with phases("ckpt_write"):
            parts = _write_blocks_on_all_ranks(store, draft, snapshot, group, previous_name)
        manifest = _assemble_manifest(snapshot, job_digest, group, parts, fencing_token)
        # After every rank's part is written: `_assemble_manifest` has what all of them gathered.
        before_commit()
        with phases("before_commit"):
            with run_on_all_ranks_or_raise(group, draft.url, "committing a checkpoint"):
                if group.rank == 0:
                    # Again: writing took a while, in which another job may have taken the run.
                    require_still_owner_of_run_and_store(fencing_token, store)
                    store.commit(draft, manifest.to_bytes())
    except CheckpointError:
        if group.rank == 0:
            # All ranks raise the same error, so no rank still writes into it.
            store.discard(draft)
        raise
    with phases("after_commit"):
        num_new_bytes = sum(part["num_new_bytes"] for part in parts)
        return WrittenCheckpoint(
            store.get_folder_once_committed(draft), manifest.num_bytes, num_new_bytes
        )


def _begin_draft_on_all_ranks(
    store: Store,
    step: int,
    group: CollectiveGroup,
    fencing_token: FencingToken | None,
    *,
    incremental: bool,
) -> tuple[Draft, str | None]:
    """Begin the draft of `step`, on rank 0, and join it on all ranks.

    Returns it with the name of the checkpoint before, whose blocks may be linked; None without one.
    """
    with run_on_all_ranks_or_raise(group, store.url, "preparing a checkpoint") as results:
        if group.rank == 0:
            # Before anything is written: `begin` removes drafts, which may be another job's.
            require_still_owner_of_run_and_store(fencing_token, store)
            previous_name = None
            if incremental and (folders := store.folders()):
                previous_name = folders[-1].name
            results.local = [store.begin_draft(step).token, previous_name]
    # Rank 0's: a shared file system may show each rank another list.
    draft_token, previous_name = results.by_rank[0]
    return store.join_draft(step, draft_token), previous_name


def _write_blocks_on_all_ranks(
    store: Store,
    draft: Draft,
    snapshot: RankSnapshot,
    group: CollectiveGroup,
    previous_name: str | None,
) -> list[dict[str, Any]]:
    """Write this rank's blocks; returns the JSON of all ranks for the manifest."""
    with run_on_all_ranks_or_raise(group, draft.url, "writing a checkpoint") as results:
        previous = None
        if previous_name is not None:
            # Each rank reads it for itself: one that cannot writes its part anew.
            previous = open_checkpoint_for_reuse(store.folder(previous_name))
        results.local = _write_blocks_of_rank(draft, snapshot.shards, group.rank, previous)
        results.local["aliases"] = dict(snapshot.aliases)
        # Only in a pipeline do ranks know of different things.
        if group.layout.pp > 1:
            # They travel in the gather that a save has anyway: no second collective for them.
            results.local["facts"] = dict(snapshot.facts)
    return results.by_rank


def select_blocks_to_write(shards: Mapping[str, LogicalShard]) -> dict[str, LogicalShard]:
    """Return `shards` reduced to the blocks that this rank must write, so that each block is
    written by one rank and no replicas are left.

    Every name stays, without blocks where other ranks write them. Each replica gets an equal part
    of a large block; for a small one the name chooses a replica: both need nothing that a rank does
    not know of others. Idempotent. Raises CheckpointError for a dtype that safetensors cannot hold.
    """
    return {
        name: replace(shard, boxes=tuple(_select_boxes_to_write(shard)), replica=0, num_replicas=1)
        for name, shard in shards.items()
    }


def _select_boxes_to_write(shard: LogicalShard) -> Iterator[Box]:
    if shard.dtype not in SAFETENSORS_DTYPE_OF_TORCH_DTYPE:
        raise CheckpointError(
            f"{shard.name} is of type {shard.dtype}, which safetensors cannot hold",
            fix="keep it in another type, or out of checkpoints (persistent=False, for a buffer)",
        )
    if shard.replica >= shard.num_replicas:
        return
    item_bytes = SAFETENSORS_DTYPE_OF_TORCH_DTYPE[shard.dtype][1]
    name_digest = xxhash.xxh3_64_intdigest(shard.name.encode())
    min_split_bytes = get_block_sizes().replica_split_bytes
    for box in shard.boxes:
        replica = shard.replica * box.num_replicas + box.replica
        num_replicas = shard.num_replicas * box.num_replicas
        # A scalar has no rows, and is never split.
        num_rows = next(iter(box.size), 0)
        if num_rows >= num_replicas and math.prod(box.size) * item_bytes >= min_split_bytes:
            # Parts that differ by one row at most, and together are all rows.
            start = num_rows * replica // num_replicas
            stop = num_rows * (replica + 1) // num_replicas
            yield _cut_box_to_rows(box, start, stop)
        elif replica == name_digest % num_replicas:
            yield replace(box, replica=0, num_replicas=1)


def _cut_box_to_rows(box: Box, start: int, stop: int) -> Box:
    return Box(
        (box.global_offset[0] + start, *box.global_offset[1:]),
        (box.local_offset[0] + start, *box.local_offset[1:]),
        (stop - start, *box.size[1:]),
    )


def _write_blocks_of_rank(
    draft: Draft,
    shards: Mapping[str, LogicalShard],
    rank: int,
    previous: ReusableCheckpoint | None,
) -> dict[str, Any]:
    """Write the blocks that this rank owns.

    Returns the JSON that the other ranks need for the manifest: tensors with their pieces, files,
    and how many bytes are new.
    """
    owned = select_blocks_to_write(shards)
    blocks = []
    for name, shard in sorted(owned.items()):
        for number, box in enumerate(shard.boxes):
            load = partial(read_block_bytes, shard.tensor, box)
            key = f"{name}#{number}"
            block = BlockToSave(name, key, shard.dtype, box.global_offset, box.size, load)
            blocks.append(block)
    written = write_or_reuse_blocks(draft, f"rank-{rank:04d}", blocks, previous)
    tensors = {}
    for name, shard in owned.items():
        pieces = [asdict(piece) for piece in written.pieces.get(name, ())]
        tensors[name] = {"shape": shard.global_shape, "dtype": shard.dtype, "pieces": pieces}
    files = {name: asdict(stored) for name, stored in written.files.items()}
    return {"tensors": tensors, "files": files, "num_new_bytes": written.num_new_bytes}


def read_block_bytes(tensor: torch.Tensor, box: Box) -> Bytes:
    """A block of a local tensor as bytes in C order, on the CPU; a view of it where that is
    possible."""
    block = view_block_of_local_tensor(tensor, box).cpu().reshape(-1)
    # torch calls blocks of one element or none contiguous, whatever their strides; a view as bytes
    # needs a stride of 1.
    if block.stride() != (1,):
        block = torch.empty(block.numel(), dtype=block.dtype).copy_(block)
    as_bytes: Bytes = block.view(torch.uint8).numpy()
    return as_bytes


def view_block_of_local_tensor(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.local_offset, box.size, strict=True))]


def _merge_nested_facts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`first`, and what `second` has besides, at any depth."""
    merged = dict(first)
    for key, value in second.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], Mapping) and isinstance(value, Mapping):
            merged[key] = _merge_nested_facts(merged[key], value)
    return merged


def _assemble_manifest(
    snapshot: RankSnapshot,
    job_digest: str,
    group: CollectiveGroup,
    parts: list[dict[str, Any]],
    fencing_token: FencingToken | None,
) -> Manifest:
    """Build one manifest of the `parts` that the ranks wrote of their `snapshot`s.

    A rank need not know of tensors that others hold (stages of a pipeline). Raises CheckpointError
    if the parts contradict each other, or do not make every tensor once.
    """
    gathered: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, tensor in part["tensors"].items():
            first = gathered.setdefault(name, {**tensor, "pieces": []})
            if (first["shape"], first["dtype"]) != (tensor["shape"], tensor["dtype"]):
                raise CheckpointError(f"the ranks do not agree on shape and type of {name}")
            first["pieces"] += tensor["pieces"]
    tensors = {}
    # Sorted: the manifest does not depend on which rank knew of a tensor first.
    for name, tensor in sorted(gathered.items()):
        pieces = tuple(map(_parse_written_piece, tensor["pieces"]))
        tensors[name] = StoredTensorPieces(tuple(tensor["shape"]), tensor["dtype"], pieces)
        if not is_tiled_by_pieces(tensors[name]):
            raise CheckpointError(f"the ranks' blocks of {name} do not make the whole tensor")
    files: dict[str, FileSizeAndChecksums] = {}
    aliases: dict[str, str] = {}
    facts: Mapping[str, Any] = {}
    for part in parts:
        for name, stored in part["files"].items():
            files[name] = FileSizeAndChecksums(**stored)
        aliases |= part["aliases"]
        # They come in the gather that a save has anyway.
        facts = _merge_nested_facts(facts, part.get("facts", {}))
    try:
        require_valid_aliases(aliases, tensors)
    except ValueError as error:
        raise CheckpointError(f"the ranks do not agree on what is tied: {error}") from None
    # 0 where claims are not counted, as in a loop of your own.
    number = 0 if fencing_token is None else fencing_token.number
    return Manifest(
        snapshot.step,
        job_digest,
        group.layout.to_json(),
        dict(facts or snapshot.facts),
        tensors,
        aliases,
        files,
        number,
        group.describe_collectives(),
    )


def _parse_written_piece(stored: Mapping[str, Any]) -> StoredPiece:
    return StoredPiece(
        stored["file"],
        stored["key"],
        tuple(stored["offset"]),
        tuple(stored["size"]),
        stored["xxh3_128"],
    )
