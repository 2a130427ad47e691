"""`--explain TERM`: the formula of a term of the step's time, or of a category of memory, with its
numbers, as the planner computed them."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import UsageError, format_nearest_word_hint
from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.advice.formula_trace import FormulaCall, FormulaLine, trace_formulas
from phalanx.plan.advice.waterfall import MEMORY_PHASES, TERM_LABELS

TIME_FORMULA_MODULES = tuple(
    f"phalanx.plan.timing.{name}"
    for name in (
        "attention", "block", "collectives", "data_parallel", "matmul", "pipeline", "step",
    )
)  # fmt: skip
MEMORY_FORMULA_MODULES = (
    "phalanx.plan.candidates",
    "phalanx.plan.memory",
    "phalanx.plan.memory_phases",
    "phalanx.plan.communication",
    "phalanx.plan.pipeline.memory",
    "phalanx.plan.host_allocator",
)
# Functions that say how a term comes about, from the parts to the sum.
TIME_FORMULAS: dict[str, tuple[str, ...]] = {
    "ideal": ("_ideal_s",),
    "matmul loss": ("compute_dense_flops_s", "estimate_matmul_times", "estimate_matmul_s"),
    "attention": (
        "estimate_attention_times",
        "_estimate_flash_attention_times",
        "_estimate_unfused_attention_times",
    ),
    "elementwise": ("memory_traffic_s", "_estimate_elementwise_times"),
    "tp": ("_estimate_tp_times", "all_reduce_s", "estimate_exposed_collective_s"),
    "cp": ("_estimate_cp_times", "all_gather_s"),
    "ep": ("_estimate_ep_s", "all_to_all_s"),
    "bubble": (
        "estimate_bubble_s",
        "_slowest_stage_s",
        "_idle_s_per_other_stage",
        "p2p_send_s",
    ),
    "dp exposed": (
        "estimate_exposed_communication_s",
        "estimate_exposed_collective_s",
        "all_gather_s",
    ),
    "optimizer": ("estimate_optimizer_s",),
    "offload": ("estimate_optimizer_s",),
    "launch": ("_add_launch_wait",),
    "jitter": ("_jitter_share",),
}
MEMORY_FORMULAS: dict[str, tuple[str, ...]] = {
    "parameters": (
        "predict_model_state_bytes",
        "_predict_state_and_buffer_bytes",
    ),
    "gradients": (
        "predict_model_state_bytes",
        "_predict_state_and_buffer_bytes",
    ),
    "optimizer state": (
        "predict_model_state_bytes",
        "_predict_state_and_buffer_bytes",
    ),
    "activations": (
        "activation_bytes",
        "bytes_at_forward_end",
        "activation_bytes_on_device",
        "predict_stage_bytes",
        "peak_segment_bytes",
        "_count_segment_saved_and_redone_bytes",
        "_activation_bytes_outside_blocks",
    ),
    "loss": ("final_norm", "_head_gradient", "predict_stage_bytes"),
    "communication": (
        "_weight_bytes",
        "_whole_gradients",
        "count_fsdp_unit_params",
        "count_cast_params",
        "_predict_p2p_message_bytes",
        "cp_buffer_bytes",
        "ep_buffer_bytes",
    ),
    "compression": (),
    "allocator": (
        "estimate_retained_bytes",
        "estimate_retained_gradient_bytes",
        "adjust_memory_for_device",
    ),
    "staging": ("staging_bytes", "predict_rank_staging_bytes"),
}
# Figures of the answer that no single term of the step, and no category, makes up.
ANSWER_FORMULA_MODULES = ("phalanx.plan.search.economics", "phalanx.plan.search.finalists")
ANSWER_FORMULAS: dict[str, tuple[str, ...]] = {
    "goodput": ("estimate_goodput", "_choose_checkpoint_interval_s"),
    "cost": ("estimate_cost",),
    "mfu": ("add_throughput",),
}
# Other words of the answer for figures that a term explains.
TERM_OF_WORD = {
    "tokens/s": "mfu",
    "tokens/s/gpu": "mfu",
    "energy": "cost",
    "kwh": "cost",
    "price": "cost",
    "step time": "step",
    "expert parallel": "ep",
}
STEP_TERM = "step"
MEMORY_PHASE_TERMS = tuple(MEMORY_PHASES)
# Where the terms of a step are put together.
_TIME_SUM_FUNCTIONS = ("estimate", "_sum_block_parts")
_MEMORY_SUM_FUNCTIONS = (
    "predict_rank_memory_by_phase",
    "predict_pipeline_memory_by_phase",
    "_predict_bytes_while_computing",
    "_predict_state_and_buffer_bytes",
    "_add_communication_buffers",
    "adjust_memory_for_device",
)


@dataclass(frozen=True)
class ExplainedTerm:
    """A term, its value, and the calls that made it."""

    term: str
    value: float
    unit: str
    """"s", "bytes", "share" (0 to 1), or "$" or "h" for a billion tokens."""
    calls: tuple[FormulaCall, ...]
    sums: tuple[FormulaLine, ...] = ()
    """The lines that put the term together from its parts."""

    def to_json(self) -> dict[str, Any]:
        calls = []
        for call in self.calls:
            lines = [
                _formula_line_to_json(line) for line, _ in _list_last_run_of_each_line(call.lines)
            ]
            calls.append({"function": f"{call.module}.{call.function}", "lines": lines})
        sums = [_formula_line_to_json(line) for line in self.sums]
        return {
            "term": self.term,
            "value": self.value,
            "unit": self.unit,
            "calls": calls,
            "sums": sums,
        }


def _formula_line_to_json(line: FormulaLine) -> dict[str, Any]:
    return {
        "target": line.target,
        "expression": line.expression,
        "inputs": line.inputs,
        "result": line.result,
    }


def list_explainable_terms() -> tuple[str, ...]:
    """The names that `--explain` knows."""
    terms = (STEP_TERM, *TIME_FORMULAS, *MEMORY_FORMULAS, *MEMORY_PHASE_TERMS, *ANSWER_FORMULAS)
    return tuple(dict.fromkeys(terms))


def parse_term_name(name: str) -> str:
    """The term called `name`, or shown by that name in a waterfall; "-" and "_" stand for the
    space.

    Raises UsageError, listing the terms, for another.
    """
    term = _normalize_term_name(name)
    if term in list_explainable_terms():
        return term
    by_label = {_normalize_term_name(label): term for term, label in TERM_LABELS.items()}
    by_label |= TERM_OF_WORD
    if term in by_label:
        return by_label[term]
    if term in ("peak", "memory"):
        phases = ", ".join(phase.replace(" ", "-") for phase in MEMORY_PHASE_TERMS)
        raise UsageError(f"{name!r} is the largest of several terms", fix=f"name one: {phases}")
    names = ", ".join(term.replace(" ", "-") for term in list_explainable_terms())
    known = (*list_explainable_terms(), *by_label)
    raise UsageError(
        f"{name!r} is no term of a plan",
        fix=format_nearest_word_hint(term, known) or f"one of {names}",
    )


def _normalize_term_name(name: str) -> str:
    return " ".join(re.split(r"[-_,\s]+", name.strip().lower()))


def explain_sum(term: str, parts: Mapping[str, float], unit: str) -> ExplainedTerm:
    """A term that is the sum of `parts`, in `unit`."""
    inputs = {part.replace(" ", "_"): value for part, value in parts.items() if value}
    total = sum(parts.values())
    line = FormulaLine(term.replace(" ", "_"), " + ".join(inputs) or "0", inputs, total)
    return ExplainedTerm(term, total, unit, (), (line,))


def explain_answer_term(
    term: str, value: float, unit: str, compute: Callable[[], Any]
) -> ExplainedTerm:
    """The formulas of a figure of the answer; `compute` makes the figure once more."""
    calls = trace_formulas(compute, ANSWER_FORMULA_MODULES, ANSWER_FORMULAS[term])
    first: dict[str, FormulaCall] = {}
    # The first call of each is of machines on demand, the next of spot machines.
    for call in calls:
        first.setdefault(call.function, call)
    chosen = tuple(first[name] for name in ANSWER_FORMULAS[term] if name in first)
    return ExplainedTerm(term, value, unit, chosen)


def explain_time_term(
    term: str, terms_s: Mapping[str, float], compute: Callable[[], Any]
) -> ExplainedTerm:
    """The formula of a term of the step's time; `compute` predicts the step once more."""
    calls = trace_formulas(
        compute, TIME_FORMULA_MODULES, (*TIME_FORMULAS[term], *_TIME_SUM_FUNCTIONS)
    )
    sums = []
    for call in calls:
        if call.function in _TIME_SUM_FUNCTIONS:
            sums += [line for line in call.lines if _is_line_of_term(line, term)]
    return ExplainedTerm(
        term, terms_s[term], "s", _choose_largest_calls(calls, TIME_FORMULAS[term]), tuple(sums)
    )


def explain_memory_term(
    term: str,
    categories: Mapping[str, float],
    zero_stage: int,
    compute: Callable[[], Any],
) -> ExplainedTerm:
    """The formula of a category of memory, of the candidate with `zero_stage`; `compute` plans once
    more."""
    # There is an optimizer among the terms of time, too.
    category = term.removesuffix(" state")
    _clear_memory_formula_caches()
    calls = trace_formulas(
        compute, MEMORY_FORMULA_MODULES, (*MEMORY_FORMULAS[term], *_MEMORY_SUM_FUNCTIONS)
    )
    # A plan computes the other candidates, too.
    calls = [call for call in calls if call.variables.get("zero_stage", zero_stage) == zero_stage]
    largest: dict[tuple[str, str], FormulaLine] = {}
    for call in calls:
        if call.function not in _MEMORY_SUM_FUNCTIONS:
            continue
        for line in call.lines:
            key = (line.target, line.expression)
            is_larger = key not in largest or (line.result or 0) > (largest[key].result or 0)
            if f"'{category}'" in line.target and is_larger:
                largest[key] = line
    return ExplainedTerm(
        term,
        float(categories.get(category, 0.0)),
        "bytes",
        _choose_largest_calls(calls, MEMORY_FORMULAS[term]),
        tuple(largest.values()),
    )


def _clear_memory_formula_caches() -> None:
    """Clear the caches of the formulas of memory: what is remembered does not run."""
    for name in MEMORY_FORMULA_MODULES:
        for value in vars(importlib.import_module(name)).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _is_line_of_term(line: FormulaLine, term: str) -> bool:
    if line.words.get("part") == term and "[part]" in line.target:
        return True
    return f"'{term}'" in line.target


def _choose_largest_calls(
    calls: list[FormulaCall], functions: tuple[str, ...]
) -> tuple[FormulaCall, ...]:
    """The call with the largest result of each function: of ten products the slowest, say."""
    chosen = []
    for function in functions:
        candidates = [call for call in calls if call.function == function]
        if candidates:
            chosen.append(max(candidates, key=_call_sort_key))
    return tuple(chosen)


def _call_sort_key(call: FormulaCall) -> float:
    if call.result is not None:
        return call.result
    return sum(line.result or 0.0 for line in call.lines)


def format_explained_term(explained: ExplainedTerm, total: float) -> list[str]:
    """The explanation as lines: the value, then each formula as it ran with its numbers."""
    share = ""
    if total > 0:
        share = f" of {_format_in_unit(total, explained.unit)} ({explained.value / total:.1%})"
    lines = [f"{explained.term}: {_format_in_unit(explained.value, explained.unit)}{share}"]
    if not explained.calls and not explained.sums:
        lines.append("  no formula ran: this plan has none of it")
    for call in explained.calls:
        function_name = f"{call.module.removeprefix('phalanx.')}.{call.function}"
        lines += ["", f"{function_name}: {call.summary}" if call.summary else function_name]
        for line, times in _list_last_run_of_each_line(call.lines):
            lines += _format_formula_line(line, times)
        if call.items:
            items = ", ".join(f"{name} {_round_to_six_digits(v)}" for name, v in call.items.items())
            lines.append(f"      = {items}")
    if explained.sums:
        lines += ["", "put together"]
        for line in explained.sums:
            lines += _format_formula_line(line)
    return lines


def _format_in_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "share":
        # As the answer has it, a goodput is never 100 %.
        return f"{value:.1%}" if value < 0.9995 else f"{min(value, 0.9999):.2%}"
    if unit in ("$", "h"):
        return f"{value:,.4g} {unit} for a billion tokens"
    return format_seconds(value)


def _format_formula_line(line: FormulaLine, times: int = 1) -> list[str]:
    """A statement in one line, and below it the same with its numbers."""
    if line.result is None and not line.inputs:
        return []
    # A short name for something else: its number stands where it is used.
    if line.expression.replace(".", "").replace("_", "").isalnum() and line.target != "result":
        return []
    repeated = ""
    if times > 1:
        repeated = f"  (the last of {times} times)"
    texts = [f"  {line.target} = {line.expression}{repeated}"]
    if line.inputs:
        texts.append(f"      = {round_line_inputs(line).expression_with_numbers}")
    if line.result is not None:
        texts.append(f"      = {_round_to_six_digits(line.result)}")
    return texts


def _list_last_run_of_each_line(lines: Sequence[FormulaLine]) -> list[tuple[FormulaLine, int]]:
    """Each statement once, as it ran last, and how often it ran: a loop has many."""
    last: dict[tuple[str, str], tuple[FormulaLine, int]] = {}
    for line in lines:
        key = (line.target, line.expression)
        times = 1
        if key in last:
            times += last[key][1]
        last[key] = (line, times)
    return list(last.values())


def round_line_inputs(line: FormulaLine) -> FormulaLine:
    """The line with its numbers as they are printed."""
    inputs = {name: _round_to_six_digits(value) for name, value in line.inputs.items()}
    return FormulaLine(line.target, line.expression, inputs, line.result)


def _round_to_six_digits(value: float) -> float:
    """Whole numbers as they are, others to six digits."""
    if not math.isfinite(value):
        return value
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.6g}")
