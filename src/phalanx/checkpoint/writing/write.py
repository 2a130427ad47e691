"""Save logical tensors: every rank writes only blocks of its own, all ranks agree on the
outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
import xxhash

from phalanx.checkpoint.all_ranks import Group, agreed
from phalanx.checkpoint.chunks import StoredFile
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.manifest import Manifest, Piece, StoredTensor, check_aliases
from phalanx.checkpoint.ownership.fencing_token import Epoch
from phalanx.checkpoint.ownership.store_owner import require_claim
from phalanx.checkpoint.reading.verify import is_tiled
from phalanx.checkpoint.shard_file import DTYPES, Bytes
from phalanx.checkpoint.stores.protocol import Draft, Store
from phalanx.checkpoint.writing.incremental import Block, Earlier, earlier_checkpoint, write_blocks
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import Phases
from phalanx.mesh.logical import Box, LogicalShard

SPLIT_BYTES = (
    1 << 20
)  # a replicated block of at least so many bytes is written in parts, one by each replica


@dataclass(frozen=True)
class Saved:
    """`num_bytes` are all bytes of the checkpoint's tensors, `num_new_bytes` those that had to
    be written for it."""

    folder: Folder
    num_bytes: int
    num_new_bytes: int

    @property
    def url(self) -> str:
        return self.folder.url


def save(
    store: Store,
    step: int,
    shards: Mapping[str, LogicalShard],
    *,
    aliases: Mapping[str, str],
    facts: Mapping[str, Any],
    job_digest: str,
    group: Group,
    phases: Phases,
    before_commit: Callable[[], None] = lambda: None,
    epoch: Epoch | None = None,
    incremental: bool = True,
) -> Saved:
    """Write the checkpoint of `step` into `store`. Collective.

    `shards` are those that this rank holds, or what `owned` made of them: nothing else is read.
    `before_commit` is called when every rank's part is written, before there is a checkpoint.
    `facts` may differ between stages of a pipeline in what they know of: the manifest has all of
    it, and of what several know what the first rank says.

    With `incremental`, what the checkpoint before holds already is linked to it, or copied by the
    store.

    Files are written and made durable in a draft, the manifest last; committing it is one
    operation. If any rank fails, every rank raises CheckpointError and nothing is left but the
    checkpoints that were there before.
    """
    with phases("ckpt_stage"):
        with agreed(group, store.url, "preparing a checkpoint") as outcome:
            if group.rank == 0:
                require_claim(epoch, store)
                before = store.folders() if incremental else []
                outcome["mine"] = [store.begin(step).token, before[-1].name if before else None]
        token, before_name = outcome["all"][0]
        draft = store.join(step, token)
    try:
        with phases("ckpt_write"):
            with agreed(group, draft.url, "writing a checkpoint") as outcome:
                earlier = earlier_checkpoint(store.folder(before_name)) if before_name else None
                outcome["mine"] = _write_mine(draft, shards, group.rank, earlier) | {
                    "aliases": dict(aliases)
                }
                if group.layout.pp > 1:  # only then do ranks know of different things
                    outcome["mine"]["facts"] = dict(facts)
            parts = outcome["all"]
        known = reduce(_together, (part["facts"] for part in parts if "facts" in part), {}) or facts
        manifest = _assemble(step, job_digest, group, known, parts, epoch)
        before_commit()
        with phases("before_commit"):
            with agreed(group, draft.url, "committing a checkpoint") as outcome:
                if group.rank == 0:
                    require_claim(epoch, store)
                    store.commit(draft, manifest.to_bytes())
    except CheckpointError:
        if group.rank == 0:
            store.discard(draft)
        raise
    with phases("after_commit"):
        new_bytes = sum(part["num_new_bytes"] for part in parts)
        return Saved(store.folder_of(draft), manifest.num_bytes, new_bytes)


def owned(shards: Mapping[str, LogicalShard]) -> dict[str, LogicalShard]:
    """Of each tensor the blocks that this rank must write, so that each is written by one rank: no
    replicas are left.

    Every name stays, without blocks where others write it. Of large blocks each replica gets an
    equal part, of small ones the name chooses a replica: both need nothing that a rank does not
    know of others. Idempotent.
    """
    return {
        name: replace(shard, boxes=tuple(_owned_boxes(shard)), replica=0, num_replicas=1)
        for name, shard in shards.items()
    }


def _owned_boxes(shard: LogicalShard) -> Iterator[Box]:
    if shard.dtype not in DTYPES:
        raise CheckpointError(
            f"{shard.name} is of type {shard.dtype}, which safetensors cannot hold",
            fix="keep it in another type, or out of checkpoints (persistent=False, for a buffer)",
        )
    if shard.replica >= shard.num_replicas:
        return
    item_bytes = DTYPES[shard.dtype][1]
    turn = xxhash.xxh3_64_intdigest(shard.name.encode())
    for box in shard.boxes:
        replica = shard.replica * box.num_replicas + box.replica
        num_replicas = shard.num_replicas * box.num_replicas
        rows = box.size[0] if box.size else 0
        if rows >= num_replicas and math.prod(box.size) * item_bytes >= SPLIT_BYTES:
            yield _rows(box, rows * replica // num_replicas, rows * (replica + 1) // num_replicas)
        elif replica == turn % num_replicas:
            yield replace(box, replica=0, num_replicas=1)


def _rows(box: Box, begin: int, end: int) -> Box:
    return Box(
        (box.global_offset[0] + begin, *box.global_offset[1:]),
        (box.local_offset[0] + begin, *box.local_offset[1:]),
        (end - begin, *box.size[1:]),
    )


def _write_mine(
    draft: Draft, shards: Mapping[str, LogicalShard], rank: int, earlier: Earlier | None
) -> dict[str, Any]:
    """Write the blocks this rank owns; what it tells the others of them and of its tensors."""
    mine = owned(shards)
    blocks = [
        Block(
            name,
            f"{name}#{number}",
            shard.dtype,
            box.global_offset,
            box.size,
            partial(block_bytes, shard.tensor, box),
        )
        for name, shard in sorted(mine.items())
        for number, box in enumerate(shard.boxes)
    ]
    written = write_blocks(draft, f"rank-{rank:04d}", blocks, earlier)
    tensors = {
        name: {
            "shape": shard.global_shape,
            "dtype": shard.dtype,
            "pieces": [asdict(piece) for piece in written.pieces.get(name, ())],
        }
        for name, shard in mine.items()
    }
    files = {name: asdict(stored) for name, stored in written.files.items()}
    return {"tensors": tensors, "files": files, "num_new_bytes": written.num_new_bytes}


def block_bytes(tensor: torch.Tensor, box: Box) -> Bytes:
    """A block of a local tensor as bytes in C order, on the CPU; a view of it where that is
    possible."""
    block = local_block(tensor, box).cpu().reshape(-1)
    if block.stride() != (
        1,
    ):  # torch calls blocks of one element or none contiguous, whatever their strides
        block = torch.empty(block.numel(), dtype=block.dtype).copy_(block)
    found: Bytes = block.view(torch.uint8).numpy()
    return found


def local_block(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.local_offset, box.size, strict=True))]


def _together(facts: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`facts`, and what `others` have besides, at any depth."""
    found = dict(facts)
    for key, value in others.items():
        if key not in found:
            found[key] = value
        elif isinstance(found[key], Mapping) and isinstance(value, Mapping):
            found[key] = _together(found[key], value)
    return found


def _assemble(
    step: int,
    job_digest: str,
    group: Group,
    facts: Mapping[str, Any],
    parts: list[dict[str, Any]],
    epoch: Epoch | None,
) -> Manifest:
    """One manifest of what the ranks wrote.

    A rank need not know of tensors that others hold (stages of a pipeline).
    """
    told: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, found in part["tensors"].items():
            first = told.setdefault(name, {**found, "pieces": []})
            if (first["shape"], first["dtype"]) != (found["shape"], found["dtype"]):
                raise CheckpointError(f"the ranks do not agree on shape and type of {name}")
            first["pieces"] += found["pieces"]
    tensors = {}
    for name, found in sorted(told.items()):
        shape = tuple(found["shape"])
        pieces = tuple(
            Piece(p["file"], p["key"], tuple(p["offset"]), tuple(p["size"]), p["xxh3_128"])
            for p in found["pieces"]
        )
        tensors[name] = StoredTensor(shape, found["dtype"], pieces)
        if not is_tiled(tensors[name]):
            raise CheckpointError(f"the ranks' blocks of {name} do not make the whole tensor")
    files = {name: StoredFile(**stored) for part in parts for name, stored in part["files"].items()}
    aliases = {name: stored_as for part in parts for name, stored_as in part["aliases"].items()}
    try:
        check_aliases(aliases, tensors)
    except ValueError as error:
        raise CheckpointError(f"the ranks do not agree on what is tied: {error}") from None
    number = epoch.number if epoch is not None else 0
    return Manifest(
        step, job_digest, group.layout.to_json(), dict(facts), tensors, aliases, files, number
    )
