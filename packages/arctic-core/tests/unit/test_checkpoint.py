"""Atomic checkpoint folders: contents, pruning, remains, and a writer killed at every stage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from arctic_core.checkpoint import (
    LATEST,
    MANIFEST,
    CheckpointInfo,
    CheckpointWriter,
    read_manifest,
    resolve_checkpoint,
    verify,
)
from arctic_core.errors import CheckpointError, InvalidStateError

INFO = CheckpointInfo(policy_version=3, engine="torch", world_size=2, dtype="float32", model="tiny", extra={"epoch": "1"})


def save(root: Path, step: int, content: str = "", keep_last: int | None = None) -> Path:
    writer = CheckpointWriter(root, step)
    folder = writer.begin()
    (folder / "weights").write_text(f"weights {step} {content}")
    (folder / "nested").mkdir()
    (folder / "nested" / "optimizer").write_bytes(b"\0" * 100)
    return writer.commit(INFO, keep_last)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_saved_checkpoint_can_be_found_verified_and_read(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path == tmp_path / "step-7"
    assert names(tmp_path) == [LATEST, "step-7"]
    assert resolve_checkpoint(tmp_path) == resolve_checkpoint(path) == path
    manifest = verify(path)
    assert (manifest.step, manifest.info) == (7, INFO)
    assert [entry.path for entry in manifest.files] == ["nested/optimizer", "weights"]
    assert manifest == read_manifest(path)


def test_latest_is_the_last_written_not_the_highest_step(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 5)
    assert resolve_checkpoint(tmp_path).name == "step-5"
    (tmp_path / LATEST).unlink()
    assert resolve_checkpoint(tmp_path).name == "step-5"


@pytest.mark.parametrize("latest", ["step-99", "", "../elsewhere", "step-2"])
def test_a_dangling_latest_falls_back_to_the_newest_complete_one(tmp_path: Path, latest: str) -> None:
    save(tmp_path, 1)
    broken = save(tmp_path, 2)
    (broken / "weights").unlink()
    (tmp_path / LATEST).write_text(latest)
    assert resolve_checkpoint(tmp_path).name == "step-1"


def test_verify_names_missing_truncated_and_altered_files(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "nested" / "optimizer").write_bytes(b"\0" * 99)
    with pytest.raises(CheckpointError, match="nested/optimizer has 99 bytes instead of 100"):
        verify(path, checksums=False)
    with pytest.raises(CheckpointError, match="99 bytes"):
        resolve_checkpoint(path)
    (path / "nested" / "optimizer").write_bytes(b"\1" * 100)
    assert verify(path, checksums=False).step == 1
    with pytest.raises(CheckpointError, match="nested/optimizer has been altered"):
        verify(path)
    (path / "weights").unlink()
    with pytest.raises(CheckpointError, match="weights is missing"):
        verify(path)


def test_unreadable_manifests_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="format 2"):
        read_manifest(path)
    (path / MANIFEST).write_text(text[:20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(path)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        read_manifest(path)


def test_nothing_to_resolve(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_checkpoint(tmp_path / "absent")


def test_pruning_keeps_the_last_written_and_touches_nothing_of_others(tmp_path: Path) -> None:
    foreign = tmp_path / "step-0"
    foreign.mkdir()
    (foreign / "precious").write_text("x")
    for step in (1, 2, 9, 3):
        save(tmp_path, step)
    save(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == [LATEST, "step-0", "step-3", "step-4"]
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == [LATEST, "step-0", "step-2"]
    with pytest.raises(CheckpointError, match="keep_last=0"):
        save(tmp_path, 5, keep_last=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, "first")
    path = save(tmp_path, 1, "second")
    assert names(tmp_path) == [LATEST, "step-1"]
    assert (path / "weights").read_text() == "weights 1 second"
    verify(path)


def test_abandon_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 2)
    (writer.begin() / "weights").write_text("half")
    writer.abandon()
    writer.abandon()
    assert names(tmp_path) == [LATEST, "step-1"]
    with pytest.raises(InvalidStateError):
        writer.commit(INFO)


def test_an_empty_save_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    writer.begin()
    with pytest.raises(CheckpointError, match="wrote nothing"):
        writer.commit(INFO)


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointWriter(tmp_path / "file", 1).begin()


def test_remains_of_a_living_writer_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mine = CheckpointWriter(tmp_path, 2).begin()
    elsewhere = tmp_path / "step-8.tmp-1@another-host"
    elsewhere.mkdir()
    save(tmp_path, 3)
    assert mine.is_dir()
    assert elsewhere.is_dir()


# Saves step 1 again or step 2, and kills itself at the given call of the given os function (or while writing files).
KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from arctic_core.checkpoint import CheckpointInfo, CheckpointWriter
root, step, function, count = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
writer = CheckpointWriter(root, step)
folder = writer.begin()
(folder / "weights").write_text("new")
if function == "files":
    os.kill(os.getpid(), signal.SIGKILL)
(folder / "optimizer").write_text("new")
genuine, calls = getattr(os, function), 0
def deadly(*args):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return genuine(*args)
setattr(os, function, deadly)
writer.commit(CheckpointInfo(policy_version=0, engine="torch", world_size=1, dtype="float32", model="m"), keep_last=1)
"""

# fsync: 1-2 files, 3 the manifest, 4 the folder, 5 the root after the renames, 6 the pointer, 7 the root after it.
STAGES = [("files", 1), *(("fsync", i) for i in range(1, 8)), ("rename", 1), ("rename", 2), ("replace", 1)]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("function", "count"), STAGES)
def test_a_writer_killed_at_any_stage_leaves_a_loadable_checkpoint(
    tmp_path: Path, step: int, function: str, count: int
) -> None:
    save(tmp_path, 1)
    command = [sys.executable, "-c", textwrap.dedent(KILLED_WRITER), str(tmp_path), str(step), function, str(count)]
    result = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr

    found = resolve_checkpoint(tmp_path)
    verify(found)
    in_place = (function, count) in {("fsync", 5), ("fsync", 6), ("fsync", 7), ("replace", 1)}
    if not in_place and (function, count) != ("rename", 2):
        assert (found / "weights").read_text() == "weights 1 "

    latest = save(tmp_path, 3)  # the next save works, and clears the remains
    assert resolve_checkpoint(tmp_path) == latest
    assert all("." not in name for name in names(tmp_path)), os.listdir(tmp_path)
    for folder in tmp_path.glob("step-*"):
        verify(folder)
