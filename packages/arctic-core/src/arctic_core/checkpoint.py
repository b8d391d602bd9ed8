"""Checkpoint folders that survive a crash at any moment.

``<root>/step-<n>`` holds what the ranks wrote and a ``manifest.json`` that lists every file with its size and CRC-32.
``<root>/latest`` names the newest one. A checkpoint is written under another name in the same folder, flushed to disk,
renamed, and only then pointed at; so whoever reads finds either the previous state or the new one, never a mixture:

====================================  ====================================================
``step-<n>``                          complete
``step-<n>.tmp-<pid>@<host>``         being written
``step-<n>.old-<pid>@<host>``         replaced by a second save of the same step
``step-<n>.trash-<pid>@<host>``       being removed
====================================  ====================================================

The last three are remains when their process is gone; the next save to the folder clears them away. Needs no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from arctic_core.errors import CheckpointError, InvalidStateError

__all__ = [
    "CheckpointInfo",
    "CheckpointWriter",
    "FileEntry",
    "Manifest",
    "read_manifest",
    "resolve_checkpoint",
    "verify",
]

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
_FOLDER = re.compile(r"step-(?P<step>\d+)(?:\.(?P<kind>tmp|old|trash)-(?P<pid>\d+)@(?P<host>.+))?")
_CHUNK = 1 << 20


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller knows about a checkpoint."""

    policy_version: int
    engine: str
    """Registered name of the trainer that wrote it."""
    world_size: int
    dtype: str
    model: str
    extra: dict[str, str] = {}
    """Caller's strings, e.g. the state of a data loader."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    path: str
    """Relative to the checkpoint, with forward slashes."""
    size: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of ``manifest.json``."""

    format: int
    step: int
    created: str
    """UTC, ISO 8601 with microseconds."""
    info: CheckpointInfo
    files: tuple[FileEntry, ...]


class CheckpointWriter:
    """Writes one checkpoint: :meth:`begin`, let the ranks write, then :meth:`commit` or :meth:`abandon`.

    One writer at a time may work in a root.

    Args:
        root: Folder of checkpoints; made if absent.
        step: Optimizer steps taken. Saving a step again replaces it.
    """

    def __init__(self, root: str | Path, step: int) -> None:
        self.root = Path(root).absolute()
        self.step = step
        self._owner = f"{os.getpid()}@{socket.gethostname()}"
        self._final = self.root / f"step-{step}"
        self._tmp = self.root / f"step-{step}.tmp-{self._owner}"
        self._open = False

    def begin(self) -> Path:
        """Clear remains of dead writers and make the empty folder that the ranks write into.

        Raises:
            CheckpointError: The folder cannot be made.
        """
        with _disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            _clear_remains(self.root)
            shutil.rmtree(self._tmp, ignore_errors=True)  # our own, from a save that was abandoned by force
            self._tmp.mkdir()
        self._open = True
        return self._tmp

    def commit(self, info: CheckpointInfo, keep_last: int | None = None) -> Path:
        """Seal what was written, move it into place, point ``latest`` at it, prune.

        Args:
            info: Recorded in the manifest.
            keep_last: Keep this many checkpoints of the root, the newest by time of writing; ``None`` keeps all. Folders
                without our manifest are never touched.

        Raises:
            CheckpointError: Nothing was written, or the disk refuses; the previous checkpoint stays.
        """
        if not self._open:
            raise InvalidStateError("begin() comes before commit()", where=str(self._final))
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last={keep_last} would keep nothing", remedy="1 or more, or None to keep all")
        with _disk_errors(self._final):
            self._seal(info)
            self._put_in_place()
            self._open = False
            _write_latest(self.root, self._final.name, self._owner)
            _remove(self.root / f"{self._final.name}.old-{self._owner}")
            if keep_last is not None:
                self._prune(keep_last)
        return self._final

    def abandon(self) -> None:
        """Remove what was begun. Idempotent; a committed checkpoint stays."""
        if self._open:
            shutil.rmtree(self._tmp, ignore_errors=True)
            self._open = False

    def _seal(self, info: CheckpointInfo) -> None:
        files = tuple(_entry(self._tmp, path) for path in sorted(self._tmp.rglob("*")) if path.is_file())
        if not files:
            raise CheckpointError("the ranks wrote nothing", where=str(self._tmp))
        manifest = Manifest(format=FORMAT, step=self.step, created=_now(), info=info, files=files)
        _write_durably(self._tmp / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        for folder in (path for path in self._tmp.rglob("*") if path.is_dir()):
            _sync_folder(folder)
        _sync_folder(self._tmp)

    def _put_in_place(self) -> None:
        # A folder cannot be replaced in one step; between the two renames the old one is found under its other name.
        if self._final.exists():
            os.rename(self._final, self.root / f"{self._final.name}.old-{self._owner}")
        os.rename(self._tmp, self._final)
        _sync_folder(self.root)

    def _prune(self, keep_last: int) -> None:
        others = [(manifest, path) for manifest, path in _checkpoints(self.root) if path != self._final]
        for _, path in others[keep_last - 1 :]:
            trash = self.root / f"{path.name}.trash-{self._owner}"
            os.rename(path, trash)
            _remove(trash)


def resolve_checkpoint(path: str | Path) -> Path:
    """The checkpoint meant by a path: the path itself, or the latest below it.

    Where ``latest`` is missing, or what it names is incomplete, the newest complete one is taken.

    Raises:
        CheckpointError: There is none, or the one named is incomplete.
    """
    folder = Path(path).absolute()
    if (folder / MANIFEST).is_file():
        verify(folder, checksums=False)
        return folder
    if not folder.is_dir():
        raise CheckpointError("no such folder", where=str(folder))
    with contextlib.suppress(OSError):
        named = folder / (folder / LATEST).read_text().strip()
        if named.parent == folder and _complete(named):
            return named
    for _, candidate in _checkpoints(folder):
        if _complete(candidate):
            return candidate
    raise CheckpointError(
        "holds no complete checkpoint", where=str(folder), remedy="name a folder that save_checkpoint has written to"
    )


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: It is missing, unreadable or of another format.
    """
    file = Path(path) / MANIFEST
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"has no {MANIFEST}: not a checkpoint, or an unfinished one", where=str(path)) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}", where=str(path)) from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"has format {manifest.format}, this version reads {FORMAT}",
            where=str(path),
            remedy="use the version that wrote it",
        )
    return manifest


def verify(path: str | Path, *, checksums: bool = True) -> Manifest:
    """Compare a checkpoint with its manifest.

    Args:
        path: Checkpoint folder.
        checksums: Read every file and compare its CRC-32; else look at sizes only.

    Raises:
        CheckpointError: Names the files that are missing, truncated or altered.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    problems = [text for entry in manifest.files if (text := _problem(folder, entry, checksums))]
    if problems:
        raise CheckpointError("; ".join(problems), where=str(folder), remedy="load an earlier checkpoint of the same folder")
    return manifest


def _problem(folder: Path, entry: FileEntry, checksums: bool) -> str:
    file = folder / entry.path
    try:
        size = file.stat().st_size
        if size != entry.size:
            return f"{entry.path} has {size} bytes instead of {entry.size}"
        if checksums and _crc32(file) != entry.crc32:
            return f"{entry.path} has been altered"
    except FileNotFoundError:
        return f"{entry.path} is missing"
    except OSError as error:
        return f"{entry.path} cannot be read: {error}"
    return ""


def _complete(folder: Path) -> bool:
    try:
        verify(folder, checksums=False)
    except CheckpointError:
        return False
    return True


def _checkpoints(root: Path) -> list[tuple[Manifest, Path]]:
    """Folders of a root with our manifest, newest first; of a step being replaced also the old one, after the new one."""
    found: list[tuple[Manifest, Path]] = []
    for folder in root.iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if match and match["kind"] in (None, "old"):
            with contextlib.suppress(CheckpointError):
                found.append((read_manifest(folder), folder))
    return sorted(found, key=lambda item: item[0].created, reverse=True)


def _clear_remains(root: Path) -> None:
    for folder in root.iterdir():
        match = _FOLDER.fullmatch(folder.name)
        if not match or match["kind"] is None or _alive(int(match["pid"]), match["host"]):
            continue
        final = root / f"step-{match['step']}"
        if match["kind"] == "old" and not final.exists():  # died between the two renames
            os.rename(folder, final)
        else:
            _remove(folder)
    for file in root.glob(f"{LATEST}.tmp-*"):
        pid, _, host = file.name.removeprefix(f"{LATEST}.tmp-").partition("@")
        if pid.isdigit() and not _alive(int(pid), host):
            file.unlink(missing_ok=True)


def _alive(pid: int, host: str) -> bool:
    """Whether the process may still be working; of another host's processes nothing is known."""
    if host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _entry(folder: Path, file: Path) -> FileEntry:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return FileEntry(path=file.relative_to(folder).as_posix(), size=file.stat().st_size, crc32=_crc32(file))


def _crc32(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _write_latest(root: Path, name: str, owner: str) -> None:
    temporary = root / f"{LATEST}.tmp-{owner}"
    _write_durably(temporary, f"{name}\n".encode())
    os.replace(temporary, root / LATEST)
    _sync_folder(root)


def _write_durably(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder that no longer counts; what cannot be removed now is cleared by a later save."""
    shutil.rmtree(folder, ignore_errors=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


@contextlib.contextmanager
def _disk_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error}", where=str(where), remedy="check free space and rights") from error
