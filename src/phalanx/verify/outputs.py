"""What modules make of each token, in one process and on every rank of a layout: it tells where a
forward begins to go wrong.

Of an output [B, T, D] one number a token is kept, its projection on a random vector: a layout whose
ranks have some rows, or some tokens, then compares just these. Modules that ranks cut by features
are left out.

Shape suffixes: B rows of a forward, T tokens of a sequence, D features.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.mesh.logical import full_name
from phalanx.parallel.model import ParallelModel
from phalanx.verify.routes import ForwardPhaseRecorder, LocalSequenceTokens
from phalanx.verify.routing_differences import train_phase_of_step
from phalanx.verify.wrong_tokens import SequenceView, WrongTokens

OUTPUTS_FILE_NAME = "outputs.safetensors"
_LocalOutputs = dict[tuple[str, str, int, int], torch.Tensor]
"""(Phase, name of the module, first row of the forward, D) -> [B, T]."""
FirstOutput = tuple[int, int, str, float, int, int]
"""(step, from 0; place in the order of the forward; name of the module; relative error; row of the
batch; token)."""
OtherMicrobatch = tuple[int, int, int]
"""(stage; first row of the microbatch whose hidden states it is given; first row of the one whose
tokens it reads)."""


class ReferenceOutputs(ForwardPhaseRecorder):
    """The outputs of one process, whose forwards take the rows of a batch in their order."""

    def __init__(self, module: nn.Module) -> None:
        self._parts: dict[tuple[str, str, int], list[torch.Tensor]] = {}
        for name, part in list_hidden_state_modules(module):
            part.register_forward_hook(functools.partial(self._record_output, name))

    def write(self, directory: Path) -> None:
        """Write what was noted, but for modules that a forward calls more than once."""
        fewest: dict[str, int] = {}
        for (phase, _, _), parts in self._parts.items():
            rows = sum(map(len, parts))
            fewest[phase] = min(rows, fewest.get(phase, rows))
        tensors: dict[str, torch.Tensor] = {}
        for output_index, ((phase, name, width), parts) in enumerate(self._parts.items()):
            projection_BT = torch.cat(parts)
            if len(projection_BT) == fewest[phase]:
                tensors[f"{phase}/{output_index}/{width}/{name}"] = projection_BT
        if tensors:
            save_file(tensors, directory / OUTPUTS_FILE_NAME)

    def _record_output(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        hidden_BTD = _extract_hidden_states(output)
        if not self._phase or hidden_BTD is None:
            return
        key = (self._phase, name, hidden_BTD.shape[-1])
        parts = self._parts.setdefault(key, [])
        # torch.cat takes no sequences of other lengths.
        if not parts or parts[0].shape[1] == hidden_BTD.shape[1]:
            parts.append(_project_hidden_states(hidden_BTD))


class LayoutOutputs:
    """The outputs of a layout's modules in training, of the rows and tokens of this rank.

    `num_compared`: those that `find_first_wrong_output` found one process's of.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self.num_compared = 0
        self._parts: _LocalOutputs = {}
        # Of later stages: what they make of their microbatch's tokens, and do not go on with.
        self._before_blocks: dict[int, _LocalOutputs] = {}
        # What is compiled takes no hooks.
        if not model.plan.compile:
            for name, part in list_hidden_state_modules(model.module):
                part.register_forward_hook(functools.partial(self._record_output, name))

    def find_first_wrong_output(self, directory: Path, tolerance: float) -> list[FirstOutput]:
        """The first output of each step, in the order of the forward, that is further than
        `tolerance` from the one that `ReferenceOutputs` has written; of this rank alone."""
        if not self._parts or not (directory / OUTPUTS_FILE_NAME).exists():
            return []
        firsts: dict[int, FirstOutput] = {}
        for key, reference_BT in load_file(directory / OUTPUTS_FILE_NAME).items():
            phase, output_index, name, width = _split_output_key(key)
            wrong_token = self._find_wrong_token(phase, name, width, reference_BT, tolerance)
            if wrong_token is None:
                continue
            step = int(phase.rpartition("-")[2])
            first = (
                step,
                output_index,
                name,
                wrong_token.error,
                wrong_token.row,
                wrong_token.token,
            )
            if step not in firsts or first[1] < firsts[step][1]:
                firsts[step] = first
        return [firsts[step] for step in sorted(firsts)]

    def find_other_microbatch(self, directory: Path, tolerance: float) -> OtherMicrobatch | None:
        """A later stage of this rank that reads the tokens of another microbatch of the first step
        than that of its hidden states; None where none does, or nobody can tell."""
        if not self._before_blocks:
            return None
        for key, reference_BT in load_file(directory / OUTPUTS_FILE_NAME).items():
            phase, _, name, width = _split_output_key(key)
            if phase != train_phase_of_step(0):
                continue
            for stage, outputs in self._before_blocks.items():
                for part in self._compare_parts(phase, name, width, reference_BT, outputs):
                    other_row = part.find_other_first_row(reference_BT, tolerance)
                    if other_row is not None:
                        return stage, part.first_row, other_row
        return None

    def _find_wrong_token(
        self, phase: str, name: str, width: int, reference_BT: torch.Tensor, tolerance: float
    ) -> _WrongToken | None:
        """The first token of a module that is wrong on this rank."""
        for part in self._compare_parts(phase, name, width, reference_BT):
            self.num_compared += 1
            # Not `error > tolerance`: NaN is above any.
            wrong = (~(part.error_BT <= tolerance)).nonzero()
            if len(wrong):
                row, column = wrong[0].tolist()
                error = float(part.error_BT.max())
                return _WrongToken(error, part.first_row + row, int(part.tokens[column]))
        return None

    def sort_wrong_tokens(
        self, directory: Path, number: int, tolerance: float, document_ids_BT: torch.Tensor | None
    ) -> WrongTokens | None:
        """All tokens that this rank has of the first step's output at `number` in the order of the
        forward, sorted by what they are to see; None if it is not an attention that is known.

        `document_ids_BT`: of the whole batch, or None.
        """
        references = {
            int(key.split("/")[1]): (key, reference_BT)
            for key, reference_BT in load_file(directory / OUTPUTS_FILE_NAME).items()
            if key.startswith(f"{train_phase_of_step(0)}/")
        }
        key, reference_BT = references[number]
        phase, _, name, width = _split_output_key(key)
        window = find_window_of_causal_attention(self._model.module, name)
        if window is None:
            return None
        wrong_tokens = WrongTokens(number, cp_rank=self._model.mesh.coordinates["cp"])
        owners = self._list_owners_of_tokens(reference_BT.shape[1])
        for part in self._compare_parts(phase, name, width, reference_BT):
            is_wrong_BT = ~(part.error_BT <= tolerance)
            for row, is_wrong in enumerate(is_wrong_BT.tolist(), part.first_row):
                begins = [0] * len(owners)
                if document_ids_BT is not None:
                    begins = _list_document_begins(document_ids_BT[row].tolist())
                view = SequenceView(owners, begins, window)
                tokens = zip(part.tokens.tolist(), is_wrong, strict=True)
                wrong_tokens.add_row(part.first_row, row, view, tokens)
        # It is the first output that differs on any rank.
        wrong_tokens.has_right_input = any(
            before < number and self._has_compared(key, reference_BT)
            for before, (key, reference_BT) in references.items()
        )
        return wrong_tokens

    def _has_compared(self, key: str, reference_BT: torch.Tensor) -> bool:
        phase, _, name, width = _split_output_key(key)
        return next(self._compare_parts(phase, name, width, reference_BT), None) is not None

    def _list_owners_of_tokens(self, length: int) -> list[int]:
        """The rank of cp that has each token of a sequence."""
        local_tokens = LocalSequenceTokens.from_model(self._model)
        owners = [0] * length
        for rank in range(local_tokens.cp):
            for token in replace(local_tokens, rank=rank).find_token_indices(length).tolist():
                owners[token] = rank
        return owners

    def _compare_parts(
        self,
        phase: str,
        name: str,
        width: int,
        reference_BT: torch.Tensor,
        parts: _LocalOutputs | None = None,
    ) -> Iterator[_ComparedPart]:
        """What this rank's forwards made of each token, beside one process's; of other `parts` than
        those that its stages go on with, if given."""
        parts = self._parts if parts is None else parts
        scale = float(reference_BT.square().mean().sqrt())
        for (other, module, first_row, features), local_BT in sorted(parts.items()):
            if (other, module, features) != (phase, name, width):
                continue
            tokens = self._find_local_tokens(reference_BT.shape[1], local_BT.shape[1])
            rows = reference_BT[first_row : first_row + len(local_BT)]
            if tokens is None or len(rows) != len(local_BT):
                continue
            local_BT = local_BT[:, : len(tokens)]
            error_BT = (local_BT - rows[:, tokens]).abs() / (scale or 1.0)
            yield _ComparedPart(first_row, tokens, local_BT, error_BT)

    def _find_local_tokens(self, length: int, num_local: int) -> torch.Tensor | None:
        """The tokens of a sequence of `length` that the `num_local` of this rank are; None if they
        are cut otherwise."""
        tokens = LocalSequenceTokens.from_model(self._model).find_token_indices(length)
        if num_local == len(tokens):
            return tokens
        layout = self._model.plan.layout
        # What pads the sequence stands behind its last token.
        if num_local != -(-len(tokens) // layout.tp):
            return None
        first = self._model.mesh.coordinates["tp"] * num_local
        return tokens[first : first + num_local]

    def _record_output(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        moment, hidden_BTD = (
            self._model.dropout_rng.current_forward,
            _extract_hidden_states(output),
        )
        # Inside a backward this is a recomputation; an evaluation has no moment.
        if moment is None or hidden_BTD is None or torch._C._current_graph_task_id() != -1:
            return
        # What stages compute to learn shapes is thrown away, and so is what a later stage makes of
        # tokens before its hidden states take the place of that: NaN, or with a tied weight more.
        parts = self._parts
        pipeline = self._model.pipeline
        if pipeline is not None and not pipeline.staged.stage_forward.is_computing_own_part:
            if pipeline.is_inferring_shapes or bool(hidden_BTD.isnan().any()):
                return
            parts = self._before_blocks.setdefault(pipeline.staged.stage_forward.running_stage, {})
        phase = train_phase_of_step(moment.step - 1)
        key = (phase, name, moment.first_row, hidden_BTD.shape[-1])
        if key not in parts:
            parts[key] = _project_hidden_states(hidden_BTD)


@dataclass(frozen=True)
class _WrongToken:
    error: float
    row: int
    token: int


@dataclass(frozen=True)
class _ComparedPart:
    """The errors of one forward, whose rows begin with `first_row`, of these tokens."""

    first_row: int
    tokens: torch.Tensor
    local_BT: torch.Tensor
    error_BT: torch.Tensor

    def find_other_first_row(self, reference_BT: torch.Tensor, tolerance: float) -> int | None:
        """The first row of the microbatch that these are of where it is not the one that they
        should be of; None where it is, or is none."""
        num_rows = len(self.error_BT)
        for first_row in range(0, len(reference_BT), num_rows):
            rows = reference_BT[first_row : first_row + num_rows, self.tokens]
            if len(rows) == num_rows and bool(((self.local_BT - rows).abs() <= tolerance).all()):
                return None if first_row == self.first_row else first_row
        return None


def _split_output_key(key: str) -> tuple[str, int, str, int]:
    """Phase, place in the order of the forward, name of the module, and width."""
    phase, number, width, name = key.split("/", 3)
    return phase, int(number), name, int(width)


def find_window_of_causal_attention(module: nn.Module, name: str) -> int | None:
    """The window, or 0, of the attention of this name; None for a module that is not known as one
    whose tokens see those before them."""
    for raw_name, part in module.named_modules():
        if full_name(raw_name) == name:
            core = getattr(part, "core", None)
            window = getattr(core, "window", None)
            return window if isinstance(window, int) and getattr(core, "causal", False) else None
    return None


def _list_document_begins(document_ids: Sequence[int]) -> list[int]:
    """Where the document of each token begins."""
    begins: list[int] = []
    for token, document in enumerate(document_ids):
        is_same = token > 0 and document == document_ids[token - 1]
        begins.append(begins[-1] if is_same else token)
    return begins


def list_hidden_state_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of all whose outputs are hidden states: those outside of lists of blocks,
    the blocks, and what these are made of."""
    watched = []
    for raw_name, part in module.named_modules():
        name = full_name(raw_name)
        segments = name.split(".")
        numbers = [index for index, segment in enumerate(segments) if segment.isdecimal()]
        is_deep = bool(numbers) and len(segments) > numbers[0] + 2
        if name and not is_deep and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            watched.append((name, part))
    return watched


def _extract_hidden_states(output: Any) -> torch.Tensor | None:
    """The [B, T, D] of a module's output: it, or the first of a tuple; None if it is something
    else."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    is_tensor = type(output) is torch.Tensor and output.ndim == 3 and output.is_floating_point()
    if not is_tensor:
        return None
    hidden_BTD: torch.Tensor = output
    return hidden_BTD


@torch.no_grad()
def _project_hidden_states(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """[B, T] float64, on the CPU."""
    return hidden_BTD.detach().double().cpu() @ _make_projection_vector(hidden_BTD.shape[-1])


@functools.cache
def _make_projection_vector(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_to_stable_64_bits("outputs", width) % 2**63)
    return torch.randn(width, generator=generator, dtype=torch.float64)
