"""One model load at a time in a process. Needs the standard library only."""

from __future__ import annotations

import threading

#: Held around ``from_pretrained``. transformers takes ``tie_weights`` off its base class while it builds a model, for all
#: threads, so that of two loads at once either may come out with its tied weights still on the meta device.
LOADING = threading.Lock()
