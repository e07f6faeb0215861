"""``python paper_figures [name ...]``: draw the figures whose tables are there, all of them unless some are named."""

import argparse
import importlib
import sys
from pathlib import Path

from style import BadTableError, MissingTableError, NoFigureError, pictures

# Of the scripts here, those that are no figure.
HELPERS = {"__main__", "ne_study", "style"}
FIGURES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in HELPERS)


def main(names: list[str]) -> int:
    """Draw; returns the exit code: 1 if a table is damaged or outdated, or one of a figure that was named is absent.

    A figure that cannot be drawn is removed: what is left of it shows other tables than those that are there.
    """
    code = 0
    for name in names or FIGURES:
        try:
            _draw(name)
        except NoFigureError as reason:
            print(f"no figure {name}: {reason}", file=sys.stderr)
            for picture in pictures(name):
                picture.unlink(missing_ok=True)
            if isinstance(reason, BadTableError) or (names and isinstance(reason, MissingTableError)):
                code = 1
    return code


def _draw(name: str) -> None:
    try:
        importlib.import_module(name).main()
    except KeyError as error:
        raise BadTableError(f"its table has no column {error}, an earlier version made it; make it anew") from error


def arguments() -> list[str]:
    """The names of the command line."""
    parser = argparse.ArgumentParser(prog="python paper_figures", description=__doc__.partition(": ")[2])
    parser.add_argument("name", nargs="*", help=f"of: {', '.join(FIGURES)}")
    names: list[str] = parser.parse_args().name
    if unknown := set(names) - set(FIGURES):
        parser.error(f"no figure {sorted(unknown)[0]!r}; choose from: {', '.join(FIGURES)}")
    return names


if __name__ == "__main__":
    sys.exit(main(arguments()))
