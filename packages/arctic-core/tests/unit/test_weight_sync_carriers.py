"""Carriers: bytes cross processes intact, refuse what is gone or truncated, and leave nothing behind."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from arctic_core.errors import WeightSyncError
from arctic_core.plugins.manager import get_registry
from arctic_core.sync.carriers import WeightCarrier
from arctic_core.sync.file import PREFIX, FileCarrier, sweep
from arctic_core.sync.shared_memory import SHM, SharedMemoryCarrier

PAYLOAD = [memoryview(b"first"), memoryview(b""), memoryview(bytes(range(256)) * 100)]


def folders(root: Path) -> set[str]:
    return {path.name for path in root.glob(f"*{PREFIX}*")}


@pytest.fixture(params=["file", "shared_memory"])
def carrier(request, tmp_path):
    made = get_registry().carrier(request.param).create(str(tmp_path))
    yield made
    made.release()


def test_a_bucket_crosses_with_checksums(carrier: WeightCarrier):
    ref = carrier.publish(3, PAYLOAD, checksums=True)
    assert (ref.index, ref.carrier, ref.nbytes) == (3, carrier.name, 5 + 25600)
    assert ref.checksums == tuple(zlib.crc32(view) for view in PAYLOAD)
    with carrier.open(ref) as view:
        assert bytes(view) == b"".join(PAYLOAD)
    assert carrier.publish(4, PAYLOAD, checksums=False).checksums is None


def test_an_empty_bucket_crosses(carrier: WeightCarrier):
    with carrier.open(carrier.publish(0, [], checksums=True)) as view:
        assert bytes(view) == b""


def test_the_receivers_writes_stay_its_own(carrier: WeightCarrier):
    ref = carrier.publish(0, PAYLOAD, checksums=False)
    with carrier.open(ref) as view:
        view[0] = 0
    with carrier.open(ref) as view:
        assert bytes(view[:5]) == b"first"


def test_release_removes_everything_and_may_be_repeated(carrier: WeightCarrier):
    ref = carrier.publish(0, PAYLOAD, checksums=False)
    folder = Path(ref.locator).parent
    carrier.release()
    carrier.release()
    assert not folder.exists()
    with pytest.raises(WeightSyncError, match="bucket 0 cannot be opened"), carrier.open(ref):
        pass
    again = carrier.publish(0, PAYLOAD, checksums=False)
    with carrier.open(again) as view:
        assert bytes(view[:5]) == b"first"


def test_a_mapping_outlives_release(carrier: WeightCarrier):
    with carrier.open(carrier.publish(0, PAYLOAD, checksums=False)) as view:
        carrier.release()
        assert bytes(view[:5]) == b"first"


def test_a_size_that_differs_is_refused(carrier: WeightCarrier):
    ref = carrier.publish(1, PAYLOAD, checksums=False)
    with Path(ref.locator).open("r+b") as file:
        file.truncate(10)
    with pytest.raises(WeightSyncError, match="bucket 1 has 10 bytes, 25605 were announced"), carrier.open(ref):
        pass
    with pytest.raises(WeightSyncError, match="announced"), carrier.open(dataclasses.replace(ref, nbytes=11)):
        pass


def test_a_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    with pytest.raises(WeightSyncError, match="cannot be written") as caught:
        FileCarrier(str(blocker)).publish(0, PAYLOAD, checksums=False)
    assert "weight_sync.directory" in caught.value.remedy


def _sender(root: str, ending: str) -> str:
    program = f"""
import os, signal
from arctic_core.sync.file import FileCarrier
carrier = FileCarrier({root!r})
ref = carrier.publish(0, [memoryview(b"hello"), memoryview(b"world")], checksums=True)
print(ref.locator, flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_a_receiver_in_another_process_does_not_destroy_the_bucket():
    sender = SharedMemoryCarrier()
    ref = sender.publish(0, [memoryview(b"hello")], checksums=True)
    program = f"""
from arctic_core.sync.plan import BucketRef
from arctic_core.sync.shared_memory import SharedMemoryCarrier
with SharedMemoryCarrier().open(BucketRef(0, "shared_memory", {ref.locator!r}, 5, None)) as view:
    print(bytes(view).decode())
"""
    try:
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
            assert (done.stdout, done.stderr) == ("hello\n", "")
    finally:
        sender.release()


def test_a_clean_exit_leaves_nothing(tmp_path: Path):
    locator = _sender(str(tmp_path), "")
    assert locator.startswith(str(tmp_path))
    assert folders(tmp_path) == set()


def test_the_next_sender_sweeps_what_a_killed_one_left(tmp_path: Path):
    locator = _sender(str(tmp_path), "os.kill(os.getpid(), signal.SIGKILL)")
    assert Path(locator).exists()
    living = FileCarrier(str(tmp_path))
    ref = living.publish(0, PAYLOAD, checksums=False)
    assert folders(tmp_path) == {Path(ref.locator).parent.name}
    assert sweep(tmp_path) == []
    assert Path(ref.locator).exists()
    living.release()


def test_shared_memory_lives_in_shared_memory():
    carrier = SharedMemoryCarrier()
    try:
        assert SHM in Path(carrier.publish(0, PAYLOAD, checksums=False).locator).parents
    finally:
        carrier.release()
