"""A scaling law from a few small runs, and what it predicts of a larger one.

The law is L(C) = E + A * C^-alpha: the loss falls as a power of the training compute C towards a floor E, the entropy of
the text itself. It holds along one recipe, in which sizes and tokens follow from one dial (Kaplan et al. 2020,
https://arxiv.org/abs/2001.08361, without the floor; Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, with one).

How it is fitted: for each of many exponents alpha the best E and A, neither negative, are a least-squares problem with
one answer, and the exponent with the least error is taken. Errors are relative ones, nearly those of the logarithm,
which Hoffmann et al. fit too; their Huber loss, made for hundreds of runs with outliers, has nothing to do for four.
Two runs can't tell E from A, so then E = 0.
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


def fit(compute: Sequence[float], loss: Sequence[float]) -> Law:
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
    unit, has_floor = float(x.max()), len(set(x.tolist())) > 2
    tried = [(_solve((x / unit) ** -a, y, has_floor), float(a)) for a in EXPONENTS]
    (error, floor, scale), exponent = min(tried, key=lambda one: one[0][0])
    return Law(floor, scale, exponent, unit, float(np.sqrt(error / len(y))))


def _solve(u: np.ndarray, y: np.ndarray, has_floor: bool) -> tuple[float, float, float]:
    """Returns the squared relative error, E and A of the best E + A * u, neither below 0."""
    ones, powers, target = 1 / y, u / y, np.ones_like(y)  # all divided by y: errors are relative
    candidates = [(0.0, float(powers @ target / (powers @ powers)))]
    if has_floor:
        candidates.append((float(ones @ target / (ones @ ones)), 0.0))
        both = np.linalg.lstsq(np.stack([ones, powers], 1), target, rcond=None)[0]
        if (both >= 0).all():
            candidates.append((float(both[0]), float(both[1])))
    found = [(float(np.sum((E * ones + A * powers - 1) ** 2)), E, A) for E, A in candidates]
    return min(found)


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
    """Predicts the loss of a run from smaller ones; raises what `fit` raises."""
    law = fit(compute, loss)
    said = [law(at)]
    for left_out in range(len(compute)):
        rest = [[v for i, v in enumerate(values) if i != left_out] for values in (compute, loss)]
        if len(set(rest[0])) > 1:
            said.append(fit(*rest)(at))
    return Prediction(law, at, said[0], min(said), max(said))
