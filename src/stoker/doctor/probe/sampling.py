"""Samples the stack of the loading thread and, between fetches, of the training thread, from a second thread.

Enters: the thread that loads, the thread that trains. Leaves: counts by kind of work and by the user's line. Costs
about 20 µs per sample, and the training thread about 0.1 ms, because it hands Python's lock over and takes it back.
Loading is sampled every 5 ms, the training thread every 4 ms (8 ms if steps take less than 3 ms) until there are 300
samples, then every 20 ms. A share of 60 % is then known to 3 percentage points; with 70 samples the error was 6, and
gains were wrong by a third.

A sample of loading walks the stack from the innermost frame out to torch's fetch. The first frame that can be
classified decides: by the library it belongs to, by the function's name, or by the words on its line of source.

A sample of the training thread is "model" (the model, its backward pass or the optimizer), "timed" (a call that is
timed directly: a DataLoader, `.item()`, a copy, `torch.save`), "data" (a frame that looks like loading: stoker's own
Loader, a function called `get_batch`, a read) or "between" (anything else). So loading without a DataLoader is measured
as well. Samples of a step that takes much longer than usual are counted separately. They are also taken in steps that
are not watched otherwise, since a rollout, a plot or an export may come once in hundreds of steps.

Python code that never waits releases Python's lock only every 5 ms. Code that runs for less would never be sampled, and
waiting code too often. So while the thread samples, the switch interval is 0.2 ms; between the stretches in which it
samples, and in a forked child, the interval is the script's own.

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

from . import clocks, places, recorder

LOOK_SECONDS = 0.005
TRAINING_LOOK_SECONDS, _FIRST_LOOK_SECONDS, _FIRST_LOOKS = 0.02, 0.004, 300
_SHORT_STEP_SECONDS, _SHORT_STEP_WEIGHT = 0.003, 2
_LATER_WEIGHT = round(TRAINING_LOOK_SECONDS / _FIRST_LOOK_SECONDS)
_IDLE_SECONDS = 0.02
_SWITCH_SECONDS = 2e-4
_usual_switch_seconds: float | None = None
"""The script's own switch interval while the probe's is set; None if it is not set."""
_DEEPEST = 80
_TIMED = (
    *("torch/utils/data/", "torch/distributed/"),
    *("torch/autograd/__init__.py", "torch/autograd/graph.py"),  # the backward pass
)
_MODEL = (
    *("torch/nn/", "torch/autograd/", "torch/optim/", "torch/_dynamo/", "torch/_inductor/"),
    *("torch/_functorch/", "torch/cuda/graphs.py", "torch/amp/", "torch/_tensor.py"),
)
"""Parts of paths that classify what the training thread is doing."""

_LIBRARIES = {
    "read": "h5py fsspec",
    "transform": "torchvision/transforms albumentations kornia torchaudio/transforms "
    "PIL/ImageFilter PIL/ImageEnhance PIL/ImageOps",
    "picture": "PIL imageio",
    "decode": "gzip.py lzma.py bz2.py zipfile.py tarfile.py json pickle.py",
}
"""Kind of work to parts of paths; the first kind that fits decides. "picture" is decoding, too."""
_WORDS = {
    "transform": r"transforms?|augment\w*|jitter|flip|rotate|rotation|crop|resize|blur|warp|affine|normali[sz]e"
    r"|preprocess\w*|noise|mixup|cutmix|erase",
    "picture": r"imread|imdecode|decode_(?:images?|jpe?g|png)",
    "decode": r"decode\w*|decompress\w*|parse\w*|unpack\w*|loads|frombuffer|inflate|decoder",
    "read": r"read\w*|open|load|pread|preadv|fetch|download|seek|recv|get_object|memmap|mmap",
}
_NAMES = {kind: re.compile(rf"(?:^|_)(?:{words})(?:$|_)", re.I) for kind, words in _WORDS.items()}
_SOURCE = {
    kind: re.compile(rf"(?:\b|_)(?:{words})(?:_\w*)?\s*\(", re.I) for kind, words in _WORDS.items()
}

_DATA_NAMES = re.compile(
    r"(?:^|_)(?:batch(?:es)?|loaders?|datasets?|samples?|prefetch\w*)(?:$|_)", re.I
)

_kinds: dict[tuple[Any, int], str] = {}
_thread: threading.Thread | None = None
_pid = 0
active_thread = 0
"""Identifier of the thread that is loading now; 0 if none is."""
collating = False
_OUTERMOST = tuple(os.sep + name for name in ("fetch.py", "dataloader.py"))
"""Ends of the paths of torch's fetch and loader. The walk ends there: frames further out belong to the training."""


def begin() -> None:
    """Start the sampling thread of this process, unless it runs already."""
    global _thread, _pid  # noqa: PLW0603
    # Threads do not survive a fork: the process number tells a child that it has none yet.
    if _pid != os.getpid():
        _pid = os.getpid()
        with recorder.guarded("sampling"):
            _thread = threading.Thread(target=_look_forever, daemon=True, name="stoker-sampler")
            _thread.start()


def awake_seconds() -> float:
    """Return the seconds in which the sampling thread ran or was queued for a core.

    It needs Python's lock for its work, and a thread that gives the lock away waits until it gets it back. So the
    training may stand still for as long.
    """
    return clocks.awake_seconds(_thread) if _thread is not None and _thread.native_id else 0.0


def _look_forever() -> None:
    jitter = random.Random(1)  # its own generator: the script's must not change
    while _pid == os.getpid():
        # Uneven intervals, so that samples do not synchronise with a periodic script.
        uneven = 0.6 + 0.8 * jitter.random()
        _switch_fast(recorder.watching)
        if not recorder.watching:
            time.sleep(_IDLE_SECONDS)
            with recorder.guarded("sampling"):
                if recorder.get().is_late():
                    _look_at_training(recorder.get(), _LATER_WEIGHT)
        elif active_thread:
            time.sleep(LOOK_SECONDS * uneven)
            with recorder.guarded("sampling"):
                _look()
        elif recorder.get().training_thread:
            weight = _weight_of_look(recorder.get())
            time.sleep(_FIRST_LOOK_SECONDS * weight * uneven)
            with recorder.guarded("sampling"):
                _look_at_training(recorder.get(), weight)
        else:
            time.sleep(_IDLE_SECONDS)


def _weight_of_look(seen: Any) -> int:
    """Return the time until the next sample of the training, in units of the shortest interval; also its weight.

    A later sample has a larger weight than a first one: steps may change, as with a buffer that grows.
    """
    first = _SHORT_STEP_WEIGHT if seen.usual_seconds < _SHORT_STEP_SECONDS else 1
    few = seen.counts["training"].total() < first * _FIRST_LOOKS
    return first if few else _LATER_WEIGHT


def _switch_fast(on: bool) -> None:
    """Make threads release Python's lock sooner, or restore the script's own switch interval."""
    global _usual_switch_seconds  # noqa: PLW0603
    if on and _usual_switch_seconds is None and sys.getswitchinterval() > _SWITCH_SECONDS:
        _usual_switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
    elif not on and _usual_switch_seconds is not None:
        sys.setswitchinterval(_usual_switch_seconds)
        _usual_switch_seconds = None


os.register_at_fork(after_in_child=lambda: _switch_fast(on=False))


def _look() -> None:
    # Checked again after the sleep: loading may have ended meanwhile. Collating is timed by its own wrapper.
    if not active_thread or collating or not recorder.watching:
        return
    frame = sys._current_frames().get(active_thread)
    if frame is None:
        return
    kind, line = describe(frame)
    counts = recorder.get().counts
    counts["doing"][kind] += 1
    if line is not None:
        counts["lines"][line] += 1


def _look_at_training(seen: Any, weight: int = 1) -> None:
    """Sample the training thread in a step that counts; loading is sampled by `_look`."""
    if active_thread or seen.num_steps < recorder.WARM_UP or seen.disturbed_steps:
        return
    late = seen.is_late()
    if not recorder.watching and not late:
        return
    frame = sys._current_frames().get(seen.training_thread)
    if frame is None:
        return
    kind, line = describe_training(frame)
    path = seen.paths.number_of_call(frame) if kind == "model" else ""
    is_evaluation = seen.evaluated is not None
    if is_evaluation:
        kind = "timed"
    # Samples are kept until their step is over: if it turns out to be late, they are counted separately.
    if seen.looked_at != seen.num_steps:
        for kind_before, line_before, weight_before, path_before, in_evaluation in seen.looks:
            if kind_before == "model" and line_before is not None:
                seen.counts["model_lines"][line_before] += weight_before
            if path_before:
                counter = "evaluated_calls" if in_evaluation else "model_calls"
                seen.counts[counter][path_before] += weight_before
        _count(seen, "training", "between", ("between", "data"))
        seen.looked_at = seen.num_steps
    seen.looks.append((kind, line, weight, path, is_evaluation))
    if late:
        _count(seen, "late", "late_lines", ("between", "data", "model"))


def _count(seen: Any, doing: str, lines: str, of_kinds: tuple[str, ...]) -> None:
    """Add the samples of a step to the counts of usual or of late steps, once it is known which the step is."""
    for kind, line, weight, *_ in seen.looks:
        seen.counts[doing][kind] += weight
        if kind in of_kinds and line is not None:
            seen.counts[lines][line] += weight
    seen.looks.clear()


def describe_training(frame: Any) -> tuple[str, str | None]:
    """Return (kind of work, file:line of the user's innermost frame) of a training thread; see the module docstring."""
    # From the innermost frame outwards: the first frame of torch decides; the user's innermost line is kept.
    line, kind = None, "between"
    for _ in range(_DEEPEST):
        if frame is None:
            break
        code = frame.f_code
        of = _files.get(code.co_filename) or _classify_file(code.co_filename)
        if of in ("timed", "model"):
            return of, line
        if of == "own":
            if code.co_name != "<module>" and (
                _DATA_NAMES.search(code.co_name) or kind_of(code, frame.f_lineno)
            ):
                kind = "data"
            if line is None:
                line = f"{code.co_filename}:{frame.f_lineno}"
        elif of == "data":
            kind = "data"
        frame = frame.f_back
    return kind, line


_files: dict[str, str] = {}


def _classify_file(filename: str) -> str:
    """Return the class of a frame in this file: "timed", "model", "data", "own" (the user's) or "foreign"."""
    name = filename.replace(os.sep, "/")
    # The probe's own wrappers time what they wrap: backward passes, fetches of values, saving.
    if name.startswith(places.PROBE) or any(part in name for part in _TIMED):
        of = "timed"
    elif any(part in name for part in _MODEL):
        of = "model"
    elif "/stoker/loader/" in name or "/stoker/store/" in name:
        of = "data"
    else:
        of = "foreign" if places.is_foreign(name) else "own"
    _files[filename] = of
    return of


def describe(frame: Any) -> tuple[str, str | None]:
    """Return (kind of work, file:line of the user's innermost frame) for a stack."""
    kind, line = "", None
    while frame is not None and not _is_fetching(frame.f_code.co_filename):
        if not kind:
            kind = kind_of(frame.f_code, frame.f_lineno)
        if line is None and not places.is_foreign(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if kind and line is not None:
            break
        frame = frame.f_back
    return kind or "other", line


def _is_fetching(filename: str) -> bool:
    return filename.endswith(_OUTERMOST) and "torch" + os.sep in filename


def kind_of(code: Any, lineno: int) -> str:
    """Return the kind of work of a frame, "" if it is unknown; cached by code and line."""
    known = _kinds.get((code, lineno))
    if known is None:
        known = _kinds[(code, lineno)] = _classify(code, lineno)
    return known


def _classify(code: Any, lineno: int) -> str:
    # The library is the most reliable sign, then the function's name, then the words on its line of source.
    filename = code.co_filename.replace(os.sep, "/")
    for kind, parts in _LIBRARIES.items():
        if any(f"/{part}" in filename for part in parts.split()):
            return kind
    for kind, words in _NAMES.items():
        if words.search(code.co_name):
            return kind
    if places.is_foreign(code.co_filename):
        return ""  # words in a library's source say little about the user's data
    source = linecache.getline(code.co_filename, lineno)
    for kind, words in _SOURCE.items():
        if words.search(source):
            return kind
    return ""
