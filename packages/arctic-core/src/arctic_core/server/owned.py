"""The server of one client, in a subprocess of it: ``python -m arctic_core.server.owned FOLDER PARENT_PID``.

The folder holds ``config.json`` and gets the port. The server ends when its standard input ends or its parent is another
process: a client that dies, however it does, takes it along.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

POLL_S = 0.5
STOP_S = 60.0
"""What jobs get to stop in when nobody waits for them any more."""


def main(folder: Path, parent: int) -> None:
    """Serve until the client is gone."""
    threading.Thread(target=_watch_parent, args=(parent,), name="arctic-owner", daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from arctic_core.config.server import ServerConfig
    from arctic_core.server.run import serve

    config = ServerConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    try:
        serve(config, port_file=folder / "port", watch_stdin=True)
    finally:
        if os.getppid() != parent:  # nobody else removes it
            shutil.rmtree(folder, ignore_errors=True)


def _watch_parent(parent: int) -> None:
    """Standard input may be held open by a process that the client has forked; its parent a process has to itself."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    logging.getLogger(__name__).error("the server did not stop within %g s", STOP_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
