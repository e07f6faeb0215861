"""How far the model is from recorded runs, in words, from the rows of ``validate_runs``'s tables."""

from collections.abc import Sequence
from statistics import median

from sparse2d.cost.sweep import Row

BYTES_TOLERANCE_PCT = 5.0
STEP_TOLERANCE_PCT = 20.0


def worst_error_pct(rows: Sequence[Row]) -> float:
    """The largest error of bytes, of means and maxima over ranks."""
    errors: list[float] = [
        abs(value) for row in rows for name, value in row.items() if name.endswith("error_pct") and value is not None
    ]
    return max(errors)


def bytes_finding(rows: Sequence[Row]) -> str:
    """The outcome in words."""
    worst = worst_error_pct(rows)
    verdict = "within" if worst <= BYTES_TOLERANCE_PCT else "NOT within"
    labels = " and ".join(sorted({row["label"] for row in rows}))
    return f"bytes of {len(rows)} {labels} runs: largest error {worst:.2f} % ({verdict} {BYTES_TOLERANCE_PCT:g} %)"


def steps_finding(rows: Sequence[Row]) -> str:
    """The outcome in words."""
    errors = [abs(row["error_pct"]) for row in rows if row["role"] == "prediction"]
    if not errors:
        return "steps: every run was fitted, none predicted"
    inside = sum(error <= STEP_TOLERANCE_PCT for error in errors)
    return (
        f"steps of {len(errors)} predicted layouts: median error {median(errors):.1f} %, "
        f"largest {max(errors):.1f} %, {inside} within {STEP_TOLERANCE_PCT:g} %"
    )
