"""NE gap of 2D under each table optimizer, by rule."""

from ne_study import draw_study


def main() -> None:
    """Draw ``results/tables/optimizers.csv``."""
    draw_study("optimizers", "unscaled", "table optimizer")


if __name__ == "__main__":
    main()
