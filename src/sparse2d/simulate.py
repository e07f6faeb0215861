"""``python -m sparse2d.simulate``: the cost model for one cluster layout, a table of them, or the best M."""

import sys

from sparse2d.cli import run_entry_point
from sparse2d.cost.config import SimulateConfig, Task, check_simulate


def main(config: SimulateConfig) -> None:
    """Run one task on the options."""
    check_simulate(config)
    # Each task imports what it needs, so that a single prediction starts at once.
    if config.task is Task.point:
        from sparse2d.cost.show import show_point as run
    elif config.task is Task.sweep:
        from sparse2d.cost.sweep import sweep as run
    elif config.task is Task.recommend:
        from sparse2d.cost.recommend import recommend as run
    elif config.task is Task.calibrate:
        from sparse2d.cost.calibrate import calibrate as run
    elif config.task is Task.validate_runs:
        from sparse2d.cost.validate_runs import validate_runs as run
    else:
        from sparse2d.cost.validate import validate as run
    run(config)


def as_override(argument: str) -> str:
    """A bare task name as Hydra's override: ``validate`` is ``task=validate``."""
    return f"task={argument}" if argument in Task.__members__ else argument


if __name__ == "__main__":
    sys.argv[1:] = [as_override(argument) for argument in sys.argv[1:]]
    run_entry_point("simulate", SimulateConfig, main)
