"""`PlanFacts`: the numbers of a plan that rules of thumb are checked with, in one flat place.

Rules read nothing else: what is None here nobody computed, and a rule that needs it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.plan.layout import Layout

# Terms of a step that are messages which nothing hides.
COMMUNICATION_TERMS = ("tp", "cp", "ep", "dp exposed")


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a model."""

    name: str
    num_params: int
    num_active_params: int
    num_layers: int
    hidden_size: int
    vocab_size: int = 0
    num_query_heads: int | None = None
    num_kv_heads: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    reads_images: bool = False


@dataclass(frozen=True)
class HardwareFacts:
    """The devices of a cluster and their links. Bandwidths are per device and direction."""

    name: str
    num_devices: int
    devices_per_node: int
    memory_bytes: int
    link_domain: int | None = None
    """Devices that the fast links (NVLink) join."""
    peak_flops: float | None = None
    """FLOP/s of dense matrix products in the job's precision."""
    memory_gb_s: float | None = None
    link_gb_s: float | None = None
    network_gb_s: float | None = None

    @property
    def num_nodes(self) -> int:
        # Rounded up: a node that is partly used counts.
        return -(-self.num_devices // self.devices_per_node)


@dataclass(frozen=True)
class BatchFacts:
    """The samples of a step. `seq_len` in tokens, sizes in sequences."""

    seq_len: int
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return self.seq_len * self.global_batch_size


@dataclass(frozen=True)
class PlanFacts:
    """Everything that rules of thumb read of a plan; None where it is not known."""

    model: ModelFacts
    hardware: HardwareFacts
    layout: Layout
    batch: BatchFacts
    zero_stage: int = 0
    element_bytes: int = 2
    """Bytes of one element that is computed with and gathered: 2 in bf16."""
    stages_per_rank: int = 1
    sequence_parallel: bool = True
    recompute: str = "none"
    optimizer: str = "adamw"
    lr_scaling: str = "none"
    """The job's rule by which the learning rate follows the batch: none, auto, linear, sqrt."""
    reference_batch_size: int | None = None
    """The global batch, in samples, that the learning rate was tuned with."""
    offload: str = "none"
    terms_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step by term; empty where time is not predicted."""
    peak_bytes: int | None = None
    """Bytes that the rank with the largest peak needs."""
    busiest_stage_ratio: float | None = None
    """Work of the busiest pipeline rank, in parts of the mean."""
    bubble: float | None = None
    """Part of a step (0 to 1) that ranks of a pipeline wait for each other."""
    wave_loss: float | None = None
    """Part of the matrix products' time (0 to 1) that partly filled waves of tiles cost."""
    single_domain_efficiency: float | None = None
    """Step time with every link as fast as inside a node, in parts of the predicted one."""
    goodput: float | None = None
    """Part of the wall time (0 to 1) that is neither saving, nor failures, nor repeated steps."""
    data_parallel_bytes: int | None = None
    """Bytes per rank of the largest ZeRO stage over all ranks, without tp, pp, cp and ep."""
    data_parallel_step_s: float | None = None
    """Seconds of a step of that."""
    stage_1_bytes: int | None = None
    """Bytes per rank of ZeRO stage 1, for a pipeline of a higher stage."""
    stage_1_step_s: float | None = None
    """Seconds of a step of that."""
    smaller_zero_bytes: int | None = None
    """Bytes per rank of the next smaller ZeRO stage in the same layout."""
    plain_bytes: int | None = None
    """Bytes per rank of the same plan without recomputation."""
    capacity_bytes: int | None = None
    """Bytes that a rank may fill."""
    spot_cost_ratio: float | None = None
    """Cost on spot instances with the expected pre-emptions, in parts of the cost on demand."""

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where time is not predicted."""
        if not self.terms_s:
            return None
        return sum(self.terms_s.values())

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of one micro-batch that one rank computes on (a tp group computes on the same)."""
        return self.batch.seq_len * self.batch.micro_batch_size // self.layout.cp

    @property
    def matmul_efficiency(self) -> float | None:
        """Part of the peak (0 to 1) that matrix products reach; None where nobody predicted it."""
        ideal = self.terms_s.get("ideal", 0.0)
        if not ideal:
            return None
        return ideal / (ideal + self.terms_s.get("matmul loss", 0.0))

    def step_share_of_terms(self, *terms: str) -> float | None:
        """The part of a step (0 to 1) that these terms take together."""
        if not self.step_s:
            return None
        return sum(self.terms_s.get(term, 0.0) for term in terms) / self.step_s

    def reduction_gb_s(self) -> float | None:
        """GB/s at which a data-parallel group gathers and reduces: its slowest link decides.

        A ring through nodes leaves a node once for all of its members there, and each brings its
        own network card.
        """
        hardware, layout = self.hardware, self.layout
        if hardware.link_gb_s is None:
            return None
        num_inside = max(1, hardware.devices_per_node // (layout.tp * layout.cp))
        if layout.data_parallel_size <= num_inside:
            return hardware.link_gb_s
        if hardware.network_gb_s is None:
            return None
        return min(hardware.link_gb_s, num_inside * hardware.network_gb_s)
