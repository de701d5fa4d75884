"""File and line: where in the user's code something happens.

Enters: frames and functions. Leaves: "file:line" of the user's own code. Costs about 1 µs per frame.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROBE = str(Path(__file__).resolve().parent)
_STOKER = str(Path(__file__).resolve().parents[2]) + os.sep
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_MODULE = os.path.join("torch", "nn", "modules", "module.py")  # noqa: PTH118  an end of a path
_OF_TENSORS = tuple(os.path.join("torch", name) for name in ("_tensor.py", "_tensor_str.py"))  # noqa: PTH118
_FOREIGN: dict[str, bool] = {}
_PARTS: dict[str, str] = {}
_INSTALLED: dict[Path, bool] = {}


def is_foreign(filename: str) -> bool:
    """Return whether a file belongs to a library or the probe, not to the user."""
    known = _FOREIGN.get(filename)
    if known is None:
        known = _FOREIGN[filename] = (
            filename.startswith((PROBE, _STOKER, "<frozen"))
            or f"{os.sep}site-packages{os.sep}" in filename
            or f"{os.sep}dist-packages{os.sep}" in filename
            or filename.startswith(_LIBRARY)
            or _is_installed(Path(filename))
        )
    return known


def _is_installed(file: Path) -> bool:
    """Return whether a file is in a folder of `sys.path` into which packages were installed (`pip --target`)."""
    script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or ".").resolve()
    for folder in {Path(entry) for entry in sys.path if entry} & set(file.parents):
        if folder not in _INSTALLED:
            packages = any(folder.glob("*.dist-info/RECORD"))
            _INSTALLED[folder] = packages and folder.resolve() not in script.parents
        if _INSTALLED[folder]:
            return True
    return False


def own_places(frame: Any) -> Iterator[str]:
    """Yield file:line of the frames in the user's own code, innermost first."""
    while frame is not None:
        # Code without line numbers was generated.
        if frame.f_lineno and not is_foreign(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


def place_of(frame: Any) -> str:
    """Return file:line of the innermost frame in the user's own code; of the frame itself if there is none."""
    return next(own_places(frame), f"{frame.f_code.co_filename}:{frame.f_lineno}")


def library_of(frame: Any) -> str:
    """Return file:line of a frame in a library, the file as in its package; "" in the user's code and torch's tensors.

    `transformers/trainer.py:2674`, for example. What a method of a tensor calls is the cost of that method.
    """
    file = frame.f_code.co_filename
    if not is_foreign(file) or file.endswith(_OF_TENSORS):
        return ""
    folders = (entry.rstrip(os.sep) + os.sep for entry in sys.path if entry)
    inside = max((folder for folder in folders if file.startswith(folder)), key=len, default="")
    return f"{file.removeprefix(inside)}:{frame.f_lineno}" if inside else ""


def is_in_module(frame: Any) -> bool:
    """Return whether the frame is in the forward pass of an `nn.Module`."""
    while frame is not None and not frame.f_code.co_filename.endswith(_MODULE):
        frame = frame.f_back
    return frame is not None


def find_model(frame: Any) -> tuple[Any, Any]:
    """Return (the frame outside of torch that calls the outermost model on the stack, the frame of its module).

    A model is a module or a compiled function, of which the second frame is None. Both are None if none is called: the
    methods of an optimizer are compiled functions too, but no model. The model may be called in an optimizer's closure.
    """
    caller = module = None
    while frame is not None:
        part = _part_of_torch(frame.f_code.co_filename)
        if part == "optim":
            if module is None:
                return None, None
            break
        if part == "module":
            module = frame
        frame = frame.f_back
        if part in ("module", "compiled"):
            caller = frame
    while caller is not None and _part_of_torch(caller.f_code.co_filename):
        caller = caller.f_back
    return caller, module


_ENDS = {
    "torch/nn/modules/module.py": "module",
    "torch/_dynamo/eval_frame.py": "compiled",
}


def _part_of_torch(file: str) -> str:
    """Return what the code of a file of torch does: "module", "compiled" or "optim", else "other"; "" elsewhere."""
    known = _PARTS.get(file)
    if known is None:
        name = file.replace(os.sep, "/")
        known = ""
        if "/torch/" in name and is_foreign(file):
            ends = (part for end, part in _ENDS.items() if name.endswith(end))
            known = "optim" if "/torch/optim/" in name else next(ends, "other")
        _PARTS[file] = known
    return known


def place_of_function(function: Any) -> str | None:
    """Return file:line of a function's definition, or None if it is not written in Python."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        code = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
