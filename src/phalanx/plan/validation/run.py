"""`MeasuredRun`: a published row as the planner's own nouns: model, machine, the setups that it may
have had, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.work import ModelWork
from phalanx.plan.timing.machine import MachineRates
from phalanx.plan.timing.setup import Precision, StepSetup
from phalanx.plan.validation.row_machine import build_row_machine
from phalanx.plan.validation.row_memory import estimate_rank_bytes, fits_in_memory
from phalanx.plan.validation.row_model import build_row_shape, count_mtp_layers
from phalanx.plan.validation.row_setups import list_possible_setups
from phalanx.plan.validation.row_stack import (
    parse_row_precision,
    parse_row_release,
)
from phalanx.plan.validation.row_values import (
    MAX_STEP_S,
    UnusableRow,
    get_optional_number,
    get_positive_int,
    get_text,
)

LONG_SEQ_LEN = 16_384
MANY_GPUS = 64
MAX_SEQ_LEN = 4_194_304
# Nobody measured more of the data sheet's peak than this, recomputation counted or not.
MAX_UTILISATION = 1.3
MIN_UTILISATION = 0.002


@dataclass(frozen=True)
class MeasuredRun:
    """A row that can be predicted. `setups`: more than one where the row leaves something out."""

    row_id: str
    source: str
    group: str
    """Rows with this in common are one model and machine, and may be ranked by layout."""
    model: str
    gpu: str
    work: ModelWork
    machine: MachineRates
    precision: Precision
    setups: tuple[StepSetup, ...]
    num_gpus: int
    step_s: float
    memory_gib: float | None
    classes: tuple[str, ...]
    ideal_s: float
    """Seconds of the model's FLOPs at the data sheet's peak on all GPUs."""

    @property
    def has_experts(self) -> bool:
        return any(block.num_experts for block, _ in self.work.block_kinds)

    @property
    def memory_estimate_gib(self) -> float:
        """GiB by the estimate of the first setup that is possible."""
        return estimate_rank_bytes(self.work, self.setups[0]) / 2**30


def build_measured_run(row: Mapping[str, Any]) -> MeasuredRun:
    """The run of a row. Raises UnusableRow, with the reason, where it cannot be predicted or was
    not measured."""
    step_s = _parse_step_s(row)
    machine = build_row_machine(row)
    shape = build_row_shape(row)
    seq_len = get_positive_int(row, "seq_len")
    if seq_len > MAX_SEQ_LEN:
        raise UnusableRow("absurd seq_len")
    work = _count_model_work(shape, seq_len, count_mtp_layers(row))
    num_gpus = get_positive_int(row, "n_gpus")
    precision = parse_row_precision(row)
    setups = tuple(list_possible_setups(row, num_gpus, seq_len, precision, shape.num_layers))
    if not setups:
        raise UnusableRow("degrees and batch do not divide")
    if machine.accelerator.memory_gib:
        setups = _keep_setups_that_fit(work, setups, machine.accelerator.memory_gib)
    ideal_s = _ideal_step_s(work, machine, precision, setups[0], num_gpus)
    if not MIN_UTILISATION <= ideal_s / step_s <= MAX_UTILISATION:
        raise UnusableRow("step time that no such machine can have")
    return MeasuredRun(
        row_id=get_text(row, "id"),
        source=get_text(row, "source") or "unknown",
        group=_build_group_key(row, machine),
        model=get_text(row, "model"),
        gpu=machine.accelerator.name,
        work=work,
        machine=machine,
        precision=precision,
        setups=setups,
        num_gpus=num_gpus,
        step_s=step_s,
        memory_gib=_parse_memory_gib(row),
        classes=_list_run_classes(row, shape, setups[0], num_gpus, machine, precision),
        ideal_s=ideal_s,
    )


@lru_cache(maxsize=256)
def _count_model_work(shape: DecoderShape, seq_len: int, num_predicted: int) -> ModelWork:
    work = shape.work(seq_len)
    if not num_predicted:
        return work
    # A block and the head again, for the token after the next.
    share = 1 + num_predicted
    return replace(
        work,
        blocks=work.blocks + work.blocks[-1:] * num_predicted,
        num_head_tokens=work.num_head_tokens * share,
    )


def _parse_step_s(row: Mapping[str, Any]) -> float:
    """Seconds of one step: measured, or from what else was. Raises UnusableRow for none."""
    measured, derived = (
        part if isinstance(part, Mapping) else {}
        for part in (row.get("measured"), row.get("derived"))
    )
    if measured.get("oom"):
        raise UnusableRow("out of memory")
    step_s = get_optional_number(measured, "step_time_s") or get_optional_number(
        derived, "step_time_s"
    )
    if step_s is None:
        step_s = _derive_step_s_from_throughput(row, measured) or _derive_step_s_from_throughput(
            row, derived
        )
    if step_s is None:
        raise UnusableRow("no step time or tokens/s")
    if not 0 < step_s < MAX_STEP_S:
        raise UnusableRow("absurd step time")
    return step_s


def _derive_step_s_from_throughput(
    row: Mapping[str, Any], rates: Mapping[str, Any]
) -> float | None:
    batch, seq_len = get_optional_number(row, "global_batch"), get_optional_number(row, "seq_len")
    num_gpus = get_optional_number(row, "n_gpus")
    if not batch or not seq_len or not num_gpus:
        return None
    per_gpu = get_optional_number(rates, "tokens_per_s_per_gpu")
    total = get_optional_number(rates, "tokens_per_s")
    samples = get_optional_number(rates, "samples_per_s") or get_optional_number(
        rates, "sequences_per_s"
    )
    if per_gpu and per_gpu > 0:
        return batch * seq_len / (per_gpu * num_gpus)
    if total and total > 0:
        return batch * seq_len / total
    if samples and samples > 0:
        return batch / samples
    return None


def _parse_memory_gib(row: Mapping[str, Any]) -> float | None:
    measured = row.get("measured")
    if not isinstance(measured, Mapping):
        return None
    memory = get_optional_number(measured, "memory_gib") or get_optional_number(
        measured, "memory_gb_reported"
    )
    return memory if memory and memory > 0 else None


def _keep_setups_that_fit(
    work: ModelWork, setups: tuple[StepSetup, ...], memory_gib: float
) -> tuple[StepSetup, ...]:
    """The setups that fit by the estimate; where none does, the one that needs least, for the run
    took place."""
    fitting = tuple(setup for setup in setups if fits_in_memory(work, setup, memory_gib))
    if fitting:
        return fitting
    return (min(setups, key=lambda setup: estimate_rank_bytes(work, setup)),)


def _ideal_step_s(
    work: ModelWork, machine: MachineRates, precision: Precision, setup: StepSetup, num_gpus: int
) -> float:
    flops = 3.0 * (work.matmul_flops + work.attention_flops) * setup.num_sequences
    peak = machine.accelerator.peak_flops(precision)
    if precision == "mxfp8":
        peak = machine.accelerator.peak_flops("fp8")
    return flops / (peak * num_gpus)


def _build_group_key(row: Mapping[str, Any], machine: MachineRates) -> str:
    """The key that rows of different layouts have in common: everything else that takes time."""
    keys = ("source", "model", "seq_len", "n_gpus", "global_batch", "precision", "framework")
    # Sweeps of widths and heads keep the model's name.
    widths = ("layers", "hidden", "ffn", "heads", "kv_heads")
    words = [get_text(row, key) for key in keys + widths]
    # Releases of one framework differ by up to 60 % in equal layouts.
    return "|".join([*words, str(parse_row_release(row)), machine.accelerator.name])


def _list_run_classes(
    row: Mapping[str, Any],
    shape: DecoderShape,
    setup: StepSetup,
    num_gpus: int,
    machine: MachineRates,
    precision: Precision,
) -> tuple[str, ...]:
    """The classes that results are told apart by; a row may be of several."""
    classes = []
    if not shape.num_experts and num_gpus >= MANY_GPUS:
        classes.append(f"dense >= {MANY_GPUS} GPUs")
    if num_gpus <= machine.gpus_per_node:
        classes.append("single-node")
    if setup.seq_len >= LONG_SEQ_LEN or setup.layout.cp > 1:
        classes.append("long-context")
    if setup.zero_stage == 3:
        classes.append("FSDP")
    if shape.num_experts:
        classes.append("MoE")
    if precision in ("fp8", "mxfp8", "fp4"):
        classes.append("fp8")
    return tuple(classes)
