"""Statistics of a dataset are those of its documents, counted one by one."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli._data_stats_output import BAR_WIDTH_CELLS, draw_text_bar
from phalanx.core.errors import DataError
from phalanx.data.build import build_dataset
from phalanx.data.dataset import open_dataset
from phalanx.data.stats import QUANTILES, compute_dataset_stats
from phalanx.report.dataset_page import render_dataset_page


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(
        st.one_of(st.integers(2, 9), st.integers(200, 300), st.integers(2, 5000)),
        min_size=1,
        max_size=40,
    )
)
def test_lengths_are_those_of_the_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("stats")
    (folder / "in").mkdir()
    for number, length in enumerate(lengths):
        (folder / "in" / f"{number:03d}.txt").write_text("x" * (length - 1))
    # Shards so small that documents go on in the next one.
    found = compute_dataset_stats(
        build_dataset([str(folder / "in")], folder / "out", shard_bytes=700)
    )
    ordered = sorted(lengths)
    assert found.num_documents == len(lengths)
    assert found.num_tokens == sum(lengths)
    assert found.mean_length == pytest.approx(np.mean(lengths))
    assert found.quantiles == {
        part: ordered[max(1, math.ceil(part * len(ordered))) - 1] for part in QUANTILES
    }
    for bin in found.bins:
        held = [length for length in lengths if bin.low <= length <= bin.high]
        assert (bin.num_documents, bin.num_tokens) == (len(held), sum(held))
    assert found.bins[0].num_documents
    assert found.bins[-1].num_documents
    assert all(
        left.high + 1 == right.low for left, right in zip(found.bins, found.bins[1:], strict=False)
    )
    assert sum(bin.num_documents for bin in found.bins) == len(lengths)


@pytest.mark.parametrize(
    ("place", "problem"),
    [("token", "it holds token .*vocabulary has 257"), ("end", "its documents do not add up")],
)
def test_a_flipped_bit_is_refused_where_it_makes_numbers_that_no_build_wrote(
    tmp_path: Path, place: str, problem: str
) -> None:
    """A count of every number up to a token of 32 bits would take gigabytes."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("aaabbc")
    dataset = build_dataset([str(tmp_path)], tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.tokens")
    content = bytearray(path.read_bytes())
    first_end = content.index((7).to_bytes(8, "little") + (14).to_bytes(8, "little"))
    content[4096 + 7 if place == "token" else first_end] ^= 128
    path.write_bytes(content)
    with pytest.raises(DataError, match=problem):
        compute_dataset_stats(open_dataset(dataset.directory))


def test_tokens_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aaabbc")
    found = compute_dataset_stats(build_dataset([str(tmp_path / "a.txt")], tmp_path / "out"))
    counted = [(token.token, token.text, token.count) for token in found.frequent]
    assert counted == [(97, "a", 3), (98, "b", 2), (99, "c", 1), (256, "(end of document)", 1)]
    assert found.counts_by_rank == ((1, 3), (2, 2), (3, 1), (4, 1))
    assert found.num_tokens_used == 4
    assert found.tokens_per_byte == 7 / 6


def test_labels_of_lengths_do_not_run_into_each_other(tmp_path: Path) -> None:
    """Lengths from 1 to a million: between the middles of two labels there is room for both of
    their halves."""
    (tmp_path / "in").mkdir()
    for power in range(21):
        (tmp_path / "in" / f"{power:02d}.txt").write_text("x" * (2**power - 1))
    dataset = build_dataset([str(tmp_path / "in")], tmp_path / "out")
    page = render_dataset_page(dataset, compute_dataset_stats(dataset))
    first = page[page.index("Documents by length") : page.index("Tokens by length")]
    labels = re.findall(r'<span class="xtick" style="left:([\d.]+)%">([^<]+)</span>', first)
    assert len(labels) > 4
    width_letters = 50  # of a picture, in digits of its labels
    for (left, text), (right, other) in pairwise(labels):
        assert float(right) - float(left) > 100 * (len(text) + len(other)) / 2 / width_letters, (
            text,
            other,
        )


def test_a_page_counts_in_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    dataset = build_dataset([str(tmp_path / "a.txt")], tmp_path / "out")
    page = render_dataset_page(dataset, compute_dataset_stats(dataset))
    ticks = re.findall(r'<span class="ytick"[^>]*>([^<]+)</span>', page)
    assert ticks
    assert not [tick for tick in ticks if "." in tick]
    assert "skipped" not in page  # nothing was


@pytest.mark.parametrize(
    ("part", "drawn"),
    [
        (0.0, ""),
        (1.0, "█" * BAR_WIDTH_CELLS),
        (0.5, "█" * (BAR_WIDTH_CELLS // 2)),
        (1e-9, "▏"),
        (1 / 80, "▌"),
    ],
)
def test_bars_are_drawn_to_an_eighth_of_a_cell(part: float, drawn: str) -> None:
    assert draw_text_bar(part) == drawn
    assert len(draw_text_bar(part, fancy=False)) == len(drawn)
