"""Datasets and programs that tests of several packages share."""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from configs import composing, tiny_data
from hydra import compose
from hypothesis import settings
from omegaconf import DictConfig, OmegaConf

from sparse2d import preprocess, reproduce, simulate, train
from sparse2d.cli import run_entry_point
from sparse2d.config import PreprocessConfig, ReportConfig, ReproduceConfig, TrainConfig, conf_dir
from sparse2d.cost.config import SimulateConfig
from sparse2d.data.prepare import prepare
from sparse2d.report import __main__ as report

# How long an example takes says nothing on a machine that does other work too.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

PROGRAMS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "train": (TrainConfig, train.main),
    "preprocess": (PreprocessConfig, preprocess.main),
    "report": (ReportConfig, report.main),
    "reproduce": (ReproduceConfig, reproduce.main),
    "simulate": (SimulateConfig, simulate.main),
}


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared synthetic dataset of 1400 rows."""
    return prepare(tiny_data(tmp_path_factory.mktemp("tiny")), progress=False)


@dataclass(frozen=True)
class Ended:
    """How a program ended: exit code, standard output and error, and what it logged."""

    code: int
    out: str
    err: str
    log: str


@pytest.fixture
def program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., Ended]]:
    """Run an entry point in this process, its ranks being real: ``program("train", "seed=1")``."""
    monkeypatch.delenv("RANK", raising=False)
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET)

    def run(name: str, *arguments: str) -> Ended:
        schema, main = PROGRAMS[name]
        monkeypatch.setattr(sys, "argv", [sys.modules[main.__module__].__file__, *arguments])
        capsys.readouterr()
        caplog.clear()
        caplog.set_level(logging.INFO, "sparse2d")
        code = 0
        try:
            run_entry_point(name, schema, main)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        out, err = capsys.readouterr()
        return Ended(code, out, err, "\n".join(caplog.messages))

    yield run
    logging.disable(disabled)


@pytest.fixture(scope="session")
def composed() -> Callable[..., DictConfig]:
    """What Hydra makes of ``conf/<name>.yaml`` and overrides."""

    def make(name: str, *overrides: str, config_dir: Path | None = None, with_hydra: bool = False) -> DictConfig:
        with composing(config_dir or conf_dir()):
            return compose(name, list(overrides), return_hydra_config=with_hydra)

    return make


@pytest.fixture(scope="session")
def train_config(composed: Callable[..., DictConfig]) -> Callable[..., TrainConfig]:
    """The typed options of ``train`` under some overrides."""
    return lambda *overrides: OmegaConf.to_object(composed("train", *overrides))


@pytest.fixture(scope="session")
def simulate_config(composed: Callable[..., DictConfig]) -> Callable[..., SimulateConfig]:
    """The typed options of ``simulate`` under some overrides."""
    return lambda *overrides: OmegaConf.to_object(composed("simulate", *overrides))
