"""How the framework of a published row computes and communicates, from the words of the row.

Words decide, never where a row comes from: a family of frameworks, its kernels, its precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.plan.timing.setup import (
    AttentionKernel,
    ExpertDispatch,
    Kernels,
    Launch,
    Precision,
    Recompute,
    SoftwareStack,
)
from phalanx.plan.validation.row_values import (
    UNSTATED_PATTERN,
    UnusableRow,
    get_optional_bool,
    get_text,
)

# Containers whose recipes for experts in 8 bits have attention, router and what prepares the
# exchange of tokens in CUDA graphs; and those that have the whole step in one.
FIRST_GRAPHED_ROUTERS = (26, 2, 1)
FIRST_GRAPHED_EXPERTS = (26, 6, 0)
# CPU time of a block whose attention and router a graph starts, as a part of what it is without.
GRAPHED_ROUTER_LAUNCHES = 0.5
SHARDED_PATTERN = re.compile(r"fsdp|zero-?3|fully")


def parse_row_precision(row: Mapping[str, Any]) -> Precision:
    """The type that products of blocks are computed in; bf16 where the row does not say. Raises
    UnusableRow for a type that the planner has no rates of."""
    text = get_text(row, "precision").lower()
    if re.search(r"fp4", text):
        return "fp4"
    if re.search(r"mxfp8|block", text):
        return "mxfp8"
    if re.search(r"fp8|float8", text):
        return "fp8"
    if "bf16" in text or "bfloat16" in text:
        return "bf16"
    if re.search(r"fp16|half|float16", text):
        return "fp16"
    if re.search(r"fp32|float32", text):
        return "fp32"
    _require_unstated(text, "precision")
    return "bf16"


def parse_row_recompute(row: Mapping[str, Any]) -> tuple[tuple[Recompute, float], ...]:
    """The modes of recomputation, and parts of the blocks, that a row's words leave possible; more
    than one where they do not say. Raises UnusableRow for words of nothing that is known."""
    text = get_text(row, "activation_checkpointing").lower()
    unknown: tuple[tuple[Recompute, float], ...] = (
        ("none", 1.0),
        ("selective", 1.0),
        ("full", 0.25),
        ("full", 0.5),
        ("full", 1.0),
    )
    if not text or UNSTATED_PATTERN.search(text):
        return unknown
    interval_match = re.search(r"every (\d+)(?:nd|rd|th)", text)
    if interval_match:
        return (("full", 1.0 / int(interval_match[1])),)
    if re.search(r"^(none|no|off|false)\b|: none", text):
        return (("none", 1.0),)
    if re.search(r"core|attention", text):
        return (("attention", 1.0),)
    if "op" in text:
        return (("per-op", 1.0),)
    if re.search(r"act|norm|mlp|up_proj|minimal", text):
        return (("selective", 1.0),)
    if "selective" in text:
        return (("attention", 1.0),)
    if re.search(r"full|every|true|yes|uniform|block", text):
        return (("full", 1.0),)
    raise UnusableRow("unknown activation_checkpointing")


def parse_row_schedule(row: Mapping[str, Any]) -> str:
    """The pipeline schedule in a row's words; 1f1b where it does not say. Raises UnusableRow for a
    schedule that the planner cannot time."""
    text = get_text(row, "pp_schedule").lower()
    if re.search(r"zb[-_]?2p|zb[-_]?h2", text):
        return "zb-h2"
    if re.search(r"zb[-_]?v", text):
        return "zb-v"
    if re.search(r"zb|zero.?bubble", text):
        return "zb-h1"
    if "dualpipe" in text:
        return "dualpipe-v"
    if "gpipe" in text:
        return "gpipe"
    if not re.search(r"1f1b|interleaved|^none$", text):
        _require_unstated(text, "pp_schedule")
    return "1f1b"


@dataclass(frozen=True)
class RowFramework:
    """The framework that a row names, and the families that it belongs to."""

    name: str
    is_xla: bool
    is_megatron: bool
    is_deepspeed: bool
    is_internevo: bool
    has_fused_head: bool


def build_row_stack(row: Mapping[str, Any]) -> SoftwareStack:
    """The software of a row. Raises UnusableRow for kernels that the planner does not know."""
    framework = _parse_framework(row)
    dp_mode = get_text(row, "dp_mode").lower()
    attention = _parse_attention_kernel(row)
    # Transformer Engine came with cuDNN's attention, overlapped collectives and a sequence cut.
    overlaps_model_parallel = framework.is_megatron and attention == "cudnn"
    overlaps_dp = _overlaps_data_parallel(framework, dp_mode)
    grad_bytes, gather_bytes = _parse_gradient_and_parameter_bytes(
        row, dp_mode, framework.is_megatron
    )
    return SoftwareStack(
        name=framework.name or "unknown",
        kernels=_parse_kernel_kind(row, framework.is_xla, framework.is_megatron),
        attention=attention,
        launch=_parse_launch(row, framework),
        launch_weight=_get_launch_weight(row, framework.is_megatron),
        # Where a row says nothing of graphs, its release alone decides what the CPU starts.
        launches_in_order=_parse_graphed_part(row) is not None
        and _parse_expert_dispatch(row) == "by rank in order",
        overlaps_reduce=overlaps_dp,
        # InternEvo's configurations leave overlap_sync_param off, and send each parameter alone.
        overlaps_gather=overlaps_dp and not framework.is_internevo,
        overlaps_tp=_get_bool(row, "async_tp", overlaps_model_parallel),
        overlaps_ep=_get_bool(row, "ep_overlap", overlaps_model_parallel),
        # Recipes with one graph delay weight gradients to have work beside the exchange of tokens,
        # and have Transformer Engine's fused grouped MLP.
        overlaps_experts=_get_bool(
            row, "ep_beside_microbatch", _launches_experts_by_graph(row, framework.is_megatron)
        ),
        fuses_experts=_get_bool(
            row, "fused_experts", _launches_experts_by_graph(row, framework.is_megatron)
        ),
        expert_dispatch=_parse_expert_dispatch(row),
        attention_has_8_bits=_has_8_bits(row, "attention_precision"),
        head_has_8_bits=_has_8_bits(row, "head_precision"),
        reads_expert_sizes=not _drops_tokens(row),
        overlaps_p2p=framework.is_megatron,
        grad_bytes=grad_bytes,
        gather_bytes=gather_bytes,
        has_main_grad=framework.is_megatron or framework.is_internevo,
        reduces_each_microbatch=bool(SHARDED_PATTERN.search(dp_mode)) and "megatron" not in dp_mode,
        # DeepSpeed gathered parameters one by one before it fetched modules ahead.
        gathers_each_tensor=framework.is_internevo
        or (framework.is_deepspeed and attention == "unfused"),
        cuts_experts=not framework.is_megatron,
        is_head_fused=framework.has_fused_head,
        extra_dropout=attention == "unfused",
    )


def _parse_framework(row: Mapping[str, Any]) -> RowFramework:
    name = get_text(row, "framework").lower()
    is_xla = bool(re.search(r"xla|pax|maxtext|jax", name + get_text(row, "compile").lower()))
    is_megatron = bool(re.search(r"megatron|nemo|mcore", name)) and not is_xla
    has_compiled_kernels = _parse_kernel_kind(row, is_xla, False) == "compiled"
    return RowFramework(
        name=name,
        is_xla=is_xla,
        is_megatron=is_megatron,
        is_deepspeed="deepspeed" in name + get_text(row, "dp_mode").lower(),
        is_internevo="internevo" in name,
        has_fused_head=is_megatron or "llm-foundry" in name or has_compiled_kernels,
    )


def _overlaps_data_parallel(framework: RowFramework, dp_mode: str) -> bool:
    """True if collectives of data parallelism run beside computation."""
    if framework.is_deepspeed and framework.is_megatron:
        # The pipeline engine reduces after all microbatches.
        return False
    return not re.search(r"no gradient|no overlap|\(local\)", dp_mode)


def _parse_launch(row: Mapping[str, Any], framework: RowFramework) -> Launch:
    if framework.is_xla or _launches_experts_by_graph(row, framework.is_megatron):
        return "graph"
    return "eager"


def is_sequence_parallel(row: Mapping[str, Any], stack: SoftwareStack) -> bool:
    """True if ranks of tp hold parts of the sequence between their regions; where the row does not
    say, if its software is of a time that does."""
    return _get_bool(row, "sequence_parallel", stack.attention != "unfused")


def _parse_attention_kernel(row: Mapping[str, Any]) -> AttentionKernel:
    text = get_text(row, "attention_kernel").lower()
    if re.search(r"unfused|eager|math|megatron|fused softmax", text) and "flash" not in text:
        return "unfused"
    if re.search(r"cudnn|\bte\b|te/|fa3|flashattention-?3|transformer engine", text):
        return "cudnn"
    # The last ones say how cp attends, and not by which kernel.
    if not re.search(
        r"flash|sdpa|triton|xformers|efficient|flex|xla|ring|ulysses|a2a|all-?to-?all|all-?gather",
        text,
    ):
        _require_unstated(text, "attention_kernel")
    return "flash"


def _parse_kernel_kind(row: Mapping[str, Any], is_xla: bool, is_megatron: bool) -> Kernels:
    compiled = get_text(row, "compile").lower()
    if is_xla or compiled in ("true", "yes", "torch.compile", "inductor"):
        return "compiled"
    if compiled not in ("false", "no", "none"):
        _require_unstated(compiled, "compile")
    if is_megatron or re.search(r"fused|deepspeed|internevo", get_text(row, "framework").lower()):
        return "fused"
    return "eager"


def _parse_gradient_and_parameter_bytes(
    row: Mapping[str, Any], dp_mode: str, is_megatron: bool
) -> tuple[int, int]:
    """Bytes of one element of a gradient that is reduced, and of a parameter that is gathered."""
    precision = get_text(row, "precision").lower()
    grad_bytes, gather_bytes = 4, 2
    framework = get_text(row, "framework").lower()
    if "pure" in dp_mode or re.search(r"deepspeed|internevo|colossal", framework):
        grad_bytes = 2
    if is_megatron and re.search(r"fp16|bf16|fp8|fp4", precision):
        grad_bytes = 2 if "distributed" in dp_mode or "fp16" in precision else 4
    if "fp8 all-gather" in precision:
        gather_bytes = 1
    return grad_bytes, gather_bytes


def _parse_expert_dispatch(row: Mapping[str, Any]) -> ExpertDispatch:
    """How tokens travel to experts; as rows of an all-to-all where the row does not say."""
    text = get_text(row, "moe_dispatcher").lower()
    if "hybridep" in text:
        return "by rank in order"
    if re.search(r"deepep|flex", text):
        return "by rank"
    if not re.search(r"all-?_?to-?_?all|a2a", text):
        _require_unstated(text, "moe_dispatcher")
    return "by expert"


def _has_8_bits(row: Mapping[str, Any], key: str) -> bool:
    """True if the words at `key` say that products have 8 bits."""
    text = get_text(row, key).lower()
    if re.search(r"fp8|float8|e4m3", text):
        return True
    if not re.search(r"16|float32|fp32", text):
        _require_unstated(text, key)
    return False


def _parse_graphed_part(row: Mapping[str, Any]) -> str | None:
    """What CUDA graphs start of a step, in a row's words: "all", "router" (with or without
    attention) or "none"; None where it does not say."""
    text = get_text(row, "cuda_graph").lower()
    if re.search(r"full|whole|step|layer", text):
        return "all"
    if re.search(r"router", text):
        return "router"
    if re.search(r"^(none|no|off|false)\b", text):
        return "none"
    _require_unstated(text, "cuda_graph")
    return None


def _launches_experts_by_graph(row: Mapping[str, Any], is_megatron: bool) -> bool:
    """True if a whole step with experts runs as one CUDA graph: by the row's words, or of
    Megatron-Core's containers since June 2026, on GPUs that group 8-bit products without reading
    sizes back."""
    graphed = _parse_graphed_part(row)
    if graphed is not None:
        return graphed == "all" and bool(row.get("moe"))
    has_small_types = parse_row_precision(row) in ("mxfp8", "fp4")
    return has_small_types and _has_experts_of(row, is_megatron, FIRST_GRAPHED_EXPERTS)


def _get_launch_weight(row: Mapping[str, Any], is_megatron: bool) -> float:
    """CPU time of one block, as a multiple of one whose kernels are all started one by one, and
    whose experts have sizes that the CPU waits for."""
    graphed = _parse_graphed_part(row)
    if graphed is not None:
        return GRAPHED_ROUTER_LAUNCHES if graphed == "router" or _drops_tokens(row) else 1.0
    has_small_types = parse_row_precision(row) in ("fp8", "mxfp8", "fp4")
    if has_small_types and _has_experts_of(row, is_megatron, FIRST_GRAPHED_ROUTERS):
        return GRAPHED_ROUTER_LAUNCHES
    return 0.5 if _drops_tokens(row) else 1.0


def _has_experts_of(
    row: Mapping[str, Any], is_megatron: bool, first_release: tuple[int, int, int]
) -> bool:
    """True for experts in one of Megatron-Core's containers from `first_release` on."""
    release = parse_row_release(row)
    has_experts = is_megatron and bool(row.get("moe"))
    return has_experts and release is not None and release >= first_release


def _drops_tokens(row: Mapping[str, Any]) -> bool:
    """True for experts with a capacity, whose sizes the CPU knows."""
    return "tokendrop" in get_text(row, "note").lower()


def parse_row_release(row: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Year, month and patch of the container that a row names, as (26, 4, 1); None where it names
    none."""
    text = f"{get_text(row, 'framework')} {get_text(row, 'table')} {get_text(row, 'note')}".lower()
    number = r"\b(2\d)\.(0[1-9]|1[0-2])(?:\.(\d+))?"
    match = re.search(number + r"\s+(?:nemo|container|pytorch)", text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _require_unstated(text: str, key: str) -> None:
    """Raise UnusableRow if `text`, which no rule has understood, states something."""
    if text and not UNSTATED_PATTERN.search(text):
        raise UnusableRow(f"unknown {key}")


def _get_bool(row: Mapping[str, Any], key: str, default: bool) -> bool:
    value = get_optional_bool(row, key)
    return default if value is None else value
