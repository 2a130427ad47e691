"""What is measured: models small enough for two CPU ranks, and who trains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.core.errors import UsageError, format_nearest_word_hint

NUM_RANKS = 2
HEAD_DIM = 64


@dataclass(frozen=True)
class Case:
    """One model and batch; the same for every contender.

    `micro_batch_size` in sequences of one rank.
    """

    dim: int
    num_layers: int
    vocab_size: int
    precision: str
    micro_batch_size: int
    num_microbatches: int = 1
    seq_len: int = 256

    @property
    def name(self) -> str:
        return f"{self.dim}x{self.num_layers}-v{self.vocab_size}-{self.precision}"

    @property
    def num_heads(self) -> int:
        return max(1, self.dim // HEAD_DIM)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step over all ranks."""
        return NUM_RANKS * self.num_microbatches * self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "name": self.name,
            "tokens_per_step": self.tokens_per_step,
            "num_ranks": NUM_RANKS,
        }


# (dim, layers, vocabulary, microbatch, microbatches): half a second to two seconds a step on two
# cores. Small batches are the severe test: what is not computation weighs more.
_SIZES = ((256, 6, 4096, 2, 2), (256, 6, 32000, 4, 1), (512, 8, 4096, 2, 1), (512, 8, 32000, 2, 1))
CASES = tuple(
    Case(dim, num_layers, vocab_size, precision, micro_batch_size, num_microbatches)
    for dim, num_layers, vocab_size, micro_batch_size, num_microbatches in _SIZES
    for precision in ("fp32", "bf16")
)
WHOLE_LOGITS_CASE = "256x6-v32000-fp32"

PHALANX, BARE, CEILING = "phalanx", "bare", "ceiling"
NO_SINKS, WHOLE_LOGITS = "phalanx-no-sinks", "bare-whole-logits"
MEANING = {
    PHALANX: "`phalanx train`: supervisor, server, ranks, events and default sinks",
    BARE: "benchmarks/bare_ddp.py under torchrun: DDP by hand, the same model and kernels",
    CEILING: "the same loop, its two ranks never talk",
    NO_SINKS: "`phalanx train` with observe.sinks=[]",
    WHOLE_LOGITS: "the bare loop with F.cross_entropy over all logits at once",
}


@dataclass(frozen=True)
class Row:
    """One measurement to be made."""

    case: Case
    contender: str
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.case.name}/{self.contender}"


def plan_rows(
    cases: Sequence[Case], repeats: int, *, observe: bool = False, only: Sequence[str] = ()
) -> list[Row]:
    """All rows in the order they are measured: contenders of a case side by side, repetitions
    outermost.

    `only` keeps rows whose "case/contender" contains one of these texts; two texts joined by "+"
    must both occur. Raises UsageError for a text that keeps nothing.
    """
    rows = []
    for repeat in range(repeats):
        for case in cases:
            contenders = [PHALANX, BARE, CEILING]
            contenders += [NO_SINKS] if observe else []
            contenders += [WHOLE_LOGITS] if case.name == WHOLE_LOGITS_CASE else []
            rows += [Row(case, contender, repeat) for contender in contenders]
    for text in only:
        if not any(_keeps(text, row) for row in rows):
            names = sorted(
                {part for row in rows for part in (row.name, row.case.name, row.contender)}
            )
            hint = format_nearest_word_hint(text, names) or f"for example {rows[0].name}"
            raise UsageError(f"--only {text}: no row has that in its name", fix=hint)
    return [row for row in rows if not only or any(_keeps(text, row) for text in only)]


def _keeps(text: str, row: Row) -> bool:
    """A contender's name is matched whole: "bare" is not "bare-whole-logits"."""
    return all(
        part == row.contender if part in MEANING else part in row.name for part in text.split("+")
    )
