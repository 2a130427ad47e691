"""What of a save lies in the checkpoint before it already: it is linked there, not written again.

Torch-free.

A file is taken over as a whole, if every block in it is still what it was: checkpoints stay flat
and whole by themselves, and none of their bytes belongs to nobody. Blocks that did not change in a
file where others did are written once more, apart from those that change, so that the next save
finds a file it can take over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from phalanx.checkpoint.chunks import StoredFile
from phalanx.checkpoint.folder import Folder, LocalFolder
from phalanx.checkpoint.manifest import Manifest, Piece, read_manifest
from phalanx.checkpoint.shard_file import DTYPES, Bytes, CheckedFile, Source, write_stream
from phalanx.checkpoint.stores.protocol import Draft
from phalanx.core.errors import CheckpointError

APART_BYTES = 1 << 20  # unchanged blocks of fewer bytes together are written with the others
SMALL_BYTES = (
    1 << 16
)  # so are smaller ones: when one of them changes, what lies in a file with it is written again
MAX_TAKEN_OVER = 32  # files of one rank; what is in the smaller ones is written into one


@dataclass(frozen=True)
class Block:
    """A block of a tensor that this rank has to save.

    `load` gives its bytes in C order, each time the same.
    """

    name: str
    key: str
    dtype: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    load: Callable[[], Bytes] = field(compare=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * DTYPES[self.dtype][1]


_Identity = tuple[
    str, str, tuple[int, ...], tuple[int, ...], str
]  # name, dtype, offset, size, digest


@dataclass(frozen=True)
class Earlier:
    """The checkpoint before."""

    folder: Folder
    manifest: Manifest

    def pieces(self) -> dict[str, dict[_Identity, Piece]]:
        """By file: what is in it.

        Files whose blocks have no digest, or that are not as long as they were, are not.
        """
        there = self.folder.sizes()
        found: dict[str, dict[_Identity, Piece]] = {
            name: {}
            for name, stored in self.manifest.files.items()
            if there.get(name) == stored.num_bytes
        }
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                if not piece.xxh3_128:
                    found.pop(piece.file, None)
                if piece.file in found:
                    identity = (name, tensor.dtype, piece.offset, piece.size, piece.xxh3_128)
                    found[piece.file][identity] = piece
        return found


def earlier_checkpoint(folder: Folder) -> Earlier | None:
    """None if it cannot be read: then everything is written."""
    try:
        return Earlier(folder, read_manifest(folder))
    except (CheckpointError, OSError):
        return None


@dataclass
class Written:
    """A rank's part of a checkpoint: pieces by tensor, its files, and how many of their bytes
    are new."""

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    num_new_bytes: int = 0


def write_blocks(
    draft: Draft, stem: str, blocks: Iterable[Block], earlier: Earlier | None
) -> Written:
    """Bring `blocks` into the draft, in files whose names begin with `stem`.

    Raises OSError, CheckpointError.
    """
    left = {_identity(block): block for block in blocks}
    written = Written()
    unchanged: set[_Identity] = set()
    if earlier is not None:
        by_file = earlier.pieces()
        unchanged = {identity for pieces in by_file.values() for identity in pieces} & set(left)
        _take_over(draft, stem, earlier, by_file, left, written)
    apart = {
        i: block for i, block in left.items() if i in unchanged and block.num_bytes >= SMALL_BYTES
    }
    if sum(block.num_bytes for block in apart.values()) < APART_BYTES:
        apart = {}
    others = {identity: block for identity, block in left.items() if identity not in apart}
    _write(draft, f"{stem}.safetensors", others, written)
    _write(draft, f"{stem}-kept-{len(written.files)}.safetensors", apart, written)
    return written


def _take_over(
    draft: Draft,
    stem: str,
    earlier: Earlier,
    by_file: Mapping[str, Mapping[_Identity, Piece]],
    left: dict[_Identity, Block],
    written: Written,
) -> None:
    """Take over the files all of whose blocks are among those `left`, which they leave.

    Blocks without elements are alike wherever they are, so several files may hold the same one.
    """
    files = earlier.manifest.files
    whole = [
        name
        for name, pieces in by_file.items()
        if pieces and all(identity in left for identity in pieces)
    ]
    whole.sort(key=lambda name: (-files[name].num_bytes, name))
    for number, earlier_name in enumerate(whole[:MAX_TAKEN_OVER]):
        name = f"{stem}-kept-{number}.safetensors"
        if any(identity not in left for identity in by_file[earlier_name]):
            # taken over with a file before it; what else is in this one is written, apart from that
            continue
        if not _is_whole(earlier, earlier_name):
            continue  # its bytes are no longer those that were written: they are, now, from memory
        if not draft.reuse(name, earlier.folder, earlier_name):
            break  # nor will the next
        written.files[name] = files[earlier_name]
        for identity, piece in by_file[earlier_name].items():
            del left[identity]
            written.pieces.setdefault(identity[0], []).append(replace(piece, file=name))


def _is_whole(earlier: Earlier, name: str) -> bool:
    """Damage must not be linked into each checkpoint that follows.

    What a store holds is the store's to keep whole.
    """
    if not isinstance(earlier.folder, LocalFolder):
        return True
    try:
        with CheckedFile(earlier.folder, name, earlier.manifest.files[name]) as file:
            for _ in file.verify():
                pass
    except CheckpointError:
        return False
    return True


def _write(draft: Draft, file: str, blocks: Mapping[_Identity, Block], written: Written) -> None:
    if not blocks:
        return
    sources = [Source(block.key, block.dtype, block.size, block.load) for block in blocks.values()]
    stored = draft.write(file, partial(write_stream, sources=sources))
    written.files[file] = stored
    written.num_new_bytes += stored.num_bytes
    for identity, block in blocks.items():
        piece = Piece(file, block.key, block.offset, block.size, identity[-1])
        written.pieces.setdefault(block.name, []).append(piece)


def _identity(block: Block) -> _Identity:
    return (
        block.name,
        block.dtype,
        block.offset,
        block.size,
        xxhash.xxh3_128_hexdigest(block.load()),
    )
