"""`TimingConstants`: what the time model can neither compute nor read in a data sheet.

Values, bounds, sources and what each moves stand in constants.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files

from phalanx.core.errors import LayoutError, format_nearest_word_hint


@dataclass(frozen=True)
class ConstantSpec:
    """One constant of the table. `prior` is its value before any measured run was looked at."""

    name: str
    value: float
    prior: float
    low: float
    high: float
    moves: str
    source: str


@dataclass(frozen=True)
class TimingConstants:
    """Values of all constants; constants.toml says what each is. A fit puts a column of candidates
    in place of a number: the formulas broadcast."""

    matmul_efficiency_sm70: float
    matmul_efficiency_sm80: float
    matmul_efficiency_sm90: float
    matmul_efficiency_sm100: float
    fp32_efficiency: float
    fp8_efficiency_sm90: float
    fp8_efficiency_sm100: float
    fp4_efficiency: float
    power_exponent: float
    ultra_speed: float
    matmul_prologue: float
    grouped_efficiency: float
    memory_efficiency: float
    eager_traffic: float
    compiled_traffic: float
    cast_bytes: float
    flash_efficiency_sm80: float
    flash_efficiency_sm90: float
    cudnn_efficiency_sm90: float
    cudnn_efficiency_sm100: float
    attention_backward_ratio: float
    small_head_efficiency: float
    small_head_efficiency_cudnn: float
    fp8_attention_speedup: float
    softmax_bytes: float
    launch_fused_s: float
    launch_eager_s: float
    launch_tp: float
    launch_experts: float
    launch_ordered: float
    expert_sync_s: float
    kernel_gap_s: float
    graph_gap_s: float
    link_hop_s: float
    step_overhead_s: float
    link_efficiency: float
    link_latency_s: float
    nic_efficiency: float
    nic_latency_s: float
    hop_s: float
    overlap_contention: float
    tp_hidden: float
    ep_hidden: float
    all_to_all_efficiency: float
    dispatch_efficiency: float
    expert_traffic: float
    p2p_exposed: float
    cp_exposed: float
    clock_spread: float
    jitter: float
    host_gb_s: float
    host_adam_gb_s: float
    attention_ramp: float
    loss_bytes: float
    optimizer_bytes: float
    tp_backward_exposed: float
    p2p_overlapped: float
    unaligned_efficiency: float
    band: float
    band_experts: float
    band_waiting: float
    anchored_band: float
    anchored_band_experts: float

    def override(self, values: Mapping[str, float]) -> TimingConstants:
        """These constants with the `values` of a profile in their place.

        Raises LayoutError for a name that there is not, and for a value that no hardware can have.
        """
        specs = list_timing_constants()
        for name, value in values.items():
            if name not in specs:
                raise LayoutError(
                    f"no constant of the time model is called {name!r}",
                    fix=format_nearest_word_hint(name, tuple(specs)),
                )
            spec = specs[name]
            if not spec.low <= value <= spec.high:
                raise LayoutError(
                    f"{name} is {value:g}; it is between {spec.low:g} and {spec.high:g}"
                )
        return replace(self, **values)

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@cache
def list_timing_constants() -> dict[str, ConstantSpec]:
    """The table of constants, by name."""
    text = files("phalanx.plan.timing").joinpath("constants.toml").read_text(encoding="utf-8")
    return {name: ConstantSpec(name, **entry) for name, entry in tomllib.loads(text).items()}


@cache
def load_timing_constants() -> TimingConstants:
    """The constants that come with phalanx."""
    return TimingConstants(**{name: spec.value for name, spec in list_timing_constants().items()})


@cache
def load_prior_constants() -> TimingConstants:
    """The constants before any measured run was looked at."""
    return TimingConstants(**{name: spec.prior for name, spec in list_timing_constants().items()})
