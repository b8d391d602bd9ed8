"""The client example of the README, run as written but for the model."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[4] / "README.md"


def test_the_client_example_runs(tiny_model, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    code, replaced = re.subn(r'^model = "[^"]+"', f"model = {tiny_model!r}", code, flags=re.MULTILINE)
    assert replaced == 1
    names: dict[str, object] = {}
    exec(compile(code, str(README), "exec"), names)
    assert len(names["batch"]) == 8
    printed = capsys.readouterr().out
    assert "Stepped(" in printed
    assert re.search(r"SyncReport\(version=1, tensors=\d+", printed)
