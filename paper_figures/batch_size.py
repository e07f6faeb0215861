"""NE gap against the global batch size, by rule."""

from ne_study import draw_study


def main() -> None:
    """Draw ``results/tables/batch_size.csv``."""
    draw_study("batch_size", "global_batch_size", "global batch size B")


if __name__ == "__main__":
    main()
