"""Sampling: a second thread looks every 5 ms at what loading code is doing.

Enters: the thread that loads. Leaves: counts by kind of work and by the user's line. Costs about 20 µs per
sample, only while something is being loaded.

A sample walks the stack from the innermost frame out to torch's fetch. The first frame that can be classified
decides: by the library it belongs to, by the function's name, or by the words on its line of source.

The thread is a daemon and only reads other threads' frames. A failure becomes a note. It ends with the process;
after a fork the child starts its own.
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
"""End of the path of torch's own fetch, where the walk ends: frames further out are torch's."""


def begin() -> None:
    """Start the sampling thread of this process; does nothing if it runs."""
    global _thread, _pid  # noqa: PLW0603
    if _pid != os.getpid():
        _pid = os.getpid()
        with recorder.guarded("sampling"):
            _thread = threading.Thread(target=_look_forever, daemon=True, name="stoker-sampler")
            _thread.start()


def _look_forever() -> None:
    jitter = random.Random(1)  # its own generator: the script's must not change
    while _pid == os.getpid():
        if not active_thread:
            time.sleep(_IDLE_SECONDS)
            continue
        # Uneven intervals, so that samples do not fall into step with a periodic script.
        time.sleep(LOOK_SECONDS * (0.6 + 0.8 * jitter.random()))
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
    """Return the kind of work of a frame, "" if it cannot be told; cached by code and line."""
    known = _kinds.get((code, lineno))
    if known is None:
        known = _kinds[(code, lineno)] = _classify(code, lineno)
    return known


def _classify(code: Any, lineno: int) -> str:
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
