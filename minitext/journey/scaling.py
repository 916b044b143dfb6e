"""A scaling law from a few small runs, and what it predicts of a larger one.

The law is L(C) = E + A * C^-alpha: the loss falls as a power of the training compute C towards a floor E, the entropy
of the text itself. It holds along one recipe, in which sizes and tokens follow from one dial (Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361, without the floor; Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, with one).

How it is fitted: for each of many exponents alpha the best E and A, neither negative, are a least-squares problem with
one answer, and the exponent with the least error is taken. Errors are relative ones, nearly those of the logarithm,
which Hoffmann et al. fit too; their Huber loss, made for hundreds of runs with outliers, has nothing to do for four.
Two runs can't tell E from A, so then E = 0.

Chapters: 27.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

EXPONENTS = np.arange(1, 1001) / 1000  # alpha; published ones lie between 0.05 and 0.5


@dataclass(frozen=True)
class Law:
    """L(C) = floor + scale * (C / unit)^-exponent.

    Attributes:
      floor: E, in nats per token.
      scale: what the loss is above the floor at C = unit.
      exponent: alpha.
      unit: the largest C it was fitted to.
      residual: root mean square of the relative errors at the points.
    """

    floor: float
    scale: float
    exponent: float
    unit: float
    residual: float

    def __call__(self, compute: float) -> float:
        """Returns the loss that it predicts at a training compute, in FLOPs."""
        return float(self.floor + self.scale * (compute / self.unit) ** -self.exponent)

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers, for json.dumps."""
        return asdict(self)


def fit_law(compute: Sequence[float], loss: Sequence[float]) -> Law:
    """Fits the law to runs.

    Args:
      compute: training FLOPs of each, two or more that differ.
      loss: in nats per token, above 0.

    Raises:
      ValueError: if there are fewer, or a number is not finite or not above 0.
    """
    x, y = np.asarray(compute, float), np.asarray(loss, float)
    if len(x) != len(y) or len(set(x.tolist())) < 2:
        raise ValueError(f"{len(set(x.tolist()))} different sizes: a law needs two or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all() and (y > 0).all()):
        raise ValueError("compute and losses must be finite and above 0")
    unit = float(x.max())
    powers = (x / unit) ** -EXPONENTS[:, None]  # [exponents, runs]
    floors, scales = _solve(powers / y, 1 / y, has_floor=len(set(x.tolist())) > 2)
    errors = (floors[:, None] + scales[:, None] * powers) / y - 1
    squares = np.sum(errors**2, axis=1)
    best = int(np.argmin(squares))
    residual = float(np.sqrt(squares[best] / len(y)))
    return Law(float(floors[best]), float(scales[best]), float(EXPONENTS[best]), unit, residual)


def _solve(
    powers: np.ndarray, ones: np.ndarray, *, has_floor: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each row of powers the E and A, neither below 0, that bring E * ones + A * powers nearest to 1."""
    pp, p1, po = np.sum(powers**2, 1), np.sum(powers, 1), powers @ ones
    no_floor = np.zeros(len(powers)), p1 / pp
    if not has_floor:
        return no_floor
    oo, o1 = float(np.sum(ones**2)), float(np.sum(ones))
    determinant = oo * pp - po**2
    E, A = (o1 * pp - p1 * po) / determinant, (oo * p1 - po * o1) / determinant
    E, A = np.where(A < 0, o1 / oo, E), np.maximum(A, 0.0)
    return np.where(E < 0, no_floor[0], E), np.where(E < 0, no_floor[1], A)


@dataclass(frozen=True)
class Prediction:
    """What a law says of a run that has not been trained.

    Attributes:
      law: fitted to all points.
      compute: training FLOPs of the run.
      loss: predicted.
      low: the least that a law fitted without one of the points predicts, or `loss`.
      high: and the most.
    """

    law: Law
    compute: float
    loss: float
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers, for json.dumps."""
        return asdict(self)


def predict(compute: Sequence[float], loss: Sequence[float], at: float) -> Prediction:
    """Predicts the loss of a run from smaller ones; raises what `fit_law` raises."""
    law = fit_law(compute, loss)
    said = [law(at)]
    for left_out in range(len(compute)):
        rest = [[v for i, v in enumerate(values) if i != left_out] for values in (compute, loss)]
        if len(set(rest[0])) > 1:
            said.append(fit_law(*rest)(at))
    return Prediction(law, at, said[0], min(said), max(said))
