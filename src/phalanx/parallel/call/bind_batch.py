"""How a batch reaches a module that phalanx has never seen."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from phalanx.core.batch import list_outermost_names, unflatten_entry
from phalanx.core.errors import DataError, LayoutError

# This stands for a forward that takes any keyword.
ACCEPTS_ANY_KEYWORD = "**"
# A message names so many entries of a batch at most.
MAX_DESCRIBED_BATCH_ENTRIES = 12


class BatchOfNamedTensors(dict[str, torch.Tensor]):
    """A batch.

    A level of nested samples is nested again. A name that it lacks is a mistake in a dataset or an
    objective, and is told as one.
    """

    def __missing__(self, key: str) -> Any:
        with suppress(KeyError):
            return unflatten_entry(self, key)
        raise DataError(
            f"a batch has no {key!r}",
            why=f"it has {describe_batch(self)}",
            fix="return it from your dataset under that name, or read another in your objective",
        )


def build_forward_arguments(
    module: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs): `batch["inputs"]` first, if there, then each other entry except "targets"
    that forward names.

    Raises LayoutError for a forward that needs what the batch does not have, or that does not name
    `document_ids` where the batch has them: one that takes any keyword may drop this one, and
    documents would see each other unnoticed.
    """
    known, first, needed = _read_forward_signature(module)
    levels = list_outermost_names(batch)
    extras = {}
    for key in levels:
        if key not in ("inputs", "targets") and _forward_accepts_entry(known, key):
            extras[key] = unflatten_entry(batch, key)
    if "document_ids" in batch and "document_ids" not in known:
        raise _missing_document_ids_parameter_error(module, takes_any=ACCEPTS_ANY_KEYWORD in known)
    args = (unflatten_entry(batch, "inputs"),) if "inputs" in levels else ()
    if not args and not extras:
        fix = "give the batch 'inputs', or name an argument of forward as the batch does"
        if "input_ids" in levels:
            # Under another name alone, a model would learn to repeat what it reads.
            fix = (
                "call the tokens 'inputs', and 'targets' what follows each of them: labels of"
                " transformers are not shifted yet (docs/own-code.md, Targets of tokens)"
            )
        elif "pixel_values" in levels:
            fix = "call the images 'inputs'"
        raise LayoutError(
            f"the forward of {type(module).__name__} names nothing of a batch with"
            f" {', '.join(sorted(batch))}",
            fix=fix,
        )
    missing = [name for name in needed if name not in extras and not (args and name == first)]
    if missing:
        hint = " (targets are for the objective alone)" if "targets" in missing else ""
        raise LayoutError(
            f"the forward of {type(module).__name__} needs {', '.join(missing)}{hint}",
            why=f"a batch has {describe_batch(batch)}",
            fix="return it from your dataset under that name, or give the argument a default",
        )
    return args, extras


def _missing_document_ids_parameter_error(module: nn.Module, *, takes_any: bool) -> LayoutError:
    why = None
    if takes_any:
        why = "it takes any keyword, which does not say that it masks attention by this one"
    return LayoutError(
        f"{type(module).__name__} cannot keep documents apart: its forward names no document_ids",
        why=why,
        fix="add the argument and mask attention with it, or leave document_ids out of the batch",
    )


def _forward_accepts_entry(known: frozenset[str], key: str) -> bool:
    return key in known or ACCEPTS_ANY_KEYWORD in known


def _read_forward_signature(module: nn.Module) -> tuple[frozenset[str], str, tuple[str, ...]]:
    """(the names that forward knows, the first of them, those that it cannot do without)."""
    # Kept: every microbatch asks, and reading a signature is slow.
    cached = module.__dict__.get("_phalanx_forward_names")
    if cached is None:
        parameters = list(inspect.signature(module.forward).parameters.values())
        known = frozenset(
            ACCEPTS_ANY_KEYWORD if p.kind is p.VAR_KEYWORD else p.name for p in parameters
        )
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = tuple(
            p.name for p in parameters if p.default is p.empty and p.kind not in variable
        )
        first = ""
        if parameters:
            first = parameters[0].name
        cached = module.__dict__["_phalanx_forward_names"] = (known, first, needed)
    return cached


def describe_batch(batch: Mapping[str, torch.Tensor]) -> str:
    """ "inputs float32 [32, 1, 8, 8], labels int64 [32]": what most mistakes of a new model are
    about."""
    shown = [
        f"{key} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for key, t in batch.items()
    ]
    if len(shown) > MAX_DESCRIBED_BATCH_ENTRIES:
        return ", ".join(shown[:MAX_DESCRIBED_BATCH_ENTRIES]) + " ..."
    return ", ".join(shown) or "nothing"
