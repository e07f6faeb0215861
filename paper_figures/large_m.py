"""NE gap at 16, 32 and 64 groups, by rule."""

from ne_study import draw_study


def main() -> None:
    """Draw ``results/tables/large_m.csv``."""
    draw_study("large_m", "num_groups", "number of groups M (replicas of each shard)")


if __name__ == "__main__":
    main()
