"""NE, AUC, log loss and calibration over pooled rows; null where a metric is undefined."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr, expit, log_expit
from sklearn.metrics import roc_auc_score

from sparse2d.errors import UserError


@dataclass(frozen=True)
class Metrics:
    """Quality of predicted click probabilities.

    Attributes:
        ne: normalized entropy: log loss over the entropy of the rows' own base rate; 1 = a constant at the base rate.
            Undefined unless both labels occur.
        auc: exact area under the ROC curve, ties count half. Undefined unless both labels occur.
        logloss: mean cross entropy in nats. Undefined without rows.
        calibration: sum of predictions over sum of labels. Undefined without positives.
        rows: how many rows it is over.
    """

    ne: float | None
    auc: float | None
    logloss: float | None
    calibration: float | None
    rows: int


def entropy(base_rate: float) -> float:
    """Entropy in nats of a coin that shows 1 with probability ``base_rate``."""
    return float(entr(base_rate) + entr(1 - base_rate))


def normalized_entropy(logloss: float, base_rate: float) -> float | None:
    """Log loss over the entropy of the base rate; None where the base rate is 0 or 1."""
    return logloss / entropy(base_rate) if 0 < base_rate < 1 else None


def evaluate_logits(logits: NDArray[np.floating], labels: NDArray[np.floating]) -> Metrics:
    """Metrics of ``logits`` [rows] against 0/1 ``labels`` [rows], in double precision.

    Raises:
        UserError: if a label is neither 0 nor 1, or a logit is not finite.
    """
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    wrong = ~np.isin(y, (0.0, 1.0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise UserError(f"label {y[row]} of row {row} is neither 0 nor 1")
    diverged = ~np.isfinite(z)
    if diverged.any():
        row = int(np.argmax(diverged))
        raise UserError(f"the logit of evaluation row {row} is {z[row]}: training diverged; lower optimizer.lr")
    if len(y) == 0:
        return Metrics(ne=None, auc=None, logloss=None, calibration=None, rows=0)
    # log_expit keeps its precision where log(expit(z)) is already -inf.
    logloss = float(-np.mean(y * log_expit(z) + (1 - y) * log_expit(-z)))
    both = 0 < y.sum() < len(y)
    return Metrics(
        ne=normalized_entropy(logloss, float(y.mean())),
        auc=float(roc_auc_score(y, z)) if both else None,
        logloss=logloss,
        calibration=float(expit(z).sum() / y.sum()) if y.sum() > 0 else None,
        rows=len(y),
    )
