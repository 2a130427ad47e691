"""Ids and labels that no row or class of a model answers to: told with key, value and range, not by
an index error.

Looked at on the CPU, where the loader leaves a batch: a GPU is not waited for, and would not say
which value it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.errors import DataError
from phalanx.mesh.devices import is_on_cpu

Batch = Mapping[str, torch.Tensor]
# An objective with this attribute takes every target for the number of a class.
TARGETS_ARE_CLASSES_ATTRIBUTE = "takes_classes"
_ID_DTYPES = (torch.int64, torch.int32)
# Those of torch's cross-entropy.
_CLASS_DTYPES = (torch.int64, torch.uint8)
# The built-in objectives look in this order.
_TARGET_ENTRY_NAMES = ("labels", "targets")


def require_token_ids_in_vocabulary(batch: Batch, vocab_size: int) -> None:
    """Raises DataError for token ids beyond the `vocab_size` rows of a model, and of a type that no
    embedding looks up; 0: it has none, or nobody knows."""
    if vocab_size and "inputs" in batch:
        ids = batch["inputs"]
        if ids.dtype not in _ID_DTYPES:
            raise DataError(
                f"'inputs' are {str(ids.dtype).removeprefix('torch.')}, and the model looks up"
                " int64 or int32",
                fix="have the dataset return whole numbers of such a type",
            )
        _require_index_range("'inputs'", ids, vocab_size)


def require_targets_within_classes(batch: Batch, outputs: Any) -> None:
    """Raises DataError for targets that are no class of `outputs`, which are logits or bring the
    head's weight, and for those of a type that is no number of a class."""
    key = next((key for key in _TARGET_ENTRY_NAMES if key in batch), None)
    num_classes = _count_classes_of_outputs(outputs)
    if key is not None and num_classes:
        # Shares of classes would be counted as a target each.
        if batch[key].dtype not in _CLASS_DTYPES:
            raise DataError(
                f"{key!r} are {str(batch[key].dtype).removeprefix('torch.')}, and the loss takes"
                " numbers of classes in int64",
                fix="have the dataset return them so, or set model.objective for other targets",
            )
        _require_index_range(repr(key), batch[key], num_classes, classes=True)


def _count_classes_of_outputs(outputs: Any) -> int:
    """0: they do not say."""
    vocabulary, head = getattr(outputs, "vocabulary", None), getattr(outputs, "head_VD", None)
    if vocabulary is not None:
        return sum(vocabulary.sizes)
    if head is not None:
        return int(head.shape[0])
    if isinstance(outputs, torch.Tensor) and outputs.ndim >= 2:
        return outputs.shape[-1]
    return 0


def raise_for_out_of_range_index(batch: Batch, error: Exception) -> None:
    """Raises DataError if `error` comes from what a user's own embedding or cross-entropy could
    not look up."""
    trace, own_line = error.__traceback__, ""
    while trace is not None:
        code, known = trace.tb_frame.f_code, trace.tb_frame.f_locals
        if code.co_filename == F.__file__ and code.co_name in (
            "embedding",
            "cross_entropy",
            "nll_loss",
        ):
            _require_indices_of_failed_call(batch, code.co_name, known, own_line)
        elif code.co_filename.endswith(".py") and "site-packages" not in code.co_filename:
            own_line = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next


def _require_indices_of_failed_call(
    batch: Batch, function: str, known: Mapping[str, Any], where: str
) -> None:
    if function == "embedding":
        values, size = known["input"], known["weight"].shape[0]
    else:
        values, logits = known["target"], known["input"]
        size = logits.shape[1 if logits.ndim > 1 else 0]
    if isinstance(values, torch.Tensor) and values.device.type == "cpu":
        name = next(
            (repr(key) for key, t in batch.items() if _have_equal_values(t, values)),
            f"what {function} got",
        )
        _require_index_range(name, values, int(size), classes=function != "embedding", where=where)


def _have_equal_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.numel() == second.numel() and torch.equal(first.ravel().to(second), second.ravel())


def _require_index_range(
    name: str, values: torch.Tensor, size: int, *, classes: bool = False, where: str = ""
) -> None:
    if (
        not is_on_cpu(values)
        or values.is_floating_point()
        or values.is_complex()
        or not values.numel()
    ):
        return
    # One pass in the usual case; the masks below are for what is wrong.
    lowest, highest = (int(edge) for edge in values.aminmax())
    if lowest >= 0 and highest < size:
        return
    is_wrong = (values >= size) | (values < 0)
    if classes:
        is_wrong &= values != IGNORE_INDEX
    if not is_wrong.any():
        return
    rows = is_wrong.reshape(len(values), -1).any(1).nonzero().ravel().tolist()
    worst = highest
    if highest < size:
        worst = int(values[is_wrong].min())
    table, also = f"{size} rows of the embedding", ""
    if classes:
        table, also = f"{size} classes", f", and {IGNORE_INDEX} for none"
    listed_rows = ", ".join(map(str, rows[:5]))
    if len(rows) > 5:
        listed_rows += " ..."
    raise DataError(
        f"{name} holds {worst}, which is none of the {table}",
        where=where or None,
        why=f"row {listed_rows} of a microbatch of {len(values)}",
        fix=f"give 0 to {size - 1}{also}, or the model more of them",
    )
