"""A checkpoint's folder: complete or not there, looked at from the command line; what goes into it."""

import json
import pickle
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_kills import read_checkpoint
from checkpoint_ranks import CheckpointedRun, count_steps_beside_a_save, train_with_checkpoints
from configs import tiny_train
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from sparse2d.checkpoint import __main__ as program
from sparse2d.checkpoint.folder import checkpoints_in, read_manifest
from sparse2d.checkpoint.local_state import flatten, rng_state, seed_rng, set_rng_state, unflatten
from sparse2d.config import DenseOptimizer, ParallelismKind, TableOptimizer
from sparse2d.data.digests import sha256_of
from sparse2d.errors import UserError
from sparse2d.launch import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_dataset) -> Path:
    """Checkpoints of steps 2, 4 and 6 of a run on 2 x 1 ranks, which keeps two."""
    path = tmp_path_factory.mktemp("checkpoints")
    config = tiny_train(
        path,
        ParallelismKind.sparse_2d,
        num_groups=2,
        optimizer=TableOptimizer.rowwise_adagrad,
        dense=DenseOptimizer.adam,
        save_every=2,
    )
    run_ranks(train_with_checkpoints, [CheckpointedRun(config, path, 7)], tiny_dataset, num_ranks=2)
    return path


def run(capsys, *arguments: str) -> tuple[str, object]:
    """Output and exit code."""
    code: object = 0
    try:
        program.main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    return capsys.readouterr().out, code


def test_the_newest_are_kept(folder):
    assert [path.name for path in checkpoints_in(folder)] == ["step-00000006", "step-00000004"]
    assert not [path for path in folder.iterdir() if path.name.endswith(".partial")]


def test_each_shard_is_written_once_and_by_both_replicas(folder):
    newest = checkpoints_in(folder)[0]
    metadata = FileSystemReader(newest).read_metadata()
    tables = {name: entry for name, entry in metadata.state_dict_metadata.items() if name.startswith("tables/")}
    assert len(tables) == 26 * 3
    for name, entry in tables.items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    tensor_bytes = sum(4 * entry.size.numel() for name, entry in tables.items() if "iteration" not in name)
    sizes = [entry.bytes for name, entry in read_manifest(newest).files.items() if name.endswith(".distcp")]
    # Replicas share the writing: none has less than a third of it.
    assert min(sizes) > tensor_bytes / 3


def test_payloads_need_no_unpickling(folder):
    newest = checkpoints_in(folder)[0]
    for info in FileSystemReader(newest).read_metadata().storage_data.values():
        with (newest / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            part = file.read(info.length)
        (path := newest.parent / "one.pt").write_bytes(part)
        assert isinstance(torch.load(path, weights_only=True), torch.Tensor)
    path.unlink()
    assert all(tensor.isfinite().all() for name, tensor in read_checkpoint(newest).items() if "/rng/" not in name)


@pytest.mark.parametrize("hidden", [False, True])
def test_code_in_a_checkpoint_is_not_run(hidden, folder, tmp_path, tiny_dataset, capsys):
    class Malicious:
        def __reduce__(self):
            return Path.touch, (tmp_path / "done",)

    foreign = tmp_path / "step-00000006"
    shutil.copytree(checkpoints_in(folder)[0], foreign)
    content = FileSystemReader(foreign).read_metadata() if hidden else Malicious()
    if hidden:
        content.planner_data = Malicious()
    (foreign / ".metadata").write_bytes(pickle.dumps(content))
    manifest = json.loads((foreign / "manifest.json").read_text())
    described = {"bytes": (foreign / ".metadata").stat().st_size, "sha256": sha256_of(foreign / ".metadata")}
    manifest["files"][".metadata"] = described
    (foreign / "manifest.json").write_text(json.dumps(manifest))
    _, code = run(capsys, "inspect", foreign)
    assert re.search(r"\.metadata is no checkpoint's \(it names pathlib.*\.Path\.touch\); give another", str(code))
    config = tiny_train(tmp_path, num_ranks=1, optimizer=TableOptimizer.rowwise_adagrad, dense=DenseOptimizer.adam)
    config.checkpoint.resume = str(foreign)
    with pytest.raises(UserError, match=r"\.metadata is no checkpoint's"):
        run_ranks(train_with_checkpoints, [CheckpointedRun(config, tmp_path / "run", 7)], tiny_dataset, num_ranks=1)
    assert not (tmp_path / "done").exists()
    pickle.loads((foreign / ".metadata").read_bytes())
    assert (tmp_path / "done").exists()


def test_list_inspect_verify(folder, capsys):
    out, code = run(capsys, "list", folder)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["step-00000006", "step-00000004"]
    assert "2 ranks, 2 groups" in out
    out, code = run(capsys, "inspect", folder / "step-00000004")
    assert code == 0
    assert "step: 4\n" in out
    assert "tables/t_C1/weight: float32 [40, 8] in 1 parts" in out
    assert run(capsys, "verify", folder) == ("step-00000006  sound\nstep-00000004  sound\n", 0)
    out, code = run(capsys, "list", folder / "nothing")
    assert "no checkpoint there" in str(code)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: content[:-8], "bytes long, expected"),
        (lambda content: b"", "0 bytes long, expected"),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "is damaged"),
        (None, "is missing, expected"),
    ],
)
@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_damage_is_found(damage, said, name, folder, capsys):
    path = folder / "step-00000004" / name
    content = path.read_bytes()
    try:
        path.unlink()
        if damage is not None:
            path.write_bytes(damage(content))
        out, code = run(capsys, "verify", folder)
        assert "step-00000006  sound" in out
        assert said in out
        assert str(path) in str(code)
    finally:
        path.write_bytes(content)


def test_a_cut_off_manifest_is_damage(folder):
    path = folder / "step-00000004" / "manifest.json"
    content = path.read_text()
    try:
        whole = json.loads(content)
        edited = [
            {"step": "four"},
            {"files": {}},
            {"files": {"a": {"bytes": -1}}},
            {"tables": {"t": ["a"]}},
            {"more": 1},
        ]
        for text in (content[:-8], "", "[]", "{}", *(json.dumps(whole | change) for change in edited)):
            path.write_text(text)
            with pytest.raises(UserError, match=r"manifest.json is damaged"):
                read_manifest(path.parent)
    finally:
        path.write_text(content)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_nested_values_come_back(value):
    assert unflatten(flatten(value, "a"), "a") == value


def test_tensors_among_them_come_back():
    value = {"a": [torch.arange(3), None], "b": {"c": torch.zeros(0)}, "d": []}
    back = unflatten(flatten(value, "x"), "x")
    assert torch.equal(back["a"][0], value["a"][0])
    assert back["a"][1] is None
    assert back["b"]["c"].numel() == 0
    assert back["d"] == []


def test_generators_go_on_where_they_were():
    kept = rng_state(torch.device("cpu"))
    try:
        seed_rng(1, 2)
        np.random.normal()  # leaves a second number in store
        random.gauss(0, 1)
        state = rng_state(torch.device("cpu"))
        drawn = [(random.gauss(0, 1), random.random(), np.random.normal(), torch.rand(1).item()) for _ in range(3)]
        set_rng_state(state, torch.device("cpu"))
        assert drawn == [
            (random.gauss(0, 1), random.random(), np.random.normal(), torch.rand(1).item()) for _ in range(3)
        ]
    finally:
        set_rng_state(kept, torch.device("cpu"))


def test_training_goes_on_beside_a_save(tmp_path, tiny_dataset):
    """A save that cannot end before five more steps are done: if steps waited for it, none would be."""
    config = tiny_train(tmp_path, num_ranks=2, save_every=2)
    steps, complete = run_ranks(count_steps_beside_a_save, config, tmp_path / "c", tiny_dataset, num_ranks=2)
    assert steps == 5
    # And it holds what there was at its own step, not what training made of it meanwhile.
    assert complete
