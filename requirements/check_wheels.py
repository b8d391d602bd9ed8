"""Look into built wheels: typed, licensed, no tests, and only what git knows. ``python check_wheels.py dist``."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel, one sentence each."""
    names = zipfile.ZipFile(wheel).namelist()
    package = wheel.name.split("-")[0]
    found = []
    if f"{package}/py.typed" not in names:
        found.append("has no py.typed")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        found.append("has no LICENSE")
    strays = [name for name in names if not name.startswith((f"{package}/", f"{package}-"))]
    if strays:
        found.append(f"holds files outside the package: {', '.join(strays[:5])}")
    return [f"{wheel.name} {problem}" for problem in found]


def main() -> None:
    folder = Path(sys.argv[1])
    wheels = sorted(folder.glob("*.whl"))
    expected = len(list(folder.glob("*.tar.gz")))
    found = [problem for wheel in wheels for problem in problems(wheel)]
    if not wheels or len(wheels) != expected:
        found.append(f"{len(wheels)} wheels and {expected} sdists in {folder}")
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
