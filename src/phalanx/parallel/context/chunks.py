"""Which tokens of a sequence each rank of cp has, and which of them see which.

A sequence is cut into equal chunks. With "zigzag" rank r of c has the chunks r and 2c-1-r: an early
one, which sees little, and a late one, which sees much, so that every rank has the same work under
a causal mask. With "none" it has the r-th of c.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from phalanx.core.errors import LayoutError
from phalanx.job.nearest import format_nearest_multiples

# Index tensors are kept: a training meets one length or two, a sample of text some more.
MAX_CACHED_POSITION_TENSORS = 32


@dataclass(frozen=True)
class VisibleChunkRectangle:
    """A product of some queries with some keys, in chunks of each rank's.

    `is_causal`: of one rank with itself.
    """

    first_query: int
    last_query: int  # exclusive
    first_key: int
    last_key: int  # exclusive
    is_causal: bool = False

    def query_token_slice(self, chunk_tokens: int) -> slice:
        return slice(self.first_query * chunk_tokens, self.last_query * chunk_tokens)

    def key_token_slice(self, chunk_tokens: int) -> slice:
        return slice(self.first_key * chunk_tokens, self.last_key * chunk_tokens)


@dataclass(frozen=True)
class SequenceChunksOfRanks:
    """The chunks of `size` ranks."""

    size: int
    balance: str = "zigzag"

    @property
    def chunks_per_rank(self) -> int:
        if self.balance == "zigzag":
            return 2
        return 1

    @property
    def num_chunks(self) -> int:
        return self.size * self.chunks_per_rank

    def list_chunks_of_rank(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks, ascending."""
        if self.balance == "zigzag":
            return (rank, 2 * self.size - 1 - rank)
        return (rank,)

    @property
    def is_in_sequence_order(self) -> bool:
        """True if the tokens of rank 0, rank 1, ... follow each other in the sequence."""
        return self.balance != "zigzag"

    @property
    def rank_of_last_token(self) -> int:
        """The rank that has the last token, as its last one."""
        if self.balance == "zigzag":
            return 0
        return self.size - 1

    def positions_of_rank_tokens(
        self, rank: int, num_tokens: int, device: torch.device | None = None
    ) -> torch.Tensor:
        """[num_tokens / size]: where in the sequence a rank's tokens stand.

        The tensor is made on `device` and kept for the next call: every layer of every step asks
        again. Raises LayoutError if the chunks would not be equally long.
        """
        return _compute_cached_positions_of_rank_tokens(
            self, rank, num_tokens, device or torch.device("cpu")
        )

    def positions_in_rank_order(
        self, num_tokens: int, device: torch.device | None = None
    ) -> torch.Tensor:
        """[num_tokens]: where in the sequence the tokens of rank 0, rank 1, ... stand; kept, as
        `positions_of_rank_tokens`."""
        return _compute_cached_rank_order(self, num_tokens, device or torch.device("cpu"))[0]

    def indices_from_rank_order_to_sequence(
        self, num_tokens: int, device: torch.device | None = None
    ) -> torch.Tensor:
        """[num_tokens]: where among the tokens of rank 0, rank 1, ... those of the sequence
        stand, in its order."""
        return _compute_cached_rank_order(self, num_tokens, device or torch.device("cpu"))[1]

    def _compute_positions_of_rank_tokens(
        self, rank: int, num_tokens: int, device: torch.device
    ) -> torch.Tensor:
        if num_tokens % self.num_chunks:
            raise LayoutError(
                f"sequences of {num_tokens} tokens cannot be cut into {self.num_chunks} equal"
                f" chunks for cp={self.size}",
                fix=f"nearest: {format_nearest_multiples(num_tokens, self.num_chunks)} tokens",
            )
        length = num_tokens // self.num_chunks
        chunks = self.list_chunks_of_rank(rank)
        return torch.cat(
            [torch.arange(c * length, (c + 1) * length, device=device) for c in chunks]
        )

    def find_visible_rectangle(
        self, query_rank: int, key_rank: int, num_tokens: int, window: int = 0
    ) -> VisibleChunkRectangle | None:
        """The smallest rectangle of chunks, of one rank's queries and another's keys, that
        causality and window do not mask; None if they mask all.

        A window masks parts of it; causality alone none, but that of a rank with itself, which is
        causal as it lies.
        """
        length = num_tokens // self.num_chunks

        def sees_key_chunk(query: int, key: int) -> bool:
            # The distance from the first query back to the last key.
            nearest = max(0, (query - key - 1) * length + 1)
            return key <= query and not 0 < window <= nearest

        pairs = []
        for at, query in enumerate(self.list_chunks_of_rank(query_rank)):
            for to, key in enumerate(self.list_chunks_of_rank(key_rank)):
                if sees_key_chunk(query, key):
                    pairs.append((at, to))
        if not pairs:
            return None
        queries, keys = [at for at, _ in pairs], [to for _, to in pairs]
        hull = (min(queries), max(queries) + 1, min(keys), max(keys) + 1)
        return VisibleChunkRectangle(*hull, is_causal=query_rank == key_rank)


@functools.lru_cache(maxsize=MAX_CACHED_POSITION_TENSORS)
def _compute_cached_positions_of_rank_tokens(
    chunks: SequenceChunksOfRanks, rank: int, num_tokens: int, device: torch.device
) -> torch.Tensor:
    # A backward of later steps may keep the tensor, and would refuse one of inference mode.
    with torch.inference_mode(False):
        return chunks._compute_positions_of_rank_tokens(rank, num_tokens, device)


@functools.lru_cache(maxsize=MAX_CACHED_POSITION_TENSORS)
def _compute_cached_rank_order(
    chunks: SequenceChunksOfRanks, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        order = torch.cat(
            [
                chunks.positions_of_rank_tokens(rank, num_tokens, device)
                for rank in range(chunks.size)
            ]
        )
        return order, order.argsort()
