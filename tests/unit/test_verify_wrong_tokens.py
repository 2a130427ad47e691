"""What is said of an attention that differs, by which of its tokens do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from phalanx.verify.diagnosis_of_attention import AttentionDiagnosis
from phalanx.verify.diagnosis_of_stages import OTHER_MASKS_CAUSE, StageDiagnosis
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
    SequenceView,
    TokenEvidence,
    WrongTokens,
)

LENGTH, CP = 16, 4
OWNERS = tuple(rank for rank in (0, 1, 2, 3, 3, 2, 1, 0) for _ in range(2))
ONE_DOCUMENT, TWO_DOCUMENTS = (0,) * LENGTH, (0,) * 5 + (5,) * 11
Differs = Callable[[int, int], bool]
"""Whether a token differs, of (row, token)."""


def _sort_tokens(
    differs: Differs,
    *,
    cp: int = CP,
    window: int = 0,
    documents: Sequence[Sequence[int]] = (ONE_DOCUMENT,) * 4,
    rows_of_forward: int = 2,
    has_right_input: bool = True,
) -> TokenEvidence:
    """The evidence of `cp` ranks that have these rows, in forwards of a few rows each."""
    owners = OWNERS if cp > 1 else (0,) * LENGTH
    bodies = []
    for rank in range(cp):
        part = WrongTokens(3, cp_rank=rank, has_right_input=has_right_input)
        for row, begins in enumerate(documents):
            own = [token for token in range(LENGTH) if owners[token] == rank]
            view = SequenceView(owners, begins, window)
            first_row = row - row % rows_of_forward
            part.add_row(first_row, row, view, [(t, differs(row, t)) for t in own])
        bodies.append(part.to_json())
    evidence = TokenEvidence.from_json([None, *bodies])
    assert evidence is not None
    return evidence


def _explain(evidence: TokenEvidence, **layout: Any) -> str:
    return AttentionDiagnosis(evidence, JudgedLayout(1, **{"cp": CP} | layout)).explain()


def test_what_a_token_is_to_see() -> None:
    view = SequenceView(OWNERS, TWO_DOCUMENTS, window=4)
    assert view.list_kinds(0) == [ALONE, ITSELF]
    assert view.list_kinds(3) == [FULL_WINDOW, ACROSS, CHUNKS]
    assert view.list_kinds(4) == [WINDOW, FULL_WINDOW, ACROSS, CHUNKS]
    assert view.list_kinds(5) == [ITSELF, DOCUMENTS]
    assert view.list_kinds(15) == [WINDOW, FULL_WINDOW, ACROSS, CHUNKS]
    assert SequenceView(OWNERS, ONE_DOCUMENT).list_kinds(15) == [LAST, ACROSS, CHUNKS, ALL_RANKS]
    assert SequenceView(OWNERS, ONE_DOCUMENT, 2).list_kinds(8) == [WINDOW, FULL_WINDOW, CHUNKS]
    # The border between both halves of the last rank's tokens is none.
    assert ALL_RANKS not in SequenceView(OWNERS, TWO_DOCUMENTS).list_kinds(9)
    assert TokenEvidence.from_json([None, None]) is None


def test_a_token_that_sees_itself_alone_differs_by_no_mask() -> None:
    everything = _sort_tokens(lambda row, token: True)
    cause = _explain(everything, queries_per_key=2)
    assert "values are those of other tokens or heads" in cause
    assert "serves other queries than the 2 of its group" in cause
    assert "group" not in _explain(everything)
    assert "weights that are gathered" in _explain(everything, gathers_weights=True)
    # Without a token that sees all, one that sees too much is possible.
    cause = _explain(_sort_tokens(lambda row, token: token == 0))
    assert "the mask (of causality) shows tokens others that come later" in cause
    assert "or values are those" in cause
    assert "merged" not in cause
    assert "hides" not in cause


def test_a_mask_that_shows_later_tokens_is_told_with_what_it_is_of() -> None:
    rows = (TWO_DOCUMENTS, ONE_DOCUMENT) * 2
    for documents, window, masks in (
        (rows, 0, "(of causality and documents)"),
        ((ONE_DOCUMENT,) * 4, 4, "(of causality and a window)"),
        (rows, 4, "(of causality, documents and a window)"),
    ):
        first = _sort_tokens(lambda row, token: token == 0, documents=documents, window=window)
        assert f"the mask {masks} shows tokens others that come later" in _explain(first)


def test_keys_of_another_owner_are_told_by_the_ranks_that_agree() -> None:
    inner = _sort_tokens(lambda row, token: OWNERS[token] in (1, 2) and token > 1)
    assert "masked as the keys of another rank" in _explain(inner)
    outer = _sort_tokens(lambda row, token: OWNERS[token] in (0, 2) and token > 1)
    assert "masked as the keys of another rank" not in _explain(outer)


def test_a_dropped_mask_makes_just_its_tokens_differ() -> None:
    rows = (TWO_DOCUMENTS, ONE_DOCUMENT) * 2
    dropped = _sort_tokens(lambda row, token: row % 2 == 0 and token >= 5, documents=rows)
    cause = _explain(dropped)
    assert cause.endswith("the mask of documents is dropped: just the tokens differ that would see"
                          " more without it")  # fmt: skip
    in_part = _sort_tokens(lambda row, token: row % 2 == 0 and token > 7, documents=rows)
    assert "wrong in part" in _explain(in_part)
    assert "is dropped" not in _explain(in_part)


def test_a_window_that_is_dropped_is_told_from_a_shorter_one() -> None:
    for cp in (1, CP):
        longer = _sort_tokens(lambda row, token: token >= 4, window=4, cp=cp)
        assert "the window is dropped or longer" in _explain(longer, cp=cp)
        shorter = _sort_tokens(lambda row, token: token >= 3, window=4, cp=cp)
        cause = _explain(shorter, cp=cp)
        assert "the window is shorter" in cause
        assert "dropped" not in cause
        assert "documents" not in cause
        assert ("a rank of cp attends otherwise" in cause) == (cp > 1)
        for_some = _sort_tokens(lambda row, token: token >= 7, window=4, cp=cp)
        assert "the window is dropped, longer or shorter" in _explain(for_some, cp=cp)


def test_a_token_of_all_ranks_that_agrees_rules_out_positions_and_merging() -> None:
    across = _explain(_sort_tokens(lambda row, token: token > 1))
    assert "positions begin again on each rank" in across
    assert "merged" in across
    later = _explain(_sort_tokens(lambda row, token: token > 3))
    assert "positions begin again" not in later
    assert "merged" in later
    assert "merged" not in _explain(_sort_tokens(lambda row, token: 3 < token < 12))


def test_a_first_sequence_that_alone_agrees_is_told() -> None:
    rows = (TWO_DOCUMENTS, ONE_DOCUMENT) * 2
    hidden = _sort_tokens(lambda row, token: row % 2 == 1 and token > 5, documents=rows)
    cause = _explain(hidden)
    assert "the first sequence of each microbatch agrees" in cause
    assert "blocks of keys that their mask shows are left out" in cause
    assert "dropped" not in cause
    # Nothing is to be hidden in first rows of one document, so that they agree says nothing.
    plain = _sort_tokens(lambda row, token: row % 2 == 1 and token > 5)
    assert "first sequence" not in _explain(plain)


def test_a_stage_that_keeps_the_first_masks_is_told_by_documents() -> None:
    rows = (TWO_DOCUMENTS, ONE_DOCUMENT, ONE_DOCUMENT, ONE_DOCUMENT, TWO_DOCUMENTS, ONE_DOCUMENT)
    kept = _sort_tokens(lambda row, token: row == 2 and token > 5, cp=1, documents=rows)
    assert kept.has_documents_of_first_forward()
    for wrong_row in (0, 4):
        other = _sort_tokens(lambda row, _, wrong=wrong_row: row == wrong, cp=1, documents=rows)
        assert not other.has_documents_of_first_forward()


@pytest.mark.parametrize(("has_right_input", "first_wrong"), [(True, 0), (True, 3), (False, 3)])
def test_a_stage_with_right_hidden_states_has_none_of_another_microbatch(
    has_right_input: bool, first_wrong: int
) -> None:
    evidence = _sort_tokens(
        lambda row, token: token >= first_wrong, cp=1, has_right_input=has_right_input
    )
    causes = StageDiagnosis.list_causes_of_wrong_attention(evidence)
    if not has_right_input:
        assert "hidden states of another microbatch" in causes[0]
    else:
        assert causes == ([OTHER_MASKS_CAUSE] if first_wrong else [])
