"""Fits of what has products in it (the loss, whole blocks), by the constants of these.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.bench.block_shape import make_block_shape
from phalanx.bench.fits import ConstantRange, FitResult, fit_constants
from phalanx.core.errors import LayoutError
from phalanx.plan.calibrated.blocks import RankBatch, estimate_calibrated_block
from phalanx.plan.calibrated.rates import LOSS_BYTES_PER_LOGIT, MeasuredRates
from phalanx.plan.cluster import Cluster
from phalanx.plan.profiles import (
    FittedRate,
    MachineProfile,
    ProfileSection,
    TimedOperation,
    evaluate_linear_fit,
)

FitKey = tuple[str, str, str, int, int]
"""Kind, mode, type, number of ranks, threads."""
LOSS_BOUNDS = {
    "overhead_s": ConstantRange(1e-6, 1e-2, 1e-4),
    "per_s": ConstantRange(1e7, 2e13, 1e10),
}
# Of a whole block beside the sum of its parts.
BLOCK_BOUNDS = {
    "scale": ConstantRange(0.7, 1.6, 1.0),
    "overhead_s": ConstantRange(1e-7, 5e-3, 2e-4),
}


def fit_losses_and_blocks(
    groups: Mapping[FitKey, Sequence[TimedOperation]], fits: Sequence[FittedRate], cluster: Cluster
) -> list[FittedRate]:
    """Fits of losses, then of blocks, for which `fits` have the parts; none where they lack one."""
    known = list(fits)
    for kind, fit_rows in (("cross_entropy", _fit_loss_constants), ("block", _fit_block_constants)):
        for key, rows in groups.items():
            if key[0] != kind:
                continue
            try:
                result = fit_rows(rows, _build_measured_rates(key, known, cluster))
            except LayoutError:
                # There was no time for one of the parts.
                continue
            known.append(make_fitted_rate(key, result, len(rows)))
    return known[len(fits) :]


def make_fitted_rate(key: FitKey, result: FitResult, num_points: int) -> FittedRate:
    """The stored form of a fit. Through as few points as there are constants any line goes: such a
    one has no residual."""
    residual: float | None = result.residual
    worst: float | None = result.worst
    if num_points <= len(result.values):
        residual = worst = None
    return FittedRate(*key, result.values, residual, worst, num_points)


def _build_measured_rates(
    key: FitKey, fits: Sequence[FittedRate], cluster: Cluster
) -> MeasuredRates:
    _, _, dtype, num_ranks, threads = key
    # Only what was measured with as many threads: other fits are of other ranks.
    same = tuple(fit for fit in fits if fit.num_threads == threads)
    section = ProfileSection("", 0.0, False, 0, "", same, ())
    profile = MachineProfile(cluster.device, cluster.name, cluster.num_devices, "", {"": section})
    return MeasuredRates(profile, num_ranks, is_low=dtype == "bf16")


def _fit_loss_constants(rows: Sequence[TimedOperation], rates: MeasuredRates) -> FitResult:
    def predict(values: Mapping[str, float], size: Sequence[float]) -> float:
        tokens, width, vocab = size
        products_s = (
            rates.matmul_s(tokens, vocab, width)
            + rates.matmul_s(tokens, width, vocab)
            + rates.matmul_s(vocab, width, tokens)
        )
        return products_s + evaluate_linear_fit(values, LOSS_BYTES_PER_LOGIT * tokens * vocab)

    points = [(tuple(map(float, row.size)), row.seconds) for row in rows]
    return fit_constants(predict, LOSS_BOUNDS, points)


def _fit_block_constants(rows: Sequence[TimedOperation], rates: MeasuredRates) -> FitResult:
    points = []
    for row in rows:
        tokens, dim = row.size
        (block,) = make_block_shape(dim).work(tokens).blocks
        times = estimate_calibrated_block(block, rates, RankBatch(tokens, 1.0))
        points.append(((times.forward.total_s + times.backward.total_s,), row.seconds))
    return fit_constants(_predict_scaled_parts, BLOCK_BOUNDS, points)


def _predict_scaled_parts(values: Mapping[str, float], size: Sequence[float]) -> float:
    return values["overhead_s"] + values["scale"] * size[0]
