"""Incremental checkpoints: a file of which nothing changed since the checkpoint before is linked
there, not written again.

Torch-free.

A file is reused as a whole, if every block in it is still what it was: checkpoints stay flat and
complete by themselves, and every byte belongs to a tensor. Blocks that did not change in a file
where others did are written once more, apart from those that change, so that the next save finds a
file it can reuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from phalanx.checkpoint.chunks import FileSizeAndChecksums
from phalanx.checkpoint.folder import CheckpointFolder, LocalCheckpointFolder
from phalanx.checkpoint.manifest import Manifest, StoredPiece, read_manifest
from phalanx.checkpoint.shard_file import (
    SAFETENSORS_DTYPE_OF_TORCH_DTYPE,
    Bytes,
    TensorToWrite,
    VerifiedSafetensorsFile,
    write_safetensors_stream,
)
from phalanx.checkpoint.stores.protocol import Draft
from phalanx.core.block_sizes import get_block_sizes
from phalanx.core.errors import CheckpointError

# Files of one rank; what is in the smaller ones is written into one.
MAX_REUSED_FILES = 32


@dataclass(frozen=True)
class BlockToSave:
    """A block of a tensor that this rank has to save.

    `load` returns its bytes in C order, each time the same.
    """

    name: str
    key: str
    dtype: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    load: Callable[[], Bytes] = field(compare=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * SAFETENSORS_DTYPE_OF_TORCH_DTYPE[self.dtype][1]


# name, dtype, offset, size, digest
_BlockIdentity = tuple[str, str, tuple[int, ...], tuple[int, ...], str]


@dataclass(frozen=True)
class ReusableCheckpoint:
    """The checkpoint before the one that is being written."""

    folder: CheckpointFolder
    manifest: Manifest

    def index_pieces_by_file(self) -> dict[str, dict[_BlockIdentity, StoredPiece]]:
        """The pieces in each file, by file name and identity.

        Leaves out files whose blocks have no digest, or that are not as long as they were.
        """
        sizes = self.folder.file_sizes()
        by_file: dict[str, dict[_BlockIdentity, StoredPiece]] = {
            name: {}
            for name, stored in self.manifest.files.items()
            if sizes.get(name) == stored.num_bytes
        }
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                if not piece.xxh3_128:
                    by_file.pop(piece.file, None)
                if piece.file in by_file:
                    identity = (name, tensor.dtype, piece.offset, piece.size, piece.xxh3_128)
                    by_file[piece.file][identity] = piece
        return by_file


def open_checkpoint_for_reuse(folder: CheckpointFolder) -> ReusableCheckpoint | None:
    """The checkpoint in `folder`; None if it cannot be read: then everything is written anew."""
    try:
        return ReusableCheckpoint(folder, read_manifest(folder))
    except (CheckpointError, OSError):
        return None


@dataclass
class WrittenPiecesOfRank:
    """A rank's part of a checkpoint: pieces by tensor, its files, and how many of their bytes
    are new."""

    pieces: dict[str, list[StoredPiece]] = field(default_factory=dict)
    files: dict[str, FileSizeAndChecksums] = field(default_factory=dict)
    num_new_bytes: int = 0


def write_or_reuse_blocks(
    draft: Draft, stem: str, blocks: Iterable[BlockToSave], previous: ReusableCheckpoint | None
) -> WrittenPiecesOfRank:
    """Put `blocks` into the draft, in files whose names begin with `stem`.

    Files of `previous` are reused where nothing in them changed. Raises OSError, CheckpointError.
    """
    remaining = {_hash_block_identity(block): block for block in blocks}
    written = WrittenPiecesOfRank()
    unchanged: set[_BlockIdentity] = set()
    if previous is not None:
        by_file = previous.index_pieces_by_file()
        # Before `_reuse_unchanged_files`, which takes what it reuses out of `remaining`.
        unchanged = set().union(*by_file.values()) & set(remaining)
        _reuse_unchanged_files(draft, stem, previous, by_file, remaining, written)
    apart, mixed = _separate_unchanged_blocks(remaining, unchanged)
    _write_blocks_to_draft_file(draft, f"{stem}.safetensors", mixed, written)
    _write_blocks_to_draft_file(
        draft, f"{stem}-kept-{len(written.files)}.safetensors", apart, written
    )
    return written


def _separate_unchanged_blocks(
    blocks: dict[_BlockIdentity, BlockToSave], unchanged: set[_BlockIdentity]
) -> tuple[dict[_BlockIdentity, BlockToSave], dict[_BlockIdentity, BlockToSave]]:
    """The blocks for a file of their own, which the next save may reuse, and all others."""
    apart: dict[_BlockIdentity, BlockToSave] = {}
    mixed: dict[_BlockIdentity, BlockToSave] = {}
    num_apart_bytes = 0
    sizes = get_block_sizes()
    for identity, block in blocks.items():
        if identity in unchanged and block.num_bytes >= sizes.reusable_block_bytes:
            apart[identity] = block
            num_apart_bytes += block.num_bytes
        else:
            mixed[identity] = block
    if num_apart_bytes < sizes.reusable_file_bytes:
        # In their order, as if none had been apart.
        return {}, blocks
    return apart, mixed


def _reuse_unchanged_files(
    draft: Draft,
    stem: str,
    previous: ReusableCheckpoint,
    by_file: Mapping[str, Mapping[_BlockIdentity, StoredPiece]],
    remaining: dict[_BlockIdentity, BlockToSave],
    written: WrittenPiecesOfRank,
) -> None:
    """Reuse the files all of whose blocks are among `remaining`, and remove those blocks from it.

    Blocks without elements are alike wherever they are, so several files may hold the same one.
    """
    files = previous.manifest.files
    reusable = [
        name for name, pieces in by_file.items() if pieces and pieces.keys() <= remaining.keys()
    ]
    # The largest first: there is a limit to how many are reused, and equal saves reuse alike.
    reusable.sort(key=lambda name: (-files[name].num_bytes, name))
    for number, previous_name in enumerate(reusable[:MAX_REUSED_FILES]):
        name = f"{stem}-kept-{number}.safetensors"
        if not by_file[previous_name].keys() <= remaining.keys():
            # Reused with a file before it; the rest of this one is written, apart from that.
            continue
        # Linked as it is, damage would be in each checkpoint from here on.
        if not _is_file_intact(previous, previous_name):
            # Its bytes are no longer those that were written: they are, now, from memory.
            continue
        if not draft.reuse_file_of_checkpoint(name, previous.folder, previous_name):
            # Nor will the next: the store takes no links, or no copies.
            break
        written.files[name] = files[previous_name]
        for identity, piece in by_file[previous_name].items():
            del remaining[identity]
            written.pieces.setdefault(identity[0], []).append(replace(piece, file=name))


def _is_file_intact(previous: ReusableCheckpoint, name: str) -> bool:
    """True if the file verifies: damage must not be linked into each checkpoint that follows.

    True for every file of an object store, which keeps its objects intact itself.
    """
    if not isinstance(previous.folder, LocalCheckpointFolder):
        return True
    try:
        with VerifiedSafetensorsFile(previous.folder, name, previous.manifest.files[name]) as file:
            for _ in file.verify_chunks():
                pass
    except CheckpointError:
        return False
    return True


def _write_blocks_to_draft_file(
    draft: Draft,
    file: str,
    blocks: Mapping[_BlockIdentity, BlockToSave],
    written: WrittenPiecesOfRank,
) -> None:
    if not blocks:
        return
    sources = []
    for block in blocks.values():
        sources.append(TensorToWrite(block.key, block.dtype, block.size, block.load))
    stored = draft.write(file, partial(write_safetensors_stream, sources=sources))
    written.files[file] = stored
    written.num_new_bytes += stored.num_bytes
    for identity, block in blocks.items():
        piece = StoredPiece(file, block.key, block.offset, block.size, identity[-1])
        written.pieces.setdefault(block.name, []).append(piece)


def _hash_block_identity(block: BlockToSave) -> _BlockIdentity:
    return (
        block.name,
        block.dtype,
        block.offset,
        block.size,
        # 128 bits: no bytes are compared, so no two blocks may have one digest by chance.
        xxhash.xxh3_128_hexdigest(block.load().data),
    )
