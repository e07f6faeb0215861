"""The report: what was claimed, what was found, how sure that is, how to run it again; as Markdown and as one page."""

import base64
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from sparse2d.errors import UserError
from sparse2d.records import write_atomically
from sparse2d.report.claims import Claim, TableView
from sparse2d.report.views import markdown, read_table, text, view

LABELS = {
    "paper": "published figures of the paper that is named",
    "measured": "real ranks, real TorchRec, the network of the machine they ran on",
    "shaped": "real ranks, real TorchRec, links between hosts shaped to a given bandwidth",
    "emulated": "all ranks' updates made in one process, which tests hold to real ranks; for NE only",
    "modelled": "the cost model's prediction for a cluster that is not at hand",
}

# A table by its name, read once; None where there is no such file.
Tables = Callable[[str], pd.DataFrame | None]

# Stands for a value that a table does not have, until its text is left out.
ABSENT = "(not in this table)"


@dataclass(frozen=True)
class Shown:
    """A table of the report: its view, and None where there is no such file yet."""

    view: TableView
    rows: pd.DataFrame | None


@dataclass(frozen=True)
class Section:
    """A claim with its evidence as it is on the disk.

    Attributes:
        verdict: the claim's, or "not run" if a table is missing, or "not judged" if the tables are of fewer runs.
        unjudged: why there is no verdict on tables that are there; empty else.
        found: what the claim's runs showed, with the tables' values; empty without a verdict.
    """

    claim: Claim
    verdict: str
    unjudged: str
    found: str
    tables: list[Shown]
    figures: dict[str, Path | None]


def write_report(claims: Sequence[Claim], results_dir: Path, figures_dir: Path) -> list[Path]:
    """Write ``REPORT.md`` and ``report.html``, which holds its figures, into ``results_dir``; returns both.

    A claim whose table or figure is not there is told with what is missing.

    Raises:
        UserError: if a claim asks for a column that its table lacks, or says something of rows that are not there.
    """
    tables = cache(partial(read_table, results_dir / "tables"))
    sections = [_section(claim, tables, figures_dir) for claim in claims]
    markdown_page, html_page = results_dir / "REPORT.md", results_dir / "report.html"
    context = {"sections": sections, "labels": LABELS}
    write_atomically(markdown_page, _environment(False).get_template("REPORT.md.j2").render(context))
    write_atomically(html_page, _environment(True).get_template("report.html.j2").render(context))
    return [markdown_page, html_page]


def _section(claim: Claim, tables: Tables, figures_dir: Path) -> Section:
    shown = [Shown(of, None if (rows := tables(of.name)) is None else view(rows, of)) for of in claim.tables]
    is_whole = all(table.rows is not None for table in shown)
    found = _found(claim, tables) if is_whole else ""
    unjudged = _unjudged(claim, tables, found) if is_whole else ""
    if unjudged:
        # It was said of the runs of the verdict; what these tables have is below it.
        found = ""
    pictures = {name: figures_dir / f"{name}.png" for name in claim.figures}
    return Section(
        claim,
        verdict="not run" if not is_whole else "not judged" if unjudged else claim.verdict,
        unjudged=unjudged,
        found=found,
        tables=shown,
        figures={name: path if path.is_file() else None for name, path in pictures.items()},
    )


def _unjudged(claim: Claim, tables: Tables, found: str) -> str:
    """Why the claim's verdict, which other runs were given, says nothing of these tables; empty if it does."""
    reasons = []
    if ABSENT in found:
        reasons.append("some of the runs that it rests on are not in these tables")
    numbers = [rows["n_seeds"].max() for of in claim.tables if "n_seeds" in (rows := _needed(tables, of.name))]
    if claim.seeds is not None and numbers and max(numbers) < claim.seeds:
        reasons.append(f"it took {claim.seeds} seeds, these tables have {int(max(numbers))}")
    return "; ".join(reasons)


def _needed(tables: Tables, name: str) -> pd.DataFrame:
    rows = tables(name)
    if rows is None:
        raise UserError(f"there is no table {name}")
    return rows


def _found(claim: Claim, tables: Tables) -> str:
    """The claim's ``found`` with the tables' values in it."""
    try:
        return (
            jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(claim.found).render(value=_value(tables))
        )
    except jinja2.TemplateError as error:
        raise UserError(f"claim {claim.name}: found: {error}") from error


def _value(tables: Tables) -> Callable[..., str]:
    """What ``value("table", "column", axis=...)`` gives in a ``found`` text."""

    def value(name: str, column: str, **where: Any) -> str:
        """A value of a table, rounded: that of the row where axes have these values, or the range of several rows'."""
        rows = _needed(tables, name)
        for axis, wanted in where.items():
            rows = rows[rows[axis] == wanted]
        values = rows[column].dropna()
        # A quick run has fewer arms, one of many settings has several rows for an arm.
        if values.empty:
            return ABSENT
        lowest, highest = text(values.min(), column), text(values.max(), column)
        return lowest if lowest == highest else f"{lowest} to {highest}"

    return value


def _environment(is_html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sparse2d.report"),
        autoescape=is_html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    # Texts are Markdown; raw HTML in them stays text.
    renderer = MarkdownIt("js-default", {"html": False})
    environment.filters["rendered"] = lambda raw: Markup(renderer.render(raw))
    environment.filters["markdown"] = markdown
    environment.filters["data_uri"] = _data_uri
    environment.filters["script_of"] = lambda name: shlex.join(["python", "paper_figures", name])
    return environment


def _data_uri(picture: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
