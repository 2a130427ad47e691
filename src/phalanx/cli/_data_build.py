"""`phalanx data build` and `phalanx data tokenizer`: progress while they work, what came out when they are done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.cli._json import print_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import ExitCode
from phalanx.core.units import MIB, format_bytes, format_count, format_seconds, plural
from phalanx.data.build import BuildProgress, build_dataset
from phalanx.data.dataset import Dataset
from phalanx.data.train_tokenizer import TrainingProgress, train_tokenizer
from phalanx.report.dataset_page import left_out
from phalanx.run.next_command import next_line


def build(
    inputs: Sequence[str],
    out: str,
    tokenizer: str,
    column: str,
    workers: int | None,
    shard_mb: int | None,
    as_json: bool,
) -> int:
    """The verb. Raises PhalanxError for what a user can mend."""
    last: BuildProgress | None = None
    try:
        with ProgressLine("building") as line:

            def show(progress: BuildProgress) -> None:
                nonlocal last
                last = progress
                counts = progress.counts
                documents = "document" if counts.num_documents == 1 else "documents"
                said = f"{format_count(counts.num_documents)} {documents}  {format_count(counts.num_tokens)} tokens"
                line.update(counts.read_bytes, progress.total_bytes, kept_bytes=progress.kept.read_bytes, said=said)

            dataset = build_dataset(
                inputs,
                Path(out),
                tokenizer=tokenizer,
                column=column,
                num_workers=workers,
                shard_bytes=shard_mb and shard_mb * MIB,
                progress=show,
                named="",
            )
    except KeyboardInterrupt:
        if last is not None:
            whole = f"{last.num_shards_done} of {last.num_shards} shards are whole and kept"
            print(f"stopped: {whole}; the same command goes on from there")
        return ExitCode.INTERRUPTED
    if as_json:
        print_json("data-build", build_facts(dataset, last), indent=1)
    else:
        print("\n".join(describe_build(dataset, last, tokenizer)))
    return ExitCode.OK


def build_facts(dataset: Dataset, progress: BuildProgress | None) -> dict[str, object]:
    """The summary as JSON. `build` is None where the dataset was there already."""
    manifest = dataset.manifest.to_json()
    return {
        "directory": str(dataset.directory),
        "digest": dataset.digest,
        "num_documents": dataset.num_documents,
        "num_tokens": dataset.num_tokens,
        "num_bytes": _on_disk(dataset),
        **{key: value for key, value in manifest.items() if key not in ("format", "checksum")},
        "build": None if progress is None else _speed(progress),
    }


def _speed(progress: BuildProgress) -> dict[str, object]:
    """What this call did; shards that an interrupted build left are not in the rates."""
    text_bytes = progress.counts.text_bytes - progress.kept.text_bytes
    encode_s = progress.counts.encode_s - progress.kept.encode_s
    return {
        "elapsed_s": progress.elapsed_s,
        "num_workers": progress.num_workers,
        "num_shards_kept": progress.num_shards_kept,
        "text_bytes": text_bytes,
        "text_bytes_per_s": text_bytes / progress.elapsed_s if progress.elapsed_s else 0.0,
        "tokenizer_bytes_per_s_per_worker": text_bytes / encode_s if encode_s else 0.0,
        "tokenizer_share_of_time": encode_s / (progress.elapsed_s * progress.num_workers),
    }


def describe_build(dataset: Dataset, progress: BuildProgress | None, tokenizer: str) -> list[str]:
    """The summary as lines."""
    manifest = dataset.manifest
    size = f"{_megabytes(dataset.source_bytes)} of text"
    tokens = f"{format_count(dataset.num_tokens)} tokens of {plural(dataset.num_documents, 'document')}"
    ratio = dataset.num_tokens / dataset.source_bytes if dataset.source_bytes else 0.0
    what = "there" if progress is None else "built"
    lines = [f"{what:<8}{dataset.directory}: {tokens}, {size} ({ratio:.3f} tokens per byte)"]
    shards = plural(len(dataset.shards), "shard")
    kept = f", {progress.num_shards_kept} of them there before" if progress and progress.num_shards_kept else ""
    kind = f"{8 * int(manifest.dtype[-1])}-bit ids of a vocabulary of {manifest.vocab_size:,}"
    lines.append(f"{'shards':<8}{shards}{kept}, {format_bytes(_on_disk(dataset))}; {kind} ({tokenizer})")
    if manifest.end_of_document is None:
        lines.append(f"{'note':<8}the tokenizer has no token that ends a document; none was put between them")
    if missing := left_out(manifest):
        lines.append(f"{'note':<8}{'; '.join(missing)}")
    if progress is not None:
        lines.append(f"{'speed':<8}{_speed_words(progress, dataset.tokenizer.kind)}")
    lines.append(next_line("train", f"data.source={dataset.directory}"))
    return lines


def _speed_words(progress: BuildProgress, tokenizer_kind: str) -> str:
    facts = _speed(progress)
    text_bytes, rate = progress.counts.text_bytes - progress.kept.text_bytes, float(str(facts["text_bytes_per_s"]))
    alone = float(str(facts["tokenizer_bytes_per_s_per_worker"]))
    share = 100 * float(str(facts["tokenizer_share_of_time"]))
    workers = f"{progress.num_workers} workers" if progress.num_workers > 1 else "1 worker"
    said = f"{rate / 1e6:,.1f} MB/s ({_megabytes(text_bytes)} in {format_seconds(progress.elapsed_s)}, {workers})"
    if tokenizer_kind != "bytes" and alone:  # bytes are tokens already
        said += f"; the tokenizer alone {alone / 1e6:,.1f} MB/s per worker, {share:.0f} % of the time"
    return said


def _on_disk(dataset: Dataset) -> int:
    return sum(shard.facts.num_bytes for shard in dataset.shards)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 50_000 else plural(num_bytes, "byte")


def train(inputs: Sequence[str], out: str, vocab_size: int, column: str, max_mb: int | None, as_json: bool) -> int:
    """The verb `tokenizer`."""
    try:
        with ProgressLine("training") as line:

            def show(progress: TrainingProgress) -> None:
                joining = f"text is read; joining pairs, {format_seconds(progress.elapsed_s)} so far"
                line.update(progress.read_bytes, progress.total_bytes, instead=joining if progress.is_merging else "")

            trained = train_tokenizer(
                inputs,
                Path(out),
                vocab_size=vocab_size,
                column=column,
                max_text_bytes=max_mb and max_mb * 10**6,
                progress=show,
            )
    except KeyboardInterrupt:
        print("stopped: no tokenizer was written")
        return ExitCode.INTERRUPTED
    if as_json:
        print_json("data-tokenizer", {**vars(trained), "path": str(trained.path)}, indent=1)
        return ExitCode.OK
    few = "" if trained.vocab_size == vocab_size else f" (the corpus has no more; {vocab_size:,} were asked for)"
    size, took = f"{_megabytes(trained.text_bytes)} of text", format_seconds(trained.elapsed_s)
    print(f"trained {trained.path}: {trained.vocab_size:,} tokens{few} from {size} in {took}")
    print(f"        about {trained.num_tokens_per_byte:.3f} tokens per byte of it")
    print(next_line("data", "build", *inputs, "--tokenizer", str(trained.path), "--out", "DIR"))
    return ExitCode.OK
