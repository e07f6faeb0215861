"""Rates that a testbed measures are those with which the cost model gives the measured times."""

import numpy as np
import pytest
import yaml
from workloads import hardware

from sparse2d.cost.config import Collectives, HardwareConfig
from sparse2d.cost.network import Traffic, all_reduce_s, all_to_all_s
from sparse2d.mesh import Mesh
from sparse2d.testbed.hardware import BYTES, Seconds, hardware_lines, hardware_numbers

HOSTS, LOCAL = 4, 2
RANKS = HOSTS * LOCAL
TESTBED = {"config": {"hosts": HOSTS, "ranks_per_host": LOCAL, "inter_host_mbit": 200.0}, "inter_host": {"mbit": 190.0}}
ALL_TO_ALL = 0.8


def seconds_of(machine: HardwareConfig) -> Seconds:
    """What would be measured if the model were right."""

    def all_to_all(values: int) -> float:
        part = [values * BYTES] * RANKS
        local, remote = [[count * value for value in part] for count in (LOCAL - 1, RANKS - LOCAL)]
        traffic = Traffic(*np.array([local, remote, local, remote], np.float64))
        return all_to_all_s(traffic, machine, ALL_TO_ALL, Mesh(RANKS, 1))

    def all_reduce(values: int, ranks: int = RANKS) -> float:
        return all_reduce_s(values * BYTES, ranks, LOCAL, machine)

    return Seconds(
        all_reduce_small=all_reduce(Seconds.SMALL),
        all_reduce_large=all_reduce(Seconds.LARGE),
        all_to_all_small=all_to_all(Seconds.TO_EACH_SMALL),
        all_to_all_large=all_to_all(Seconds.TO_EACH_LARGE),
        host_all_reduce_large=all_reduce(Seconds.LARGE, LOCAL),
        matmul=2 * Seconds.MATRIX**3 / (machine.peak_tflops * 1e12),
        lookup=Seconds.LOOKUPS * Seconds.DIM * BYTES / (machine.memory_gb_per_s * 1e9),
    )


def test_the_models_own_times_give_back_its_rates():
    machine = hardware(
        gpus_per_host=LOCAL,
        gpus_per_nic=LOCAL,
        collectives=Collectives.gloo,
        nic_gb_per_s=190e6 / 8 / 1e9,
        nic_efficiency=0.9,
        host_gb_per_s=0.5,
        half_rate_message_kb=3.0,
        latency_us=300.0,
        peak_tflops=0.01,
        memory_gb_per_s=2.0,
    )
    numbers, all_to_all = hardware_numbers(seconds_of(machine), TESTBED)
    assert all_to_all == pytest.approx(ALL_TO_ALL, rel=0.01)
    for name, value in numbers.items():
        if name != "memory_gb":
            # Two hops of latency stand beside 2 MB.
            assert value == pytest.approx(getattr(machine, name), rel=0.15 if name == "host_gb_per_s" else 0.01), name


def test_the_lines_are_a_hardware_file():
    lines = hardware_lines(seconds_of(hardware(latency_us=300.0, collectives=Collectives.gloo)), TESTBED)
    content = yaml.safe_load(lines)
    assert content.keys() == HardwareConfig.__dataclass_fields__.keys()
    assert "python -m sparse2d.testbed measure hosts=4 ranks_per_host=2 inter_host_mbit=200" in lines
