"""`phalanx checkpoint export`: a checkpoint with its tokenizer as a directory that transformers
opens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.exchange.companion_files import COPIED_FILE_NAMES, find_companion_files
from phalanx.checkpoint.exchange.hf_directory import export_unrenamed_weights
from phalanx.checkpoint.exchange.hf_export import (
    ExportDtypeRounding,
    ExtraConfigAndFiles,
    HuggingFaceExportResult,
    Progress,
    export_hugging_face_directory,
)
from phalanx.checkpoint.exchange.new_directory import require_absent_or_empty
from phalanx.checkpoint.folder import CheckpointFolder
from phalanx.checkpoint.reading.choose import find_newest_or_best_checkpoint
from phalanx.checkpoint.reading.origin import (
    ModelOfCheckpoint,
    find_model_of_checkpoint,
    find_run_directory_of_checkpoint,
)
from phalanx.core.digest import JsonDifference, find_differences
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    DataStorageError,
    JobError,
    LayoutError,
    PhalanxError,
    UsageError,
)
from phalanx.core.files import read_json
from phalanx.core.registry import is_foreign
from phalanx.data.corpus import load_corpus
from phalanx.data.model_tokenizer import ModelTokenizer
from phalanx.data.tokenizer_files import TokenizerFiles, collect_tokenizer_files
from phalanx.job.hugging_face import is_hugging_face, read_model_config
from phalanx.job.load import load_job_json
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Model
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.plan.stored_plan import StoredPlanError, read_stored_plan
from phalanx.run.tokens import find_tokenizer_beside_weights

# torch's names by those of a job.
TORCH_DTYPE_OF_PRECISION = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportResult:
    """The checkpoint that was exported, and the directory `out` that was written."""

    folder: CheckpointFolder
    out: str
    exported: HuggingFaceExportResult
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx checkpoint export --json`."""
        return {
            "checkpoint": self.folder.url,
            "out": self.out,
            **vars(self.exported),
            "notes": list(self.notes),
        }


def export_checkpoint(
    location: str, out: str, *, dtype: str | None, shard_bytes: int, best: bool, progress: Progress
) -> ExportResult:
    """Export the checkpoint at `location`, or the newest (with `best` the best) of the run there.

    `dtype` ("bf16") rounds the weights; None leaves them as they are. A weight file has about
    `shard_bytes` at most. Raises UsageError if `out` is there, CheckpointError if no plan or import
    says what model it is, LayoutError if transformers has no class for the model.
    """
    if dtype is not None and dtype not in TORCH_DTYPE_OF_PRECISION:
        raise UsageError(
            f"unknown type {dtype!r}", fix=f"one of {', '.join(TORCH_DTYPE_OF_PRECISION)}"
        )
    # Before anything slow is done.
    require_absent_or_empty(Path(out))
    folder = find_newest_or_best_checkpoint(location, best=best)
    with CheckpointReader(folder) as weights:
        origin = _require_known_origin(location, weights)
        tokenizer = _find_tokenizer_files(location, folder)
        settings = {**tokenizer.settings, **origin.settings}
        how: dict[str, Any] = {
            "shard_bytes": shard_bytes,
            "rounding": _build_dtype_rounding(dtype),
            "extras": ExtraConfigAndFiles(
                settings, tokenizer.files, tokenizer.texts, origin.seq_len
            ),
            "progress": progress,
        }
        config = _read_config_of_run(location, folder, origin, tokenizer)
        if config is not None:
            exported = export_unrenamed_weights(weights, config, Path(out), **how)
        else:
            assert isinstance(origin.shape, TransformerShape), "checked above"
            exported = export_hugging_face_directory(weights, origin.shape, Path(out), **how)
    notes = exported.notes
    if tokenizer.note:
        notes = (*notes, tokenizer.note)
    return ExportResult(folder, out, exported, notes)


def _require_known_origin(location: str, weights: CheckpointReader) -> ModelOfCheckpoint:
    origin = find_model_of_checkpoint(location, weights.folder, weights.manifest)
    if origin is None:
        raise _build_unknown_model_error(location, weights.folder)
    if is_foreign(origin.shape.kind) and not is_hugging_face(origin.shape.kind):
        raise LayoutError(
            f"{origin.shape.kind} is a model of your own: transformers has no class for it",
            fix="phalanx.load_weights fills your module",
        )
    # What an import recorded stands in the manifest, under a checksum.
    if not weights.manifest.facts.get("model_shape"):
        require_model_of_job(origin, find_run_directory_of_checkpoint(location, weights.folder))
    return origin


def require_model_of_job(origin: ModelOfCheckpoint, run_dir: Path | None) -> None:
    """Raise CheckpointError where the run's plan says another model than its job: one of the files
    was changed, and the weights would be exported as a model that they are not of."""
    if run_dir is None or not (run_dir / "job.json").is_file() or is_foreign(origin.shape.kind):
        return
    try:
        job = load_job_json(run_dir / "job.json")
        if job.model.is_foreign:
            differences = [JsonDifference("kind", origin.shape.kind, job.model.kind)]
        else:
            planned = build_model_shape(job, origin.shape.vocab_size)
            # Sequences of images have the length that the images give them.
            seq_len = origin.seq_len if planned.reads_images else job.data.seq_len
            differences = find_differences(
                {**origin.shape.to_json(), "seq_len": origin.seq_len},
                {**planned.to_json(), "seq_len": seq_len},
            )
    except (JobError, LayoutError) as error:
        why = "; ".join(str(error).splitlines())
        raise CheckpointError("the run's job cannot be read", where=str(run_dir), why=why) from None
    if differences:
        first = differences[0]
        raise CheckpointError(
            f"plan.json says that {first.key} is {json.dumps(first.a)}, and job.json makes it"
            f" {json.dumps(first.b)}",
            where=str(run_dir),
            fix="put the file back that was changed; phalanx train --resume writes both anew",
        )


def _build_unknown_model_error(location: str, folder: CheckpointFolder) -> CheckpointError:
    problem = "nothing says what model it is of"
    run_dir = find_run_directory_of_checkpoint(location, folder)
    if run_dir is None or not (run_dir / "job.json").is_file():
        return CheckpointError(problem, where=location, fix="give the run's own directory")
    why = "the run's plan cannot be used"
    try:
        read_stored_plan(run_dir / "plan.json")
    except StoredPlanError as error:
        why = error.what
    return CheckpointError(
        problem,
        where=str(run_dir / "plan.json"),
        why=why,
        fix="put it back; phalanx train --resume writes it anew",
    )


def _read_config_of_run(
    location: str, folder: CheckpointFolder, origin: ModelOfCheckpoint, tokenizer: TokenizerFiles
) -> dict[str, Any] | None:
    """The config.json of a run whose model came from one; None for any other model.

    What it says of special tokens holds for the tokenizer that it came with, and for no other.
    """
    run_dir = find_run_directory_of_checkpoint(location, folder)
    if not is_hugging_face(origin.shape.kind) or run_dir is None:
        return None
    special_tokens: dict[str, Any] = {}
    if not tokenizer.is_models:
        special_tokens = {"bos_token_id": None, "pad_token_id": None, **tokenizer.settings}
    try:
        model = read_json(run_dir / "job.json")["model"]
        return {
            **read_model_config(model["kind"], model["args"]),
            **model["args"],
            **special_tokens,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the run's job.json cannot be read", where=str(run_dir), why=str(error)
        ) from None


def _build_dtype_rounding(dtype: str | None) -> ExportDtypeRounding | None:
    if dtype is None:
        return None
    # Only now: torch takes seconds to import.
    from phalanx.checkpoint.exchange.casts import round_float_bits_to_dtype

    return ExportDtypeRounding(TORCH_DTYPE_OF_PRECISION[dtype], round_float_bits_to_dtype)


def _find_tokenizer_files(location: str, folder: CheckpointFolder) -> TokenizerFiles:
    """The tokenizer of the run's text, or the files that an import brought along."""
    run_dir = find_run_directory_of_checkpoint(location, folder)
    if run_dir is None:
        return TokenizerFiles(note="a store holds no tokenizer")
    files = find_companion_files(run_dir)
    if files:
        return TokenizerFiles(files=files)
    if not (run_dir / "data").is_dir():
        return TokenizerFiles(note="there is no tokenizer with it")
    try:
        return collect_tokenizer_files(
            load_corpus(run_dir / "data"), _find_model_tokenizer(run_dir), COPIED_FILE_NAMES
        )
    except DataStorageError:
        # A disk that refuses is no missing tokenizer: the export would lack it without need.
        raise
    except DataError as error:
        return TokenizerFiles(note=f"without a tokenizer: {error}")


def _find_model_tokenizer(run_dir: Path) -> ModelTokenizer | None:
    """The tokenizer that the model of a run came with; None if it cannot be found any more."""
    try:
        return find_tokenizer_beside_weights(Model(**read_json(run_dir / "job.json")["model"]))
    except (OSError, ValueError, KeyError, TypeError, PhalanxError):
        return None
