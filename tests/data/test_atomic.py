"""Names that stand for whole content, after a failure and after a power cut."""

import os

import pytest

from sparse2d.data.atomic import replacing


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def spied_fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def spied_replace(source, target):
        events.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_replace)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_bytes(b"content")
    assert events == [("fsync", str(temporary)), ("replace", str(temporary)), ("fsync", str(tmp_path))]


def write_and_fail(final, folder):
    with replacing(final) as temporary:
        if folder:
            temporary.mkdir()
            (temporary / "part").touch()
        else:
            temporary.write_text("new")
        raise RuntimeError


@pytest.mark.parametrize("folder", [False, True])
def test_failure_leaves_the_old_content(tmp_path, folder):
    final = tmp_path / "final"
    if not folder:
        final.write_text("old")
    with pytest.raises(RuntimeError):
        write_and_fail(final, folder)
    assert [path.name for path in tmp_path.iterdir()] == ([] if folder else ["final"])
    assert folder or final.read_text() == "old"
