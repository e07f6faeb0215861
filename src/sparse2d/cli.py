"""What all entry points share: compose the config with Hydra, run the task, end with one line when it goes wrong."""

import dataclasses
import difflib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, get_type_hints

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from sparse2d.config import conf_dir, register_schemas
from sparse2d.errors import UserError, refusals_told
from sparse2d.launch import RanksFailedError
from sparse2d.preemption import EXIT_CODE, terminate

log = logging.getLogger(__name__)
C = TypeVar("C")


def run_entry_point(name: str, schema: type[C], task: Callable[[C], object]) -> None:
    """Compose ``conf/<name>.yaml`` with the command line, run ``task`` on the typed config, and exit.

    What ``task`` returns is a sweep's to know: the folder of the job's run, if it has one.

    Exit code 0 on success, 1 on a failure that is told in one line, 130 on Ctrl-C, 143 on SIGTERM; a
    traceback means a bug.
    """
    _log_to_stderr()
    # Hydra would print its own, longer story and exit.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Records and wandb ask git for the checkout's state; killed meanwhile, they must not leave its index locked.
    os.environ["GIT_OPTIONAL_LOCKS"] = "0"
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, _interrupt_once)
    # argparse refuses overrides on both sides of a flag: -m goes first.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    register_schemas()
    OmegaConf.register_new_resolver("groups", groups_text, replace=True)
    failures: list[Exception] = []

    def job(config: DictConfig) -> object:
        # Once more where a cluster's job starts here, in a process of its own.
        _log_to_stderr()
        try:
            refuse_unknown(config, schema, groups_of(name))
            _refuse_single_job_for_a_cluster()
            with refusals_told(config.get("results_dir", "results")):
                return task(OmegaConf.to_object(config))  # type: ignore[arg-type]  # an instance of schema
        except Exception as error:
            # The sweeper tells a failing job of a multirun; of a single run Hydra would print its overrides first.
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise
            failures.append(error)
            return None

    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(job)()
        if failures:
            raise failures[0]
    except (UserError, RanksFailedError, HydraException, OmegaConfBaseException) as error:
        print(f"sparse2d.{name}: error: {explain(error, schema, groups_of(name))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        # `--help | head`; what Python still has to flush must not meet the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        print(f"sparse2d.{name}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code == EXIT_CODE:
            print(f"sparse2d.{name}: terminated", file=sys.stderr)
        raise
    except ValueError as error:
        # Hydra's own, without a class to tell them by: group=null, group=3; -m --cfg job.
        groups = ", ".join(sorted(groups_of(name)))
        remedies = {
            "Config group override": f"each group ({groups}) takes one of its names",
            "Only one of": "leave -m out to see the options of one job",
        }
        remedy = next((remedies[start] for start in remedies if str(error).startswith(start)), None)
        if remedy is None:
            raise
        print(f"sparse2d.{name}: error: {error}; {remedy}", file=sys.stderr)
        sys.exit(1)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("sparse2d").setLevel(logging.INFO)


def _refuse_single_job_for_a_cluster() -> None:
    """Hydra ignores its launcher without ``-m``: the job would run on the login node."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode is RunMode.RUN and hydra_config.runtime.choices["hydra/launcher"] != "basic":
        raise UserError(f"launch={hydra_config.runtime.choices['launch']} submits the jobs of a sweep: add -m")


def _interrupt_once(*_: Any) -> None:
    """The first Ctrl-C ends the run in order; more of them would only cut that short and leave ranks behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def refuse_unknown(config: DictConfig, schema: type[Any], groups: Iterable[str] = ()) -> None:
    """Refuse keys that ``+key=value`` added, which Hydra lets pass even where the schema does not declare them."""
    declared = set(option_names(schema))
    for name in _key_names(config):
        if name not in declared:
            raise UserError(_unknown(name, schema, groups))


def _key_names(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys of a config."""
    for key in map(str, config):
        yield f"{prefix}{key}"
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none():
            yield from _key_names(node, f"{prefix}{key}.")


def explain(error: Exception, schema: type[Any], groups: Iterable[str] = ()) -> str:
    """One line for the user; unknown keys come with the nearest known one."""
    chain = list(_causes(error))
    for cause in chain:
        if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
            return _unknown(str(cause.full_key), schema, groups)
    for cause in chain:
        if isinstance(cause, MissingMandatoryValue):
            return f"option {cause.full_key} needs a value: add {cause.full_key}=..."
        if isinstance(cause, OverrideParseException):
            return f"cannot read the override {cause.override!r}: expected key=value"
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file:
            options = ", ".join(cause.options or [])
            return f"no config {cause.missing_cfg_file}" + (f"; choose from: {options}" if options else "")
        if isinstance(cause, ConfigCompositionException) and "No match in the defaults list" in str(cause):
            return _unknown(str(cause).split("'")[1], schema, groups)
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            if "is not a ListConfig" in str(cause.msg):
                return f"{cause.full_key}={cause.value} is no list; write {cause.full_key}=[{cause.value}]"
            return f"{cause.full_key}: {str(cause.msg or cause).splitlines()[0]}"
        if "Ambiguous value for argument" in str(cause):
            return f"{str(cause).splitlines()[0]}: several values make a sweep, which takes -m"
    return str(error).splitlines()[0]


def _unknown(key: str, schema: type[Any], groups: Iterable[str]) -> str:
    known = [*option_names(schema), *groups]
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"unknown option {key!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def option_names(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all options that a schema declares."""
    for name, kind in get_type_hints(schema).items():
        yield prefix + name
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from option_names(kind, f"{prefix}{name}.")


def groups_of(program: str) -> dict[str, list[str]]:
    """The groups in the defaults of ``conf/<program>.yaml``, each with its choices.

    Of the experiments, those whose header names the program: all programs share their folder.
    """
    defaults = yaml.safe_load((conf_dir() / f"{program}.yaml").read_text())["defaults"]
    names = [name for entry in defaults if isinstance(entry, dict) for name in entry]
    groups = {name: sorted((conf_dir() / name).glob("*.yaml")) for name in names if (conf_dir() / name).is_dir()}
    groups["experiment"] = [path for path in groups.get("experiment", []) if f"sparse2d.{program} " in path.read_text()]
    return {name: [path.stem for path in paths] for name, paths in groups.items() if paths}


def groups_text(program: str) -> str:
    """``groups_of`` as lines of a help text."""
    return "\n".join(f"{name}: {', '.join(choices)}" for name, choices in groups_of(program).items())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
