"""`pytest --workers 3`: the tests are collected once, and forks of that process run them.

Enters: what pytest has collected, and how `shares.py` shares it out. Leaves: the report of every test, given to pytest
as if the test had run in the process that collected it. A worker of pytest-xdist imports torch and collects all by
itself: 10 s of CPU for each of them; a fork begins with all of it. A worker gets one file after the other of its share.
One whose share is done takes the next share, and when there is none, the last file of the worker that has the most
left. A worker that dies is replaced: the test that it ran has failed, and its successor runs what was left.

CUDA does not survive a fork. Where collecting the tests has begun to use it, they run in this process, with a note;
`conftest.py` asks for the GPU in a way that does not begin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import itertools
import mmap
import multiprocessing.connection
import os
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from pathlib import Path

import pytest
from _pytest.reports import TestReport

import shares

PR_SET_PDEATHSIG = 1  # a worker ends with the process that has started it
PATIENCE = 10.0
"""Seconds in which a worker that is interrupted ends its test; then it is killed."""
TOGETHER_SECONDS = 0.1
"""Reports of so many seconds are sent together; those of a worker that dies before it are of tests that run again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, help="run in this many forks; files go to them whole"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, where `--workers` asks for them."""
    number = session.config.option.workers
    if not number or session.config.option.collectonly or session.testsfailed:
        return None
    if not forks_can_use_cuda():
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"no workers: {IN_USE}; the tests run in one process")
        return None
    run(session, number)
    return True


def write_bytecode_ahead(config: pytest.Config, folder: Path) -> None:
    """Rewrite the asserts of a fresh clone's tests in a fork, the last file first, until it meets this process.

    To compile them takes as long as to collect them, and only one core would be busy with both.
    """

    def is_kept(file: Path) -> bool:
        return any((folder / "__pycache__").glob(f"{file.stem}.*-pytest-*.pyc"))

    files = sorted(folder.glob("test_*.py"), reverse=True)
    if not files or is_kept(files[0]) or sys.dont_write_bytecode:
        return
    pid = _fork()
    if pid:
        config.add_cleanup(lambda: os.waitpid(pid, 0))
        return
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for file in itertools.takewhile(lambda file: not is_kept(file), files):
            spec = config.pluginmanager.rewrite_hook.find_spec(file.stem, [str(folder)])
            module = importlib.util.module_from_spec(spec)
            module.__dict__["__builtins__"] = {}  # it is written, and ends at its first import
            with contextlib.suppress(Exception):
                spec.loader.exec_module(module)
    finally:
        os._exit(0)


IN_USE = "CUDA was in use when all was collected, and no fork could use it then"


def forks_can_use_cuda() -> bool:
    """Ask a fork: only there torch says whether CUDA was begun (by a context, or a count of devices without NVML)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    pid = _fork()
    if not pid:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(pid, 0)[1] == 0


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads, where a plugin has some
        return os.fork()


class Worker:
    """A fork, as its parent sees it."""

    def __init__(self, session: pytest.Session, number: int):
        self.number, self.left, self.files = number, deque[int](), deque[list[int]]()
        self._running = mmap.mmap(-1, 8)  # the test it is at: known when it dies, too
        self.messages, theirs = multiprocessing.connection.Pipe()
        self.pid = _fork()
        if not self.pid:
            self.messages.close()
            try:
                _Fork(session, number, theirs, self._running).work()
            except KeyboardInterrupt:
                pass
            except BaseException:  # noqa: BLE001  nobody else would say it
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(1)
        theirs.close()
        self.ended = os.pidfd_open(self.pid)

    def give(self, tests: list[int] | None) -> None:
        """Have it run these; None ends it."""
        self.left = deque(tests or ())
        self.messages.send(tests)

    def running(self) -> int:
        return struct.unpack("q", self._running[:])[0]

    def wait(self) -> int:
        """Return how it ended."""
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.ended)
        self.messages.close()
        return os.waitstatus_to_exitcode(status)

    def stop(self) -> None:
        """End it within `PATIENCE`, as Ctrl-C would."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGINT)
            if not multiprocessing.connection.wait([self.ended], PATIENCE):
                os.kill(self.pid, signal.SIGKILL)
        self.wait()


class _Fork:
    """A worker, as it sees itself: it runs the files that it is given, and never returns."""

    def __init__(self, session, number: int, messages, running: mmap.mmap):
        self.session, self.number, self.messages, self._running = session, number, messages, running
        self._reports: list[tuple | dict] = []

    def pytest_runtest_logreport(self, report) -> None:
        config = self.session.config
        if report.passed and not report.sections and not report.user_properties:
            told = (report.location, report.when, report.duration, report.start, report.stop)
        else:
            told = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._reports.append(told)

    def work(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        config = self.session.config
        plugins = config.pluginmanager
        for name in ("terminalreporter", "terminalprogress"):
            if plugins.has_plugin(name):
                plugins.unregister(name=name)
        plugins.register(self, "forked-worker")
        capture = plugins.getplugin("capturemanager")
        if capture.is_globally_capturing():
            capture.stop_global_capturing()  # its files are the parent's, too
            capture.start_global_capturing()
        factory = config._tmp_path_factory
        factory._basetemp = factory.getbasetemp() / f"worker-{self.number}"
        factory._basetemp.mkdir(exist_ok=True)
        _count_folders(factory)
        code = 0
        try:
            while (tests := self.messages.recv()) is not None:
                self._run(tests)
        except KeyboardInterrupt:
            code = 1
        self._end(code)

    def _run(self, tests: list[int]) -> None:
        items, done, told_at = self.session.items, [], time.monotonic()
        for place, number in enumerate(tests):
            # Behind the last one stands the session: what is made once for all tests stays.
            follows = items[tests[place + 1]] if place + 1 < len(tests) else self.session
            self._running[:] = struct.pack("q", number)
            item = items[number]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=follows)
            done.append((number, self._reports))
            # Most tests take milliseconds: to send and to receive one by one is a third of that.
            failed = any(isinstance(report, dict) for report in self._reports)
            if failed or follows is self.session or time.monotonic() > told_at + TOGETHER_SECONDS:
                self.messages.send(done)
                done, told_at = [], time.monotonic()
            self._reports = []

    def _end(self, code: int) -> None:
        """Undo what was made once for all tests; then end as Python does."""
        self.session._setupstate.teardown_exact(None)
        self.session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        threading._shutdown()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # triton tells at length what it leaves
        atexit._run_exitfuncs()
        os._exit(code)


def _count_folders(factory: pytest.TempPathFactory) -> None:
    """Number the folders of tests without a look at all that are there, hundreds by the end, and without links."""
    make, numbers = factory.mktemp, Counter[str]()

    def mktemp(basename: str, numbered: bool = True) -> Path:
        path = factory.getbasetemp() / f"{basename}{numbers[basename]}"
        numbers[basename] += 1
        try:
            if numbered and path.parent == factory.getbasetemp():
                path.mkdir(mode=0o700)
                return path
        except FileExistsError:
            pass  # of a worker that has died
        return make(basename, numbered)

    factory.mktemp = mktemp


def run(session: pytest.Session, number: int) -> None:
    """Run all that is collected in that many workers."""
    files = [item.nodeid.partition("::")[0] for item in session.items]
    waiting = deque(shares.shares_of(files))
    workers: list[Worker] = []
    session.config._tmp_path_factory.getbasetemp()
    try:
        for place in range(min(number, len(waiting))):
            workers.append(Worker(session, place))
            workers[-1].give(next_file(workers[-1], workers, waiting))
        while workers:
            _attend(session, workers, waiting)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.stop()


def next_file(worker, workers, waiting: deque[list[list[int]]]) -> list[int] | None:
    """Return the tests of the file that a worker runs next: of its share, a new one or another worker's; or None."""
    if not worker.files and waiting:
        worker.files = deque(waiting.popleft())
    if not worker.files:
        busiest = max(workers, key=lambda one: len(one.files))
        return busiest.files.pop() if busiest.files else None
    return worker.files.popleft()


def _attend(
    session: pytest.Session, workers: list[Worker], waiting: deque[list[list[int]]]
) -> None:
    """Take one message of every worker that has some, and bury the dead."""
    known = {one.messages: one for one in workers} | {one.ended: one for one in workers}
    ready = multiprocessing.connection.wait([*known])
    for worker in dict.fromkeys(known[each] for each in ready):
        if worker.messages.poll():
            with contextlib.suppress(EOFError):
                for number, reports in worker.messages.recv():
                    _take(session, worker, number, reports)
                if not worker.left:
                    worker.give(next_file(worker, workers, waiting))
                continue
        if worker.ended not in ready and not multiprocessing.connection.wait([worker.ended], 5):
            continue
        workers.remove(worker)
        _bury(session, workers, worker)


def _take(session: pytest.Session, worker: Worker, number: int, reports: list) -> None:
    hook, config, name = session.config.hook, session.config, session.items[number].nodeid
    for told in reports:
        if isinstance(told, tuple):  # passed
            location, when, duration, start, stop = told
            report = TestReport(name, location, {}, "passed", None, when, (), duration, start, stop)
        else:
            report = hook.pytest_report_from_serializable(config=config, data=told)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=name, location=report.location)
    worker.left.popleft()


def _bury(session: pytest.Session, workers: list[Worker], worker: Worker) -> None:
    """Report the test in which a worker has died, and have another one do what it has left."""
    number, code = worker.running(), worker.wait()
    if not code and not worker.left:
        return
    if worker.left and number not in worker.left:
        number = worker.left[
            0
        ]  # before its first test began; else the successor would meet it for ever
    item = session.items[number] if worker.left else None
    text = f"a worker ended with {code} in {item.nodeid if item else 'the teardown of the session'}"
    facts = (item.nodeid, item.location) if item else ("workers", ("workers", None, "workers"))
    began = time.time()
    report = TestReport(
        *facts, {}, "failed", text, "call", (), duration=0.0, start=began, stop=began
    )
    session.config.hook.pytest_runtest_logreport(report=report)
    if left := [index for index in worker.left if index != number]:
        worker.files.appendleft(left)
    if worker.files and not session.shouldfail:
        workers.append(Worker(session, worker.number))
        workers[-1].files = worker.files
        workers[-1].give(worker.files.popleft())
