"""Inputs become a dataset directory: shards in parallel, dataset.json last. Torch-free.

What has been built lies under OUT/.build until dataset.json is there: for each finished shard a
note with the digest of what went into it. Whoever comes after a kill keeps every shard whose note
still holds, and builds the others.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.cores import count_allowed_cores
from phalanx.core.digest import find_differing_dotted_keys
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import DataError, ResourceError
from phalanx.core.files import (
    MAX_TOKENIZER_FILE_BYTES,
    read_json,
    read_whole_regular_file,
    write_bytes_atomically,
    write_json_atomically,
)
from phalanx.core.units import format_bytes
from phalanx.data.build_folder import (
    BUILD_STATE_FOLDER,
    lock_output_folder,
    refuse_unsuitable_output_folder,
    remove_build_output,
)
from phalanx.data.build_options import BuildOptions, collect_build_options
from phalanx.data.build_pool import build_all_shard_tasks
from phalanx.data.cuts import build_text_cutter
from phalanx.data.dataset import (
    DATASET_FILE_NAME,
    Dataset,
    DatasetManifest,
    is_dataset,
    open_dataset,
)
from phalanx.data.encode import EncodingCounts, ShardOutcome, add_up_encoding_counts
from phalanx.data.readers import plan_file_parts
from phalanx.data.shards import choose_smallest_token_dtype, open_shard
from phalanx.data.sources import SourceListing, list_source_files
from phalanx.data.spans import ShardTask, choose_default_shard_bytes, plan_shard_tasks
from phalanx.data.tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    tokenizer_path,
)
from phalanx.data.unchanged import (
    find_changed_files,
    find_latest_change_times,
    require_inputs_unchanged,
)

OPTIONS_FILE_NAME = "options.json"
# Files are cut into shards at multiples of this, or of a shard's size where that is smaller.
_CUT_MULTIPLE_BYTES = 1 << 20
# Of bytes as tokens: done before workers have started.
_MAX_IN_PROCESS_BYTES = 128 << 20
# Of 2 bytes a token, for what a shard holds besides.
_DISK_SPACE_FACTOR = 1.05


@dataclass(frozen=True)
class BuildProgress:
    """The progress of a build. `counts` is of all shards, those kept from an interrupted build
    included.
    """

    counts: EncodingCounts
    total_bytes: int
    num_shards_done: int
    num_shards: int
    num_shards_kept: int
    kept_counts: EncodingCounts  # of shards that an interrupted build left
    elapsed_s: float
    num_workers: int


Progress = Callable[[BuildProgress], None]


@dataclass
class _BuildState:
    """One build as it goes on."""

    tasks: list[ShardTask]
    outcomes: dict[int, ShardOutcome]
    num_workers: int
    began: float = field(default_factory=time.monotonic)
    kept_shards: tuple[int, ...] = ()
    running: dict[int, EncodingCounts] = field(default_factory=dict)

    def progress(self) -> BuildProgress:
        done = [outcome.counts for outcome in self.outcomes.values()]
        return BuildProgress(
            counts=add_up_encoding_counts([*done, *self.running.values()]),
            total_bytes=sum(task.weight for task in self.tasks),
            num_shards_done=len(self.outcomes),
            num_shards=len(self.tasks),
            num_shards_kept=len(self.kept_shards),
            kept_counts=add_up_encoding_counts(
                self.outcomes[number].counts for number in self.kept_shards
            ),
            elapsed_s=time.monotonic() - self.began,
            num_workers=self.num_workers,
        )


def build_dataset(
    inputs: Sequence[str],
    out: Path,
    *,
    tokenizer: str = "bytes",
    column: str = "text",
    num_workers: int | None = 1,
    shard_bytes: int | None = None,
    progress: Progress | None = None,
    keep_unfinished: bool = True,
    named: str = "data.source",
) -> Dataset:
    """Turn text, JSONL, Parquet and Arrow files into the dataset directory `out`, and open it.

    The shards are the same byte for byte at any number of workers; one worker builds in this
    process, None takes as many as there are cores if that is worth their start. A finished dataset
    of the same inputs and options is opened as it is, an unfinished one is continued. With
    `keep_unfinished=False` an error takes away whatever was written. Errors call the inputs a value
    of `named`.

    Raises DataError (exit 4) for inputs that cannot be used or an `out` that holds something else,
    ResourceError (exit 7) if `out` cannot be written, RunLockedError (exit 9) if another build is
    at it.
    """
    encoder = load_tokenizer(tokenizer)
    sources = list_source_files(inputs, named, out)
    cutter = build_text_cutter(encoder)
    files = [file for listing in sources for file in listing.files]
    total_bytes = sum(file.num_bytes for file in files)
    shard_bytes = shard_bytes or choose_default_shard_bytes(total_bytes)
    step_bytes = min(_CUT_MULTIPLE_BYTES, shard_bytes)
    parts = [plan_file_parts(file, column, step_bytes, cutter.can_cut) for file in files]
    tasks = plan_shard_tasks(parts, shard_bytes)
    options = collect_build_options(sources, encoder, column, shard_bytes)
    refuse_unsuitable_output_folder(out)
    # Before the lock, which writes: a finished dataset may be read-only.
    if is_dataset(out):
        return _open_dataset_if_unchanged(out, options, tasks, find_latest_change_times(sources))
    is_new = not out.exists()
    try:
        with lock_output_folder(out):
            # Another build may have finished since we looked.
            if is_dataset(out):
                return _open_dataset_if_unchanged(
                    out, options, tasks, find_latest_change_times(sources)
                )
            try:
                workers = num_workers or _count_useful_workers(encoder, total_bytes)
                return _build_missing_shards(
                    tasks, sources, encoder, tokenizer, options, out, workers, progress
                )
            # Ctrl-C, too: with keep_unfinished=False nothing of this build stays.
            except BaseException:
                if not keep_unfinished:
                    names = [task.file for task in tasks]
                    names += (TOKENIZER_FILE, CONFIG_FILE, DATASET_FILE_NAME)
                    remove_build_output(out, names, is_new=is_new)
                raise
    except OSError as error:  # reading raises DataError, so this was writing
        raise build_path_resource_error(
            error, "writing the token shards", out, place="folder"
        ) from None


def _count_useful_workers(encoder: Tokenizer, total_bytes: int) -> int:
    if encoder.kind == "bytes" and total_bytes < _MAX_IN_PROCESS_BYTES:
        return 1
    return count_allowed_cores()


def _open_dataset_if_unchanged(
    out: Path, options: BuildOptions, tasks: list[ShardTask], changed_ns: dict[str, int]
) -> Dataset:
    """The dataset that is already there, if it is the one that is wanted."""
    dataset = open_dataset(out)
    differing = options.list_differences(dataset.manifest)
    if differing:
        raise _other_dataset_error(out, f"other {', '.join(differing)}")
    contents = dict(enumerate(dataset.manifest.contents))
    for task in tasks:
        paths = find_changed_files(
            task, contents.get(task.number), options.column, changed_ns, out / DATASET_FILE_NAME
        )
        if paths:
            why = f"{paths[0]} had another content when it was built"
            if len(paths) > 1:
                why += f" (or another of {len(paths)} that were written lately)"
            raise _other_dataset_error(out, why)
    # Of a build that was killed on its very last step.
    with contextlib.suppress(OSError):
        shutil.rmtree(out / BUILD_STATE_FOLDER)
    return dataset


def _other_dataset_error(out: Path, why: str) -> DataError:
    fix = "give another --out, or remove that folder"
    return DataError("another dataset is there", where=str(out), why=why, fix=fix)


def _build_missing_shards(
    tasks: list[ShardTask],
    sources: list[SourceListing],
    encoder: Tokenizer,
    tokenizer: str,
    options: BuildOptions,
    out: Path,
    num_workers: int,
    progress: Progress | None,
) -> Dataset:
    _refuse_other_build_options(out, options)
    # Of a build that was killed: the lock says that none writes them now.
    for partial_file in out.glob(".*.partial"):
        partial_file.unlink(missing_ok=True)
    finished = _read_finished_shards(tasks, find_latest_change_times(sources), options.column, out)
    todo = [task for task in tasks if task.number not in finished]
    # At least one, by which rates are divided, even if every shard was kept.
    num_workers = min(num_workers, max(1, len(todo)))
    build = _BuildState(tasks, finished, num_workers, kept_shards=tuple(finished))
    # After partial files are gone and kept shards are known: neither needs room.
    _require_disk_space_for_build(todo, encoder, out)

    def report() -> None:
        if progress is not None:
            progress(build.progress())

    def on_counts(number: int, counts: EncodingCounts) -> None:
        build.running[number] = counts
        report()

    def on_shard(task: ShardTask, outcome: ShardOutcome) -> None:
        _record_finished_shard(out, task, outcome)
        build.running.pop(task.number, None)
        build.outcomes[task.number] = outcome
        report()

    report()
    build_all_shard_tasks(
        todo, out, encoder, tokenizer, options.column, build.num_workers, on_counts, on_shard
    )
    return _write_finished_dataset(build, sources, encoder, tokenizer, options, out)


def _refuse_other_build_options(out: Path, options: BuildOptions) -> None:
    """Refuse to go on with a build of other options. Inputs may have changed: each shard knows what
    went into it.
    """
    path = out / BUILD_STATE_FOLDER / OPTIONS_FILE_NAME
    # Without a finished shard any options will do.
    if path.exists() and any((out / BUILD_STATE_FOLDER).glob("[0-9]*.json")):
        try:
            earlier = read_json(path)
        except ValueError:
            earlier = {}
        differing = find_differing_dotted_keys(earlier, options.to_json())
        if differing:
            raise DataError(
                "an unfinished build with other options is there",
                where=str(out),
                why=f"other {', '.join(differing)}",
                fix="give the same options to finish it, another --out, or remove that folder",
            )
    write_json_atomically(path, options.to_json())


def _record_finished_shard(out: Path, task: ShardTask, outcome: ShardOutcome) -> None:
    """Written when the shard is durable under its name."""
    path = out / BUILD_STATE_FOLDER / f"{task.number:05d}.json"
    # Not durable: a note that a power cut takes costs one shard.
    write_json_atomically(path, {"task": task.digest, "outcome": outcome.to_json()}, durable=False)


def _read_finished_shards(
    tasks: list[ShardTask], changed_ns: dict[str, int], column: str, out: Path
) -> dict[int, ShardOutcome]:
    """Outcomes of an interrupted build that still hold: same inputs, and the shard is the one of
    the note.
    """
    outcomes: dict[int, ShardOutcome] = {}
    for task in tasks:
        path = out / BUILD_STATE_FOLDER / f"{task.number:05d}.json"
        try:
            note = read_json(path)
            outcome = ShardOutcome.from_json(note["outcome"])
            if note["task"] != task.digest:
                continue
            if find_changed_files(task, outcome.content, column, changed_ns, path):
                continue
            if outcome.facts is not None and open_shard(out / task.file).facts != outcome.facts:
                continue
        except (OSError, ValueError, KeyError, TypeError, DataError):
            # Whatever is wrong with a note or its shard: the shard is built again.
            continue
        outcomes[task.number] = outcome
    return outcomes


def _require_disk_space_for_build(todo: list[ShardTask], encoder: Tokenizer, out: Path) -> None:
    """Said at once rather than after an hour."""
    # Only for bytes: other tokenizers make less of it, who knows how much.
    if encoder.kind != "bytes":
        return
    num_text_bytes = 0
    for task in todo:
        formats = {span.format for span in task.spans}
        # Compressed rows and columns say nothing of how much text they hold.
        if not formats <= {"text", "jsonl"}:
            return
        # A row may be mostly other fields than its text.
        if formats == {"text"}:
            num_text_bytes += task.weight
    # Ids of bytes, and of the end of a document, take 16 bits.
    needed = int(_DISK_SPACE_FACTOR * 2 * num_text_bytes)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise ResourceError(
            f"the dataset needs about {format_bytes(needed)} and {format_bytes(free)} are free",
            where=str(out),
            fix="free space there or choose another place",
        )


def _write_finished_dataset(
    build: _BuildState,
    sources: list[SourceListing],
    encoder: Tokenizer,
    tokenizer: str,
    options: BuildOptions,
    out: Path,
) -> Dataset:
    outcomes = [build.outcomes[task.number] for task in build.tasks]
    shards = tuple(outcome.facts for outcome in outcomes if outcome.facts is not None)
    total = build.progress().counts
    if not shards:
        why = "no row has any text"
        if total.num_null_rows:
            why = f"{total.num_null_rows} null rows"
        where = ", ".join(listing.source for listing in sources)
        raise DataError("there is no text in it", where=where, why=why)
    # After the last file was read, before anything says that the dataset is whole.
    require_inputs_unchanged(build.tasks, build.outcomes, sources, options.column)
    if encoder.kind == "tokenizer.json":
        _copy_tokenizer_into_dataset(encoder, tokenizer, out)

    def sum_over_listings(count: str) -> int:
        return sum(getattr(listing, count) for listing in sources)

    manifest = DatasetManifest(
        tokenizer=options.tokenizer,
        vocab_size=encoder.vocab_size,
        dtype=choose_smallest_token_dtype(encoder.vocab_size),
        end_of_document=options.end_of_document,
        column=options.column,
        shard_bytes=options.shard_bytes,
        source_bytes=total.text_bytes,
        num_skipped_files=sum_over_listings("num_skipped"),
        num_skipped_rows=total.num_null_rows,
        num_not_utf8=total.num_not_utf8,
        inputs=options.inputs,
        shards=shards,
        num_skipped_folders=sum_over_listings("num_skipped_folders"),
        num_repeated_files=sum_over_listings("num_repeated"),
        num_not_files=sum_over_listings("num_not_files"),
        num_empty_files=sum_over_listings("num_empty"),
        num_json_as_text=sum_over_listings("num_json_text"),
        num_ends_in_text=total.num_ends_in_text,
        contents=tuple(outcome.content for outcome in outcomes),
    )
    # Before dataset.json: nothing that it does not list lies beside it.
    for stale in set(out.glob("shard-*.tokens")) - {out / shard.file for shard in shards}:
        # Of inputs that are not there any more.
        stale.unlink()
    # The last step that counts: without dataset.json there is no dataset, with it all is whole.
    write_json_atomically(out / DATASET_FILE_NAME, manifest.to_json())
    dataset = open_dataset(out)
    shutil.rmtree(out / BUILD_STATE_FOLDER, ignore_errors=True)
    return dataset


def _copy_tokenizer_into_dataset(encoder: Tokenizer, name: str, out: Path) -> None:
    """The tokenizer goes with its tokens, and so does what says which token ends a document."""
    path = tokenizer_path(name)
    write_bytes_atomically(
        out / TOKENIZER_FILE, read_whole_regular_file(path, MAX_TOKENIZER_FILE_BYTES)
    )
    if encoder.end_name is not None:
        write_json_atomically(out / CONFIG_FILE, {"eos_token": encoder.end_name})
