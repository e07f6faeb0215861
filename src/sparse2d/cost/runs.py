"""Recorded training runs as the model's inputs: workload, plan, how often data have each row, links."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparse2d.config import Combine, EngineKind, ParallelismKind, Pipeline, TrainConfig, WireDtype
from sparse2d.cost.config import Collectives, HardwareConfig, SimulateConfig
from sparse2d.cost.from_model import VALUE_BYTES, workload_of
from sparse2d.cost.model import Prediction, predict
from sparse2d.cost.planned import Counts
from sparse2d.cost.workload import Workload
from sparse2d.data.dataset import Dataset, open_dataset, train_batches
from sparse2d.data.prepare import prepare
from sparse2d.errors import UserError
from sparse2d.plan import Plan
from sparse2d.records import plain

MBIT_IN_GB = 1e6 / 8 / 1e9
# Ranks of the testbed that conf/hardware/cpu_testbed.yaml was measured on; they share the machine's cores.
REFERENCE_RANKS = 8


@dataclass(frozen=True)
class Run:
    """A completed training run on real ranks.

    Attributes:
        record: as ``record.json`` has it.
        config: what was trained.
    """

    record: dict[str, Any]
    config: TrainConfig

    @property
    def num_ranks(self) -> int:
        """T."""
        return self.config.launch.num_ranks

    @property
    def batch_per_rank(self) -> int:
        """Samples."""
        return self.config.global_batch_size // self.num_ranks

    @property
    def step_ms(self) -> float | None:
        """Mean of a step, averagings included; None if no step was timed."""
        qps = self.record["train"]["qps"]
        return 1e3 * self.config.global_batch_size / qps if qps else None

    @property
    def testbed(self) -> dict[str, Any] | None:
        """Hosts, ranks and shaping of the testbed that it ran on."""
        testbed = self.record.get("testbed")
        return None if testbed is None else dict(testbed["config"])

    @cached_property
    def dataset(self) -> Dataset:
        """The rows, prepared again if they are gone."""
        data = self.config.data
        return open_dataset(prepare(data, progress=False), data.train_rows, data.eval_rows, data.multi_hot)

    @cached_property
    def workload(self) -> Workload:
        """Tables and dense part; data parallelism makes tables part of the latter."""
        model = workload_of(self.config, self.dataset.num_embeddings)
        return Workload(
            name=self.config.experiment,
            table_names=model.names,
            rows=np.asarray(model.rows, np.float64),
            dims=np.asarray(model.dims, np.float64),
            pooling=np.asarray(model.pooling, np.float64),
            zipf=np.zeros(len(model.rows)),
            batch_per_gpu=self.batch_per_rank,
            dense_flops=model.flops_per_sample,
            dense_params=model.dense_params,
            dense_memory=0.0,
            weight_bytes=VALUE_BYTES,
            activation_bytes=VALUE_BYTES,
            wire_bytes=VALUE_BYTES,
            dense_wire_bytes=VALUE_BYTES,
            id_bytes=4,
            state_bytes_per_row=model.state_bytes_per_row,
            state_bytes_per_value=model.state_bytes_per_value,
        )

    @cached_property
    def plan(self) -> Plan:
        """As the ranks made it, or as it was pinned."""
        # Imports TorchRec.
        from sparse2d.planning import plan_here

        config = self.config
        if self.testbed is not None and config.parallelism.ranks_per_host is None:
            ranks_per_host = self.testbed["ranks_per_host"]
            config = replace(config, parallelism=replace(config.parallelism, ranks_per_host=ranks_per_host))
        return plan_here(config, self.dataset.num_embeddings)[0]

    @cached_property
    def counts(self) -> Counts:
        """Occurrences of each row of each table in the batches that were trained on."""
        counts = [np.zeros(rows, np.int64) for rows in self.dataset.num_embeddings]
        config = self.config
        batches = train_batches(
            self.dataset,
            config.global_batch_size,
            0,
            1,
            max_steps=config.max_steps,
            shuffle_seed=config.data.shuffle_seed,
        )
        for batch in batches:
            ends = np.cumsum(batch.hotness)[:-1]
            for held, ids in zip(counts, np.split(batch.sparse, ends, axis=1), strict=True):
                held += np.bincount(ids.ravel(), minlength=len(held))
        return counts

    def predicted(self, config: SimulateConfig) -> Prediction:
        """What the model says of the run.

        Args:
            config: hardware and constants.
        """
        trained = self.config
        layout, sync = trained.parallelism, trained.sync
        asked = replace(
            config,
            num_gpus=self.num_ranks,
            parallelism=replace(config.parallelism, num_groups=layout.num_groups, replicas=layout.replicas),
            sync=replace(config.sync, interval=sync.interval, rows=sync.rows, moments=sync.moments),
            pipeline=Pipeline.sparse_dist if trained.pipeline is Pipeline.sparse_dist else Pipeline.none,
            hardware=self.hardware(config.hardware),
        )
        return predict(asked, self.workload, plan=self.plan, counts=self.counts)

    def hardware(self, base: HardwareConfig) -> HardwareConfig:
        """``base`` with the hosts and links that the testbed measured before this run; its ranks share the cores."""
        testbed = self.record.get("testbed")
        on_gloo = replace(base, collectives=Collectives.gloo)
        if testbed is None:
            return on_gloo
        ranks_per_host, link = testbed["config"]["ranks_per_host"], testbed["inter_host"]
        share = REFERENCE_RANKS / self.num_ranks
        return replace(
            on_gloo,
            gpus_per_host=ranks_per_host,
            gpus_per_nic=ranks_per_host,
            nic_gb_per_s=base.nic_gb_per_s if link is None else link["mbit"] * MBIT_IN_GB,
            **{name: getattr(base, name) * share for name in ("peak_tflops", "memory_gb_per_s", "host_gb_per_s")},
        )


def find_runs(folders: Sequence[str]) -> list[Run]:
    """Completed runs below some folders that the model can speak of.

    Raises:
        UserError: if there are none, or a record is damaged or of another version.
    """
    paths = [path for folder in folders for path in sorted(Path(folder).rglob("record.json"))]
    runs = [_run(path) for path in paths]
    found = [run for run in runs if run is not None]
    if not found:
        raise UserError(
            f"runs={list(folders)}: no completed run of full_mp or sparse_2d (sync.combine=mean, fp32) on real CPU "
            f"ranks among {len(paths)} records"
        )
    return found


def _run(path: Path) -> Run | None:
    """None for a run that did not end well, or that the model does not know."""
    try:
        record = json.loads(path.read_text())
        if record["status"] != "completed":
            return None
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), record["config"]))
        assert isinstance(config, TrainConfig)
        return Run(record, config) if _is_modelled(config, record["train"]["device"]) else None
    except (OSError, ValueError, KeyError, TypeError, OmegaConfBaseException) as error:
        fault = str(error).splitlines()[0]
    # Out here, for whoever explains this error would explain its cause, as an option of the command line.
    raise UserError(f"{path}: no record of this version's sparse2d.train ({fault}); leave its folder out")


def _is_modelled(config: TrainConfig, device: str) -> bool:
    return (
        config.engine is EngineKind.distributed
        and config.parallelism.kind is not ParallelismKind.data_parallel
        and config.sync.combine is Combine.mean
        and config.sync.wire_dtype is WireDtype.fp32
        and all(part["method"] == "none" for part in plain(config.compression).values())
        and device == "cpu"
    )
