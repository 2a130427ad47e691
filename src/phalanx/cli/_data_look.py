"""`phalanx data verify | stats | ledger`: whether a dataset is what was written, what is in it, what was read of it."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.cli._json import print_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import DataError, ExitCode
from phalanx.core.files import resource_error, write_bytes_atomic
from phalanx.core.units import format_bytes, format_count, plural
from phalanx.data.dataset import open_dataset, read_manifest, verify_dataset
from phalanx.data.stats import DatasetStats, LengthBin, measure
from phalanx.report.dataset_page import part_words, range_words, render

BAR_CELLS = 40
_EIGHTHS = " ▏▎▍▌▋▊▉"


def verify(directory: str, as_json: bool) -> int:
    """The verb. Every problem on a line of its own; exit code 4 if there is one, 7 if the disk cannot be read."""
    problems: list[DataError] = []
    num_shards, num_bytes, read_bytes = 0, 0, 0
    try:
        manifest, _ = read_manifest(Path(directory))
        num_shards, num_bytes = len(manifest.shards), sum(shard.num_bytes for shard in manifest.shards)
    except DataError:
        pass  # said below
    with ProgressLine("verifying") as line:

        def show(more: int) -> None:
            nonlocal read_bytes
            read_bytes += more
            line.update(read_bytes, num_bytes, said=plural(len(problems), "problem") if problems else "")

        for problem in verify_dataset(Path(directory), show):
            problems.append(problem)
            if not as_json:
                print(f"phalanx: {problem}", file=sys.stderr)
    code = max((problem.exit_code for problem in problems), default=ExitCode.OK)  # 7: the rest is not known to be so
    if as_json:
        facts = {"directory": directory, "num_shards": num_shards, "num_bytes": num_bytes}
        print_json("data-verify", {**facts, "problems": [problem.to_json() for problem in problems]}, indent=1)
    elif problems:
        print(f"damaged {directory}: {plural(len(problems), 'problem')}")
    else:
        print(f"whole   {directory}: {plural(num_shards, 'shard')}, {format_bytes(num_bytes)}, every checksum holds")
    return code


def stats(directory: str, page: str | None, as_json: bool) -> int:
    """The verb."""
    dataset = open_dataset(Path(directory))
    total, read_bytes = dataset.num_tokens * int(dataset.dtype[-1]), 0
    with ProgressLine("reading") as line:

        def show(more: int) -> None:
            nonlocal read_bytes
            read_bytes += more
            line.update(read_bytes, total)

        found = measure(dataset, show)
    if page is not None:
        try:
            write_bytes_atomic(Path(page), render(dataset, found).encode())
        except OSError as error:
            raise resource_error(error, "writing the page", page, place="--page") from None
    if as_json:
        print_json("data-stats", {"directory": directory, "digest": dataset.digest, **found.to_json()}, indent=1)
        return ExitCode.OK
    for text in describe_stats(found, directory, fancy=_can_draw()):
        print(text)
    if page is not None:
        print(f"\npage    {page}")
    return ExitCode.OK


def ledger(run: str, as_json: bool) -> int:
    """The verb."""
    from phalanx.data.ledger import check_ledger

    report = check_ledger(Path(run))
    if as_json:
        print_json("data-ledger", report.to_json(), indent=1)
    else:
        print("\n".join(report.lines()))
    return ExitCode.OK if report.ok else ExitCode.VERIFICATION


def _can_draw() -> bool:
    try:
        "█▏".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def describe_stats(found: DatasetStats, directory: str, *, fancy: bool = True) -> list[str]:
    """The facts as lines, with a picture of how long documents are."""
    share = 100 * found.num_tokens_used / found.vocab_size
    lines = [
        f"dataset {directory}: {plural(found.num_shards, 'shard')}, {format_bytes(found.num_bytes)}",
        f"        {plural(found.num_documents, 'document')}, {format_count(found.num_tokens)} tokens"
        f" ({found.tokens_per_byte:.3f} per byte of text)",
        f"        {found.num_tokens_used:,} of a vocabulary of {found.vocab_size:,} are used ({share:.0f} %)",
        "",
        f"length of a document in tokens: mean {found.mean_length:,.0f}",
        "  " + "  ".join(f"{part_words(part)} {length:,}" for part, length in found.quantiles.items()),
        "",
        *_histogram(found.bins, fancy),
        "",
        "most frequent tokens",
    ]
    for token in found.frequent:
        text = token.text if token.text == "(end of document)" else repr(token.text)
        if not fancy:
            text = ascii(token.text)
        lines.append(f"  {token.token:>7}  {100 * token.count / found.num_tokens:5.2f} %  {text}")
    return lines


def _histogram(bins: tuple[LengthBin, ...], fancy: bool) -> list[str]:
    most = max(bin.num_documents for bin in bins)
    labels = [range_words(bin.low, bin.high) for bin in bins]
    width = max(map(len, labels))
    return [
        f"  {label:>{width}}  {bar(bin.num_documents / most, fancy=fancy):<{BAR_CELLS}} {bin.num_documents:,}"
        for label, bin in zip(labels, bins, strict=True)
    ]


def bar(part: float, *, fancy: bool = True) -> str:
    """`part` of BAR_CELLS, to an eighth of a cell; anything above nought shows."""
    eighths = max(round(part * BAR_CELLS * 8), 1 if part > 0 else 0)
    if not fancy:
        return "#" * -(-eighths // 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")
