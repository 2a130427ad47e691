"""Which tokens of an attention's output differ, sorted by what each of them is to see: that says
which mistakes of masks, positions and blocks can have made them differ, and which cannot.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

ALONE, LAST, ITSELF = "alone", "last", "itself"
DOCUMENTS, WINDOW, FULL_WINDOW = "documents", "window", "full window"
ACROSS, CHUNKS, ALL_RANKS = "across", "chunks", "all ranks"
KINDS = {
    ALONE: "the first of a sequence",
    LAST: "the last of a sequence, where it sees all others",
    ITSELF: "sees itself alone",
    DOCUMENTS: "would see more without a mask of documents",
    WINDOW: "would see more without a window",
    FULL_WINDOW: "sees as many tokens as a window holds",
    ACROSS: "sees tokens from across a border of what a rank of cp has",
    CHUNKS: "sees tokens of several chunks that ranks of cp have, which may be one rank's two",
    ALL_RANKS: "sees tokens of each rank of cp",
}


@dataclass(frozen=True)
class SequenceView:
    """What tokens of a causal sequence see: `owners` says which rank of cp has each token,
    `begins` where the document of each token begins; a `window` of 0 is none."""

    owners: Sequence[int]
    begins: Sequence[int]
    window: int = 0

    def list_kinds(self, token: int) -> list[str]:
        """The KINDS that a token is of."""
        document_begin, owners = self.begins[token], self.owners
        reach = token - self.window + 1 if self.window else 0
        first = max(document_begin, reach)
        seen_owners = set(self._owner_of_run[self._run_of[first] : self._run_of[token] + 1])
        is_cut = len(self._owner_of_run) > 1
        is_of_kind = {
            ALONE: token == 0,
            LAST: token + 1 == len(owners) and first == 0,
            ITSELF: first == token,
            DOCUMENTS: max(reach, 0) < document_begin,
            WINDOW: reach > document_begin,
            FULL_WINDOW: self.window > 0 and reach >= document_begin,
            ACROSS: len(seen_owners) > 1,
            CHUNKS: len(seen_owners) > 1 or (is_cut and first < len(owners) // 2 <= token),
            ALL_RANKS: len(seen_owners) == len(set(self._owner_of_run)) > 1,
        }
        return [kind for kind, is_it in is_of_kind.items() if is_it]

    @cached_property
    def _run_of(self) -> list[int]:
        """For each token the number of the run of tokens of one rank that it is of."""
        runs, run = [], 0
        for token, owner in enumerate(self.owners):
            run += token > 0 and owner != self.owners[token - 1]
            runs.append(run)
        return runs

    @cached_property
    def _owner_of_run(self) -> list[int]:
        return list(dict(zip(self._run_of, self.owners, strict=True)).values())


@dataclass
class WrongTokens:
    """The tokens of one output on a rank, or on all: kind -> how many of it differ and how many
    agree.

    `rows`: "FIRST/ROW", the first row of a forward and the row -> how many of its tokens differ,
    and how many would see more without a mask of documents. `has_right_input`: what this rank had
    made of its tokens before was compared, and agrees.
    """

    place: int
    counts: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict)
    """Of the same rows, where their documents begin."""
    total: list[int] = field(default_factory=lambda: [0, 0])
    cp_rank: int = 0
    has_right_input: bool = False

    def add_row(
        self, first_row: int, row: int, view: SequenceView, is_wrong: Iterable[tuple[int, bool]]
    ) -> None:
        """Count a row of the batch, of a forward that begins with `first_row`: (token, whether it
        differs)."""
        key = f"{first_row}/{row}"
        self.documents[key] = ",".join(map(str, sorted(set(view.begins))))
        counted = self.rows.setdefault(key, [0, 0])
        for token, wrong in is_wrong:
            kinds = view.list_kinds(token)
            counted[0] += wrong
            counted[1] += DOCUMENTS in kinds
            self.total[not wrong] += 1
            for kind in kinds:
                self.counts.setdefault(kind, [0, 0])[not wrong] += 1

    def has_documents_of_first_forward(self) -> bool:
        """True if the first forward agrees, and of the later ones those whose rows have the same
        documents, and no others."""
        wrong_of, documents_of = dict[int, int](), dict[int, list[str]]()
        for key, documents in self.documents.items():
            first = int(key.partition("/")[0])
            wrong_of[first] = wrong_of.get(first, 0) + self.rows[key][0]
            documents_of.setdefault(first, []).append(documents)
        first = min(wrong_of, default=0)
        return len(wrong_of) > 1 and all(
            (wrong > 0) == (documents_of[forward] != documents_of[first])
            for forward, wrong in wrong_of.items()
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class TokenEvidence:
    """What all ranks together say of an output's wrong tokens."""

    def __init__(self, of_ranks: Sequence[WrongTokens]) -> None:
        self._of_ranks = of_ranks
        self.total = [sum(part.total[index] for part in of_ranks) for index in (0, 1)]

    @classmethod
    def from_json(cls, bodies: Iterable[Mapping[str, Any] | None]) -> TokenEvidence | None:
        """None where no rank knows what tokens are to see."""
        parts = [WrongTokens(**body) for body in bodies if body is not None]
        return cls(parts) if any(part.total[0] for part in parts) else None

    def count_wrong(self, kind: str) -> int:
        return sum(part.counts.get(kind, (0, 0))[0] for part in self._of_ranks)

    def count_right(self, kind: str) -> int:
        return sum(part.counts.get(kind, (0, 0))[1] for part in self._of_ranks)

    def are_all_wrong_of(self, kind: str) -> bool:
        return self.count_wrong(kind) == self.total[0]

    def is_exactly(self, kind: str) -> bool:
        """True if the tokens of a kind differ and no others."""
        return self.are_all_wrong_of(kind) and not self.count_right(kind)

    @property
    def has_right_input(self) -> bool:
        """True if the ranks on which tokens differ had the right ones before."""
        return all(part.has_right_input for part in self._of_ranks if part.total[0])

    @property
    def wrong_cp_ranks(self) -> set[int]:
        return {part.cp_rank for part in self._of_ranks if part.total[0]}

    def agrees_in_first_rows(self) -> bool:
        """True if of several forwards the first row agrees though it has several documents, and a
        later one differs."""
        firsts, later = list[list[int]](), set[int]()
        for (first, row), counted in self._sum_rows().items():
            if row == first:
                firsts.append(counted)
            elif counted[0]:
                later.add(first)
        has_documents = sum(masked > 0 for _, masked in firsts) > 1
        return has_documents and len(later) > 1 and not any(wrong for wrong, _ in firsts)

    def has_documents_of_first_forward(self) -> bool:
        """True if on each rank with wrong tokens the first forward agrees, and those alone of the
        later ones whose rows have the same documents."""
        return all(
            part.has_documents_of_first_forward() for part in self._of_ranks if part.total[0]
        )

    def _sum_rows(self) -> dict[tuple[int, int], list[int]]:
        """(First row of a forward, row) -> its two numbers, of all ranks' tokens."""
        sums: dict[tuple[int, int], list[int]] = {}
        for part in self._of_ranks:
            for key, counted in part.rows.items():
                first, _, row = key.partition("/")
                before = sums.get((int(first), int(row)), [0, 0])
                sums[int(first), int(row)] = [a + b for a, b in zip(before, counted, strict=True)]
        return sums
