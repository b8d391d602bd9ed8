"""How much memory a process holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident host memory of processes, bytes; a process that is gone, or a system without ``/proc``, counts 0."""
    total = 0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total
