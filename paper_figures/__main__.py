"""``python paper_figures [name ...]``: draw the figures whose tables are there, all of them unless some are named."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
# Of the scripts here, those that are no figure.
HELPERS = {"__main__", "ne_study", "style"}


def main(names: list[str]) -> int:
    """Draw; returns the exit code: 1 if a table is outdated, or a figure that was named has none."""
    figures = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS)
    if unknown := set(names) - set(figures):
        print(f"no figure {sorted(unknown)[0]!r}; choose from: {', '.join(figures)}", file=sys.stderr)
        return 1
    absent = outdated = 0
    for name in names or figures:
        try:
            importlib.import_module(name).main()
        except FileNotFoundError as error:
            print(f"no figure {name}: it needs results/tables/{Path(str(error.filename)).name}", file=sys.stderr)
            absent += 1
        except KeyError as error:
            # Made by an earlier version; the others are drawn all the same.
            print(f"no figure {name}: its table has no column {error}; make the table anew", file=sys.stderr)
            outdated += 1
    return int(outdated > 0 or (bool(names) and absent > 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
