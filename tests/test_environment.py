"""The pinned lists, and the check that what they install works together."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from sparse2d.environment import WANTED, check_environment

REPOSITORY = Path(__file__).parents[1]
LISTS = ["cpu", "cuda", "cuda_runtime"]
PIN = re.compile(r"([a-z0-9][a-z0-9.-]*)==([^ ;]+)( ; [^;]+)?")


def lines(name: str) -> list[str]:
    text = (REPOSITORY / "requirements" / f"{name}.txt").read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pins(name: str) -> dict[str, set[str]]:
    """Versions of each package, with the platforms they are for."""
    versions = defaultdict(set)
    for line in lines(name):
        package, version, marker = PIN.fullmatch(line).groups()
        versions[package].add(f"{version}{marker or ''}")
    return dict(versions)


@pytest.mark.parametrize("name", LISTS)
def test_lists_hold_exact_versions_and_no_addresses(name):
    for line in lines(name):
        assert PIN.fullmatch(line), line
        assert "://" not in line


def test_cpu_and_cuda_lists_agree_but_for_fbgemm_and_cudas_libraries():
    cpu, cuda = pins("cpu"), pins("cuda")
    shared = cpu.keys() & cuda.keys()
    assert {name: cpu[name] for name in shared} == {name: cuda[name] for name in shared}
    assert cpu.keys() - cuda.keys() == {"fbgemm-gpu-cpu"}
    assert cuda.keys() - cpu.keys() == pins("cuda_runtime").keys() | {"fbgemm-gpu"}
    assert {name: cuda[name] for name in pins("cuda_runtime")} == pins("cuda_runtime")


def test_lists_hold_the_versions_that_the_check_wants():
    for name, fbgemm in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        found = {"torch": pins(name)["torch"], "torchrec": pins(name)["torchrec"], "fbgemm-gpu": pins(name)[fbgemm]}
        assert found == {package: {version} for package, version in WANTED.items()}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_dependency_is_pinned(name):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras[name], *extras["dev"]]:
        assert re.match(r"[\w-]+", requirement).group() in pins(name)


def test_conda_environment_is_the_cuda_list():
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    requirements = [entry.removeprefix("-r ").strip() for entry in pip if entry.startswith("-r ")]
    assert requirements == ["requirements/cuda.txt"]
    # Anything pinned beside the list must be what the list says.
    for entry in pip:
        if "==" in entry:
            package, version = entry.split("==")
            assert pins("cuda")[package] == {version}
    (python,) = (entry for entry in environment["dependencies"] if str(entry).startswith("python="))
    supported = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    low, high = (int(text) for text in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", supported).groups())
    assert low <= int(python.split("=")[-1].split(".")[1]) < high


def test_installed_packages_are_the_pinned_ones():
    installed = {re.sub(r"[-_.]+", "-", d.name).lower(): d.version for d in importlib.metadata.distributions()}
    for package, versions in pins("cpu" if "fbgemm-gpu-cpu" in installed else "cuda").items():
        if package in installed:
            assert installed[package].split("+")[0] in {version.split(" ;")[0] for version in versions}, package


def test_no_two_packages_own_the_same_file():
    owners = defaultdict(set)
    for distribution in importlib.metadata.distributions():
        name = distribution.name
        for file in distribution.files or []:
            if file.parts[0] != "__pycache__":
                owners[str(file)].add(name)
    assert len(owners) > 1000
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}


def test_this_environment_works():
    check_environment()


def run_with_broken_fbgemm(folder: Path, source: str, *module: str) -> subprocess.CompletedProcess[str]:
    package = folder / "broken" / "fbgemm_gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", *module],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('libtorch.so: undefined symbol')",
        "raise OSError('fbgemm_gpu_py.so: cannot open shared object file')",
        "",
    ],
    ids=["no import", "no library", "no operators"],
)
def test_a_mismatch_names_the_versions_wanted_and_found(source, tmp_path):
    done = run_with_broken_fbgemm(tmp_path, source, "sparse2d.environment")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    triple = ", ".join(f"{name} {re.escape(version)}" for name, version in WANTED.items())
    assert re.search(rf"error: FBGEMM does not work here: wanted {triple}; found {triple}; install with", done.stderr)


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_training_checks_the_environment_before_it_starts_ranks(error, tmp_path):
    options = ["data.synthetic.rows=1400", "global_batch_size=64", f"results_dir={tmp_path / 'results'}"]
    done = run_with_broken_fbgemm(tmp_path, f"raise {error}('symbol')", "sparse2d.train", *options)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("sparse2d.train: error: FBGEMM does not work here: wanted torch ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "results" / "runs").exists()
