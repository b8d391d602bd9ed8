"""All benchmarks of ZoRRo Train by one name.

    python benchmarks/zorro.py attention|model|step|head|layout [options of that benchmark]

``attention``: one layer; ``model``: a few layers of Qwen3-4B widths with output layer; ``step``: the training phase of a GRPO
step through the client; ``head``: log-probs and entropies from hidden states; ``layout``: finding the forest on the CPU. Each
takes ``--json FILE``, and ``--help`` says what it prints.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPTS = {
    "attention": "zorro_attention.py",
    "model": "zorro_model.py",
    "step": "zorro_step.py",
    "head": "head.py",
    "layout": "zorro_layout.py",
}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        sys.exit(__doc__)
    script = Path(__file__).with_name(SCRIPTS[sys.argv.pop(1)])
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
