"""What `phalanx data verify` and `phalanx data stats` print, with a picture of how long documents
are.
"""

from __future__ import annotations

import sys

from phalanx.core.units import format_bytes, format_count, plural
from phalanx.data.stats import DatasetStats, LengthBin
from phalanx.data.verification import DatasetVerification
from phalanx.report.dataset_page import format_number_range, format_quantile

BAR_WIDTH_CELLS = 40
_BAR_EIGHTHS = " ▏▎▍▌▋▊▉"


def print_dataset_verdict(result: DatasetVerification) -> None:
    """Print the verdict; problems were printed when they were stats."""
    if result.problems:
        print(f"damaged {result.directory}: {plural(len(result.problems), 'problem')}")
        return
    shards = f"{plural(result.num_shards, 'shard')}, {format_bytes(result.num_bytes)}"
    print(f"whole   {result.directory}: {shards}, every checksum holds")


def print_dataset_stats(stats: DatasetStats, directory: str) -> None:
    """Print the facts of a dataset, and a histogram in characters that the terminal has."""
    for text in format_dataset_stats(stats, directory, fancy=_can_encode_block_characters()):
        print(text)


def _can_encode_block_characters() -> bool:
    try:
        "█▏".encode(sys.stdout.encoding or "ascii")
    # LookupError: an encoding that Python does not know.
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def format_dataset_stats(stats: DatasetStats, directory: str, *, fancy: bool = True) -> list[str]:
    """The facts of a dataset as lines, with a histogram of how long documents are; without `fancy`
    in ASCII.
    """
    share = 100 * stats.num_tokens_used / stats.vocab_size
    lines = [
        (
            f"dataset {directory}: {plural(stats.num_shards, 'shard')},"
            f" {format_bytes(stats.num_bytes)}"
        ),
        (
            f"        {plural(stats.num_documents, 'document')}, {format_count(stats.num_tokens)}"
            f" tokens ({stats.tokens_per_byte:.3f} per byte of text)"
        ),
        (
            f"        {stats.num_tokens_used:,} of a vocabulary of {stats.vocab_size:,} are used"
            f" ({share:.0f} %)"
        ),
        "",
        f"length of a document in tokens: mean {stats.mean_length:,.0f}",
        "  "
        + "  ".join(
            f"{format_quantile(part)} {length:,}" for part, length in stats.quantiles.items()
        ),
        "",
        *_format_histogram(stats.bins, fancy),
        "",
        "most frequent tokens",
    ]
    for token in stats.frequent:
        # This one is a name of ours, and not a text of the corpus.
        text = token.text if token.text == "(end of document)" else repr(token.text)
        if not fancy:
            text = ascii(token.text)
        lines.append(f"  {token.token:>7}  {100 * token.count / stats.num_tokens:5.2f} %  {text}")
    return lines


def _format_histogram(bins: tuple[LengthBin, ...], fancy: bool) -> list[str]:
    most = max(bin.num_documents for bin in bins)
    labels = [format_number_range(bin.low, bin.high) for bin in bins]
    width = max(map(len, labels))
    lines = []
    for label, bin in zip(labels, bins, strict=True):
        bar = draw_text_bar(bin.num_documents / most, fancy=fancy)
        lines.append(f"  {label:>{width}}  {bar:<{BAR_WIDTH_CELLS}} {bin.num_documents:,}")
    return lines


def draw_text_bar(part: float, *, fancy: bool = True) -> str:
    """A bar as wide as `part` (0 to 1) of BAR_WIDTH_CELLS, to an eighth of a cell; any part above 0
    shows.
    """
    eighths = max(round(part * BAR_WIDTH_CELLS * 8), 1 if part > 0 else 0)
    if not fancy:
        # Rounded up, so that any part above 0 shows here, too.
        return "#" * -(-eighths // 8)
    full_cells, rest = divmod(eighths, 8)
    if not rest:
        return "█" * full_cells
    return "█" * full_cells + _BAR_EIGHTHS[rest]
