"""Notes the temporary folders that Python's multiprocessing makes in the script's processes.

Enters: every call of `multiprocessing.util.get_temp_dir`. Leaves: a file `temporary-NAME` in the doctor's folder
that holds the path. Costs nothing but that file, once per process.

A process that ends by itself removes its folder. One that the doctor, or a signal to all of them, has killed
cannot: whoever removes the doctor's folder removes those too (`ownership.remove_leftover`).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any


def install(util: Any, folder: str) -> None:
    """Wrap `get_temp_dir` of the module `multiprocessing.util`."""
    original = util.get_temp_dir
    noted: set[str] = set()

    @functools.wraps(original)
    def get_temp_dir() -> Any:
        path = original()
        try:
            if path not in noted:
                noted.add(path)
                name = str(Path(folder, f"temporary-{Path(path).name}"))
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(file, os.fsencode(path))
                os.close(file)
        except Exception:  # noqa: BLE001  the script must not see what the probe cannot do
            pass
        return path

    util.get_temp_dir = get_temp_dir
