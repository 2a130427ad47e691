"""Where a long text can be cut so that its parts have the tokens of the whole. Torch-free.

Tokenizers split text at places that depend on a few characters around them, and never join across.
So a place at a line's end is good if the text around it gives the same tokens in one go as in two.
A tokenizer for which no place is good (one that marks the beginning of a text, say) gets its
documents whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from phalanx.core.errors import DataError
from phalanx.core.units import MIB
from phalanx.data.tokenizer import Tokenizer, replace_surrogates

TARGET_PIECE_CHARS = MIB // 4
# A line of JSONL, or a cell of Parquet and Arrow, is held in memory several times.
MAX_ROW_BYTES = 64 * MIB
# Encoding takes about a hundred bytes of memory for each token.
MAX_UNCUT_CHARS = 64 * MIB

_CONTEXT_CHARS = 256
_MAX_SPACE_CHARS = 32  # a longer run of white space may be split by what lies outside the context
_SEARCH_WINDOW_BYTES = 1 << 16
# A character has four bytes of UTF-8 at most.
_CONTEXT_MARGIN_BYTES = 4 * _CONTEXT_CHARS + 4 * _MAX_SPACE_CHARS
_CUT_TEST_TEXTS = (("One line of text", "\nanother line"), ("One line of text\n", "another line"))


class TokenSafeTextCutter:
    """Cuts texts where `same(before, after)`: the two have the tokens of both together.

    With `anywhere` (a token is a byte) files are cut at any byte.
    """

    def __init__(self, same: Callable[[str, str], bool], *, anywhere: bool = False) -> None:
        self._same, self._anywhere = same, anywhere
        # Tokenizers that mark where a text begins fail both: no place in any text is searched then.
        self.can_cut = anywhere or any(same(*probe) for probe in _CUT_TEST_TEXTS)

    def is_cut_token_safe(self, text: str, at: int) -> bool:
        """True if `text` has the same tokens when it is cut at `at`."""
        before, after = text[max(0, at - _CONTEXT_CHARS) : at], text[at : at + _CONTEXT_CHARS]
        return self._same(replace_surrogates(before), replace_surrogates(after))

    def find_token_safe_cut(self, text: str, start: int) -> int | None:
        """The first good place at or after `start`, or None in this text."""
        at = text.find("\n", start)
        while at >= 0:
            for position in _list_cut_offsets(text, at):
                if position >= start and self.is_cut_token_safe(text, position):
                    return position
            at = text.find("\n", at + 1)
        return None

    def find_token_safe_cut_in_file(self, file: BinaryIO, offset: int, num_bytes: int) -> int:
        """Offset of the first good place at or after byte `offset` of a file is; its end if there
        is none.

        The same for everyone who asks for the same offset, and never smaller for a larger one.
        """
        if offset <= 0 or self._anywhere:
            return max(0, min(offset, num_bytes))
        while self.can_cut and offset < num_bytes:
            window_start = max(0, offset - _CONTEXT_MARGIN_BYTES)
            file.seek(window_start)
            data = file.read(offset - window_start + _SEARCH_WINDOW_BYTES + _CONTEXT_MARGIN_BYTES)
            until = offset + _SEARCH_WINDOW_BYTES
            # One letter for each odd byte, so that places can be told.
            text = data.decode("utf-8", "surrogateescape")
            start = len(data[: offset - window_start].decode("utf-8", "surrogateescape"))
            cut = self.find_token_safe_cut(text, start)
            if cut is not None:
                at = window_start + len(text[:cut].encode("utf-8", "surrogateescape"))
                # A place in the margin is judged in the next window, which sees what follows it.
                if at < until or window_start + len(data) >= num_bytes:
                    return at
            offset = until
        return num_bytes

    def cut_into_pieces(self, text: str, where: str) -> Iterator[str]:
        """`text` in parts of about TARGET_PIECE_CHARS. DataError if it is huge and cannot be
        cut."""
        start = 0
        while len(text) - start > 2 * TARGET_PIECE_CHARS and self.can_cut:
            cut = self.find_token_safe_cut(text, start + TARGET_PIECE_CHARS)
            if cut is None:
                break
            yield text[start:cut]
            start = cut
        rest = text[start:]
        if len(rest) > MAX_UNCUT_CHARS:
            raise text_too_long_error(len(rest), where)
        yield rest


def build_text_cutter(tokenizer: Tokenizer) -> TokenSafeTextCutter:
    """Cuts that keep the tokens of one tokenizer."""

    def same(before: str, after: str) -> bool:
        together, *parts = tokenizer.encode_batch([before + after, before, after])
        return list(together) == [*parts[0], *parts[1]]

    return TokenSafeTextCutter(same, anywhere=tokenizer.kind == "bytes")


def row_too_long_error(where: str, summary: str) -> DataError:
    fix = "cut the text into several rows, or give it as a text file"
    return DataError(summary, where=where, why="a row is read whole, and is one document", fix=fix)


def text_too_long_error(num_chars: int, where: str) -> DataError:
    return DataError(
        f"{num_chars // MIB} million characters in one piece",
        where=where,
        why=(
            "the tokenizer gives other tokens wherever the text is cut at a line's end, and this is"
            " too long to encode"
        ),
        fix="divide it into documents: files, or rows of JSONL",
    )


def _list_cut_offsets(text: str, line_end: int) -> Iterator[int]:
    """Behind a line's end, and before the white space it stands in, if that is short."""
    start, end = line_end, line_end + 1
    while start > 0 and text[start - 1].isspace() and end - start < _MAX_SPACE_CHARS:
        start -= 1
    while end < len(text) and text[end].isspace() and end - start < _MAX_SPACE_CHARS:
        end += 1
    if start > 0 and end < len(text) and end - start < _MAX_SPACE_CHARS:
        yield line_end + 1
        yield start
