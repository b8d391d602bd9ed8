"""The file carrier: buckets are files in a folder that both sides see.

A sender owns one sub-folder, ``arctic-sync-<pid>-<random>``, and holds a lock on a file inside it for as long as it lives.
The kernel drops that lock with the process, however it ends, so the next sender to start under the same root can tell a
leftover (its lock is free) from a folder in use and sweeps it. Nothing relies on process ids, which are reused and differ
between containers; the id is in the name for people. POSIX only.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from arctic_core.errors import WeightSyncError
from arctic_core.sync.carriers import WeightCarrier
from arctic_core.sync.plan import BucketRef

PREFIX = "arctic-sync-"
_LOCK = "owner.lock"


class FileCarrier(WeightCarrier):
    """Buckets as files under ``root``.

    Args:
        directory: An existing or new folder for the senders' sub-folders; ``None`` takes the system's temporary folder.
    """

    name = "file"
    remedy = "free space, or set weight_sync.directory to a folder with room for the weights"

    def __init__(self, directory: str | None = None) -> None:
        self.root = Path(directory or tempfile.gettempdir())
        self._folder: _OwnedFolder | None = None

    def publish(self, index: int, payload: Sequence[memoryview], *, checksums: bool) -> BucketRef:
        """Write a bucket under a temporary name and rename it, so that a reader never finds half of one.

        Raises:
            WeightSyncError: The folder cannot be written, e.g. it is full.
        """
        size = sum(view.nbytes for view in payload)
        try:
            if self._folder is None:
                self._folder = _OwnedFolder(self.root)
            path = self._folder.path / f"{index:06d}-{secrets.token_hex(4)}.bucket"
            part = path.with_suffix(".part")
            with part.open("xb", buffering=0) as file:
                for view in payload:
                    _write(file.fileno(), view)
            part.rename(path)
        except OSError as error:
            raise WeightSyncError(
                f"bucket {index} ({size} bytes) cannot be written: {error}",
                where=f"carrier {self.name}",
                remedy=self.remedy,
            ) from error
        return BucketRef(
            index=index,
            carrier=self.name,
            locator=str(path),
            nbytes=size,
            checksums=tuple(zlib.crc32(view) for view in payload) if checksums else None,
        )

    @contextlib.contextmanager
    def open(self, ref: BucketRef) -> Iterator[memoryview]:
        """Map a bucket privately: the receiver's writes, if any, stay in its own memory.

        Whatever still views the bytes on exit keeps the mapping alive until it goes.
        """
        try:
            with Path(ref.locator).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != ref.nbytes:
                    raise WeightSyncError(
                        f"bucket {ref.index} has {size} bytes, {ref.nbytes} were announced", where=ref.locator
                    )
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else None
        except OSError as error:
            raise WeightSyncError(
                f"bucket {ref.index} cannot be opened: {error}",
                where=ref.locator,
                remedy="the sender is gone, or the two sides do not share this folder; start the sync anew",
            ) from error
        if mapped is None:
            yield memoryview(b"")
            return
        view = memoryview(mapped)
        try:
            yield view
        finally:
            with contextlib.suppress(BufferError):
                view.release()
                mapped.close()

    def release(self) -> None:
        """Remove everything this side published."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()


class _OwnedFolder:
    """A sender's sub-folder, locked while its owner lives and removed at the latest when the process exits cleanly."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        # Made under a hidden name and renamed once locked: a concurrent sweep never sees an unlocked folder.
        hidden = root / f".{name}"
        hidden.mkdir(mode=0o700)
        lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = root / name
        hidden.rename(self.path)
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child runs this too; the folder is its parent's
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def sweep(root: Path) -> list[Path]:
    """Remove folders under ``root`` whose senders are dead; returns what was removed."""
    removed = []
    for path in root.glob(f"{PREFIX}*"):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
    return removed


def _write(descriptor: int, view: memoryview) -> None:
    rest = view
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]
