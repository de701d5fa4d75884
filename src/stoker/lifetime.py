"""Ends child processes and removes temporary files with their process, however it ends.

Enters: child processes, temporary files and folders. Leaves: none of them once this process is gone.
Costs: one small helper process (about 12 MB) from the first use on, one line on a pipe per entry.

A helper process, the janitor, waits for this process to end. It runs in a session of its own, so that
Ctrl-C in a terminal and a signal to the process group do not reach it.

- Normal end: this process has removed its own files. The janitor finds nothing to do, and ends.
- Any other end (SIGKILL, a crash, `os._exit`): the janitor kills the children, which carry this
  process's tag in their environment, removes the files that were not yet removed, and ends.
- The janitor itself is killed: children still end with their parent (`end_with_parent`), files stay.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.strict_json import json_text, parse_json

TAG = "STOKER_JOB"
"""Environment variable that every child carries; its value names the process that started it."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL_SECONDS = 0.5
_TRACKER_SECONDS = 1.0
"""Time that Python's resource trackers get to remove semaphores after their process is gone."""
_JANITOR = """
import sys
sys.path.insert(0, sys.argv[1])
from stoker.lifetime import keep_watch
from stoker.ownership import remove_leftover
keep_watch(int(sys.argv[2]), remove_leftover)
"""


# -- children --------------------------------------------------------------------------------------


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a child process that must not outlive this one."""
    _janitor.start()
    return {**(os.environ if environment is None else environment), TAG: _janitor.tag}


@contextlib.contextmanager
def children_of_this_process() -> Iterator[None]:
    """End every process that is started in the block with this one; for launchers that stoker calls."""
    before = os.environ.get(TAG)
    os.environ[TAG] = child_environment()[TAG]
    try:
        yield
    finally:
        del os.environ[TAG]
        if before is not None:
            os.environ[TAG] = before


@contextlib.contextmanager
def until_terminated() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets, for loops that SIGTERM ends normally; never set outside of the main thread."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent `parent` is gone. A child calls it before anything else.

    On Linux the kernel sends a signal, which also ends a process that hangs in C code; it is sent when
    the parent's *thread* that started this process ends. Elsewhere a thread polls every half second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    else:
        watch = threading.Thread(target=_watch_parent, args=(parent,), daemon=True)
        watch.start()
    if os.getppid() != parent:  # the parent ended before the signal was set up
        os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def end_forked_children_with_this_process() -> None:
    """End every process that is forked from now on when this one ends.

    torch's own DataLoader workers notice only after five seconds. A thread in the child polls, since
    the kernel's signal would also come when the *thread* that forked ends.
    """
    parent = os.getpid()

    def watch() -> None:
        if os.getppid() == parent:
            threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()

    os.register_at_fork(after_in_child=watch)


# -- files -----------------------------------------------------------------------------------------


is_command = False
"""Whether this process is the command `stoker`, not a user's script. Set by the command line."""


def remember(path: Path, mark: str, *, start: bool = True) -> None:
    """Have the janitor remove `path`, which this process is about to make, if the process ends before `forget`.

    `mark` proves that it is ours (`ownership.remove_leftover`). With `start=False` a janitor is not started for this.
    """
    if start:
        _janitor.start()
    _janitor.tell({"add": os.fsdecode(path.absolute()), "mark": mark})


def forget(path: Path) -> None:
    """Tell the janitor that `path` was removed, or got its final name."""
    _janitor.tell({"drop": os.fsdecode(path.absolute())})


# -- the janitor, seen from this process -----------------------------------------------------------


class _Janitor:
    """Starts the helper process when it is first needed, and talks to it. Thread-safe."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.tag = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._pipe = -1

    def start(self) -> None:
        with self._lock:
            if self._pipe >= 0:
                return
            theirs, ours = os.pipe()
            root = str(Path(__file__).resolve().parent.parent)
            words = [sys.executable, "-I", "-S", "-c", _JANITOR, root, str(os.getpid())]
            variables = {name: value for name, value in os.environ.items() if name != TAG}
            try:
                # No output and `/` as working folder: it must keep neither a pipe nor a mount of ours open.
                subprocess.Popen(
                    words, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    env=variables, cwd="/", start_new_session=True,
                ).returncode = 0  # fmt: skip  # no warning that it still runs: it ends after this process
            finally:
                os.close(theirs)
            self._pipe = ours
            self._write({"tag": self.tag})
            atexit.register(self.end_normally, os.getpid())

    def tell(self, line: dict[str, Any]) -> None:
        with self._lock:
            if self._pipe >= 0:
                self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        # If the janitor was killed, only the cleaning is lost, not the job.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, json_text(line).encode() + b"\n")

    def end_normally(self, owner: int) -> None:
        if os.getpid() == owner:
            self.tell({"end": True})

    def close_in_child(self) -> None:
        """Close the parent's pipe in a forked child: while it is open, the janitor would wait for the child."""
        if self._pipe >= 0:
            os.close(self._pipe)
        self._reset()


_janitor = _Janitor()
os.register_at_fork(after_in_child=_janitor.close_in_child)


def end_normally() -> None:
    """Tell the janitor that this process has ended its children and removed its files."""
    _janitor.end_normally(os.getpid())


# -- the janitor's own side ------------------------------------------------------------------------


def keep_watch(owner: int, remove: Callable[[str, str], None]) -> None:
    """Wait for the process `owner`, which writes lines to standard input, to end; then clean up after it.

    The janitor's main function. `remove` removes one path, given its mark.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left: dict[str, str] = {}
    tag, ended = "", False
    for text in _lines_until_death(owner):
        line = parse_json(text)
        tag = line.get("tag", tag)
        ended = line.get("end", ended)
        if "add" in line:
            left[line["add"]] = line["mark"]
        elif "drop" in line:
            left.pop(line["drop"], None)
    if tag and not ended:  # processes that run on after a normal end may be intended
        _kill_tagged(tag)
    for path, mark in left.items():
        with contextlib.suppress(Exception):  # a path that cannot be removed is skipped
            remove(path, mark)


def _lines_until_death(owner: int) -> Iterator[bytes]:
    """Yield lines of standard input until it ends or `owner` is gone.

    Both are watched: a grandchild may hold the pipe open after the owner's death.
    """
    watched = [0]
    with contextlib.suppress(OSError, AttributeError):  # it is gone already, or this is not Linux
        watched.append(os.pidfd_open(owner))
    held = b""
    while True:
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready:
            piece = os.read(0, 1 << 16)
            *lines, held = (held + piece).split(b"\n")
            yield from lines
            if not piece:
                return
        elif ready:
            return


def _kill_tagged(tag: str) -> None:
    """Kill every process that carries `tag`, resource trackers last."""
    deadline = time.monotonic() + _TRACKER_SECONDS
    mine = {os.getpid()}
    while found := {pid: words for pid, words in _tagged(tag) if pid not in mine}:
        late = time.monotonic() > deadline
        for pid, words in found.items():
            if late or b"resource_tracker" not in words:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline + _TRACKER_SECONDS:  # stuck in the kernel
            return
        time.sleep(0.02)


def _tagged(tag: str) -> list[tuple[int, bytes]]:
    """Return processes that carry `tag`, with their command lines; only Linux shows them."""
    entry = f"{TAG}={tag}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append((int(folder.name), (folder / "cmdline").read_bytes()))
    return found
