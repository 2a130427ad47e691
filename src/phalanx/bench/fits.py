"""Fits constants to measurements: in log space, within physical bounds, pulled towards priors.

Least squares of log(predicted / measured): a message of 8 KB counts as much as one of 64 MB. What a
measurement cannot tell (the bandwidth of tiny messages, say) stays at its prior; a constant never
leaves its bounds to make up for another one's error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

# What one constant being a factor of e off its prior costs, beside a measurement that is 1 % off:
# weak where there are measurements, and all that counts where there are none.
PRIOR_WEIGHT = 0.02
ITERATIONS, REWEIGHTINGS = 60, 4
# Errors beyond this multiple of the median error count less (Huber): somebody else was computing.
HUBER_THRESHOLD = 2.0


@dataclass(frozen=True)
class ConstantRange:
    """The range of a constant, which is positive, and its prior."""

    low: float
    high: float
    prior: float


@dataclass(frozen=True)
class FitResult:
    """Constants, and |predicted / measured - 1| over the points: the median, and the largest."""

    values: dict[str, float]
    residual: float
    worst: float


Predict = Callable[[Mapping[str, float], Sequence[float]], float]
"""Seconds of one point (its sizes) by the constants."""


def fit_constants(
    predict: Predict,
    bounds: Mapping[str, ConstantRange],
    points: Sequence[tuple[Sequence[float], float]],
) -> FitResult:
    """Fit the constants in `bounds` to `points`, each (sizes, seconds).

    Damped Gauss-Newton over the logarithms of the constants, reweighted so that outliers count
    less. Points without time (0 s and less) are left out; without any, constants are their priors
    and the residual is not a number.
    """
    fit = _LogSpaceFit(predict, bounds, [point for point in points if point[1] > 0])
    theta = fit.prior
    weights = np.ones(len(fit.measured))
    for _ in range(REWEIGHTINGS):
        theta = fit.minimize(theta, weights)
        distance = np.abs(fit.compute_log_errors(theta))
        limit = HUBER_THRESHOLD * max(0.005, float(np.median(distance)) if len(distance) else 0.0)
        weights = np.minimum(1.0, limit / np.maximum(distance, 1e-12))
    ratios = np.abs(np.expm1(fit.compute_log_errors(theta))).tolist()
    residual = math.nan
    if ratios:
        residual = statistics.median(ratios)
    return FitResult(fit.name_constants(theta), residual, max(ratios, default=math.nan))


class _LogSpaceFit:
    """The problem in logarithms: `theta` are those of the constants."""

    def __init__(
        self,
        predict: Predict,
        bounds: Mapping[str, ConstantRange],
        points: Sequence[tuple[Sequence[float], float]],
    ) -> None:
        self._predict = predict
        self._names = list(bounds)
        self._sizes = [sizes for sizes, _ in points]
        self.low = np.log(np.array([bound.low for bound in bounds.values()]))
        self.high = np.log(np.array([bound.high for bound in bounds.values()]))
        priors = np.log(np.array([bound.prior for bound in bounds.values()]))
        self.prior: Vector = np.clip(priors, self.low, self.high)
        self.measured: Vector = np.log(np.array([seconds for _, seconds in points]))

    def name_constants(self, theta: Vector) -> dict[str, float]:
        return dict(zip(self._names, np.exp(theta).tolist(), strict=True))

    def compute_log_errors(self, theta: Vector) -> Vector:
        """log(predicted / measured) of each point."""
        values = self.name_constants(theta)
        predicted = [max(1e-12, self._predict(values, sizes)) for sizes in self._sizes]
        return np.log(np.array(predicted)) - self.measured

    def _cost(self, theta: Vector, weights: Vector) -> float:
        errors, off = self.compute_log_errors(theta), theta - self.prior
        return float(weights @ errors**2 + PRIOR_WEIGHT**2 * off @ off)

    def minimize(self, theta: Vector, weights: Vector) -> Vector:
        """The least cost from `theta` on, by Levenberg and Marquardt, inside the bounds."""
        damping, cost = 1e-3, self._cost(theta, weights)
        for _ in range(ITERATIONS):
            jacobian, errors = self._jacobian(theta), self.compute_log_errors(theta)
            gradient = jacobian.T @ (weights * errors) + PRIOR_WEIGHT**2 * (theta - self.prior)
            curvature = jacobian.T @ (weights[:, None] * jacobian)
            curvature += PRIOR_WEIGHT**2 * np.eye(len(theta))
            # A constant at its bound, pushed outwards, takes no part: the others find their best.
            is_stuck = (theta <= self.low) & (gradient > 0) | (theta >= self.high) & (gradient < 0)
            gradient[is_stuck] = 0.0
            curvature[is_stuck, :] = curvature[:, is_stuck] = 0.0
            curvature += np.diag(damping * np.diag(curvature) + is_stuck)
            step = np.linalg.solve(curvature, gradient)
            trial = np.clip(theta - np.clip(step, -1.0, 1.0), self.low, self.high)
            trial_cost = self._cost(trial, weights)
            if trial_cost >= cost:
                damping *= 10
                if damping > 1e6:
                    break
                continue
            is_done = cost - trial_cost < 1e-10 * max(cost, 1e-12)
            theta, cost, damping = trial, trial_cost, max(1e-9, damping / 5)
            if is_done:
                break
        return theta

    def _jacobian(self, theta: Vector) -> Vector:
        columns = []
        for index in range(len(theta)):
            step = np.zeros(len(theta))
            step[index] = 1e-5
            columns.append(
                (self.compute_log_errors(theta + step) - self.compute_log_errors(theta - step))
                / 2e-5
            )
        return np.array(columns).T
