"""Judges phalanx's own module, in one process, by Hugging Face's module of the same model.

The weights go there as `phalanx checkpoint export` writes them, and the gradients come back as
`import` reads them, so that names, orientation and config.json are judged, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from phalanx.checkpoint.exchange.families import find_family_of_model_type
from phalanx.checkpoint.exchange.hf_export import ExtraConfigAndFiles, export_hugging_face_directory
from phalanx.checkpoint.exchange.importing import read_hugging_face_directory
from phalanx.checkpoint.exchange.settings import (
    build_hugging_face_config,
    normalize_shape_for_inference,
)
from phalanx.checkpoint.exchange.tensor_readers import TensorShapeAndDtype
from phalanx.checkpoint.reading.full_tensors import Bits, choose_unsigned_bits_dtype
from phalanx.checkpoint.reading.mismatch import MismatchError
from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.errors import LayoutError
from phalanx.core.files import read_json
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.nn.hugging_face.adapter import load_transformers_module
from phalanx.plan.plan import Plan
from phalanx.run.one_process.plain_loss import Batch
from phalanx.verify.cases import HUGGING_FACE
from phalanx.verify.float64_casts import NARROW_DTYPES, cast_to_float64
from phalanx.verify.plain_row import compare_with_plain_implementation
from phalanx.verify.row import Difference, Row
from phalanx.verify.second_implementation import (
    StepResult,
    Tensors,
    WeightsError,
    compare_with_second_implementation,
)

ROW_DTYPE = "float64"
JUDGED_PARTS = ("loss", "gradients", "config.json", "names and orientation of exported tensors")
MODULE_DISAGREES_CAUSE = (
    "phalanx.nn disagrees with transformers' {} and with the plain implementation: the reference"
    " itself may be wrong, and then every layout is, alike"
)
EXPORT_DISAGREES_CAUSE = (
    "phalanx.nn and the plain implementation agree, so what is exported is another model to"
    " transformers' {}: the name or orientation of a tensor, or config.json, is wrong"
)
IMPORT_DISAGREES_CAUSE = (
    "phalanx.nn and the plain implementation agree, and so does the loss of transformers' {}: what"
    " it saves is imported under another name, or in another orientation"
)
ROW_NOTE = (
    "beside {} of transformers {}, whose casts to float32 (norms, softmax, rotary positions) are"
    " float64 here: its formulas are compared, and not its rounding"
)
# Keys of a shape that no module of transformers computes alike, and what is left out with them.
NOT_JUDGED_OF_SETTING = {
    "balance_loss": "the balance loss, 0 in this row: transformers has another one",
    "expert_capacity": "the capacity of experts, none in this row: transformers drops no token",
}
# Of exports: the longest sequences that the model is said to be trained on.
LONGEST_SEQUENCE = 61
FILES_NOT_JUDGED = "exports that round weights, and the checkpoint that an import writes"
ROUTER_BIASES_NOT_JUDGED = "how routers' biases move: transformers leaves them as they are"


@dataclass(frozen=True)
class HuggingFaceImplementation:
    """transformers' module of a shape as a second implementation; files come and go in
    `directory`."""

    shape: TransformerShape
    directory: Path
    notes: tuple[str, ...]
    not_judged: tuple[str, ...]
    judged = JUDGED_PARTS
    # Its rotations are in float32.
    takes_far_positions = False
    # `compare_with_hugging_face` finds it once something differs.
    cause = ""

    def compute(self, module: nn.Module, microbatches: Sequence[Batch]) -> StepResult:
        with TemporaryDirectory(dir=self.directory) as folder, cast_to_float64() as casts:
            exported, gradients = Path(folder) / "weights", Path(folder) / "gradients"
            self._export_weights(module, exported)
            self._require_longest_sequence(exported)
            hugging_face_model = _load_exported_model(exported)
            casts.is_narrowed = _has_narrow_tensors(hugging_face_model)
            total, count = 0.0, 0
            for batch in microbatches:
                loss = self._compute_loss_sum(hugging_face_model, batch)
                loss.backward()
                total += loss.item()
                count += int((batch["targets"] != IGNORE_INDEX).sum())
            narrows = casts.is_narrowed
            _write_gradients(hugging_face_model, count, gradients)
            return StepResult(
                total / count, count, self._read_exported_tensors(gradients), narrows=narrows
            )

    def _export_weights(self, module: nn.Module, directory: Path) -> None:
        # No token is padding: transformers gives the row of such a one no gradient.
        extras = ExtraConfigAndFiles({"pad_token_id": None}, {}, {}, LONGEST_SEQUENCE)
        weights = _ModuleTensorReader(module)
        # Several files, and an index.
        size = 1 + sum(info.num_bytes for info in weights.tensors.values()) // 3
        try:
            export_hugging_face_directory(
                weights, self.shape, directory, shard_bytes=size, extras=extras
            )
        except MismatchError as error:
            raise _build_weights_error("exported weight", error) from None

    def _require_longest_sequence(self, directory: Path) -> None:
        """Raise WeightsError for rotary positions that are exported for sequences of another length
        than the model was trained on, or than its positions are stretched to if that is more."""
        shape = self.shape
        if not isinstance(shape, DecoderShape) or shape.positions != "rope":
            return
        expected = max(LONGEST_SEQUENCE, int(shape.rope_original_len * shape.rope_factor))
        config = read_json(directory / "config.json")
        length = config.get("max_position_embeddings")
        if length != expected:
            cause = (
                f"config.json says max_position_embeddings {length}, of a model that was trained on"
                f" {LONGEST_SEQUENCE} tokens and should say {expected}"
            )
            raise WeightsError("exported config.json", "", cause)

    def _compute_loss_sum(self, hugging_face_model: Any, batch: Batch) -> torch.Tensor:
        targets = batch["targets"]
        if self.shape.reads_images:
            logits = hugging_face_model(pixel_values=batch["inputs"]).logits
            return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        # Positions that begin again are documents to transformers, too.
        positions = batch.get("positions")
        logits = hugging_face_model(
            input_ids=batch["inputs"], position_ids=positions, use_cache=False
        ).logits
        loss: torch.Tensor = hugging_face_model.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets,
            vocab_size=logits.shape[-1],
            # Of a sum, and not of a mean.
            num_items_in_batch=1,
        )
        return loss

    def _read_exported_tensors(self, directory: Path) -> dict[str, torch.Tensor]:
        """The tensors of a directory of transformers under phalanx's names.

        Raises WeightsError if they are not those of the model.
        """
        try:
            imported = read_hugging_face_directory(directory)
        except (MismatchError, LayoutError) as error:
            raise _build_weights_error("imported weight", error) from None
        assert imported.shape is not None
        _require_same_shape_keys(imported.shape, self.shape)
        sizes = self.shape.list_stored_tensors()
        tensors = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        for part in imported.tensors:
            # A copy in C order: the file goes, and some are transposed.
            values = torch.from_numpy(np.array(part.load(), order="C").view(ROW_DTYPE))
            if part.offset is None:
                tensors[part.name].copy_(values)
            else:
                # An expert's matrix of a stack.
                tensors[part.name][part.offset[0]].copy_(values.reshape(sizes[part.name][1:]))
        return tensors


def _load_exported_model(directory: Path) -> Any:
    """transformers' module of an export. Raises WeightsError where it does not open that."""
    try:
        return load_transformers_module(directory, torch.float64)
    except LayoutError as error:
        message = f"transformers does not open what is exported: {error.why or error.what}"
    name = ""
    try:
        read_hugging_face_directory(directory)
    except (MismatchError, LayoutError) as error:
        name = _describe_first_misfit(error)
    raise WeightsError("exported weight", name, message)


def _build_weights_error(
    tensor_description: str, error: MismatchError | LayoutError
) -> WeightsError:
    # One line: `str()` of a mismatch is a table.
    return WeightsError(
        tensor_description, _describe_first_misfit(error), f"{error.what} ({error.why})"
    )


def _describe_first_misfit(error: MismatchError | LayoutError) -> str:
    """The first tensor that does not fit; "" for an error about config.json."""
    if isinstance(error, MismatchError):
        return error.mismatches[0].name
    return ""


def _require_same_shape_keys(imported: TransformerShape, exported: TransformerShape) -> None:
    """Raise WeightsError for the first key that differs."""
    values = normalize_shape_for_inference(imported).to_json()
    for key, value in normalize_shape_for_inference(exported).to_json().items():
        if values[key] != value:
            cause = (
                "the config.json that transformers writes of an export is read as another model:"
                f" its {key} is {values[key]} and was {value}"
            )
            raise WeightsError("imported config.json", "", cause)


def _has_narrow_tensors(module: nn.Module) -> bool:
    tensors = [*module.parameters(), *module.buffers()]
    return any(tensor.dtype in NARROW_DTYPES for tensor in tensors)


class _ModuleTensorReader:
    """Reads the tensors of a module, as exports read those of a checkpoint."""

    where = "the judged module"

    def __init__(self, module: nn.Module) -> None:
        self._tensors: Tensors = module.state_dict()
        self.tensors: Mapping[str, TensorShapeAndDtype] = {
            name: TensorShapeAndDtype(tuple(tensor.shape), ROW_DTYPE)
            for name, tensor in self._tensors.items()
        }

    def load(self, name: str) -> Bits:
        bits: Bits = (
            self._tensors[name].contiguous().numpy().view(choose_unsigned_bits_dtype(ROW_DTYPE))
        )
        return bits

    def load_element(self, name: str, number: int) -> Bits:
        element: Bits = self.load(name)[number]
        return element


@torch.no_grad()
def _write_gradients(hugging_face_model: Any, count: int, directory: Path) -> None:
    """Write the gradients per target as transformers writes weights, in the weights' place."""
    for parameter in hugging_face_model.parameters():
        if parameter.grad is None:
            parameter.zero_()
        else:
            parameter.copy_(parameter.grad / count)
    hugging_face_model.save_pretrained(str(directory))


def explain_no_hugging_face_row(job: Job, plan: Plan) -> str:
    """Why no module of transformers computes what this job's does; "" if one does."""
    if job.model.is_foreign or not isinstance(plan.model_shape, TransformerShape):
        return "modules of transformers are references for phalanx's own models alone"
    if job.model.objective is not None:
        return "modules of transformers are references for phalanx's own loss alone"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install 'phalanx[hf]'"
    try:
        config = build_hugging_face_config(_find_comparable_shape(plan))
    except LayoutError as error:
        return f"{error.what} ({error.why})"
    family = find_family_of_model_type(config["model_type"])
    if "auto_map" in family.written:
        return f"transformers has no {family.architecture}: a file of code brings it"
    return ""


def compare_with_hugging_face(
    job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], directory: Path
) -> Row:
    """The row "hugging-face", in float64: phalanx's module in one process, judged by that of
    transformers, as `compare_with_second_implementation` says. Files come and go in `directory`.

    Raises LayoutError where `explain_no_hugging_face_row` has a reason.
    """
    refused = explain_no_hugging_face_row(job, plan)
    if refused:
        raise LayoutError(refused)
    import transformers

    shape = _find_comparable_shape(plan)
    architecture = find_family_of_model_type(
        build_hugging_face_config(shape)["model_type"]
    ).architecture
    note = ROW_NOTE.format(architecture, transformers.__version__)
    second = HuggingFaceImplementation(shape, directory, (note,), _list_unjudged_settings(plan))
    plan = replace(plan, shape=shape.to_json())
    row = compare_with_second_implementation(second, job, plan, steps, ROW_DTYPE, HUGGING_FACE)
    # Anything else says itself what is wrong.
    if row.first is None or row.first.what not in ("loss", "gradient"):
        return row
    cause = _choose_disagreement_cause(
        row.first, compare_with_plain_implementation(job, plan, steps, ROW_DTYPE)
    ).format(architecture)
    return replace(row, first=replace(row.first, cause=cause))


def _choose_disagreement_cause(first: Difference, plain: Row) -> str:
    if not plain.ok:
        return MODULE_DISAGREES_CAUSE
    if first.what == "loss":
        return EXPORT_DISAGREES_CAUSE
    return IMPORT_DISAGREES_CAUSE


def _find_comparable_shape(plan: Plan) -> TransformerShape:
    """The plan's shape without what no module of transformers computes alike."""
    shape = plan.model_shape
    assert isinstance(shape, TransformerShape)
    if isinstance(shape, DecoderShape):
        return replace(shape, balance_loss=0.0, expert_capacity=0.0)
    return shape


def _list_unjudged_settings(plan: Plan) -> tuple[str, ...]:
    shape = plan.model_shape
    if not isinstance(shape, DecoderShape):
        return (FILES_NOT_JUDGED,)
    left_out = [reason for key, reason in NOT_JUDGED_OF_SETTING.items() if getattr(shape, key)]
    if shape.balance_bias:
        left_out.append(ROUTER_BIASES_NOT_JUDGED)
    return (*left_out, FILES_NOT_JUDGED)
