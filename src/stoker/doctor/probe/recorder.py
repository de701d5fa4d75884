"""What one process has seen, and the file it is written to.

Enters: steps, waits, calls and fetches, as the other files report them. Leaves: lines of JSON in
`FOLDER/PID.jsonl`: rows of steps as they come, and now and then the whole of the rest; the last one counts.
Costs under a µs per report and some ms per second for writing. Reports come from any thread; rows are
only added by the thread that trains.

A process that is killed has lost at most the last second. A fork begins its own file.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

MOST_ROWS = 20_000
WARM_UP = 3
"""Steps that are measured but not counted: caches, lazy initialisation, first batches."""
FLUSH_SECONDS = 1.0
_STOP_POLL_SECONDS = 0.2
_STUCK_SECONDS = 2.0

DISTURBED, OTHER_LOADER, EPOCH_START = 1, 2, 4
"""Flags of a step: the probe itself cost time; another loader (validation) ran; an epoch began."""

KINDS = {"batch": 0, "backward": 1, "optimizer": 2, "replay": 3}
"""What may end a step, the better ones last: an optimizer's update is preferred when there is one, and a
CUDA graph that is replayed without any optimizer call holds the whole step."""
_REPLAYS_WITHOUT_UPDATE = 16


class Row(NamedTuple):
    """One step: when it began, its seconds by what they were spent on, what it held, what memory held.

    `delay` and `wait_delay` are the seconds, of the step and of its wait, in which the thread was ready to
    run and no core was free: other work on the machine, not the step's own. `cpu` are those it ran.
    """

    start: float
    seconds: float
    cpu: float
    delay: float
    wait: float
    wait_delay: float
    batches: int
    samples: int
    backward: float
    optimizer: float
    sync: float
    collective: float
    flags: int
    loader: int
    host_bytes: int | None
    device_bytes: int | None


class Fetch(NamedTuple):
    """One batch being made: when it began, wall seconds, those on a core, those queued for one."""

    start: float
    seconds: float
    cpu: float
    delay: float
    collate: float
    loader: int


class Site:
    """A line of somebody's code and what it cost.

    `mark` and `num_in_step` belong to the step that is running: a loop of fetches counts with what stands
    between its calls.
    """

    __slots__ = (
        "call",
        "calls",
        "last_end",
        "mark",
        "num_bytes",
        "num_in_step",
        "seconds",
        "where",
    )

    def __init__(self, where: str, call: str) -> None:
        self.where = where
        self.call = call
        self.calls = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self.last_end = 0.0
        self.mark = -1
        self.num_in_step = 0

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "where": self.where,
            "call": self.call,
            "calls": self.calls,
            "seconds": self.seconds,
            "bytes": self.num_bytes,
        }


class Recorder:
    """All that one process has seen. One per process, made by `begin`; public to the probe's files."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.overrides: dict[str, Any] = {}
        self.stop_steps: int | None = None
        self.reset("main")

    def reset(self, role: str) -> None:
        """Forget everything: a new process begins."""
        self.pid, self.ppid = os.getpid(), os.getppid()
        self.role = role
        self.began = time.perf_counter()
        self.lock = threading.RLock()
        self.finished = False
        self.kind = ""
        self.training_thread = 0
        self.rows: list[Row] = []
        self.num_steps = 0
        self.num_counted = 0
        self.num_written = 0
        self.num_replays = 0
        self.step_start = self.step_delay = self.step_cpu = 0.0
        self.disturbed_steps = 0
        self.stepped: set[int] = set()
        self.on_step: list[Any] = []
        # Of the running step.
        self.wait = self.wait_delay = 0.0
        self.backward = self.optimizer = self.sync = self.collective = 0.0
        self.batches = self.samples = 0
        self.flags = 0
        self.loader_of_step = -1
        # By place.
        self.sites: dict[tuple[str, Any], Site] = {}
        self.loaders: dict[int, dict[str, Any]] = {}
        self.hdf5: dict[Any, dict[str, Any]] = {}
        self.bad: dict[str, list[Any]] = {}
        # Of loading, in whichever process does it.
        self.fetches: list[Fetch] = []
        self.num_fetches = 0
        self.seen_doing: dict[str, int] = {}
        self.seen_lines: dict[str, int] = {}
        self.loader_id = -1
        self.worker_id = -1
        # Once.
        self.spans: list[tuple[Any, ...]] = []
        self.profile: dict[str, Any] = {}
        self.first_cpu: tuple[float, float] | None = None
        self.first_torch: dict[str, Any] = {}
        self.torch: dict[str, Any] = {}
        self._file: Any = None
        self._last_flush = 0.0
        self._flusher: threading.Thread | None = None

    # -- steps -------------------------------------------------------------------------------------

    def mark(self, kind: str, now: float) -> None:
        """Something that may end a step has happened; only the best kind seen so far does."""
        if kind != self.kind:
            if self.kind and KINDS[kind] < KINDS[self.kind]:
                return
            self._restart(kind)
            return
        if threading.get_ident() == self.training_thread:
            self._end_step(now)

    def mark_replay(self, now: float) -> None:
        """A CUDA graph was replayed; many of them without an update are whole steps."""
        self.num_replays += 1
        if self.kind == "replay" or self.num_replays > _REPLAYS_WITHOUT_UPDATE:
            self.mark("replay", now)

    def _restart(self, kind: str) -> None:
        with self.lock:
            self.kind = kind
            self.training_thread = threading.get_ident()
            self.rows.clear()
            self.num_steps = self.num_counted = self.num_written = 0
            self.sites.clear()
            self.spans.clear()
            self.write({"event": "restart", "kind": kind})
        self._begin_step()
        self._start_flusher()

    def _begin_step(self) -> None:
        self.wait = self.wait_delay = 0.0
        self.backward = self.optimizer = self.sync = self.collective = 0.0
        self.batches = self.samples = self.flags = 0
        self.loader_of_step = -1
        self.step_delay, self.step_cpu = run_delay(), time.thread_time()
        self.step_start = time.perf_counter()

    def _end_step(self, now: float) -> None:
        if self.disturbed_steps:
            self.disturbed_steps -= 1
            self.flags |= DISTURBED
        self.num_steps += 1
        self.num_replays = 0
        if self.num_steps > WARM_UP and not self.flags & DISTURBED:
            self.num_counted += 1
        if len(self.rows) < MOST_ROWS:
            self.rows.append(
                Row(
                    self.step_start,
                    now - self.step_start,
                    time.thread_time() - self.step_cpu,
                    run_delay() - self.step_delay,
                    self.wait,
                    self.wait_delay,
                    self.batches,
                    self.samples,
                    self.backward,
                    self.optimizer,
                    self.sync,
                    self.collective,
                    self.flags,
                    self.loader_of_step,
                    *_memory(),
                )
            )
        if self.num_steps == WARM_UP:
            self.first_cpu = (time.process_time(), time.perf_counter())
            self.first_torch = _torch_facts()
        for call in self.on_step:
            with guarded("step"):
                call(self)
        self._begin_step()

    def disturb(self, steps: int = 1) -> None:
        """The step that runs and the next ones are not to be counted: the probe is at work."""
        self.disturbed_steps = max(self.disturbed_steps, steps)

    def site(self, family: str, key: Any, frame: Any, call: str) -> Site:
        """Return the site of a call, made when it is met first."""
        known = self.sites.get((family, key))
        if known is None:
            known = self.sites[(family, key)] = Site(place_of(frame), call)
        return known

    # -- writing -----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return everything but the rows, as plain values."""
        # Kept, since a script may end its process group before it ends itself.
        self.torch.update(_torch_facts())
        cpu = None
        if self.first_cpu is not None:
            cpu = [time.process_time() - self.first_cpu[0], time.perf_counter() - self.first_cpu[1]]
        return {
            "event": "state",
            "pid": self.pid,
            "ppid": self.ppid,
            "role": self.role,
            "kind": self.kind,
            "argv": [str(word) for word in getattr(sys, "argv", [])][:50],
            "num_steps": self.num_steps,
            "seconds": time.perf_counter() - self.began,
            "cpu": cpu,
            "sites": [{"family": f, **site.plain()} for (f, _), site in list(self.sites.items())],
            "loaders": dict(self.loaders),
            "hdf5": [dict(data) for data in list(self.hdf5.values())],
            "bad": {what: list(counts) for what, counts in list(self.bad.items())},
            "num_fetches": self.num_fetches,
            "doing": dict(self.seen_doing),
            "lines": dict(sorted(self.seen_lines.items(), key=lambda item: -item[1])[:50]),
            "loader_id": self.loader_id,
            "worker_id": self.worker_id,
            "spans": list(self.spans),
            "profile": self.profile,
            "stands": self._stuck_place(),
            "torch": self.torch,
            "first_torch": self.first_torch,
            "notes": list(self.notes)[:20],
        }

    def flush(self) -> None:
        """Write what is new. Never raises, never waits for long."""
        with guarded("flush"), self.lock:
            if self.pid != os.getpid():
                return
            self._last_flush = time.perf_counter()
            rows = self.rows[self.num_written :]
            if rows:
                self.num_written += len(rows)
                self.write({"event": "steps", "rows": rows})
            if self.fetches:
                fetches, self.fetches = self.fetches, []
                self.write({"event": "fetches", "rows": fetches})
            if self.kind or self.num_fetches or self.loaders:
                self.write(self.snapshot())

    def flush_when_due(self) -> None:
        """Write if the last time is a while ago; for processes without a writing thread."""
        if time.perf_counter() - self._last_flush > FLUSH_SECONDS:
            self.flush()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line with one write, so that a killed process leaves whole lines."""
        with self.lock:
            if self._file is None:
                path = Path(self.folder) / f"{self.pid}.jsonl"
                self._file = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
                )
            os.write(self._file, (json.dumps(line, default=str) + "\n").encode("utf-8", "replace"))

    def _stuck_place(self) -> str | None:
        """Return where the training thread stands when no step has ended for a while."""
        if not self.kind or time.perf_counter() - self.step_start < _STUCK_SECONDS:
            return None
        frame = sys._current_frames().get(self.training_thread)
        return None if frame is None else place_of(frame)

    def _start_flusher(self) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(
                target=self._flush_forever, daemon=True, name="stoker-probe"
            )
            self._flusher.start()

    def _flush_forever(self) -> None:
        stop = Path(self.folder) / "stop"
        while not self.finished and self.pid == os.getpid():
            time.sleep(_STOP_POLL_SECONDS)
            if stop.exists():
                self.say_done()
                return
            self.flush_when_due()

    def say_done(self) -> None:
        """Write everything, and tell the doctor that it may end the script."""
        self.flush()
        (Path(self.folder) / f"{self.pid}.done").touch()

    def finish(self) -> None:
        """Write the last lines; the process is about to end."""
        if not self.finished and self.pid == os.getpid():
            self.finished = True
            self.flush()


current_thread = threading.get_ident
_RECORDER: Recorder | None = None
_PROBE = str(Path(__file__).resolve().parent)
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_FOREIGN: dict[str, bool] = {}


def get() -> Recorder:
    """Return this process's recorder."""
    assert _RECORDER is not None
    return _RECORDER


def begin(folder: str) -> None:
    """Make the recorder of this process, and see to it that every way out writes it."""
    global _RECORDER  # noqa: PLW0603  one per process, as the process is one
    _RECORDER = Recorder(folder)
    _RECORDER.stop_steps = int(os.environ.get("STOKER_DOCTOR_STEPS") or 0) or None
    with guarded("overrides"):
        _RECORDER.overrides = json.loads(os.environ.get("STOKER_DOCTOR_OVERRIDE") or "{}")
    atexit.register(finish)
    os.register_at_fork(after_in_child=_after_fork)
    original = os._exit

    def _exit(code: int) -> None:
        finish()
        original(code)

    os._exit = _exit  # type: ignore[assignment]


def finish() -> None:
    """Write the last lines of this process."""
    if _RECORDER is not None:
        _RECORDER.finish()


def _after_fork() -> None:
    recorder = get()
    loader_id, on_step = recorder.loader_id, recorder.on_step
    recorder.reset("forked")
    recorder.loader_id, recorder.on_step = loader_id, on_step


def note_failure(what: str, error: Exception) -> None:
    """Remember that the probe failed; the script must not feel it."""
    if _RECORDER is not None and len(_RECORDER.notes) < 20:
        note = f"the probe failed in {what}: {type(error).__name__}: {error}"
        if note not in _RECORDER.notes:
            _RECORDER.notes.append(note)


class guarded:  # noqa: N801  used as a function; a generator would cost three times as much
    """Turn a failure of the probe inside a `with` into a note."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        note_failure(self.what, error)
        return True


# -- places ----------------------------------------------------------------------------------------


def is_foreign(filename: str) -> bool:
    """Return whether a file is a library's or the probe's, not the user's."""
    known = _FOREIGN.get(filename)
    if known is None:
        known = _FOREIGN[filename] = (
            filename.startswith((_PROBE, "<frozen"))
            or f"{os.sep}site-packages{os.sep}" in filename
            or f"{os.sep}dist-packages{os.sep}" in filename
            or filename.startswith(_LIBRARY)
        )
    return known


def place_of(frame: Any) -> str:
    """Return file:line of the nearest frame of the user's own code; of the frame itself if there is none."""
    own = frame
    while own is not None and is_foreign(own.f_code.co_filename):
        own = own.f_back
    own = own or frame
    return f"{own.f_code.co_filename}:{own.f_lineno}"


def place_of_function(function: Any) -> str | None:
    """Return file:line of a function's definition, or None for what is not Python."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        code = getattr(getattr(type(function), "__call__", None), "__code__", None)  # noqa: B004
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


# -- readings --------------------------------------------------------------------------------------

_MEMORY_EVERY_SECONDS = 0.02
_memory_at = 0.0
_statm: tuple[int, int] = (-1, -1)
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _memory() -> tuple[int | None, int | None]:
    """Return (resident bytes, bytes allocated on the GPU), read at most fifty times a second."""
    global _memory_at, _statm  # noqa: PLW0603
    now = time.perf_counter()
    if now - _memory_at < _MEMORY_EVERY_SECONDS:
        return None, None
    _memory_at = now
    try:
        if _statm[0] != os.getpid():
            _statm = (os.getpid(), os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC))
        resident: int | None = int(os.pread(_statm[1], 256, 0).split()[1]) * _PAGE
    except OSError:
        resident = None
    torch = sys.modules.get("torch")
    device = None
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = int(torch.cuda.memory_allocated())
    return resident, device


_schedstat = threading.local()


def run_delay() -> float:
    """Return seconds that this thread was ready and no core was free; 0 where the kernel does not say."""
    try:
        if getattr(_schedstat, "pid", 0) != os.getpid():
            flags = os.O_RDONLY | os.O_CLOEXEC
            _schedstat.file = os.open("/proc/thread-self/schedstat", flags)
            _schedstat.pid = os.getpid()
        return int(os.pread(_schedstat.file, 128, 0).split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _torch_facts() -> dict[str, Any]:
    """Return what torch says of itself, without a call to the driver: another thread may be capturing."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return {}
    facts: dict[str, Any] = {"version": str(torch.__version__), "threads": torch.get_num_threads()}
    if torch.cuda.is_initialized():
        stats = torch.cuda.memory_stats()
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["cuda"] = device.name
        facts["free_bytes"] = device.total_memory - stats.get("reserved_bytes.all.current", 0)
        facts["retries"] = stats.get("num_alloc_retries", 0)
        facts["device_allocs"] = stats.get("num_device_alloc", 0)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        facts["rank"] = distributed.get_rank()
        facts["world_size"] = distributed.get_world_size()
    return facts
