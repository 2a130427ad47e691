"""What a rank says of a collective that it calls, to be compared with what the others say, and the
words for ranks that differ."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phalanx.core.black_box import PostedCollective

NUM_REMEMBERED = 64
# Ranks of one group may give tensors of different shapes, as what each sends to each.
_OPS_OF_ANY_SHAPE = ("all_to_all",)
# Their callers often stand in the two branches of an `if`: the root's, and that of the others.
_OPS_OF_ANY_LINE = ("broadcast", "reduce", "gather", "scatter", "send", "recv")


class CollectiveTag(NamedTuple):
    """A collective as one rank calls it. `sequence` counts within its channel; `step` is 0 for what
    is of none.

    `compared`: what must be the same on all ranks, besides `step`.
    """

    sequence: int
    compared: str
    words: str
    site: str
    step: int

    def describe(self) -> str:
        if self.step:
            return f"{self.words} in step {self.step}"
        return self.words


def build_collective_tag(call: PostedCollective, reduce_op: str, step: int) -> CollectiveTag:
    """The tag of `call`. `step` is the step of training; 0 for what is not of one."""
    is_message = call.tag >= 0
    compared, words, site = _describe_call(
        call.op,
        reduce_op,
        -1 if is_message else call.peer,
        call.dtype,
        tuple(call.shape),
        call.num_tensors,
        call.num_bytes,
        is_message,
        call.site.file,
        call.site.line,
    )
    # What is a send on one side is a receive on the other, and they may be of other steps.
    return CollectiveTag(call.sequence, compared, words, site, 0 if is_message else step)


@functools.lru_cache(maxsize=4096)
def _describe_call(
    op: str,
    reduce_op: str,
    root: int,
    dtype: str,
    shape: tuple[int, ...],
    num_tensors: int,
    num_bytes: int,
    is_message: bool,
    file: str,
    line: int,
) -> tuple[str, str, str]:
    """The fields of a call that are compared, the call in words, and its line: the same in every
    step."""
    name = " ".join(filter(None, (op, reduce_op)))
    compared = ["message" if is_message else name, str(root), dtype]
    if op not in _OPS_OF_ANY_SHAPE:
        compared += ["x".join(map(str, shape)), str(num_tensors), str(num_bytes)]
    site = "an unknown line"
    if file:
        site = f"{file}:{line}"
    if op not in _OPS_OF_ANY_LINE:
        # Of other machines' ranks the file may lie elsewhere.
        compared.append(f"{os.path.basename(file)}:{line}")
    words = f"{name} of {dtype} {list(shape)}"
    if num_tensors > 1:
        words += f" and {num_tensors - 1} more tensors ({num_bytes} B)"
    if root >= 0:
        words += f" with root {root}"
    return "|".join(compared), words, site


@dataclass
class Channel:
    """A sequence of calls that must be the same on `ranks`: the collectives of a group, or the
    messages from one rank to another with one tag.

    `digest` is of all tags so far: equal on two ranks if all of them were. `number` is that of the
    channel on boards.
    """

    key: str
    label: str
    ranks: Sequence[int]
    digest: int = 0
    number: int = 0
    newest: int = 0
    tags: deque[CollectiveTag] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    left_at: dict[str, str] = field(default_factory=dict)
    """What this rank last compared, by key of the store."""

    def add(self, tag: CollectiveTag) -> None:
        text = f"{self.digest}|{tag.step}|{tag.compared}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        self.digest = int.from_bytes(digest, "little")
        self.newest = tag.sequence
        self.tags.append(tag)

    def to_json(self) -> dict[str, Any]:
        return {"newest": self.newest, "tags": [list(tag) for tag in list(self.tags)]}


def read_tags(state: Mapping[str, Any] | None, key: str) -> dict[int, CollectiveTag]:
    """The tags of channel `key` by sequence, of the JSON that a rank has published."""
    if state is None or key not in state["channels"]:
        return {}
    return {each[0]: CollectiveTag(*each) for each in state["channels"][key]["tags"]}


def describe_difference(
    channel: Channel, tags_of: Mapping[int, Mapping[int, CollectiveTag]]
) -> str:
    """The first collective in which ranks of `channel` differ, the odd ranks first; empty where
    the tags that are known (by rank and sequence) do not tell."""
    numbers = sorted({number for tags in tags_of.values() for number in tags})
    for number in numbers:
        known = {rank: tags[number] for rank, tags in tags_of.items() if number in tags}
        groups: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(known):
            groups.setdefault((known[rank].compared, known[rank].step), []).append(rank)
        if len(groups) < 2:
            continue
        # Of two that are equally frequent, that of the lowest rank is taken for right.
        odd_first = sorted(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
        parts = []
        for ranks in odd_first:
            tag = known[ranks[0]]
            verb = "calls" if len(ranks) == 1 else "call"
            parts.append(f"{name_ranks(ranks)} {verb} {tag.describe()} at {tag.site}")
        return f"the ranks differ in #{number} of {channel.label}: {', '.join(parts)}"
    return ""


def describe_absence(
    channel: Channel,
    tag: CollectiveTag,
    absent: Mapping[int, Mapping[str, Any] | None],
    waited_s: float,
) -> str:
    """The ranks that have not come to `tag`, and where they were last; `absent` has the state that
    each has published, None for one that does not answer."""
    present = [rank for rank in channel.ranks if rank not in absent]
    verb = "has" if len(absent) == 1 else "have"
    text = (
        f"{name_ranks(list(absent))} {verb} not come to {tag.describe()}, #{tag.sequence} of"
        f" {channel.label}, for which {name_ranks(present)}"
        f" {'has' if len(present) == 1 else 'have'} waited {waited_s:.0f} s at {tag.site}"
    )
    for rank, state in absent.items():
        text += f"; rank {rank} {_describe_newest(state)}"
    return text


def _describe_newest(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "does not answer"
    if not state["newest"]:
        return "has called no collective"
    tag = CollectiveTag(*state["newest"])
    return f"last called {tag.describe()}, #{tag.sequence} of {state['label']}, at {tag.site}"


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0 and 2", "ranks 0, 1 and 3"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
