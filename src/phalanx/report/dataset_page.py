"""A dataset as one self-contained page: how long its documents are, where its tokens lie, which
are frequent."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from phalanx.core.files import resource_error, write_bytes_atomic
from phalanx.core.units import format_bytes, format_count, plural
from phalanx.data.dataset import Dataset, DatasetManifest
from phalanx.data.stats import DatasetStats
from phalanx.report.markup import Html, table, tag
from phalanx.report.scales import Scale, scale_for, tick_texts

_SIZE = 1000  # of the SVG's own coordinates, both ways
_GAP = 0.08  # between columns, as a part of one
_LEAST_COLUMNS = 8  # wide: one alone does not fill the picture
_LABEL_LETTERS = 48  # under one picture, with the space between labels
_MOST_SHARDS = 40
_CONTENT_SECURITY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_dataset_page(path: Path, dataset: Dataset, stats: DatasetStats) -> None:
    """Write the page of a dataset to `path`. Raises ResourceError."""
    try:
        write_bytes_atomic(path, render_dataset_page(dataset, stats).encode())
    except OSError as error:
        raise resource_error(error, "writing the page", path, place="--page") from None


def render_dataset_page(dataset: Dataset, stats: DatasetStats) -> str:
    """The page of a dataset, as HTML text."""
    name = dataset.directory.resolve().name or str(dataset.directory)
    style = Html(files("phalanx.report").joinpath("page.css").read_text("utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY}">'),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name}, a dataset · phalanx"),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    main = tag("main", _lengths(stats), _tokens(stats), _origin(dataset), id="main")
    footer = tag("footer", "Written by phalanx. This file is complete in itself and loads nothing.")
    body = tag("body", tag("div", _header(name, dataset, stats), main, footer, class_="page"))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(name: str, dataset: Dataset, stats: DatasetStats) -> Html:
    used = f"{stats.num_tokens_used:,} of them occur"
    keys = [
        ("Documents", f"{stats.num_documents:,}", ""),
        (
            "Tokens",
            format_count(stats.num_tokens),
            f"{stats.num_tokens:,}" if stats.num_tokens >= 1000 else "",
        ),
        ("Text", format_bytes(stats.source_bytes), f"{stats.tokens_per_byte:.3f} tokens per byte"),
        ("On disk", format_bytes(stats.num_bytes), plural(stats.num_shards, "shard")),
        ("Vocabulary", f"{stats.vocab_size:,}", used),
        ("Tokenizer", dataset.tokenizer.kind, f"digest {dataset.tokenizer.digest}"),
        ("Median length", plural(stats.quantiles[0.5], "token"), f"mean {stats.mean_length:,.0f}"),
        ("Longest", plural(stats.quantiles[1.0], "token"), f"shortest {stats.quantiles[0.0]:,}"),
    ]
    return tag(
        "header",
        tag("div", tag("h1", name), tag("span", "dataset", class_="status open"), class_="name"),
        tag("p", f"Digest {dataset.digest}.", class_="when"),
        tag("dl", [_key(*key) for key in keys], class_="keys"),
    )


def _key(name: str, value: str, detail: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", detail) if detail else None))


def _lengths(stats: DatasetStats) -> Html:
    ranges = [(bin.low, bin.high) for bin in stats.bins]
    documents = draw_histogram(
        "Documents by length", "documents", ranges, [bin.num_documents for bin in stats.bins], "g1"
    )
    tokens = draw_histogram(
        "Tokens by length of their document",
        "tokens",
        ranges,
        [b.num_tokens for b in stats.bins],
        "g4",
    )
    quantiles = table(
        ["of the documents", "at most this many tokens"],
        [[format_quantile(part), f"{length:,}"] for part, length in stats.quantiles.items()],
        css_class="num",
    )
    rows = [
        [format_range(b.low, b.high), f"{b.num_documents:,}", f"{b.num_tokens:,}"]
        for b in stats.bins
    ]
    numbers = table(["length in tokens", "documents", "tokens"], rows, css_class="num")
    return tag(
        "section",
        tag("h2", "Length of documents"),
        tag("div", documents, tokens, class_="pair"),
        tag(
            "p",
            "A column's range shows where one points at it, and in the numbers below.",
            class_="note",
        ),
        tag("div", quantiles, class_="block"),
        tag("details", tag("summary", "The numbers of the pictures"), numbers),
        id="lengths",
    )


def format_quantile(part: float) -> str:
    """0.5 -> 'median', 0.05 -> '5 %'."""
    return {0.0: "shortest", 0.5: "median", 1.0: "longest"}.get(part, f"{100 * part:g} %")


def format_range(low: int, high: int) -> str:
    return f"{low:,} to {high:,}" if high > low else f"{low:,}"


def describe_left_out(manifest: DatasetManifest) -> list[str]:
    """Phrases for everything in the inputs that the dataset leaves out or changes; usually none."""
    parts = []
    if manifest.num_skipped_files:
        parts.append(f"{plural(manifest.num_skipped_files, 'binary file')} skipped")
    if manifest.num_skipped_folders:
        parts.append(
            f"{plural(manifest.num_skipped_folders, 'folder')} skipped, a dataset or a run and not"
            " text"
        )
    if manifest.num_empty_files:
        parts.append(f"{plural(manifest.num_empty_files, 'empty file')} skipped")
    if manifest.num_not_files:
        nouns = (
            "entry that is no file" if manifest.num_not_files == 1 else "entries that are no files"
        )
        parts.append(
            f"{manifest.num_not_files:,} {nouns} skipped (broken links, linked folders, pipes,"
            " devices)"
        )
    if manifest.num_json_as_text:
        files = plural(manifest.num_json_as_text, ".json file")
        parts.append(
            f"{files} read as text, not holding an object per line: an array, say, is no rows"
        )
    if manifest.num_repeated_files:
        parts.append(f"{plural(manifest.num_repeated_files, 'file')} given again, read once")
    if manifest.num_skipped_rows:
        parts.append(f"{plural(manifest.num_skipped_rows, 'null row')} skipped")
    if manifest.num_not_utf8:
        parts.append(
            f"bytes that are not UTF-8 became U+FFFD in {plural(manifest.num_not_utf8, 'piece')} of"
            " text"
        )
    if manifest.num_ends_in_text:
        times = plural(manifest.num_ends_in_text, "place")
        parts.append(
            f"in {times} of a text the tokenizer itself gave the token that ends a document"
        )
    return parts


def _tokens(stats: DatasetStats) -> Html:
    rows = [
        [
            tag("code", _show_white_space(t.text)),
            str(t.token),
            f"{t.count:,}",
            f"{100 * t.count / stats.num_tokens:.2f} %",
        ]
        for t in stats.frequent
    ]
    ranks = [[f"{rank:,}", f"{count:,}"] for rank, count in stats.counts_by_rank]
    return tag(
        "section",
        tag("h2", "Tokens"),
        _rank_curve(stats),
        tag(
            "details",
            tag("summary", "The numbers of the picture"),
            table(["rank", "times"], ranks, css_class="num"),
        ),
        tag(
            "div",
            table(["most frequent", "id", "times", "share"], rows, css_class="num"),
            class_="block",
        ),
        id="tokens",
    )


def _show_white_space(text: str) -> str:
    """White space as something one can see."""
    if text == "(end of document)":
        return text
    return "".join(
        {"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍"}.get(letter, letter) for letter in text
    )


def _origin(dataset: Dataset) -> Html:
    manifest = dataset.manifest
    inputs = [
        [str(one["source"]), f"{one['num_files']:,}", format_bytes(one["num_bytes"])]
        for one in manifest.inputs
    ]
    facts = [shard.facts for shard in dataset.shards[:_MOST_SHARDS]]
    shards = [
        [f.file, f"{f.num_tokens:,}", f"{f.num_documents:,}", f"{f.max_token_id:,}", f.xxh3]
        for f in facts
    ]
    more = len(dataset.shards) - len(facts)
    note = "; ".join(describe_left_out(manifest))
    return tag(
        "section",
        tag("h2", "Where it comes from"),
        table(["input", "files", "size"], inputs, css_class="num"),
        tag("p", f"{note[0].upper()}{note[1:]}.", class_="note") if note else None,
        tag(
            "details",
            tag("summary", "Shards"),
            table(["shard", "tokens", "documents", "largest id", "XXH3"], shards, css_class="num"),
            tag("p", f"and {more:,} more", class_="note") if more else None,
        ),
        id="origin",
    )


def draw_histogram(
    title: str,
    y_label: str,
    ranges: Sequence[tuple[int, int]],
    values: Sequence[int],
    css_class: str,
) -> Html:
    """A histogram: one column per range of lengths, whose numbers show where one points at it."""
    scale = scale_for([0, *values], zero=True)
    paths, names = [], []
    num_slots = max(len(values), _LEAST_COLUMNS)
    first = (num_slots - len(values)) / 2
    labels = [_short(low) for low, _ in ranges]
    label_period = -(-len(values) * (max(map(len, labels)) + 2) // _LABEL_LETTERS)
    for number, ((low, high), value) in enumerate(zip(ranges, values, strict=True)):
        left_edge, right_edge = (
            (first + number + edge) / num_slots for edge in (_GAP / 2, 1 - _GAP / 2)
        )
        top = scale(value)
        if value:
            top = max(top, 0.004)  # one document of a million still shows
            start_x, end_x = _SIZE * left_edge, _SIZE * right_edge
            d = f"M{start_x:.1f} {_SIZE}V{_SIZE * (1 - top):.1f}H{end_x:.1f}V{_SIZE}Z"
            pointed = tag("title", f"{format_range(low, high)} tokens: {value:,} {y_label}")
            paths.append(tag("path", pointed, d=d, class_=css_class))
        if number % label_period == 0:
            names.append(
                tag(
                    "span",
                    labels[number],
                    class_="xtick",
                    style=f"left:{100 * (left_edge + right_edge) / 2:.2f}%",
                )
            )
    return _figure(title, y_label, "length in tokens", scale, paths, names)


def _short(length: int) -> str:
    """16384 -> '16 K': the place of a column; pointing at it shows the exact range."""
    return f"{length:,}" if length < 10_000 else format_count(length)


def _rank_curve(stats: DatasetStats) -> Html:
    """Rank and frequency, both logarithmic: a straight line is Zipf's law."""
    xs = scale_for([rank for rank, _ in stats.counts_by_rank], may_be_log=True, snug=True)
    ys = scale_for([count for _, count in stats.counts_by_rank], may_be_log=True)
    places = [
        f"{_SIZE * xs(rank):.1f} {_SIZE * (1 - ys(count)):.1f}"
        for rank, count in stats.counts_by_rank
    ]
    line = tag("path", d="M" + "L".join(places), class_="s0", vector_effect="non-scaling-stroke")
    ticks = xs.ticks()
    names = [
        tag("span", text, class_="xtick", style=f"left:{100 * xs(tick):.2f}%")
        for tick, text in zip(ticks, tick_texts(ticks), strict=True)
    ]
    title = "How often each token occurs, from the most frequent on"
    return _figure(title, "times", "rank of the token", ys, [line], names)


def _figure(
    title: str, y_label: str, x_label: str, scale: Scale, paths: list[Html], names: list[Html]
) -> Html:
    ticks = [tick for tick in scale.ticks() if tick == round(tick)]  # of things one counts
    grid = [
        tag(
            "path",
            d=f"M0 {_SIZE * (1 - scale(tick)):.1f}H{_SIZE}",
            class_="grid",
            vector_effect="non-scaling-stroke",
        )
        for tick in ticks
    ]
    heights = [
        tag("span", text, class_="ytick", style=f"bottom:{100 * scale(tick):.2f}%")
        for tick, text in zip(ticks, tick_texts(ticks), strict=True)
    ]
    svg = tag(
        "svg",
        grid,
        paths,
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    return tag(
        "figure",
        tag("figcaption", tag("h3", title)),
        tag("div", tag("span", y_label, class_="ylabel"), class_="axis"),
        tag("div", tag("div", svg, heights, names, class_="plot"), class_="row"),
        tag("div", x_label, class_="xlabel"),
    )
