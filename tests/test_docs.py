"""Every command in the documentation, in the headers of ``conf/`` and in the claims is one that works."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from configs import composing
from hydra import compose
from omegaconf import OmegaConf
from test_sweep import jobs

from sparse2d.checkpoint.__main__ import COMMANDS
from sparse2d.cli import refuse_unknown
from sparse2d.config import TrainConfig, check_train, conf_dir
from sparse2d.cost.config import SimulateConfig, check_simulate
from sparse2d.report.claims import claims_file, read_claims
from sparse2d.simulate import as_override
from sparse2d.testbed.__main__ import parse

CHECKOUT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "experiments/**/*.md")
    for path in CHECKOUT.glob(pattern)
    if "results" not in path.parts
)
HEADERS = sorted((CHECKOUT / "conf").rglob("*.yaml"))
# Programs of the system, which are not ours to test.
FOREIGN = {"source", "conda", "rm", "unshare"}


def blocks(page: Path) -> Iterator[str]:
    """Logical lines of a page's code blocks."""
    for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`((?:python|make|torchrun|wandb) [^`\n]+)`", page.read_text())


def headers(file: Path) -> Iterator[str]:
    """Commands in a config's comments; an ellipsis or brackets stand for anything."""
    text = file.read_text().replace(" \\\n#", " ")
    for line in text.splitlines():
        if line.startswith("#") and "python -m sparse2d." in line:
            command = re.sub(r"`.*|\s{2,}.*|\s*\(\d+ runs\)", "", line[line.index("python -m") :])
            yield " ".join(word for word in command.split() if "..." not in word and word[0] != "[")


def commands(lines: Iterator[str]) -> list[list[str]]:
    """Words of each command; a map of the source, say, holds none."""
    starts = r"(?:[A-Z_]+=\S+ )*(?:python|make|torchrun|wandb|sbatch|source|conda|rm|\.venv/bin/\w+|\S+\.sh)\b"
    parts = [part for line in lines for part in re.split(r" && ", line) if re.match(starts, part)]
    # A reader puts a value in place of <digest>.
    return [shlex.split(re.sub(r"<\w+>", "0", part), comments=True) for part in parts]


def check(words: list[str]) -> None:
    """Fail unless a command names what is there, with options that compose."""

    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets, words
    elif program == "wandb":
        from wandb.cli.cli import cli

        assert words[1] in cli.commands
    elif program == "python" and words[1] == "-m":
        check_module(words[2], words[3:])
    elif program == "python":
        assert (CHECKOUT / words[1]).exists(), words[1]
        figures = words[2:] if words[1] == "paper_figures" else []
        assert all((CHECKOUT / "paper_figures" / f"{name}.py").is_file() for name in figures)
    elif program in ("torchrun", "sbatch") or program.endswith(".sh"):
        check_launcher(program, words)
    else:
        assert program in FOREIGN, words


def check_launcher(program: str, words: list[str]) -> None:
    if program == "torchrun":
        check_module("sparse2d.train", words[words.index("sparse2d.train") + 1 :])
        return
    script = next(index for index, word in enumerate(words) if word.startswith("experiments/"))
    assert (CHECKOUT / words[script]).is_file()
    check_module("sparse2d.train", words[script + 1 :])


def check_module(module: str, arguments: list[str]) -> None:
    if module == "pytest":
        assert all((CHECKOUT / path).exists() for path in arguments)
        return
    name = module.removeprefix("sparse2d.")
    assert importlib.util.find_spec(module) is not None
    if name == "testbed":
        own, overrides = (arguments[1:], []) if "--" not in arguments else split_at(arguments[1:], "--")
        parse(own)
        check_module("sparse2d.train", overrides)
    elif name == "checkpoint":
        assert arguments[0] in COMMANDS
    elif arguments != ["--help"]:
        check_options(name, *arguments)


def split_at(words: list[str], mark: str) -> tuple[list[str], list[str]]:
    return words[: words.index(mark)], words[words.index(mark) + 1 :]


@cache
def check_options(name: str, *arguments: str) -> None:
    """Compose; once for each of the many commands that are on several pages."""
    if name == "simulate":
        arguments = tuple(as_override(argument) for argument in arguments)
    overrides = [argument for argument in arguments if argument != "-m"]
    if "launch=slurm" in overrides and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        return
    with composing(conf_dir()):
        sweeper = (
            compose(name, single(overrides), return_hydra_config=True).hydra.sweeper if "-m" in arguments else None
        )
    lines = [overrides]
    if sweeper is not None:
        lines = jobs(list(sweeper.arms), dict(sweeper.params), overrides)
        lines = lines[:: max(len(lines) - 1, 1)]
    with composing(conf_dir()):
        configs = [compose(name, line) for line in lines]
    schemas = {"train": (TrainConfig, check_train), "simulate": (SimulateConfig, check_simulate)}
    for config in configs:
        typed = OmegaConf.to_object(config)
        if name in schemas:
            schema, check_values = schemas[name]
            refuse_unknown(config, schema)
            check_values(typed)


def single(overrides: list[str]) -> list[str]:
    """The overrides that are no sweeps: those that an experiment's arms are read with."""
    return [override for override in overrides if "," not in override or "[" in override]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_commands_of_a_page(page):
    found = commands(blocks(page))
    for words in found:
        check(words)
    assert found or page.parent.name == "experiments"


def test_commands_in_the_headers_of_configs():
    found = [words for file in HEADERS for words in commands(headers(file))]
    assert len(found) > 20
    for words in found:
        check(words)


def test_commands_of_claims():
    for claim in read_claims(claims_file()):
        for scale in (claim.laptop, claim.full):
            for command in [] if scale is None else scale.commands:
                check(shlex.split(command.replace("{data}", "data=synthetic")))


def test_the_readmes_headline_numbers_are_those_of_the_table():
    table = pd.read_csv(CHECKOUT / "results" / "tables" / "ne_parity.csv")
    gaps = [column for column in table if column.endswith("gap_pct")]
    written = {format(value, "+.2f") for column in gaps for value in table[column].dropna()}
    spreads = {format(value, ".2f") for column in gaps for value in table[f"{column}_ci95"].dropna()}
    rows = re.findall(r"^\| M = \d+, .*", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 7
    assert set(re.findall(r"(?<= )[+-]\d\.\d+", "".join(rows))) <= written
    assert set(re.findall(r"(?<=\+- )\d\.\d+", "".join(rows))) <= spreads


def test_links_lead_somewhere():
    for page in [*PAGES, CHECKOUT / "results" / "REPORT.md"]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_cheap_commands_of_the_readme_run(program, tmp_path):
    cheap = [
        words[3:]
        for words in commands(blocks(CHECKOUT / "README.md"))
        if words[:3] == ["python", "-m", "sparse2d.simulate"] and "workload.path=tables.csv" not in words
    ]
    assert len(cheap) >= 3
    for arguments in cheap:
        ended = program("simulate", f"results_dir={tmp_path}", *map(as_override, arguments))
        assert ended.code == 0, ended.err
