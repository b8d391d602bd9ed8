"""Where the ranks of an engine meet: a TCP store hosted by rank 0's process.

Rank 0's process opens the store on a port the system chooses and keeps it; only then is the address told to anyone. So no
port is looked up, released and lost to another program. The store has no authentication: keep it inside a trusted network.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import DistError, HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from arctic_core.backends.base import RankSpec
from arctic_core.errors import DeadlineExceeded, EngineStartError

_hosted: dict[str, TCPStore] = {}
_lock = threading.Lock()


def open_store(host: str) -> str:
    """Host a store in this process, for the rank 0 that will start here.

    Args:
        host: Name or address under which the other ranks' machines reach this one.

    Returns:
        ``tcp://host:port``, the value of :attr:`RankSpec.rendezvous` for all ranks.

    Raises:
        EngineStartError: No port can be bound.
    """
    try:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise EngineStartError(f"cannot host the ranks' meeting point: {error}", where=f"{host}:0") from error
    address = f"tcp://[{host}]:{store.port}" if ":" in host else f"tcp://{host}:{store.port}"
    with _lock:
        _hosted[address] = store
    return address


def meet(spec: RankSpec) -> Store:
    """The store of a rank's engine: the one hosted here, a connection to it, or a private one for a world of one.

    Raises:
        EngineStartError: There is no address, or rank 0 hosts no such store.
        DeadlineExceeded: The store did not answer within ``deadlines.start``.
    """
    where = f"{spec.engine}[{spec.rank}]"
    if spec.world_size == 1:
        return HashStore()
    if spec.rendezvous is None:
        raise EngineStartError(
            f"{spec.world_size} ranks need an address to meet at", where=where, remedy="open_store() in rank 0's process first"
        )
    if spec.rank == 0:
        with _lock:
            store = _hosted.pop(spec.rendezvous, None)
        if store is None:
            raise EngineStartError(
                f"this process does not host {spec.rendezvous}",
                where=where,
                remedy="call open_store() in rank 0's process before every start",
            )
        return store
    address = urlsplit(spec.rendezvous)
    seconds = spec.config.deadlines.start
    if address.scheme != "tcp" or not address.hostname or not address.port:
        raise EngineStartError(f"{spec.rendezvous!r} is not tcp://host:port", where=where)
    try:
        return TCPStore(address.hostname, address.port, is_master=False, timeout=timedelta(seconds=seconds))
    except DistError as error:
        raise DeadlineExceeded(
            f"rank 0's store at {spec.rendezvous} did not answer: {error}",
            where=where,
            remedy="see why rank 0 is not up, or raise deadlines.start",
        ) from error
