"""What loading code is doing: looked at now and then from a second thread.

Enters: the thread that loads. Leaves: counts by kind of work and by the user's line. Costs about 20 µs per
look, a look every 5 ms or so, only while something is being loaded.

A look follows the stack from the innermost frame out to the fetch. The first frame that tells what it is
decides: by the library it belongs to, by the function's name, or by the words on its line of source.
"""

from __future__ import annotations

import linecache
import os
import random
import re
import sys
import threading
import time
from typing import Any

from . import places, recorder

LOOK_SECONDS = 0.005
_IDLE_SECONDS = 0.02

_LIBRARIES = (
    ("h5py", "read"),
    ("fsspec", "read"),
    ("torchvision/transforms", "transform"),
    ("albumentations", "transform"),
    ("kornia", "transform"),
    ("torchaudio/transforms", "transform"),
    ("PIL/ImageFilter", "transform"),
    ("PIL/ImageEnhance", "transform"),
    ("PIL/ImageOps", "transform"),
    ("PIL", "decode"),
    ("imageio", "decode"),
    ("gzip.py", "decode"),
    ("lzma.py", "decode"),
    ("bz2.py", "decode"),
    ("zipfile.py", "decode"),
    ("tarfile.py", "decode"),
    ("/json/", "decode"),
    ("pickle.py", "decode"),
)
_WORDS = (
    (
        "transform",
        (
            r"transforms?|augment\w*|jitter|flip|rotate|rotation|crop|resize|blur|warp|affine|normali[sz]e"
            r"|preprocess\w*|noise|mixup|cutmix|erase"
        ),
    ),
    (
        "decode",
        r"decode\w*|decompress\w*|imread|imdecode|parse\w*|unpack\w*|loads|frombuffer|inflate|decoder",
    ),
    ("read", r"read\w*|open|load|pread|preadv|fetch|download|seek|recv|get_object|memmap|mmap"),
)
_NAMES = tuple((kind, re.compile(rf"(?:^|_)(?:{words})(?:$|_)", re.I)) for kind, words in _WORDS)
_SOURCE = tuple(
    (kind, re.compile(rf"(?:\b|_)(?:{words})(?:_\w*)?\s*\(", re.I)) for kind, words in _WORDS
)

_kinds: dict[tuple[Any, int], str] = {}
_thread: threading.Thread | None = None
_pid = 0
active_thread = 0
"""The thread that is loading now; 0 when none is."""
collating = False
_OUTERMOST = os.path.join("_utils", "fetch.py")  # noqa: PTH118  the end of a name, not a place
"""torch's own fetch: looking further out would be looking at torch."""


def begin() -> None:
    """Start looking in this process, once."""
    global _thread, _pid  # noqa: PLW0603
    if _pid != os.getpid():
        _pid = os.getpid()
        with recorder.guarded("sampling"):
            _thread = threading.Thread(target=_look_forever, daemon=True, name="stoker-sampler")
            _thread.start()


def _look_forever() -> None:
    dice = random.Random(1)
    while _pid == os.getpid():
        if not active_thread:
            time.sleep(_IDLE_SECONDS)
            continue
        # Uneven, so that it does not beat in time with what it watches.
        time.sleep(LOOK_SECONDS * (0.6 + 0.8 * dice.random()))
        with recorder.guarded("sampling"):
            _look()


def _look() -> None:
    if not active_thread or collating:
        return
    frame = sys._current_frames().get(active_thread)
    if frame is None:
        return
    kind, line = describe(frame)
    seen = recorder.get()
    seen.seen_doing[kind] = seen.seen_doing.get(kind, 0) + 1
    if line is not None:
        seen.seen_lines[line] = seen.seen_lines.get(line, 0) + 1


def describe(frame: Any) -> tuple[str, str | None]:
    """Return (kind of work, file:line of the user's innermost frame) for a stack."""
    kind, line = "", None
    while frame is not None and not frame.f_code.co_filename.endswith(_OUTERMOST):
        if not kind:
            kind = kind_of(frame.f_code, frame.f_lineno)
        if line is None and not places.is_foreign(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if kind and line is not None:
            break
        frame = frame.f_back
    return kind or "other", line


def kind_of(code: Any, lineno: int) -> str:
    """Return what a frame does, "" when it does not tell; remembered by code and line."""
    known = _kinds.get((code, lineno))
    if known is None:
        known = _kinds[(code, lineno)] = _judge(code, lineno)
    return known


def _judge(code: Any, lineno: int) -> str:
    filename = code.co_filename.replace(os.sep, "/")
    for part, kind in _LIBRARIES:
        if f"/{part.strip('/')}" in filename:
            return kind
    for kind, words in _NAMES:
        if words.search(code.co_name):
            return kind
    if places.is_foreign(code.co_filename):
        return ""
    source = linecache.getline(code.co_filename, lineno)
    for kind, words in _SOURCE:
        if words.search(source):
            return kind
    return ""
