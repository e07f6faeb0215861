"""Tables of a user's own: a CSV file with columns rows, dim, pooling and, if wanted, name and zipf_exponent."""

import csv
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparse2d.cost.config import WorkloadConfig
from sparse2d.errors import UserError

NEEDED = ("rows", "dim", "pooling")
# Beyond 2 ** 53 floats skip whole numbers. 1e6 is taken for a million, so that these are no ints.
WholeNumber = Annotated[float, Field(ge=1, le=2**53, multiple_of=1)]


class _Line(BaseModel):
    """One table."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    rows: WholeNumber
    dim: WholeNumber
    pooling: float = Field(gt=0)
    zipf_exponent: float = Field(ge=0)
    name: str


def read_tables(config: WorkloadConfig) -> tuple[list[str], list[int], list[int], list[float], list[float]]:
    """Names, rows, dims, pooling and Zipf exponents.

    Raises:
        UserError: one line with the file, the line and the column.
    """
    if config.path is None:
        raise UserError("workload.path is not set; give a CSV file with columns rows, dim, pooling")
    path = Path(config.path)
    try:
        # Spreadsheets put a mark before the first column.
        with path.open(newline="", encoding="utf-8-sig") as file:
            tables = _tables(path, csv.reader(file, skipinitialspace=True), config.zipf_exponent)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{path}: two tables have the name {twice!r}")
    return (
        names,
        [int(table.rows) for table in tables],
        [int(table.dim) for table in tables],
        [table.pooling for table in tables],
        [table.zipf_exponent for table in tables],
    )


def _tables(path: Path, lines: Any, zipf_exponent: float) -> list[_Line]:
    columns = [column.strip().lower() for column in next(lines, [])]
    for name in NEEDED:
        if columns.count(name) != 1:
            fault = f"column {name!r} is there twice" if name in columns else f"no column {name!r}"
            raise UserError(f"{path}: {fault}; it needs rows, dim, pooling, between commas")
    tables: list[_Line] = []
    for values in lines:
        where = f"{path}:{lines.line_num}"
        if not any(value.strip() for value in values):
            continue
        if len(values) != len(columns):
            raise UserError(f"{where}: {len(values)} values for {len(columns)} columns")
        given = {column: value.strip() for column, value in zip(columns, values, strict=True) if value.strip()}
        usual = {"name": f"table_{len(tables)}", "zipf_exponent": zipf_exponent}
        try:
            tables.append(_Line.model_validate(usual | given))
        except ValidationError as error:
            first = error.errors()[0]
            column = first["loc"][0]
            raise UserError(f"{where}: {column}={given.get(str(column), '')}: {first['msg']}") from None
    return tables
