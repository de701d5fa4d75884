"""The measurements of one process, and the file that they are written to.

Enters: steps, waits, calls and fetches, as the other files report them. Leaves: lines of JSON in
`FOLDER/PID.jsonl`: rows of new steps, and about once a second the whole remaining state, of which the last one
counts. Costs under 1 µs per report and some ms per second for writing.

Threads: any thread may report; only the training thread adds rows; the lock covers writing.
Success: the process ends, and its last lines are written by `atexit` or before `os._exit`.
Killed: at most the last second is lost; every line is one write, so no line is cut.
Failure: an exception while reporting or writing becomes a note (`guarded`).
Fork: the child forgets everything and begins its own file.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from . import calls, clocks, places

MOST_ROWS = 20_000
WARM_UP = 3
"""First steps that are measured but not counted: they fill caches and initialise libraries."""
FLUSH_SECONDS = 1.0
_NEVER = 1 << 60
FIRST_DRAWN, NUM_DRAWN = 10, 6
"""The first step, and the number of steps, whose spans of time are kept for the timeline on the page."""
_STOP_POLL_SECONDS = 0.2
_STUCK_SECONDS = 2.0
_LONG_LOOK_SECONDS = 1e-3
"""If a look at the heap takes longer, there is only one more, at the end: no other thread gets memory meanwhile."""
_HIGH_NUMBER = 1000

DISTURBED, OTHER_LOADER, EPOCH_START, UNWATCHED, PROFILED = 1, 2, 4, 8, 16
"""Flags of a step: the probe disturbed it; another loader (validation) ran in it; an epoch began in it; only its ends
and its waits were timed; torch's profiler had run before it and still slows launches on a GPU."""

LONG = 3.0
"""A step is long if it takes more than this many times a usual step."""
_FIRST_WATCHED, _FIRST_UNWATCHED, _STRETCH = 20, 36, 16
_PATTERN = 0b0110100110010110_1001011001101001
_SHORT_STEP_SECONDS, _FEWER_FROM, _LONGER_STRETCH = 3e-3, 128, 4
"""Steps shorter than the first number are many: from the second number on, a quarter of them is timed, in stretches
that are the third number times as long."""
watching = True
"""Whether calls are timed and threads sampled now. This is on in some stretches of steps (in a worker: of batches) and
off in the others, from which the time of a step is taken."""


def is_watched(number: int, usual_seconds: float = float("inf")) -> bool:
    """Return whether calls are timed in step or batch `number`; less often if steps are short."""
    if number < _FIRST_UNWATCHED:
        return number < _FIRST_WATCHED
    stretch = number // _STRETCH
    if usual_seconds < _SHORT_STEP_SECONDS and number >= _FEWER_FROM:
        # Longer stretches, so that the thread that samples every few ms meets them. The pattern selects one of two
        # stretches; here it counts only if it is the first.
        stretch //= _LONGER_STRETCH
        if stretch % 2:
            return False
    # An uneven pattern: with an even one, work that repeats (an epoch, a checkpoint) could hide in one half.
    return bool(_PATTERN >> (stretch % 32) & 1)


_LATE_SECONDS = 1e-4
"""If a thread's clocks are read later than this after the end of a step, or before its begin, it lost its core."""
_SHORT_SECONDS, _READ_EVERY = 4e-3, 4
_ON_CORE, _USUAL = 0.97, 1.2
"""Reading a thread's clocks costs as much as all else at the end of a step. While steps are below `_SHORT_SECONDS`, and
the thread was on its core for the share `_ON_CORE` of the last step that was read, they are read only at every fourth
step and after steps above `_USUAL` usual ones; in the others the thread is assumed to be on its core throughout."""

KINDS = {"batch": 0, "backward": 1, "optimizer": 2, "replay": 3}
"""Events that may end a step, by rank. The highest kind seen so far ends steps: an optimizer's update if there is any.
A CUDA graph that is replayed without any optimizer call contains the whole step."""
_REPLAYS_WITHOUT_UPDATE = 16


COUNTS = (
    "doing", "lines", "training", "between", "late", "late_lines", "model_lines", "model_calls", "evaluated_calls",
)  # fmt: skip
"""Counters of samples: kinds of work and lines of loading; then those of the training thread: between the model's
calls, in steps that take too long, in modules, by the path of lines that calls the model (in an evaluation apart)."""
_TOLD = (
    "pid", "ppid", "role", "kind", "num_steps", "num_watched", "num_fetches", "num_watched_fetches", "loader_id",
    "worker_id", "profile", "torch", "first_torch", "heap_free",
)  # fmt: skip
"""Attributes that a snapshot contains unchanged."""


class Row(NamedTuple):
    """One step: its start, its seconds by kind of work, its batches and samples, and memory in use.

    `delay` and `wait_delay` are the seconds of the step, and of its wait, in which the thread was ready to
    run and no core was free: other work on the machine caused them. `cpu` is the time on a core, `host` that in
    `gc.collect`, `torch.save` and `empty_cache`, `evaluation` that from `model.eval()` to `model.train()`.
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
    host: float = 0.0
    evaluation: float = 0.0


_new_tuple = tuple.__new__
"""Makes a Row without calling Python code, which would be a tenth of the cost of ending a step."""


class Fetch(NamedTuple):
    """Loading of one batch: its start, wall seconds, seconds on a core, seconds queued for one.

    `sample` is the time of one more sample, if the dataset is asked for samples one by one.
    """

    start: float
    seconds: float
    cpu: float
    delay: float
    collate: float
    loader: int
    sample: float | None = None


class Site:
    """A line of the user's code and the calls made there.

    `mark` and `num_in_step` refer to the current step: they tell whether the line is in a loop. `loop_seconds` is the
    time of the loop that runs now. `before` has the totals before the current step. `in_model` says that a module's
    forward pass made the first call, `library` is the library's line that makes the calls, if not the user's.
    """

    __slots__ = (
        *("before", "call", "calls", "code", "in_model", "last_end", "library", "loop_seconds"),
        *("mark", "num_bytes", "num_in_step", "seconds", "where"),
    )

    def __init__(self, frame: Any, call: str, in_model: bool = False) -> None:
        self.in_model = in_model
        self.where = places.place_of(frame)
        self.library = places.library_of(frame)
        self.code = frame.f_code
        self.call = call
        self.calls = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self.last_end = 0.0
        self.loop_seconds = 0.0
        self.mark = -1
        self.num_in_step = 0
        self.before = (0, 0.0, 0)

    def begin_step(self, number: int) -> None:
        """Prepare for the first call in step `number`."""
        self.before = (self.calls, self.seconds, self.num_bytes)
        self.mark, self.num_in_step, self.loop_seconds = number, 1, 0.0

    def plain(self, running: int) -> dict[str, Any]:
        """Return the totals as plain values, without the unfinished step `running`: they are divided by steps."""
        whole = (self.calls, self.seconds, self.num_bytes)
        calls, seconds, num_bytes = self.before if self.mark == running else whole
        return {
            "where": self.where,
            "call": self.call,
            "calls": calls,
            "seconds": seconds,
            "bytes": num_bytes,
            "in_model": self.in_model,
            "library": self.library,
        }


class Recorder:
    """The measurements of one process. Made by `begin`; the probe's other files set its attributes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.overrides: dict[str, Any] = {}
        self.reset("main")

    def reset(self, role: str) -> None:
        """Forget everything, for a new process."""
        self.pid, self.ppid = os.getpid(), os.getppid()
        self.role = role
        self.lock = threading.RLock()
        self.finished = False
        self.asked_at: float | None = None
        self.kind = ""
        self.training_thread = 0
        self.rows: list[Row] = []
        self.num_steps = 0
        self.num_counted = 0
        self.num_watched = 0
        self.was_profiled = self.is_profiling = False
        self.num_written = 0
        self.num_replays = 0
        self.num_unread = 0
        self.step_start = self.step_delay = self.step_cpu = self.memory_at = 0.0
        self.read_at = time.perf_counter()  # when the thread's clocks were read
        self.disturbed_steps = 0
        self.stepped: set[int] = set()
        self.on_step: list[Any] = []
        self.on_restart: list[Any] = []
        self.call_at = self.stop_at = _NEVER
        self.usual_seconds = float("inf")
        self._begin_step()
        self.evaluated: tuple[int, float, Site] | None = None
        # Records by place in the code, file or loader.
        self.sites: dict[tuple[str, str, int, int], Site] = {}
        self.loaders: dict[Any, dict[str, Any]] = {}
        self.hdf5: dict[Any, dict[str, Any]] = {}
        self.bad: dict[str, list[Any]] = {}
        # Loading, in the process that does it.
        self.fetches: list[Fetch] = []
        self.num_fetches = 0
        self.num_watched_fetches = 0
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in COUNTS}
        # Samples of the training thread.
        self.trains_modules = False
        self.looks: list[tuple[str, str | None, int, str, bool]] = []
        self.paths = calls.Paths()
        self.looked_at = 0
        self.fetch_delay = 0.0
        self.short_fetches = False
        self.loader_id = -1
        self.worker_id = -1
        # Recorded once per process.
        self.spans: list[tuple[Any, ...]] = []
        self.profile: dict[str, Any] = {}
        self.first_cpu: tuple[float, float] | None = None
        self.first_busy: float | None = None
        self.first_torch: dict[str, Any] = {}
        self.torch: dict[str, Any] = {}
        # Free bytes of the heap after the warm-up and now, and the seconds that reading them took.
        self.heap_free: list[int] = []
        self.heap_seconds = 0.0
        self._file: _OwnFile | None = None
        self._last_flush = 0.0
        self._flusher: threading.Thread | None = None

    # -- steps -------------------------------------------------------------------------------------

    def mark(self, kind: str, now: float) -> None:
        """Report an event that may end a step; only the highest kind seen so far does.

        A higher kind than before starts the measurement again, with the calling thread as the training thread.
        """
        if kind != self.kind:
            if self.kind and KINDS[kind] < KINDS[self.kind]:
                return
            self._restart(kind)
            return
        if threading.get_ident() == self.training_thread:
            self._end_step(now)

    def mark_replay(self, now: float) -> None:
        """Report a replayed CUDA graph; many replays without an update are whole steps."""
        self.num_replays += 1
        if self.kind == "replay" or self.num_replays > _REPLAYS_WITHOUT_UPDATE:
            self.mark("replay", now)

    def _restart(self, kind: str) -> None:
        with self.lock:
            self.kind = kind
            self.training_thread = threading.get_ident()
            self.rows.clear()
            self.num_steps = self.num_counted = self.num_watched = self.num_written = 0
            self.sites.clear()
            self.spans.clear()
            for name in COUNTS[2:]:
                self.counts[name].clear()
            self.write({"event": "restart", "kind": kind})
        self.read_at = 0.0
        self._begin_step()
        self.start_flusher()
        for call in self.on_restart:
            with guarded("restart"):
                call()

    def _begin_step(self) -> None:
        global watching  # noqa: PLW0603
        watching = is_watched(self.num_steps, self.usual_seconds) or self.is_profiling
        self.wait = self.wait_delay = self.held_delay = 0.0
        self.backward = self.optimizer = self.sync = self.collective = self.host = 0.0
        self.evaluation = 0.0
        self.batches = self.samples = self.flags = 0
        self.loader_of_step = -1
        self.drawing = FIRST_DRAWN <= self.num_steps < FIRST_DRAWN + NUM_DRAWN
        self.step_start = time.perf_counter()
        # What the thread did or queued since is no step's.
        if self.step_start - self.read_at > _LATE_SECONDS:
            self.step_start, self.step_cpu, self.step_delay = clocks.read()

    def _end_step(self, now: float) -> None:
        seconds = now - self.step_start
        if (
            0 < self.num_unread < _READ_EVERY
            and seconds < _USUAL * self.usual_seconds
            and self.num_steps >= _STRETCH  # before that, the usual duration is unknown
            and not self.wait_delay
        ):
            self.num_unread += 1
            self.read_at, cpu, delay = now, self.step_cpu + seconds, self.step_delay
            late = 0.0
        else:
            # One reading of the thread's clocks ends this step and begins the next.
            self.read_at, cpu, delay = clocks.read()
            late = self.read_at - now
            on_core = cpu - self.step_cpu > _ON_CORE * seconds
            self.num_unread = int(on_core and seconds < _SHORT_SECONDS)
        ran = max(0.0, min(cpu - self.step_cpu, seconds))
        # Time queued for a core while the probe records a step belongs to no step.
        queued = delay - self.step_delay + self.held_delay
        queued -= late if late > _LATE_SECONDS else 0.0
        queued = max(0.0, min(queued, max(self.wait_delay, seconds - ran)))
        if self.disturbed_steps:
            self.disturbed_steps -= 1
            self.flags |= DISTURBED
        if watching:
            self.num_watched += 1
        else:
            self.flags |= UNWATCHED
        if self.was_profiled:
            self.flags |= PROFILED
        self.num_steps += 1
        self.num_replays = 0
        if self.num_steps > WARM_UP and not self.flags & DISTURBED:
            self.num_counted += 1
        if len(self.rows) < MOST_ROWS:
            memory: tuple[int | None, int | None] = (None, None)
            if now - self.memory_at > clocks.MEMORY_EVERY_SECONDS:
                self.memory_at, memory = now, clocks.memory()
            fields = (
                self.step_start,
                seconds,
                ran,
                queued,
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
                *memory,
                self.host,
                self.evaluation,
            )
            self.rows.append(_new_tuple(Row, fields))
            if self.num_steps % (_STRETCH // 2) == 0:
                last = sorted(row.seconds for row in self.rows[-_STRETCH:])
                self.usual_seconds = last[len(last) // 2]
        if self.num_steps == WARM_UP:
            self.first_cpu = (time.process_time(), time.perf_counter())
            self.first_busy = clocks.busy_seconds()
            self.first_torch = clocks.torch_facts()
            self.heap_free = [clocks.free_bytes()] * 2
        self.step_cpu, self.step_delay = cpu, delay
        if self.num_steps >= self.call_at or self.num_counted >= self.stop_at:
            for call in self.on_step:
                with guarded("step"):
                    call(self)
        self._begin_step()

    def is_late(self) -> bool:
        """Return whether the current step takes much longer than usual, and no evaluation explains it."""
        late = time.perf_counter() - self.step_start > LONG * self.usual_seconds
        return late and self.evaluated is None and not self.flags & OTHER_LOADER

    def disturb(self, steps: int = 1) -> None:
        """Do not count the current step and the next ones: the probe takes time in them."""
        self.disturbed_steps = max(self.disturbed_steps, steps)

    def site(self, family: str, frame: Any, call: str) -> Site:
        """Return the site of a call, made at its first call."""
        code = frame.f_code
        # The key is the id: hashing a code object takes longer than most calls. The site keeps the code, so
        # that its id is not reused.
        key = (family, call, id(code), frame.f_lineno)
        known = self.sites.get(key)
        if known is None:
            in_model = family == "sync" and places.is_in_module(frame)
            known = self.sites[key] = Site(frame, call, in_model)
        return known

    # -- writing -----------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return everything except rows and fetches, as plain values."""
        # Updated, not replaced: a script may destroy its process group before it ends.
        self.torch.update(clocks.torch_facts())
        cpu = None
        if self.first_cpu is not None:
            now = time.perf_counter()
            cpu = [time.process_time() - self.first_cpu[0], now - self.first_cpu[1], now]
            # In the training process, children are the workers themselves.
            if self.role == "worker":
                cpu[0] += clocks.children_seconds()
        cores = clocks.busy_seconds() if self.first_busy is not None else None
        busy = None if cores is None or self.first_busy is None else cores - self.first_busy
        until = time.perf_counter() if self.asked_at is None else self.asked_at
        running = [until - self.step_start, self.flags, self.loader_of_step]
        sites = list(self.sites.items())
        is_last = self.finished or self.asked_at is not None
        if self.heap_free and (is_last or self.heap_seconds < _LONG_LOOK_SECONDS):
            began = time.perf_counter()
            self.heap_free[1] = clocks.free_bytes()
            self.heap_seconds = time.perf_counter() - began
        return {
            "event": "state",
            **{name: getattr(self, name) for name in _TOLD},
            "cpu": cpu,
            "busy": busy,
            "running": running if self.kind else None,
            "sites": [{"family": key[0], **site.plain(self.num_steps)} for key, site in sites],
            "loaders": [dict(facts) for facts in list(self.loaders.values())],
            "hdf5": [dict(data) for data in list(self.hdf5.values())],
            "bad": {what: list(counts) for what, counts in list(self.bad.items())},
            **{name: _largest(counts) for name, counts in self.counts.items()},
            "paths": self.paths.plain(),
            "modules": self.trains_modules,
            "spans": list(self.spans),
            "stands": self._stuck_place(),
            "notes": list(self.notes)[:20],
        }

    def flush(self) -> None:
        """Write what is new. Never raises."""
        with guarded("flush"), self.lock:
            # A child that was forked in C: Python's fork handlers did not run.
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
            if self.kind or self.num_fetches or self.loaders or self.asked_at is not None:
                self.write(self.snapshot())

    def flush_when_due(self) -> None:
        """Write if the last time is more than a second ago; for processes without a writing thread."""
        if time.perf_counter() - self._last_flush > FLUSH_SECONDS:
            self.flush()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line with one write, so that a killed process leaves whole lines."""
        with self.lock:
            if self._file is None or not self._file.is_open():
                self._file = _OwnFile(Path(self.folder) / f"{self.pid}.jsonl")
            self._file.append((json.dumps(line, default=str) + "\n").encode("utf-8", "replace"))

    def _stuck_place(self) -> str | None:
        """Return the current line of the training thread if no step has ended for two seconds; else None.

        Before the first step, the main thread counts. None if that thread itself is writing its last lines.
        """
        if self.kind and time.perf_counter() - self.step_start < _STUCK_SECONDS:
            return None
        thread = self.training_thread if self.kind else threading.main_thread().ident
        frame = sys._current_frames().get(thread or 0)
        if frame is None or thread == threading.get_ident():
            return None
        return places.place_of(frame)

    def start_flusher(self, *_: Any) -> None:
        """Start the thread that writes every second and looks for the doctor's request to finish."""
        if self._flusher is None:
            self._flusher = threading.Thread(
                target=self._flush_forever, daemon=True, name="stoker-probe"
            )
            self._flusher.start()

    def _flush_forever(self) -> None:
        stop = Path(self.folder) / "stop"
        # A spawned worker starts this thread before it knows that it is a worker: then the thread ends here.
        while not self.finished and self.pid == os.getpid() and self.role != "worker":
            time.sleep(_STOP_POLL_SECONDS)
            if stop.exists() and self.kind:
                self.say_done()
                return
            if stop.exists():
                # A process without steps may be a launcher: the doctor waits for those with steps only.
                self.asked_at = time.perf_counter()
                self.flush()
                return
            self.flush_when_due()

    def say_done(self) -> None:
        """Write everything, and tell the doctor, by a file, that it may end the script."""
        self.asked_at = time.perf_counter()
        self.flush()
        (Path(self.folder) / f"{self.pid}.done").touch()

    def finish(self) -> None:
        """Write the last lines; the process is about to end."""
        if not self.finished and self.pid == os.getpid():
            self.finished = True
            self.flush()


def _largest(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:50])


class _OwnFile:
    """A file to append to, whose descriptor the script may close.

    A script that closes all descriptors, as daemons do, closes this one too. The script's next file may get the same
    number, and writing to it would damage that file. So the file behind the number is checked before each write.
    """

    def __init__(self, path: Path) -> None:
        low = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # A high number, so that the script's own files get the same numbers as without the probe.
            self._number = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _HIGH_NUMBER)
        except OSError:  # the limit of open files is lower
            self._number = low
        else:
            os.close(low)
        self._identity = _identity(self._number)

    def is_open(self) -> bool:
        return self._identity is not None and _identity(self._number) == self._identity

    def append(self, text: bytes) -> None:
        os.write(self._number, text)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Return device and inode of an open descriptor; None if it is closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_RECORDER: Recorder | None = None


def get() -> Recorder:
    """Return this process's recorder."""
    assert _RECORDER is not None
    return _RECORDER


def begin(folder: str) -> None:
    """Make the recorder of this process, and make every kind of exit write its last lines."""
    global _RECORDER  # noqa: PLW0603  one per process, as the process is one
    _RECORDER = Recorder(folder)
    _RECORDER.stop_at = int(os.environ.get("STOKER_DOCTOR_STEPS") or 0) or _NEVER
    with guarded("overrides"):
        _RECORDER.overrides = json.loads(os.environ.get("STOKER_DOCTOR_OVERRIDE") or "{}")
    atexit.register(finish)
    os.register_at_fork(after_in_child=_after_fork)
    original = os._exit

    # Python ends forked processes, such as workers, by `os._exit`, which calls no `atexit` function.
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
    kept = ("on_step", "on_restart", "call_at", "stop_at")
    values = [getattr(recorder, name) for name in kept]
    recorder.reset("forked")
    for name, value in zip(kept, values, strict=True):
        setattr(recorder, name, value)
    clocks.forget()


def note_failure(what: str, error: Exception) -> None:
    """Note that the probe failed. The script is not affected."""
    if _RECORDER is not None and len(_RECORDER.notes) < 20:
        note = f"the probe failed in {what}: {type(error).__name__}: {error}"
        if note not in _RECORDER.notes:
            _RECORDER.notes.append(note)


class guarded:  # noqa: N801  used as a function; a generator would cost three times as much
    """Context manager that turns an exception of the probe into a note. KeyboardInterrupt passes."""

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
