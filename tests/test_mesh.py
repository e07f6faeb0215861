"""T = M x N and which rank is where."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse2d.config import Replicas
from sparse2d.errors import UserError
from sparse2d.mesh import Mesh, RankInfo, rank_from_env

LAYOUTS = st.tuples(st.integers(1, 16), st.integers(1, 16), st.sampled_from(Replicas))


@given(LAYOUTS)
def test_groups_partition_the_ranks(layout):
    num_groups, group_size, replicas = layout
    mesh = Mesh(num_groups * group_size, num_groups, replicas)
    assert mesh.group_size == group_size
    assert [len(ranks) for ranks in mesh.groups] == [group_size] * num_groups
    assert sorted(rank for ranks in mesh.groups for rank in ranks) == list(range(mesh.world_size))
    for group, ranks in enumerate(mesh.groups):
        assert ranks == sorted(ranks)
        assert {mesh.group_of(rank) for rank in ranks} == {group}


@given(LAYOUTS)
def test_replicas_of_a_shard_are_neighbours_or_a_group_apart(layout):
    num_groups, group_size, replicas = layout
    mesh = Mesh(num_groups * group_size, num_groups, replicas)
    for place in range(group_size):
        holders = [ranks[place] for ranks in mesh.groups]
        step = 1 if replicas is Replicas.intra_host else group_size
        assert [b - a for a, b in pairwise(holders)] == [step] * (num_groups - 1)


@given(st.integers(1, 64), st.integers(-3, 80))
def test_only_divisors_are_groups(world_size, num_groups):
    if num_groups >= 1 and world_size % num_groups == 0:
        assert Mesh(world_size, num_groups).group_size * num_groups == world_size
    else:
        with pytest.raises(UserError, match=f"num_groups={num_groups} does not divide .* {world_size} ranks"):
            Mesh(world_size, num_groups)


def test_the_refusal_lists_what_would_do():
    with pytest.raises(UserError, match=r"choose one of \[1, 2, 3, 4, 6, 12\]"):
        Mesh(12, 5)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), LAYOUTS)
def test_local_group_size_is_the_ranks_of_a_group_on_one_host(hosts, per_host, layout):
    _, _, replicas = layout
    world_size = hosts * per_host
    for num_groups in (m for m in range(1, world_size + 1) if world_size % m == 0):
        mesh = Mesh(world_size, num_groups, replicas)
        counts = {
            sum(rank // per_host == host for rank in ranks)
            for ranks in mesh.groups
            for host in range(hosts)
            if any(rank // per_host == host for rank in ranks)
        }
        assert counts == {mesh.local_group_size(per_host)}


@pytest.mark.parametrize("replicas", list(Replicas))
def test_a_groups_ranks_are_taken_to_share_a_host_only_where_they_do(replicas):
    """Also where hosts and groups do not divide each other, which no planner can be told exactly."""
    for per_host, hosts, num_groups in product(range(1, 13), range(1, 5), range(1, 49)):
        world_size = hosts * per_host
        if world_size % num_groups != 0:
            continue
        mesh = Mesh(world_size, num_groups, replicas)
        size = mesh.local_group_size(per_host)
        assert mesh.group_size % size == 0
        for ranks in mesh.groups:
            for first in range(0, mesh.group_size, size):
                assert len({rank // per_host for rank in ranks[first : first + size]}) == 1


@pytest.mark.parametrize(
    ("num_groups", "replicas", "expected"),
    [
        (2, Replicas.intra_host, 4),
        (8, Replicas.intra_host, 1),
        (16, Replicas.intra_host, 1),
        (2, Replicas.inter_host, 8),
        (8, Replicas.inter_host, 8),
        (16, Replicas.inter_host, 4),
    ],
)
def test_local_group_size_on_hosts_of_eight_gpus(num_groups, replicas, expected):
    assert Mesh(64, num_groups, replicas).local_group_size(8) == expected


def test_started_plainly_there_is_no_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_from_env() is None


def test_rank_of_the_second_host_is_read_from_the_environment(monkeypatch):
    for name, value in {"RANK": 11, "WORLD_SIZE": 16, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    assert rank_from_env() == RankInfo(rank=11, world_size=16, local_rank=3, local_world_size=8)
    assert not rank_from_env().is_first
