"""A dataset as one self-contained page: how long its documents are, where its tokens lie, which
are frequent."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.files import write_bytes_atomically
from phalanx.core.units import format_bytes, format_count, plural
from phalanx.data.dataset import Dataset, DatasetManifest
from phalanx.data.stats import DatasetStats
from phalanx.report.figure import (
    VIEW_BOX_SIZE,
    draw_horizontal_path,
    draw_path,
    draw_x_ticks,
    draw_y_ticks,
)
from phalanx.report.markup import Html, build_note, build_small_text, build_table, build_tag
from phalanx.report.scales import AxisScale, choose_scale, select_whole_numbers

_COLUMN_GAP_SHARE = 0.08  # between columns, as a part of one
_MIN_COLUMN_SLOTS = 8  # wide: one alone does not fill the picture
_MAX_LABEL_CHARS = 48  # under one picture, with the space between labels
_MAX_SHOWN_SHARDS = 40
# No source of scripts at all: this page has none.
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_VISIBLE_WHITESPACE = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍"})


def write_dataset_page(path: Path, dataset: Dataset, stats: DatasetStats) -> None:
    """Write the page of a dataset to `path`. Raises ResourceError."""
    try:
        write_bytes_atomically(path, render_dataset_page(dataset, stats).encode())
    except OSError as error:
        raise build_path_resource_error(error, "writing the page", path, place="--page") from None


def render_dataset_page(dataset: Dataset, stats: DatasetStats) -> str:
    """The page of a dataset, as HTML text."""
    name = dataset.directory.resolve().name or str(dataset.directory)
    style = Html(files("phalanx.report").joinpath("page.css").read_text("utf-8"))
    head = build_tag(
        "head",
        build_tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">'),
        build_tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        build_tag("title", f"{name}, a dataset · phalanx"),
        # Else a browser asks for /favicon.ico.
        build_tag("link", rel="icon", href="data:,"),
        build_tag("style", style),
    )
    main = build_tag(
        "main",
        _render_length_histograms(stats),
        _render_frequent_tokens(stats),
        _render_inputs_and_origin(dataset),
        id="main",
    )
    footer = build_tag(
        "footer", "Written by phalanx. This file is complete in itself and loads nothing."
    )
    body = build_tag(
        "body", build_tag("div", _render_header(name, dataset, stats), main, footer, class_="page")
    )
    return f"<!doctype html>\n{build_tag('html', head, body, lang='en')}\n"


def _render_header(name: str, dataset: Dataset, stats: DatasetStats) -> Html:
    used = f"{stats.num_tokens_used:,} of them occur"
    num_tokens = ""
    # Below that the rounded count is exact.
    if stats.num_tokens >= 1000:
        num_tokens = f"{stats.num_tokens:,}"
    keys = [
        ("Documents", f"{stats.num_documents:,}", ""),
        ("Tokens", format_count(stats.num_tokens), num_tokens),
        ("Text", format_bytes(stats.source_bytes), f"{stats.tokens_per_byte:.3f} tokens per byte"),
        ("On disk", format_bytes(stats.num_bytes), plural(stats.num_shards, "shard")),
        ("Vocabulary", f"{stats.vocab_size:,}", used),
        ("Tokenizer", dataset.tokenizer.kind, f"digest {dataset.tokenizer.digest}"),
        ("Median length", plural(stats.quantiles[0.5], "token"), f"mean {stats.mean_length:,.0f}"),
        ("Longest", plural(stats.quantiles[1.0], "token"), f"shortest {stats.quantiles[0.0]:,}"),
    ]
    return build_tag(
        "header",
        build_tag(
            "div",
            build_tag("h1", name),
            build_tag("span", "dataset", class_="status open"),
            class_="name",
        ),
        build_tag("p", f"Digest {dataset.digest}.", class_="when"),
        build_tag("dl", [_render_key_value(*key) for key in keys], class_="keys"),
    )


def _render_key_value(name: str, value: str, detail: str) -> Html:
    return build_tag("div", build_tag("dt", name), build_tag("dd", value, build_small_text(detail)))


def _render_length_histograms(stats: DatasetStats) -> Html:
    ranges, num_documents, num_tokens, rows = [], [], [], []
    for bin in stats.bins:
        ranges.append((bin.low, bin.high))
        num_documents.append(bin.num_documents)
        num_tokens.append(bin.num_tokens)
        rows.append(
            [
                format_number_range(bin.low, bin.high),
                f"{bin.num_documents:,}",
                f"{bin.num_tokens:,}",
            ]
        )
    documents = draw_histogram("Documents by length", "documents", ranges, num_documents, "g1")
    tokens = draw_histogram(
        "Tokens by length of their document", "tokens", ranges, num_tokens, "g4"
    )
    quantiles = build_table(
        ["of the documents", "at most this many tokens"],
        [[format_quantile(part), f"{length:,}"] for part, length in stats.quantiles.items()],
        css_class="num",
    )
    numbers = build_table(["length in tokens", "documents", "tokens"], rows, css_class="num")
    return build_tag(
        "section",
        build_tag("h2", "Length of documents"),
        build_tag("div", documents, tokens, class_="pair"),
        build_tag(
            "p",
            "A column's range shows where one points at it, and in the numbers below.",
            class_="note",
        ),
        build_tag("div", quantiles, class_="block"),
        build_tag("details", build_tag("summary", "The numbers of the pictures"), numbers),
        id="lengths",
    )


def format_quantile(part: float) -> str:
    """0.5 -> 'median', 0.05 -> '5 %'."""
    return {0.0: "shortest", 0.5: "median", 1.0: "longest"}.get(part, f"{100 * part:g} %")


def format_number_range(low: int, high: int) -> str:
    if high > low:
        return f"{low:,} to {high:,}"
    return f"{low:,}"


def describe_left_out_inputs(manifest: DatasetManifest) -> list[str]:
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
        entries = plural(
            manifest.num_not_files, "entry that is no file", "entries that are no files"
        )
        parts.append(f"{entries} skipped (broken links, linked folders, pipes, devices)")
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


def _render_frequent_tokens(stats: DatasetStats) -> Html:
    rows = []
    for frequent in stats.frequent:
        text = build_tag("code", _show_white_space(frequent.text))
        share = f"{100 * frequent.count / stats.num_tokens:.2f} %"
        rows.append([text, str(frequent.token), f"{frequent.count:,}", share])
    ranks = [[f"{rank:,}", f"{count:,}"] for rank, count in stats.counts_by_rank]
    return build_tag(
        "section",
        build_tag("h2", "Tokens"),
        _draw_rank_frequency_curve(stats),
        build_tag(
            "details",
            build_tag("summary", "The numbers of the picture"),
            build_table(["rank", "times"], ranks, css_class="num"),
        ),
        build_tag(
            "div",
            build_table(["most frequent", "id", "times", "share"], rows, css_class="num"),
            class_="block",
        ),
        id="tokens",
    )


def _show_white_space(text: str) -> str:
    """White space as something one can see."""
    if text == "(end of document)":
        return text
    return text.translate(_VISIBLE_WHITESPACE)


def _render_inputs_and_origin(dataset: Dataset) -> Html:
    manifest = dataset.manifest
    inputs = []
    for entry in manifest.inputs:
        size = format_bytes(entry["num_bytes"])
        inputs.append([str(entry["source"]), f"{entry['num_files']:,}", size])
    shards = []
    for shard in dataset.shards[:_MAX_SHOWN_SHARDS]:
        facts = shard.facts
        numbers = [facts.num_tokens, facts.num_documents, facts.max_token_id]
        shards.append([facts.file, *[f"{number:,}" for number in numbers], facts.xxh3])
    note = "; ".join(describe_left_out_inputs(manifest))
    if note:
        note = f"{note[0].upper()}{note[1:]}."
    num_more, more = len(dataset.shards) - len(shards), ""
    if num_more:
        more = f"and {num_more:,} more"
    return build_tag(
        "section",
        build_tag("h2", "Where it comes from"),
        build_table(["input", "files", "size"], inputs, css_class="num"),
        build_note(note),
        build_tag(
            "details",
            build_tag("summary", "Shards"),
            build_table(
                ["shard", "tokens", "documents", "largest id", "XXH3"], shards, css_class="num"
            ),
            build_note(more),
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
    scale = choose_scale([0, *values], zero=True)
    paths, names = [], []
    num_slots = max(len(values), _MIN_COLUMN_SLOTS)
    first = (num_slots - len(values)) / 2
    labels = [_format_thousands(low) for low, _ in ranges]
    # Every label, or each second, third, ...: as many as have room (rounded up).
    label_period = -(-len(values) * (max(map(len, labels)) + 2) // _MAX_LABEL_CHARS)
    for number, ((low, high), value) in enumerate(zip(ranges, values, strict=True)):
        left_edge = (first + number + _COLUMN_GAP_SHARE / 2) / num_slots
        right_edge = (first + number + (1 - _COLUMN_GAP_SHARE / 2)) / num_slots
        top = scale(value)
        if value:
            # One document of a million still shows.
            top = max(top, 0.004)
            start_x, end_x = VIEW_BOX_SIZE * left_edge, VIEW_BOX_SIZE * right_edge
            top_y = VIEW_BOX_SIZE * (1 - top)
            d = f"M{start_x:.1f} {VIEW_BOX_SIZE}V{top_y:.1f}H{end_x:.1f}V{VIEW_BOX_SIZE}Z"
            pointed = build_tag(
                "title", f"{format_number_range(low, high)} tokens: {value:,} {y_label}"
            )
            paths.append(build_tag("path", pointed, d=d, class_=css_class))
        if number % label_period == 0:
            style = f"left:{100 * (left_edge + right_edge) / 2:.2f}%"
            names.append(build_tag("span", labels[number], class_="xtick", style=style))
    return _render_figure(title, y_label, "length in tokens", scale, paths, names)


def _format_thousands(length: int) -> str:
    """16384 -> '16 K': the place of a column; pointing at it shows the exact range."""
    if length < 10_000:
        return f"{length:,}"
    return format_count(length)


def _draw_rank_frequency_curve(stats: DatasetStats) -> Html:
    """Rank and frequency, both logarithmic: a straight line is Zipf's law."""
    xs = choose_scale([rank for rank, _ in stats.counts_by_rank], may_be_log=True, snug=True)
    ys = choose_scale([count for _, count in stats.counts_by_rank], may_be_log=True)
    corners = []
    for rank, count in stats.counts_by_rank:
        corners.append(f"{VIEW_BOX_SIZE * xs(rank):.1f} {VIEW_BOX_SIZE * (1 - ys(count)):.1f}")
    line = draw_path("M" + "L".join(corners), "s0")
    title = "How often each token occurs, from the most frequent on"
    return _render_figure(
        title, "times", "rank of the token", ys, [line], draw_x_ticks(xs.tick_values(), xs)
    )


def _render_figure(
    title: str, y_label: str, x_label: str, scale: AxisScale, paths: list[Html], names: list[Html]
) -> Html:
    # Whole numbers: what is shown is counted.
    ticks = select_whole_numbers(scale.tick_values())
    grid = [draw_path(draw_horizontal_path(scale(tick)), "grid") for tick in ticks]
    heights = draw_y_ticks(ticks, scale)
    svg = build_tag(
        "svg",
        grid,
        paths,
        viewBox=f"0 0 {VIEW_BOX_SIZE} {VIEW_BOX_SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    return build_tag(
        "figure",
        build_tag("figcaption", build_tag("h3", title)),
        build_tag("div", build_tag("span", y_label, class_="ylabel"), class_="axis"),
        build_tag("div", build_tag("div", svg, heights, names, class_="plot"), class_="row"),
        build_tag("div", x_label, class_="xlabel"),
    )
