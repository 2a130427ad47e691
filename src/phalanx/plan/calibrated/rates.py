"""`MeasuredRates`: seconds of single operations on one of several ranks, from a profile's fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.core.errors import LayoutError
from phalanx.plan.profiles import (
    GLOO,
    PROCESSOR,
    FittedRate,
    MachineProfile,
    evaluate_linear_fit,
    evaluate_matmul_fit,
)

# What tensor parallelism calls where phalanx has no faster way around gloo's own gather and scatter
# (docs/benchmarks.md, "Collectives"): these take twice as long as those that are measured.
GLOO_GATHER_SLOWDOWN = 2.0


@dataclass(frozen=True)
class MeasuredRates:
    """The fits of `profile` for `num_ranks` ranks on one machine.

    A fit of ranks that had a device each is preferred, with the threads that these ranks have; of
    another number of threads, its seconds are shared among those that there are.
    Ranks beyond the devices of a CPU take turns: computing takes `crowding` times as long.
    """

    profile: MachineProfile
    num_ranks: int
    is_low: bool = False
    """True for products in bf16 under autocast; the rest of a step is in fp32."""
    is_compiled: bool = False
    counts_processor: bool = False
    """True for processor seconds of a rank instead of those on the wall: nobody waits then."""
    _fits: dict[tuple[str, str, str], FittedRate | None] = field(default_factory=dict)

    @property
    def num_threads(self) -> int:
        """Threads of a rank, as `phalanx train` gives them."""
        if self.profile.device != "cpu":
            return 1
        return max(1, self.profile.num_devices // self.num_ranks)

    @property
    def ranks_per_device(self) -> float:
        """The number of ranks that share a device, at least 1."""
        return max(1.0, self.num_ranks * self.num_threads / self.profile.num_devices)

    @property
    def dtype(self) -> str:
        """The type of products."""
        if self.is_low:
            return "bf16"
        return "fp32"

    def matmul_s(self, rows: float, cols: float, inner: float, count: float = 1.0) -> float:
        """Seconds of `count` equal products [rows, inner] x [inner, cols]."""
        fit = self._require_fit("matmul", "", self.dtype)
        return (
            count * self._compute_slowdown(fit) * evaluate_matmul_fit(fit.values, rows, cols, inner)
        )

    def peak_flops(self) -> float:
        """FLOP/s of a rank in long products."""
        fit = self._require_fit("matmul", "", self.dtype)
        return fit.values["flops_per_s"] / self._compute_slowdown(fit)

    def kernel_s(self, kind: str, mode: str, amount: float, dtype: str = "fp32") -> float:
        """Seconds of one kernel of `amount` bytes (FLOPs of attention)."""
        fit = self._find_cached_fit(kind, mode, dtype) or self._require_fit(kind, mode, "fp32")
        return self._compute_slowdown(fit) * evaluate_linear_fit(fit.values, amount)

    def backward_s(self, kind: str, forward: float, training: float, dtype: str = "fp32") -> float:
        """Seconds of a kernel's backward: those of its training, of `training` bytes, without its
        forward of `forward` bytes."""
        both = self.kernel_s(kind, "training", training, dtype)
        return max(0.0, both - self.kernel_s(kind, "forward", forward, dtype))

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of reading and writing `num_bytes` in all."""
        return self.kernel_s("copy", "", num_bytes)

    def loss_s(self, tokens: float, vocab: float) -> float:
        """Seconds of a loss and its gradients without its products."""
        fit = self._find_cached_fit("cross_entropy", "training", self.dtype)
        fit = fit or self._require_fit("cross_entropy", "training", "fp32")
        return self._compute_slowdown(fit) * evaluate_linear_fit(
            fit.values, LOSS_BYTES_PER_LOGIT * tokens * vocab
        )

    def collective_s(self, kind: str, num_bytes: float, size: int) -> float:
        """Seconds of a collective of a message of `num_bytes` between `size` ranks."""
        if size == 1:
            return 0.0
        mode = ""
        if self.counts_processor:
            mode = PROCESSOR
        fit = self.profile.find_rate(kind, mode, dtype="fp32", num_ranks=size)
        if fit is None:
            if self.profile.collectives == GLOO:
                kind, fix = f"{kind} through gloo", "run phalanx bench comm --collectives gloo"
                raise self._build_missing_fit_error(kind, fix)
            raise self._build_missing_fit_error(kind)
        return evaluate_linear_fit(fit.values, num_bytes)

    @property
    def tensor_gather_slowdown(self) -> float:
        """How many times as long as those that are measured gathers and scatters of tensor
        parallelism take: as long through shared memory and NCCL, which have them as one call."""
        is_gloo = self.profile.collectives in ("", GLOO) and self.profile.device == "cpu"
        return GLOO_GATHER_SLOWDOWN if is_gloo else 1.0

    def hidden_all_reduce_share(self, size: int) -> float:
        """The part of an all-reduce that products beside it hide, 0 to 1."""
        fit = self.profile.find_rate("overlap", dtype="fp32", num_ranks=size)
        if fit is None or self.counts_processor:
            return 0.0
        return max(0.0, fit.values["hidden_share"])

    def block_scale_and_overhead(self) -> Mapping[str, float]:
        """The seconds of whole blocks, as `scale` times the sum of their parts and `overhead_s`."""
        fit = self._find_cached_fit("block", "training", self.dtype)
        if fit is None:
            return {"scale": 1.0, "overhead_s": 0.0}
        return fit.values

    def _compute_slowdown(self, fit: FittedRate) -> float:
        """Seconds of this rank for one second of `fit`."""
        if self.counts_processor:
            return fit.num_threads
        return self.ranks_per_device * fit.num_threads / self.num_threads

    def _find_cached_fit(self, kind: str, mode: str, dtype: str) -> FittedRate | None:
        key = kind, mode, dtype
        if key not in self._fits:
            self._fits[key] = self._search_nearest_fit(*key)
        return self._fits[key]

    def _search_nearest_fit(self, kind: str, mode: str, dtype: str) -> FittedRate | None:
        nearest, least = None, (0, 0)
        for fit in self.profile.fits:
            if (fit.kind, fit.mode, fit.dtype) != (kind, mode, dtype):
                continue
            if fit.num_ranks * fit.num_threads > self.profile.num_devices:
                continue
            distance = (
                abs(fit.num_threads - self.num_threads),
                abs(fit.num_ranks - self.num_ranks),
            )
            if nearest is None or distance < least:
                nearest, least = fit, distance
        return nearest

    def _require_fit(self, kind: str, mode: str, dtype: str) -> FittedRate:
        fit = self._find_cached_fit(kind, mode, dtype)
        if fit is None:
            raise self._build_missing_fit_error(" ".join(filter(None, (kind, mode, dtype))))
        return fit

    def _build_missing_fit_error(
        self, name: str, fix: str = "run phalanx bench all on a quiet machine"
    ) -> LayoutError:
        return LayoutError(
            f"the profile of this machine has no {name}",
            why="that was not measured, or there was no time for it",
            fix=fix,
        )


LOSS_BYTES_PER_LOGIT = 18.0
"""Bytes of a loss for one token and one word: what `bench` counts them as."""
