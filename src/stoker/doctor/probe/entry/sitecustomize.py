"""Python imports this module before it runs a measured script; it starts the probe.

Enters: the environment variable with the doctor's folder. Leaves: the probe as a package with a private name. If the
machine has a `sitecustomize` of its own, it is imported as if this one did not exist. Costs about 5 ms. Errors here
are ignored: a script must run the same with or without the probe.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _start_probe() -> None:
    """Load the probe's folder as the package `_stoker_probe` and start it."""
    folder = os.environ.get("STOKER_DOCTOR_FOLDER")
    if not folder or not Path(folder).is_dir():
        return
    package = _HERE.parent
    spec = importlib.util.spec_from_file_location(
        "_stoker_probe", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["_stoker_probe"] = module
    spec.loader.exec_module(module)
    module.start(folder)


def _import_the_other() -> None:
    """Import the next `sitecustomize` on the path, if there is one."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


with contextlib.suppress(Exception):  # the script must run even if the probe cannot
    _start_probe()
_import_the_other()
