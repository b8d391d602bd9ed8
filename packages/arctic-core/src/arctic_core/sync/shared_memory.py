"""The shared-memory carrier: the file carrier on a file system that lives in memory.

On Linux POSIX shared memory *is* the files of ``/dev/shm``. Going there directly, instead of through
:mod:`multiprocessing.shared_memory`, keeps Python's resource tracker out, which before Python 3.13 unlinks a segment as soon
as any process that merely opened it exits. Space is taken by writing, so a full ``/dev/shm`` (64 MiB in a plain container)
is an error here and not a bus error in the receiver.
"""

from __future__ import annotations

from pathlib import Path

from arctic_core.errors import UnsupportedOperation
from arctic_core.sync.file import FileCarrier

SHM = Path("/dev/shm")


class SharedMemoryCarrier(FileCarrier):
    """Buckets in shared memory of one host.

    Raises:
        UnsupportedOperation: The system has no ``/dev/shm``.
    """

    name = "shared_memory"
    remedy = "enlarge /dev/shm (e.g. docker --shm-size), lower weight_sync.bucket_bytes, or set weight_sync.carrier=file"

    def __init__(self) -> None:
        if not SHM.is_dir():
            raise UnsupportedOperation(
                "there is no /dev/shm on this system", where="carrier shared_memory", remedy="set weight_sync.carrier=file"
            )
        super().__init__(str(SHM))
