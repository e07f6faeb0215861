"""What is claimed, and for each claim where its evidence is: ``experiments/claims.yaml``, typed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparse2d.config import conf_dir
from sparse2d.errors import UserError

Verdict = Literal["holds", "holds in part", "does not hold", "modelled", "not run"]


class _Strict:
    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TableView(_Strict):
    """What of a table a reader sees.

    Attributes:
        name: of ``results/tables/<name>.csv``.
        columns: of the CSV, and the headings they get.
        where: a pandas query that keeps some rows.
        published: rows of a publication that the table cannot hold, since they are words and no numbers; shown first.
    """

    name: str
    columns: dict[str, str]
    where: str | None = None
    published: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Scale(_Strict):
    """How a claim is run.

    Attributes:
        commands: lines for a shell without a shell's features; ``{data}`` stands for the options of the data.
        minutes: about how long they take on 2 cores.
        testbed: whether they run on hosts in miniature, which not every machine allows.
    """

    commands: list[str]
    minutes: float
    testbed: bool = False


@dataclass(frozen=True)
class Claim(_Strict):
    """A claim and its evidence.

    Attributes:
        name: the folder in ``experiments/``.
        title: what it is about.
        source: who claims it.
        claimed: in a sentence or two.
        verdict: in a word.
        found: a Jinja text over the tables' values (see ``page.py``), so that it cannot say other numbers than they do.
        sure: how sure, and what it rests on.
        tables: to show.
        figures: names in ``paper_figures/``.
        laptop: how to run it on 2 cores; None = not at that scale.
        full: how to run it as it was run for the committed tables.
        missing: what was not reproduced, and why.
        seeds: how many the verdict takes at least; None where there are none.
    """

    name: str
    title: str
    source: str
    claimed: str
    verdict: Verdict
    sure: str
    found: str = ""
    tables: list[TableView] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    laptop: Scale | None = None
    full: Scale | None = None
    missing: str = ""
    seeds: int | None = None


def claims_file() -> Path:
    """Beside the ``experiments/`` that it tells of; an installed wheel has none."""
    return conf_dir().parent / "experiments" / "claims.yaml"


def read_claims(path: Path) -> list[Claim]:
    """All claims, in the report's order.

    Raises:
        UserError: if the file cannot be read, or an entry is not what ``Claim`` declares.
    """
    try:
        return TypeAdapter(list[Claim]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; it is part of a checkout") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
