"""`phalanx checkpoint export | import`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.checkpoint.choose import choose_checkpoint
from phalanx.checkpoint.exchange.hf_directory import export_own_directory
from phalanx.checkpoint.exchange.hf_export import CONFIG, Exported, Extras, Rounding, export_hugging_face
from phalanx.checkpoint.exchange.importing import KEPT_FILES, MODEL_TOML, Weights, write_import
from phalanx.checkpoint.exchange.new_directory import refuse_old
from phalanx.checkpoint.exchange.sources import open_source
from phalanx.checkpoint.exchange.stored import StoredBag
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.origin import Origin, origin_of, run_of
from phalanx.cli._checkpoint_output import refusing, tell
from phalanx.cli._json import print_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import (
    CheckpointError,
    DataError,
    DataStorageError,
    ExitCode,
    JobError,
    LayoutError,
    PhalanxError,
    UsageError,
)
from phalanx.core.files import read_json
from phalanx.core.units import format_bytes, format_count
from phalanx.data.corpus import load_corpus
from phalanx.data.model_tokenizer import ModelTokenizer
from phalanx.data.tokenizer_files import TokenizerFiles, tokenizer_files
from phalanx.job.hugging_face import is_hugging_face, read_config
from phalanx.job.load import load_job
from phalanx.job.model_toml import model_section
from phalanx.job.schema import Data, Model
from phalanx.job.toml import toml_value
from phalanx.run.tokens import model_tokenizer

GB = 10**9
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(place: str, out: str, form: str, dtype: str | None, shard_gb: float, best: bool, as_json: bool) -> int:
    """The verb."""
    with refusing(as_json):
        if form != "hf":
            raise UsageError(f"unknown format {form!r}", fix="the one there is: hf")
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"unknown type {dtype!r}", fix=f"one of {', '.join(DTYPES)}")
        refuse_old(Path(out))
        folder = choose_checkpoint(place, best=best)
        with StoredBag(folder) as weights, ProgressLine("exporting") as line:
            origin = _origin(place, weights)
            tokens = _tokenizer_of(place, folder)
            extras = Extras({**tokens.settings, **origin.settings}, tokens.files, tokens.texts, origin.seq_len)
            own = _own_config(place, folder, origin, tokens)
            write: Any = partial(export_own_directory, weights, own) if own else partial(_translated, weights, origin)
            exported: Exported = write(
                Path(out),
                shard_bytes=max(1, int(shard_gb * GB)),
                rounding=_rounding(dtype),
                extras=extras,
                progress=line.update,
            )
    notes = [*exported.notes, *([tokens.note] if tokens.note else [])]
    if as_json:
        facts = {"checkpoint": folder.url, "out": out, **vars(exported), "notes": notes}
        print_json("checkpoint-export", facts, indent=1)
    else:
        _say_exported(folder, out, exported, notes)
    return ExitCode.OK


def _translated(weights: StoredBag, origin: Origin, out: Path, **how: Any) -> Exported:
    return export_hugging_face(weights, origin.shape, out, **how)


def _own_config(place: str, folder: Folder, origin: Origin, tokens: TokenizerFiles) -> dict[str, Any]:
    """The config.json of a run whose model came from one; nothing for any other.

    What it says of special tokens holds for the tokenizer that it came with, and for no other.
    """
    run_dir = run_of(place, folder)
    if not is_hugging_face(origin.shape.kind) or run_dir is None:
        return {}
    try:
        model = read_json(run_dir / "job.json")["model"]
        special = {} if tokens.is_models else {"bos_token_id": None, "pad_token_id": None, **tokens.settings}
        return {**read_config(model["kind"]), **model["args"], **special}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError("the run's job.json cannot be read", where=str(run_dir), why=str(error)) from None


def _rounding(dtype: str | None) -> Rounding | None:
    if dtype is None:
        return None
    from phalanx.checkpoint.exchange.casts import cast_bits  # torch takes seconds

    return Rounding(DTYPES[dtype], cast_bits)


def _say_exported(folder: Folder, out: str, exported: Exported, notes: list[str]) -> None:
    size = format_bytes(exported.num_bytes)
    tell(f"from    {folder.url}, every byte verified")
    tell(f"model   {exported.architecture}, {exported.num_tensors} tensors of {exported.dtype}, {size}")
    for note in notes:
        tell(f"note    {note}")
    tell(f"wrote   {out}: {', '.join(exported.files[:6])}{' ...' if len(exported.files) > 6 else ''}")
    tell(f'open    transformers.{exported.auto_class}.from_pretrained("{out}")')


def import_weights(source: str, out: str, prefix: str, trust_pickle: bool, as_json: bool) -> int:
    """The verb."""
    with refusing(as_json):
        refuse_old(Path(out))
        with (
            open_source(
                Path(source), prefix=prefix, trust_pickle=trust_pickle, beside=Path(out).absolute().parent
            ) as weights,
            ProgressLine("importing") as line,
        ):
            checkpoint = write_import(weights, Path(out), _job_file(weights, Path(out)), progress=line.update)
            facts = _facts(weights, checkpoint)
    if as_json:
        print_json("checkpoint-import", {"source": source, "out": out, **facts}, indent=1)
        return ExitCode.OK
    tell(f"from    {source}: {facts['num_tensors']} tensors of {facts['dtype']}, {format_bytes(facts['num_bytes'])}")
    for note in weights.notes:
        tell(f"note    {note}")
    tell(f"wrote   {checkpoint}")
    if weights.shape is not None:
        tell(f"train   phalanx train {Path(out) / MODEL_TOML} data.source=...   (starts from these weights)")
    else:
        tell(f"train   set model.init_from={out} beside your own model.kind")
    return ExitCode.OK


def _facts(weights: Weights, checkpoint: Path) -> dict[str, Any]:
    dtypes = sorted({tensor.described.dtype for tensor in weights.tensors})
    return {
        "checkpoint": str(checkpoint),
        "num_tensors": len({tensor.name for tensor in weights.tensors}),
        "num_bytes": weights.num_bytes,
        "dtype": " and ".join(dtypes),
        "model_toml": str(checkpoint.parents[1] / MODEL_TOML) if weights.shape else None,
        "notes": list(weights.notes),
    }


def _job_file(weights: Weights, out: Path) -> str | None:
    """A job file that trains on from the imported weights; None where nothing is known of the model."""
    if weights.shape is None:
        return None
    out = out.absolute()
    casts = any(tensor.described.dtype != "float32" for tensor in weights.tensors)
    more = {"init_from": str(out), **({"init_cast": True} if casts else {})}
    params = format_count(weights.shape.num_params).strip()
    text = f"# {params} parameters from {weights.origin}.\n#\n#   phalanx train {out / MODEL_TOML} data.source=...\n\n"
    text += model_section(weights.shape, more)
    data: dict[str, object] = {}
    if "tokenizer.json" in (weights.files or {}):
        data["tokenizer"] = str(out / "tokenizer.json")
    if 0 < weights.shape.max_positions < Data().seq_len:
        data["seq_len"] = weights.shape.max_positions
    if data:
        text += "\n[data]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in data.items())
    _require_job(text, weights)
    return text


def _require_job(text: str, weights: Weights) -> None:
    """Raise LayoutError unless `text` is a job that phalanx takes: a configuration may say what no job may."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / MODEL_TOML
        path.write_text(text, encoding="utf-8")
        try:
            load_job(path)
        except JobError as error:
            where = str(Path(weights.origin) / CONFIG)
            why = "; ".join(f"{problem.key}: {problem.what}" for problem in error.problems)
            raise LayoutError("config.json describes a model that no job can have", where=where, why=why) from None


def _origin(place: str, weights: StoredBag) -> Origin:
    origin = origin_of(place, weights.folder, weights.manifest)
    if origin is None:
        raise CheckpointError("nothing says what model it is of", where=place, fix="give the run's own directory")
    if not origin.shape.is_known and not is_hugging_face(origin.shape.kind):
        raise LayoutError(
            f"{origin.shape.kind} is a model of your own: transformers has no class for it",
            fix="phalanx.load_weights fills your module",
        )
    return origin


def _tokenizer_of(place: str, folder: Folder) -> TokenizerFiles:
    """What the run's text went through, or what an import brought along."""
    run_dir = run_of(place, folder)
    if run_dir is None:
        return TokenizerFiles(note="a store holds no tokenizer")
    kept = {name: run_dir / name for name in KEPT_FILES if (run_dir / name).is_file()}
    if kept or not (run_dir / "data").is_dir():
        return TokenizerFiles(files=kept, note="" if kept else "there is no tokenizer with it")
    try:
        return tokenizer_files(load_corpus(run_dir / "data"), _brought(run_dir), KEPT_FILES)
    except DataStorageError:
        raise
    except DataError as error:
        return TokenizerFiles(note=f"without a tokenizer: {error}")


def _brought(run_dir: Path) -> ModelTokenizer | None:
    """The tokenizer that the model of a run came with; None where it is not to be found any more."""
    try:
        return model_tokenizer(Model(**read_json(run_dir / "job.json")["model"]))
    except (OSError, ValueError, KeyError, TypeError, PhalanxError):
        return None
