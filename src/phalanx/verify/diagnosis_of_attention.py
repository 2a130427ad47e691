"""Explains an attention whose output differs, by which of its tokens do. Torch-free."""

from __future__ import annotations

from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.wrong_tokens import (
    ACROSS,
    ALL_RANKS,
    ALONE,
    CHUNKS,
    DOCUMENTS,
    FULL_WINDOW,
    ITSELF,
    LAST,
    WINDOW,
    TokenEvidence,
)

OTHER_VALUES = (
    "values are those of other tokens or heads, or what heads make is put together in another order"
)
WRONG_VALUES_CAUSE = (
    "the first token of a sequence, which sees itself alone, differs, and so does the last one,"
    f" which sees all: no mask, no position and no merging of blocks makes both so; {OTHER_VALUES}"
)
WRONG_GROUPS_CAUSE = (
    ", as where a head of keys and values serves other queries than the {queries} of its group"
)
GATHERED_VALUES_CAUSE = ", or weights that are gathered are not what ranks hold"
FIRST_ROW_CAUSE = (
    "the first sequence of each microbatch agrees and later ones do not: what it sees is taken for"
    " what all of its microbatch see"
)
HIDDEN_BLOCKS_CAUSE = (
    "; only tokens that see keys of another rank differ: blocks of keys that their mask shows are"
    " left out for them, or masked as for the first"
)
DROPPED_DOCUMENTS_CAUSE = (
    "the mask of documents is dropped: just the tokens differ that would see more without it"
)
SHARED_DOCUMENTS_CAUSE = (
    "the mask of documents is wrong in part: all that differ are of documents behind a row's first"
)
DROPPED_WINDOW_CAUSE = (
    "the window is dropped or longer: just the tokens differ that would see more without it"
)
SHORTER_WINDOW_CAUSE = (
    "the window is shorter: tokens differ that fill it and would see no more without it"
)
WRONG_WINDOW_CAUSE = (
    "the window is dropped, longer or shorter: all that differ see as many tokens as it holds"
)
POSITIONS_CAUSE = "positions begin again on each rank"
MERGING_CAUSE = "blocks of keys are merged without their weights, or with other ones"
OWNERS_CAUSE = (
    "a rank of cp attends otherwise than the whole sequence does, but for the first rank and the"
    " last, which see equal parts of every other rank's keys: so blocks arrive and are merged"
    " rightly, and are masked as the keys of another rank than the one that they are of (the order"
    " of their owners)"
)
CP_BEGIN = "a rank of cp attends otherwise than the whole sequence does: "
BLOCKS_BEGIN = (
    "attention in blocks, as layouts have it, computes something else than attention with one mask:"
    " "
)
MASK_CAUSE = "a mask {does} keys"
LATER_KEYS_CAUSE = (
    "the mask ({masks}) shows tokens others that come later, as where a block of keys gets that of"
    " another one or none"
)
LOST_BLOCKS_CAUSE = (
    "keys of some blocks are left out, have other positions, or are taken for those of other tokens"
)


class AttentionDiagnosis:
    """Explains wrong tokens of an attention whose input agrees."""

    def __init__(self, evidence: TokenEvidence, layout: JudgedLayout) -> None:
        self._evidence, self._layout = evidence, layout

    def explain(self) -> str:
        evidence, layout = self._evidence, self._layout
        if evidence.count_wrong(ALONE) and evidence.count_wrong(LAST):
            cause = WRONG_VALUES_CAUSE
            if layout.queries_per_key > 1:
                cause += WRONG_GROUPS_CAUSE.format(queries=layout.queries_per_key)
            if layout.gathers_weights:
                cause += GATHERED_VALUES_CAUSE
            return cause
        opening = CP_BEGIN if layout.cp > 1 else BLOCKS_BEGIN
        if evidence.is_exactly(DOCUMENTS) and not evidence.is_exactly(ACROSS):
            return opening + DROPPED_DOCUMENTS_CAUSE
        if evidence.is_exactly(WINDOW) and not evidence.is_exactly(ACROSS):
            return opening + DROPPED_WINDOW_CAUSE
        # A mask that shows other documents spares rows by how many they have.
        if evidence.agrees_in_first_rows() and not evidence.are_all_wrong_of(DOCUMENTS):
            words = HIDDEN_BLOCKS_CAUSE if evidence.are_all_wrong_of(ACROSS) else ""
            return opening + FIRST_ROW_CAUSE + words
        if self._is_of_inner_ranks():
            return OWNERS_CAUSE
        return opening + ", or ".join(self._list_possible_mistakes())

    def _is_of_inner_ranks(self) -> bool:
        """True if exactly the ranks of cp differ that see unequal parts of the others' keys."""
        cp, evidence = self._layout.cp, self._evidence
        return (
            cp > 2
            and evidence.wrong_cp_ranks == set(range(1, cp - 1))
            and evidence.count_right(ALL_RANKS) > 0
            and not any(
                evidence.count_right(kind) + evidence.count_wrong(kind)
                for kind in (DOCUMENTS, WINDOW)
            )
        )

    def _describe_masks(self) -> str:
        """Name what of these tokens a mask hides keys for."""
        of_tokens = ["causality"]
        for kind, words in ((DOCUMENTS, "documents"), (WINDOW, "a window")):
            if self._evidence.count_wrong(kind) + self._evidence.count_right(kind):
                of_tokens.append(words)
        *first, last = of_tokens
        return f"of {', '.join(first)} and {last}" if first else f"of {last}"

    def _list_possible_mistakes(self) -> list[str]:
        """The mistakes that these tokens, and no others, can differ by."""
        evidence, causes = self._evidence, list[str]()
        if evidence.count_wrong(ALONE):
            return [LATER_KEYS_CAUSE.format(masks=self._describe_masks()), OTHER_VALUES]
        if evidence.are_all_wrong_of(DOCUMENTS):
            causes.append(SHARED_DOCUMENTS_CAUSE)
        if evidence.are_all_wrong_of(FULL_WINDOW):
            is_shorter = evidence.count_wrong(FULL_WINDOW) > evidence.count_wrong(WINDOW)
            causes.append(SHORTER_WINDOW_CAUSE if is_shorter else WRONG_WINDOW_CAUSE)
        # Each of these spoils all tokens across borders, or those with the most blocks.
        if self._layout.cp > 1:
            if evidence.is_exactly(ACROSS):
                causes.append(POSITIONS_CAUSE)
            if evidence.are_all_wrong_of(CHUNKS) and not evidence.count_right(ALL_RANKS):
                causes.append(MERGING_CAUSE)
        # Whoever sees itself alone has no key to lose, and the last that sees all none to win.
        hides, shows = not evidence.count_wrong(ITSELF), not evidence.count_wrong(LAST)
        does = " or ".join(word for word, may in (("hides", hides), ("shows other", shows)) if may)
        if does:
            causes.append(MASK_CAUSE.format(does=does))
        causes.append(LOST_BLOCKS_CAUSE)
        return causes
