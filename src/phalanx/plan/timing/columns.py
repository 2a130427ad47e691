"""`SetupColumns`: many setups as one array for each key, which the formulas compute with. A single
setup is columns of length 1: there is one set of formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.plan.timing.setup import SoftwareStack, StepSetup

Column = npt.NDArray[Any]
Flag = npt.NDArray[np.bool_]

# The parts of a block that each mode computes again: products, attention, and what is between.
RECOMPUTED_SHARES = {
    "none": (0.0, 0.0, 0.0),
    "attention": (0.0, 1.0, 0.0),
    "selective": (0.0, 0.0, 1.0),
    "per-op": (0.5, 0.0, 1.0),
    "full": (1.0, 1.0, 1.0),
}
# Weight gradients that a zero-bubble schedule puts where a rank would wait: ZB-H1 and ZB-H2 of
# arXiv 2401.10241.
DEFERRED_WEIGHT_GRADS = {"interleaved-zero-bubble": 2.0, "zb-h1": 2.0, "zb-h2": 3.0}

# Larger codes of setups are numbered anew: counting them takes memory in proportion to the largest.
MAX_COUNTED_CODE = 1 << 20

# What neither a block's time for a microbatch nor that of the model's ends depends on.
KEYS_BESIDE_BLOCKS = frozenset(
    [
        *("pp", "dp_replicate", "dp_shard", "zero_stage", "num_microbatches", "stages_per_rank"),
        *("last_stage_blocks", "deferred_weights", "grad_bytes", "gather_bytes"),
        *("accumulates_sharded", "offloads_optimizer", "offloads_parameters"),
        *("overlaps_reduce", "overlaps_gather", "overlaps_p2p", "reduces_each_microbatch"),
        *("keeps_gathered", "gathers_each_tensor", "balances_stages"),
        *("is_gpipe", "is_interleaved", "is_v_shaped"),
    ]
)


@dataclass(frozen=True)
class SetupColumns:
    """Keys of setups, each a column of equal length. Choices are flags, one column an option."""

    pp: Column
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    tp: Column
    ep: Column
    zero_stage: Column
    micro_batch_size: Column
    num_microbatches: Column
    stages_per_rank: Column
    recomputed_matmul: Column
    recomputed_attention: Column
    recomputed_elementwise: Column
    last_stage_blocks: Column
    imbalance: Column
    deferred_weights: Column
    grad_bytes: Column
    gather_bytes: Column
    launch_weight: Column
    sequence_parallel: Flag
    accumulates_sharded: Flag
    offloads_optimizer: Flag
    offloads_parameters: Flag
    is_fused: Flag
    is_eager: Flag
    is_compiled: Flag
    is_unfused_attention: Flag
    is_cudnn_attention: Flag
    is_ring: Flag
    is_gathered_cp: Flag
    launches_graphs: Flag
    launches_in_order: Flag
    overlaps_reduce: Flag
    overlaps_gather: Flag
    overlaps_tp: Flag
    overlaps_ep: Flag
    overlaps_experts: Flag
    sends_by_rank: Flag
    arrives_in_order: Flag
    attention_has_8_bits: Flag
    head_has_8_bits: Flag
    fuses_experts: Flag
    reads_expert_sizes: Flag
    overlaps_p2p: Flag
    has_main_grad: Flag
    reduces_each_microbatch: Flag
    keeps_gathered: Flag
    gathers_each_tensor: Flag
    cuts_experts: Flag
    is_head_fused: Flag
    balances_stages: Flag
    extra_dropout: Flag
    is_gpipe: Flag
    is_interleaved: Flag
    is_v_shaped: Flag

    def __len__(self) -> int:
        return int(self.pp.shape[-1])

    @property
    def num_ranks(self) -> Column:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel_size(self) -> Column:
        return self.dp_replicate * self.dp_shard

    @property
    def sequence_parts(self) -> Column:
        """Into how many parts the sequence is cut between tp's regions."""
        return np.where(self.sequence_parallel, self.tp, 1.0)

    def take(self, rows: npt.NDArray[np.intp]) -> SetupColumns:
        """The setups at `rows`, in this order."""
        return SetupColumns(**{key.name: getattr(self, key.name)[rows] for key in fields(self)})

    def group_by_block_times(self) -> tuple[SetupColumns, npt.NDArray[np.intp]]:
        """The setups whose blocks take different times, and the index of each setup's among them.

        Keys that blocks have no use for are empty columns, so that a formula which reads one fails.
        """
        names = [key.name for key in fields(self) if key.name not in KEYS_BESIDE_BLOCKS]
        first, index = _group_equal_setups([getattr(self, name) for name in names])
        empty = np.zeros(0)
        columns: dict[str, Any] = dict.fromkeys(KEYS_BESIDE_BLOCKS, empty)
        columns |= {name: getattr(self, name)[first] for name in names}
        return SetupColumns(**columns), index


def _group_equal_setups(
    columns: Sequence[Column],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """A row of each different setup, and the index of each row's setup among these."""
    code = np.zeros(columns[0].shape[-1], dtype=np.intp)
    for column in columns:
        if (column == column[0]).all():
            continue
        # A column has few different values: to find and to look them up is faster than to sort it.
        values = np.array(sorted(set(column.tolist())))
        code = code * len(values) + np.searchsorted(values, column)
        if code.max() >= MAX_COUNTED_CODE:
            code = np.unique(code, return_inverse=True)[1]
    is_there = np.bincount(code) > 0
    index = (np.cumsum(is_there) - 1)[code]
    first = np.zeros(np.count_nonzero(is_there), dtype=np.intp)
    first[index] = np.arange(len(code))
    return first, index


def build_setup_columns(setups: Sequence[StepSetup]) -> SetupColumns:
    """The columns of `setups`, which may differ in all but seq_len and precision."""
    of_stack: dict[int, dict[str, float | bool]] = {}
    rows = []
    for setup in setups:
        # Thousands of setups share a few stacks, which stay alive with them.
        if id(setup.stack) not in of_stack:
            of_stack[id(setup.stack)] = _list_stack_values(setup.stack)
        rows.append(_list_setup_values(setup) | of_stack[id(setup.stack)])
    columns: dict[str, npt.NDArray[Any]] = {}
    for key, values in zip(rows[0], zip(*(row.values() for row in rows), strict=True), strict=True):
        dtype = np.bool_ if isinstance(values[0], bool) else np.float64
        columns[key] = np.array(values, dtype=dtype)
    return SetupColumns(**columns)


def compute_recomputed_shares(
    mode: str, share: float, mode_of_others: str
) -> tuple[float, float, float]:
    """The parts of the blocks' products, of their attention and of what is between that a backward
    computes again: `share` of the blocks in `mode`, the others in `mode_of_others`."""
    pairs = zip(RECOMPUTED_SHARES[mode], RECOMPUTED_SHARES[mode_of_others], strict=True)
    matmul, attention, elementwise = (share * a + (1 - share) * b for a, b in pairs)
    return matmul, attention, elementwise


def _list_setup_values(setup: StepSetup) -> dict[str, float | bool]:
    layout = setup.layout
    matmul, attention, elementwise = compute_recomputed_shares(
        setup.recompute, setup.recompute_share, setup.recompute_of_others
    )
    return {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "ep": setup.folded_ep or layout.ep,
        "zero_stage": setup.zero_stage,
        "micro_batch_size": setup.micro_batch_size,
        "num_microbatches": setup.num_microbatches,
        "stages_per_rank": setup.stages_per_rank,
        "recomputed_matmul": matmul,
        "recomputed_attention": attention,
        "recomputed_elementwise": elementwise,
        "last_stage_blocks": setup.last_stage_blocks,
        "imbalance": setup.imbalance,
        "sequence_parallel": setup.sequence_parallel,
        "accumulates_sharded": setup.accumulate == "sharded",
        "offloads_optimizer": setup.offload != "none",
        "offloads_parameters": setup.offload == "parameters",
        "is_ring": setup.cp_attention == "ring",
        "is_gathered_cp": setup.cp_attention == "all-gather",
        "is_gpipe": setup.schedule == "gpipe",
        "is_interleaved": setup.stages_per_rank > 1,
        "deferred_weights": DEFERRED_WEIGHT_GRADS.get(setup.schedule, 0.0),
        "is_v_shaped": setup.schedule in ("zb-v", "dualpipe-v"),
    }


def _list_stack_values(stack: SoftwareStack) -> dict[str, float | bool]:
    return {
        "grad_bytes": stack.grad_bytes,
        "gather_bytes": stack.gather_bytes,
        "launch_weight": stack.launch_weight,
        "is_fused": stack.kernels == "fused",
        "is_eager": stack.kernels == "eager",
        "is_compiled": stack.kernels == "compiled",
        "is_unfused_attention": stack.attention == "unfused",
        "is_cudnn_attention": stack.attention == "cudnn",
        "launches_graphs": stack.launch == "graph",
        "launches_in_order": stack.launches_in_order,
        "overlaps_reduce": stack.overlaps_reduce,
        "overlaps_gather": stack.overlaps_gather,
        "overlaps_tp": stack.overlaps_tp,
        "overlaps_ep": stack.overlaps_ep,
        "overlaps_experts": stack.overlaps_experts,
        "sends_by_rank": stack.expert_dispatch != "by expert",
        "arrives_in_order": stack.expert_dispatch == "by rank in order",
        "attention_has_8_bits": stack.attention_has_8_bits,
        "head_has_8_bits": stack.head_has_8_bits,
        "fuses_experts": stack.fuses_experts,
        "reads_expert_sizes": stack.reads_expert_sizes,
        "overlaps_p2p": stack.overlaps_p2p,
        "has_main_grad": stack.has_main_grad,
        "reduces_each_microbatch": stack.reduces_each_microbatch,
        "keeps_gathered": stack.keeps_gathered,
        "gathers_each_tensor": stack.gathers_each_tensor,
        "cuts_experts": stack.cuts_experts,
        "is_head_fused": stack.is_head_fused,
        "balances_stages": stack.balances_stages,
        "extra_dropout": stack.extra_dropout,
    }
