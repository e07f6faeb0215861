"""NE gap by how often training saw the rarest id of an evaluation row, by rule."""

from ne_study import draw_study


def main() -> None:
    """Draw ``results/tables/row_frequency.csv``."""
    draw_study("row_frequency", "seen_from", "how often training saw the rarest id of a row (from)")


if __name__ == "__main__":
    main()
