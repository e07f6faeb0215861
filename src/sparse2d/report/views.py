"""Tables as a reader sees them: chosen columns, rounded, as Markdown and LaTeX."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path

import jinja2
import pandas as pd

from sparse2d.errors import UserError
from sparse2d.records import write_atomically
from sparse2d.report.claims import TableView
from sparse2d.units import size

# Bytes with a unit.
SIZE = "size"
# The first pattern that fits a column's name decides how its numbers are written.
FORMATS = {
    "*gap_pct": "+.2f",
    "*bytes_error_pct": "+.2f",
    "*error_pct": "+.1f",
    "*_ci95": ".2f",
    "*_pct": ".1f",
    "ne": ".4f",
    "auc": ".4f",
    "imbalance*": ".2f",
    "*ratio*": ".3g",
    "*_bytes*": SIZE,
    "bytes": SIZE,
    "*_ms": ".3g",
    "*_ms_modelled": ".3g",
    "ms": ".3g",
    "*qps": ".0f",
    "qps_m*": ".0f",
    "rows_per_s": ".3g",
    "*share*": ".3g",
    "steps_per_s": ".3g",
}
MISSING = "-"
# Numbers up to this one are written to the last digit.
LARGE = 1e6


def read_table(tables: Path, name: str) -> pd.DataFrame | None:
    """A table as it was written; None if there is none.

    Raises:
        UserError: if the file is no table.
    """
    path = tables / f"{name}.csv"
    try:
        return pd.read_csv(path)
    except FileNotFoundError:
        return None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no table ({str(error).strip()}); make it anew") from error


def view(table: pd.DataFrame, of: TableView) -> pd.DataFrame:
    """The rows and columns of a view, as texts; a value with a spread is written ``mean +- spread``.

    Raises:
        UserError: if the view names a column that the table lacks.
    """
    rows = table if of.where is None else table.query(of.where)
    unknown = {*of.columns, *(column for row in of.published for column in row)} - set(table.columns)
    if unknown:
        raise UserError(f"table {of.name} has no column {sorted(unknown)[0]!r}; it has: {', '.join(table.columns)}")
    published = [{heading: row.get(column, MISSING) for column, heading in of.columns.items()} for row in of.published]
    ours = pd.DataFrame({heading: _texts(rows, column) for column, heading in of.columns.items()})
    return pd.concat([pd.DataFrame(published), ours], ignore_index=True) if published else ours


def _texts(rows: pd.DataFrame, column: str) -> list[str]:
    spreads = rows.get(f"{column}_std", pd.Series(index=rows.index, dtype=float))
    if column == "fingerprints":
        return [_short_names(value) for value in rows[column]]
    return [
        text(value, column) + (f" +- {_spread_text(value, spread, column)}" if pd.notna(spread) else "")
        for value, spread in zip(rows[column], spreads, strict=True)
    ]


def _spread_text(value: float, spread: float, column: str) -> str:
    """A spread, rounded as its value is; equal values have one of some 1e-16 of them, by rounding."""
    return text(0.0 if spread < 1e-12 * abs(value) else spread, column).lstrip("+")


def text(value: object, column: str) -> str:
    """One value, rounded as its column asks."""
    if pd.isna(value):  # type: ignore[call-overload]
        return MISSING
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    form = next((form for pattern, form in FORMATS.items() if fnmatch.fnmatchcase(column, pattern)), ".6g")
    if form == SIZE:
        return size(value)
    shown = format(float(value), form)
    if "e+" not in shown:
        return shown
    # Rows of a table, or milliseconds, say, are read more easily whole.
    return format(float(value if abs(value) < LARGE or float(value).is_integer() else shown), ".0f")


def _short_names(value: object) -> str:
    """The first runs behind a row, and how many more there are; the CSV has all of them, whole."""
    if pd.isna(value):  # type: ignore[call-overload]
        return MISSING
    if str(value).startswith("arXiv"):
        return str(value)
    first, *others = str(value).split()
    return first[:8] + (f" and {len(others)} more" if others else "")


_MARKDOWN = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True).from_string(
    """\
| {{ headings | join(" | ") }} |
|{{ "---|" * (headings | length) }}
{% for row in rows %}
| {{ row | join(" | ") }} |
{% endfor %}
"""
)


def markdown(shown: pd.DataFrame) -> str:
    """A table for a page in Markdown."""
    rows = [[str(cell).replace("|", "\\|") for cell in row] for row in shown.itertuples(index=False)]
    return _MARKDOWN.render(headings=list(shown.columns), rows=rows)


def latex(shown: pd.DataFrame) -> str:
    """A table for a paper (booktabs)."""
    escaped = shown.map(lambda cell: _escaped(str(cell)).replace("+-", "$\\pm$"))
    styled = escaped.rename(columns=_escaped).style.hide(axis="index")
    return str(styled.to_latex(hrules=True, column_format="l" * len(shown.columns)))


def _escaped(raw: str) -> str:
    return "".join(f"\\{letter}" if letter in "#$%&_{}" else letter for letter in raw)


def write_views(views: Iterable[TableView], tables: Path) -> None:
    """``<name>.md`` and ``<name>.tex`` beside each table that is there."""
    for of in views:
        table = read_table(tables, of.name)
        if table is not None:
            shown = view(table, of)
            write_atomically(tables / f"{of.name}.md", markdown(shown))
            write_atomically(tables / f"{of.name}.tex", latex(shown))
