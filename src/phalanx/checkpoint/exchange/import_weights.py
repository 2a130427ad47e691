"""`phalanx checkpoint import`: weights of another system as a checkpoint, and a job file that
trains on from them.

Torch-free, but for sources that torch pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpoint.exchange.hf_export import CONFIG_FILE_NAME
from phalanx.checkpoint.exchange.importing import (
    MODEL_TOML_FILE_NAME,
    Progress,
    WeightsToImport,
    write_checkpoint_of_imported_weights,
)
from phalanx.checkpoint.exchange.new_directory import require_absent_or_empty
from phalanx.checkpoint.exchange.sources import open_weights_to_import
from phalanx.core.errors import JobError, LayoutError
from phalanx.core.places import open_temporary_directory
from phalanx.core.units import format_count
from phalanx.job.load import load_job
from phalanx.job.schema import Data
from phalanx.job.toml import format_model_section, format_toml_value


@dataclass(frozen=True)
class WeightsImportResult:
    """The checkpoint that an import wrote. `model_toml`: its job file; None if nothing says what
    model it is.
    """

    checkpoint: Path
    num_tensors: int
    num_bytes: int
    dtype: str
    model_toml: Path | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Facts of `phalanx checkpoint import --json`."""
        model_toml = None
        if self.model_toml is not None:
            model_toml = str(self.model_toml)
        return {
            "checkpoint": str(self.checkpoint),
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "dtype": self.dtype,
            "model_toml": model_toml,
            "notes": list(self.notes),
        }


def import_weights_as_checkpoint(
    source: Path, out: Path, *, prefix: str, trust_pickle: bool, progress: Progress
) -> WeightsImportResult:
    """Write the weights of `source` as the checkpoint OUT/checkpoints/step-0, with OUT/model.toml
    beside.

    Only names that begin with `prefix` are taken, without it; `trust_pickle` lets torch unpickle
    `source`, which can run any code. Raises UsageError if `out` is there, CheckpointError or
    LayoutError for weights that are not readable.
    """
    # Before weights are read, which may take minutes; the directory is looked at again at its end.
    require_absent_or_empty(out)
    parent = out.absolute().parent
    with open_weights_to_import(
        source, prefix=prefix, trust_pickle=trust_pickle, parent=parent
    ) as weights:
        checkpoint = write_checkpoint_of_imported_weights(
            weights, out, _write_job_file_text(weights, out), progress=progress
        )
        dtypes = sorted({tensor.info.dtype for tensor in weights.tensors})
        model_toml = None
        if weights.shape is not None:
            model_toml = checkpoint.parents[1] / MODEL_TOML_FILE_NAME
        return WeightsImportResult(
            checkpoint,
            num_tensors=len({tensor.name for tensor in weights.tensors}),
            num_bytes=weights.num_bytes,
            dtype=" and ".join(dtypes),
            model_toml=model_toml,
            notes=tuple(weights.notes),
        )


def _write_job_file_text(weights: WeightsToImport, out: Path) -> str | None:
    """Text of a job file that trains on from the weights at `out`; None if nothing says what model
    they are of.
    """
    if weights.shape is None:
        return None
    out = out.absolute()
    model: dict[str, object] = {"init_from": str(out)}
    if any(tensor.info.dtype != "float32" for tensor in weights.tensors):
        model["init_cast"] = True
    params = format_count(weights.shape.num_params).strip()
    text = (
        f"# {params} parameters from {weights.origin}.\n#\n"
        f"#   phalanx train {out / MODEL_TOML_FILE_NAME} data.source=...\n\n"
    )
    text += format_model_section(weights.shape, model)
    data: dict[str, object] = {}
    if "tokenizer.json" in (weights.files or {}):
        data["tokenizer"] = str(out / "tokenizer.json")
    if 0 < weights.shape.longest_sequence < Data().seq_len:
        data["seq_len"] = weights.shape.longest_sequence
    if data:
        text += "\n[data]\n"
    for key, value in data.items():
        text += f"{key} = {format_toml_value(value)}\n"
    _require_valid_job_file_text(text, weights)
    return text


def _require_valid_job_file_text(text: str, weights: WeightsToImport) -> None:
    """Raise LayoutError unless `text` is a job that phalanx takes: a configuration may say what no
    job may.
    """
    with open_temporary_directory() as folder:
        path = folder / MODEL_TOML_FILE_NAME
        path.write_text(text, encoding="utf-8")
        try:
            load_job(path)
        except JobError as error:
            where = str(Path(weights.origin) / CONFIG_FILE_NAME)
            why = "; ".join(f"{problem.key}: {problem.what}" for problem in error.problems)
            raise LayoutError(
                "config.json describes a model that no job can have", where=where, why=why
            ) from None
