"""Where Hydra finds the typed declarations and the ``conf/`` folder."""

from pathlib import Path

from hydra.core.config_store import ConfigStore

from sparse2d.config.options import (
    PreprocessConfig,
    ReportConfig,
    ReproduceConfig,
    TrainConfig,
)
from sparse2d.errors import UserError


def register_schemas() -> None:
    """Make the typed declarations known to Hydra under the names that ``conf/*.yaml`` refer to."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig)
    store.store(name="preprocess_schema", node=PreprocessConfig)
    store.store(name="report_schema", node=ReportConfig)
    store.store(name="reproduce_schema", node=ReproduceConfig)
    # Not at the top: its options refer to the enums above.
    from sparse2d.cost.config import SimulateConfig

    store.store(name="simulate_schema", node=SimulateConfig)


def conf_dir() -> Path:
    """The ``conf/`` folder: at the top of the checkout, or inside an installed wheel.

    Raises:
        UserError: if there is none beside the package.
    """
    package = Path(__file__).parents[1]
    for candidate in (package / "conf", package.parents[1] / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(f"no conf/ folder beside {package}; install sparse2d from its checkout: pip install -e .")
