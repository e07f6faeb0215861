"""NE gap of samples that the model had not seen yet, along the pass, by rule."""

from ne_study import draw_study


def main() -> None:
    """Draw ``results/tables/ne_curves.csv``."""
    draw_study("ne_curves", "samples", "samples seen (gap over those since the last point)", places=False)


if __name__ == "__main__":
    main()
