"""`pytest --forks 4`: the tests in forks of one process, which has collected them once.

Workers that are started by themselves import torch, collect seven thousand tests and import what is dear (Lightning,
transformers) one by one, 20 s of CPU each. Forks begin with all of it. Each takes one file after the other
from a common pipe, so that fixtures of a module are made once; the files that take longest come first. Reports go to
the process that has collected, which shows them. A fork that crashes fails its test, and another goes on in its place.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import selectors
import signal
import struct
import sys
import traceback

import pytest

# By the CPU and the waiting that they take: what is long must not begin last.
FIRST = (
    "test_doctor_attach", "test_augment_fused", "test_advice", "test_doctor_endings", "test_export", "test_demo",
    "test_ranks", "test_cluster", "test_doctor_cases", "test_bad_machine", "test_examples", "test_docs_site",
    "test_doctor_benchmark", "test_remote_store", "test_docs_code", "test_tune", "test_trainer", "test_cli_doctor",
    "test_every_pair", "test_doctor_job", "test_checkpoint", "test_run", "test_predict", "test_recipe_segmentation",
    "test_frameworks_accelerate", "test_cli", "test_bounds", "test_secrets", "test_commit", "test_packing",
    "test_cli_train", "test_recipe_tabular", "test_msp", "test_compat_massspec", "test_frameworks_huggingface",
)  # fmt: skip
# Not onnxruntime: it starts a thread, which a fork would not have.
DEAR = ("torch._dynamo", "h5py", "pyarrow.csv", "pyarrow.parquet", "lightning.pytorch", "transformers.trainer",
        "onnxscript", "torch.onnx", "PIL.Image", "rdkit.Chem", "distributed")  # fmt: skip
_LENGTH = struct.Struct("<Q")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many forks")


def prepare() -> None:
    """Set what must be set before torch is imported, in a process that will be forked."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # a thread would not be there in a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asks for a GPU without opening it


def into_files(items: list[pytest.Item]) -> list[tuple[int, int]]:
    """Return from where to where the tests of each file stand, the longest files first."""
    bounds = [0]
    bounds += [n for n in range(1, len(items)) if items[n].path != items[n - 1].path]
    files = list(zip(bounds, [*bounds[1:], len(items)], strict=True))
    rank = {name: number for number, name in enumerate(FIRST)}
    return sorted(files, key=lambda file: rank.get(items[file[0]].path.stem, len(rank)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests in forks, if that is asked for."""
    number = session.config.option.forks
    if not number or session.config.option.collectonly or session.testsfailed or not session.items:
        return None
    for name in DEAR if len(session.items) > 2000 else ():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a fork that collects would copy all pages
    _Pool(session).run(number)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _Fork:
    """What the first process knows of a fork: where its reports come from, and what it is to run."""

    def __init__(self, pid: int, end: int, todo: list[int]) -> None:
        self.pid, self.end, self.todo = pid, end, todo
        self.current: int | None = None
        self.is_done = False
        self.unread = b""

    def read(self) -> list[tuple]:
        """Return the messages that are whole; an empty list is the end."""
        data = os.read(self.end, 1 << 16)
        if not data:
            return []
        self.unread += data
        found = [("nothing",)]
        while len(self.unread) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self.unread)[0]
            if len(self.unread) < _LENGTH.size + size:
                break
            found.append(pickle.loads(self.unread[_LENGTH.size : _LENGTH.size + size]))
            self.unread = self.unread[_LENGTH.size + size :]
        return found


class _Pool:
    """The forks, and the pipe from which they take the numbers of files."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.config = session, session.config
        self.files = into_files(session.items)
        self.waiting, ahead = os.pipe()
        os.write(ahead, b"".join(_LENGTH.pack(number) for number in range(len(self.files))))
        os.close(ahead)  # the end of the pipe is the end of the work
        self.base = self.config._tmp_path_factory.getbasetemp()
        self.started = 0
        self.ends = selectors.DefaultSelector()

    def run(self, number: int) -> None:
        for _ in range(number):
            self._start([])
        try:
            while self.ends.get_map() and not self._is_over():
                for key, _ in self.ends.select():
                    self._hear(key.data)
        finally:
            left = [key.data for key in self.ends.get_map().values()]
            for fork in left:
                os.kill(fork.pid, signal.SIGINT)  # it ends what its test has started
            for fork in left:
                self._forget(fork)
            os.close(self.waiting)

    def _start(self, todo: list[int]) -> None:
        end, sending = os.pipe()
        self.started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                for key in self.ends.get_map().values():
                    os.close(key.data.end)
                os.close(end)
                self._be_a_fork(sending, todo)
                code = 0
            except KeyboardInterrupt:
                self.session._setupstate.teardown_exact(None)
                atexit._run_exitfuncs()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(code)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(sending)
        fork = _Fork(pid, end, list(todo))
        self.ends.register(end, selectors.EVENT_READ, fork)

    def _forget(self, fork: _Fork) -> int:
        self.ends.unregister(fork.end)
        os.close(fork.end)
        return os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])

    def _hear(self, fork: _Fork) -> None:
        messages = fork.read()
        for kind, *rest in messages:
            if kind == "file":
                fork.todo += range(*self.files[rest[0]])
            elif kind == "start":
                fork.current = rest[0]
                fork.todo.remove(rest[0])
                item = self.session.items[rest[0]]
                self.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            elif kind == "reports":
                for report in rest[0]:
                    self.config.hook.pytest_runtest_logreport(report=report)
            elif kind == "done":
                fork.is_done = True
        if messages:
            return
        code = self._forget(fork)
        if not fork.is_done and not self._is_over():
            self._tell_crash(fork, code)
            self._start(fork.todo)

    def _tell_crash(self, fork: _Fork, code: int) -> None:
        if fork.current is None:
            raise RuntimeError(f"a fork ended with {code} before its first test")
        item = self.session.items[fork.current]
        report = pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed",
            longrepr=f"the process of this test ended with {code}", when="call",
        )  # fmt: skip
        self.config.hook.pytest_runtest_logreport(report=report)

    def _is_over(self) -> bool:
        return bool(self.session.shouldfail or self.session.shouldstop)

    # -- in a fork -----------------------------------------------------------------------------------

    def _be_a_fork(self, sending: int, todo: list[int]) -> None:
        name = f"gw{self.started - 1}"
        os.environ["PYTEST_XDIST_WORKER"] = name
        plugins = self.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the first process
        capture.start_global_capturing()
        capture.suspend_global_capture()
        plugins.unregister(name="terminalreporter")
        plugins.register(_Sender(sending))
        own = self.base / name
        own.mkdir()
        self.config._tmp_path_factory._basetemp = own

        def send(*message: object) -> None:
            _send(sending, message)

        def more() -> list[int]:
            got = os.read(self.waiting, _LENGTH.size)
            if not got:
                return []
            send("file", _LENGTH.unpack(got)[0])
            return list(range(*self.files[_LENGTH.unpack(got)[0]]))

        items, todo = self.session.items, list(todo) or more()
        while todo:
            number = todo.pop(0)
            if not todo and not self._is_over():
                todo = more()  # before the last test of a file: it decides what is torn down
            following = items[todo[0]] if todo and not self._is_over() else None
            send("start", number)
            items[number].config.hook.pytest_runtest_protocol(
                item=items[number], nextitem=following
            )
            if self._is_over():
                break
        atexit._run_exitfuncs()
        send("done")


def _send(end: int, message: tuple) -> None:
    data = pickle.dumps(message)
    data = _LENGTH.pack(len(data)) + data
    while data:
        data = data[os.write(end, data) :]


class _Sender:
    """In a fork: sends the reports of a test, when it has ended, instead of showing them."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self) -> None:
        _send(self._end, ("reports", self._reports))
        self._reports = []
