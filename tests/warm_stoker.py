"""`stoker …` without its start: each command runs in a fork of one process that has loaded what commands load.

A start of Python with torch, and the first training step of a process, cost three to five seconds; a fork
costs a tenth of one. A command here has its own process, streams, folder and environment, and ends as it
would by itself: its exit functions run. `Started` is one that its test sends signals to, or gives a terminal.
With several workers of pytest there is one such process for all, and each worker has a fork of it.
Tests about the process (closed streams, what is imported, how Python ends) start one of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

from forked import Forked, begin_as_python_does, has_cuda_in_use
from forked_packers import fork_packers

FIRST_USE = (
    "h5py", "pyarrow.csv", "pyarrow.parquet", "torch._dynamo", "torch.onnx", "torch.utils.data",
    "rich.console", "rich.progress", "rich.table", "typer.rich_utils", "pydantic.type_adapter",
    "stoker.recipes.run", "stoker.report", "stoker.store.inspection", "stoker.store.quality_page",
)  # fmt: skip
ROOMS = (
    "stoker.sources.tables", "stoker.sources.bars", "stoker.sources.images", "stoker.sources.massspec",
    "stoker.recipes.forex", "stoker.recipes.images", "stoker.recipes.massspec", "stoker.recipes.segmentation",
    "stoker.recipes.tabular.recipe", "stoker.recipes.export.trained", "stoker.recipes.inference", "stoker.monitor",
    "stoker.packing.samples", "stoker.runs.run_page", "stoker.runs.evaluation_page", "stoker.doctor.scripts",
    "numpy.ma", "pyarrow.feather", "typer._click.decorators",
)  # fmt: skip
_of_rooms: set[str] = set()
"""What these have imported: forgotten where a module that they need is not to be there."""

ADDRESS = "WARM_STOKER"


def serve() -> None:
    """Serve the one that has started this process, through its streams."""
    main = _load()
    _answer(sys.stdin, sys.stdout, main)


def serve_all(number: int) -> None:
    """Serve each worker that connects to a socket by a fork of this process, until our stdin ends."""
    main = _load()
    door = socket.socket(fileno=number)
    while True:
        ready = select.select([door, sys.stdin], [], [])[0]
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            os._exit(0)  # the libraries that are loaded here would tell at length what they leave
        worker, _ = door.accept()
        if not os.fork():
            door.close()
            with worker, worker.makefile("r") as asked, worker.makefile("w") as answers:
                _answer(asked, answers, main)
            os._exit(0)
        worker.close()


def _load():
    """Import what commands load, and return what runs one."""
    import gc
    import importlib
    import pkgutil

    import torch
    import typer

    import stoker.cli.main

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verbs = [found.name for found in pkgutil.iter_modules(stoker.cli.__path__, "stoker.cli.")]
        for name in (*FIRST_USE, *verbs):
            importlib.import_module(name)
        before = {*sys.modules}
        for name in ROOMS:
            importlib.import_module(name)
        _of_rooms.update({*sys.modules} - before)
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    whole = typer.main.get_command(stoker.cli.main.app)  # a fork may change its copy
    typer.main.get_command = lambda app: whole
    do_not_wait_for_the_disk()
    keep_no_stacks()
    grow_few_trees()
    fork_packers()
    for made_here in list(weakref.finalize._registry):
        # Thousands of torch's, for its tables of operators: 40 ms of every command, which copies the pages.
        made_here.atexit = False
    gc.collect()
    gc.freeze()  # a fork that collects would copy all pages
    return stoker.cli.main.run


def do_not_wait_for_the_disk() -> None:
    """Leave `fsync` out: no test takes the power away, and the suite would wait a minute for it."""
    os.fsync = os.fstat  # which fails for what is no open file, too


def keep_no_stacks() -> None:
    """Leave out the stack that torch writes down at every seed, three times: for CUDA, XPU and MTIA not begun yet.

    Only an error of theirs would show it; it is 2 % of all training in the tests.
    """
    import torch

    for module in (torch.cuda, torch.xpu, torch.mtia):
        module.traceback = SimpleNamespace(format_stack=list)


def grow_few_trees() -> None:
    """Fit the baselines of tables with 6 rounds instead of 60: most runs of the tests do not look at them."""
    from stoker.recipes import baselines

    baselines._ROUNDS = 6


def _answer(requests, answers, main) -> None:
    """Run the commands that come as lines of JSON, and answer each with its exit code."""
    for line in requests:
        asked = json.loads(line)
        if asked["beside"]:
            _run_beside(asked, main)
            continue
        print(json.dumps(_in_a_fork(asked, main)), file=answers, flush=True)


def _in_a_fork(asked: dict, main) -> list:
    """Return the exit code of a command, and what it says on its two streams."""
    pipes = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        nothing = os.open(os.devnull, os.O_RDONLY)
        _run(asked, main, [nothing, *(end for _, end in pipes)])
    for _, end in pipes:
        os.close(end)
    texts = _read([end for end, _ in pipes])
    status = os.waitpid(pid, 0)[1]
    return [os.waitstatus_to_exitcode(status), *texts]


def _read(ends: list[int]) -> list[str]:
    """Read pipes to their ends, in turns: one that is full would hold up the other's writer."""
    found = dict.fromkeys(ends, b"")
    with selectors.DefaultSelector() as waiting:
        for end in ends:
            waiting.register(end, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
    return [text.decode(errors="surrogateescape") for text in found.values()]


def _run_beside(asked: dict, main) -> None:
    """Run a command that its test talks to: a keeper between us waits for its end and reports it."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)  # so that the keeper is nobody's child
    os.setsid()
    tty = asked["beside"].get("tty")
    names = [tty] * 3 if tty else [os.devnull, asked["beside"]["out"], asked["beside"]["err"]]
    flags = (
        [os.O_RDWR | os.O_NOCTTY] * 3
        if tty
        else [os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT | os.O_APPEND] * 2]
    )
    streams = [os.open(name, flag) for name, flag in zip(names, flags, strict=True)]
    status = os.open(asked["beside"]["status"], os.O_WRONLY)
    pid = os.fork()
    if not pid:
        os.close(status)
        if tty:  # the keeper would go with its terminal
            os.setsid()
            fcntl.ioctl(streams[0], termios.TIOCSCTTY, 0)
        _run(asked, main, streams)
    for stream in streams:
        os.close(stream)
    os.write(status, f"{pid}\n".encode())
    gone = select.poll()
    gone.register(status, 0)
    ended, how = 0, 0
    while not ended:
        if gone.poll(0):  # nobody reads any more: the test's process has ended without a word
            os.kill(pid, signal.SIGKILL)
        ended, how = os.waitpid(pid, os.WNOHANG)
        time.sleep(0 if ended else 0.02)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{os.waitstatus_to_exitcode(how)}\n".encode())
    os._exit(0)


def _run(asked: dict, main, streams: list[int]) -> None:
    """Be the command that is asked for; end the process."""
    import resource

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # A stream of Python remembers whether its file can seek, and this one has another file now.
    told = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    sys.stdout = open(1, "w", closefd=False, **told)  # noqa: SIM115  for the rest of this process
    if asked["here"]:
        begin_as_python_does(asked["environment"])
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    time.tzset()
    for option in [*os.environ.get("PYTHONWARNINGS", "").split(","), *asked["warnings"]]:
        if option:
            warnings._setoption(option)
    for name in _of_rooms if asked["blocked"] else ():
        del sys.modules[name]
    for name in asked["blocked"]:
        sys.modules[name] = None
    if asked["limit"]:
        # A .pyc that is cut by the limit would be read by everybody after us.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"],) * 2)
    if asked["forks_ranks"]:
        _fork_ranks(main)
    if asked["forks_scripts"]:
        _fork_scripts()
    tempfile.tempdir = None  # found anew from this environment
    sys.argv = [asked["script"] or "stoker", *asked["words"]]
    code = 99
    try:
        if asked["script"]:
            sys.path.insert(0, str(Path(asked["script"]).parent))
            runpy.run_path(asked["script"], run_name="__main__")
            code = 0
        else:
            main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  as Python ends a script
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                code = 120  # what Python ends with then
        os._exit(code)


def _fork_scripts() -> None:
    """Have the doctor fork this process for `python script`."""
    sys.path.insert(0, str(Path(__file__).parent))
    import forked_scripts

    sys.path.pop(0)
    forked_scripts.attach._start = forked_scripts.start


def _fork_ranks(main) -> None:
    """Have torch's launcher fork this process for `python -m stoker …`: each rank imports seconds of torch else."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(self, command, environment):
        assert command[:3] == (sys.executable, "-m", "stoker"), command

        def be_rank():
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT):  # the launcher's own handlers
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            atexit._clear()
            asked = _asked([*command[3:]], None, environment, "")
            _run(asked, main, [os.dup(number) for number in range(3)])

        return Forked(command, be_rank)

    subprocess_handler.SubprocessHandler._popen = start


def _asked(words, folder, environment, script) -> dict:
    asked = {"words": words, "folder": str(folder or Path.cwd()), "script": str(script)}
    asked |= {"limit": 0, "blocked": [], "warnings": [], "beside": None}
    asked |= {"forks_ranks": False, "forks_scripts": False, "here": False}
    return asked | {"environment": dict(os.environ if environment is None else environment)}


class Started:
    """A command that runs while its test goes on, with what a `Popen` has: signals reach it by its number.

    Its output comes as text. With a `tty`, the name of a terminal, that is all three streams; with a `log`, a file,
    both outputs go there: there are none to read here then. With `forks_ranks` the processes of `--gpus` are forks.
    """

    def __init__(
        self,
        words,
        folder=None,
        environment=None,
        script="",
        tty="",
        warned=(),
        log="",
        forks_ranks=False,
    ):
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-warm-")
        self.returncode: int | None = None
        paths = {name: str(Path(self._folder.name, name)) for name in ("out", "err", "status")}
        for path in paths.values():
            os.mkfifo(path)
        # Open for writing too, so that it has no end before the keeper has opened it.
        self._status = open(os.open(paths["status"], os.O_RDWR), "rb", buffering=0)  # noqa: SIM115, PTH123
        elsewhere = tty or log
        self.stdout, self.stderr = (
            (None, None) if elsewhere else map(_reader, (paths["out"], paths["err"]))
        )
        if log:
            paths |= {"out": str(log), "err": str(log)}
        beside = {**paths, "tty": str(tty)}
        server = shared()
        asked = _asked([*map(str, words)], folder, environment, script)
        asked |= {"warnings": [*warned], "beside": beside, "forks_ranks": forks_ranks}
        server.ask(asked)
        self.pid = int(self._status.readline())

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self.wait(0) if self.returncode is None else self.returncode

    def wait(self, timeout: float = 200) -> int | None:
        """Return the exit code, or None where it has not ended by then."""
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline())
        return self.returncode

    def communicate(self, timeout: float = 200) -> tuple[str, str]:
        """Read both streams to their ends; TimeoutError where the command has not ended by then."""
        said: list[str] = ["", ""]

        def read(number: int, stream) -> None:
            said[number] = stream.read()

        streams = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        if self.wait(timeout) is None:
            self.kill()
            raise TimeoutError(f"process {self.pid} is still there after {timeout} s")
        for reader in readers:
            reader.join(60)
        self.close()
        return said[0], said[1]

    def close(self) -> None:
        """End the command where it runs, and give its pipes back."""
        self.kill()
        self.wait()
        for stream in (self._status, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self._folder.cleanup()


def _reader(path: str):
    """Open a pipe before anybody writes to it."""
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(end, True)
    return open(end, encoding="utf-8", errors="surrogateescape")  # noqa: PTH123


def _start(call: str, **options) -> subprocess.Popen[str]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import warm_stoker; "
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", f"{code}sys.path.pop(0); warm_stoker.{call}"]
    return subprocess.Popen(words, stdin=subprocess.PIPE, text=True, env=environment, **options)


@contextlib.contextmanager
def for_all_workers():
    """Start the process that serves all workers, which are started from here; it ends with us."""
    folder = tempfile.mkdtemp(prefix="stoker-warm-")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen(64)
        process = _start(f"serve_all({door.fileno()})", pass_fds=[door.fileno()])
    os.environ[ADDRESS] = f"{folder}/door"
    try:
        yield
    finally:
        os.environ.pop(ADDRESS, None)
        process.stdin.close()
        process.wait(30)
        shutil.rmtree(folder)


class Server:
    """The process whose forks are the commands: our own, or our fork of the one for all workers."""

    def __init__(self):
        self._process = self._socket = None
        if ADDRESS in os.environ:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(os.environ[ADDRESS])
            self._asked, self._answers = self._socket.makefile("w"), self._socket.makefile("r")
        else:
            self._process = _start("serve()", stdout=subprocess.PIPE)
            self._asked, self._answers = self._process.stdin, self._process.stdout

    def run(
        self,
        words,
        folder: Path | str | None = None,
        environment: dict[str, str] | None = None,
        limit: int = 0,
        blocked=(),
        script: Path | str = "",
        warned=(),
        *,
        forks_scripts: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command, or a `script` of Python's, and return its end.

        Args:
            words: What stands behind `stoker` or the script.
            folder: Where it runs.
            environment: Its variables; ours when None.
            limit: Bytes that a file may have; 0 for any number.
            blocked: Modules that are not there.
            script: A file of Python, run as `python script words`.
            warned: What `python -W` would get.
            forks_scripts: The doctor forks itself for the script that it watches.
        """
        words = [*map(str, words)]
        asked = _asked(words, folder, environment, script)
        asked |= {"limit": limit, "blocked": [*blocked], "warnings": [*warned]}
        asked["forks_scripts"] = forks_scripts
        try:
            self.ask(asked)
            code, out, err = json.loads(self._answers.readline())
        except BaseException:
            self._give_up()  # what it would answer next belongs to this command
            raise
        return subprocess.CompletedProcess(words, code, out, err)

    def ask(self, asked: dict) -> None:
        self._asked.write(json.dumps(asked) + "\n")
        self._asked.flush()

    def lives(self) -> bool:
        return not self._answers.closed and (self._process is None or self._process.poll() is None)

    def _give_up(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._answers.close()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._asked.close()
        if self._process is not None:
            self._process.wait(30)
        else:
            self._socket.close()
        self._answers.close()


@functools.cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def shared() -> Server:
    """Return this worker's server, which starts at its first command."""
    if not _server().lives():
        _server.cache_clear()
    return _server()


def stoker(
    *words: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `stoker words` in a fork of this worker's server."""
    return shared().run(words, cwd, env)


def run_script_here(
    script: Path, folder: Path | None, environment: dict[str, str], warned=(), words=()
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork of this worker, which has imported what earlier tests have needed.

    Where this worker uses CUDA, which a fork of it could not, in a fork of its server.
    """
    if has_cuda_in_use():
        return shared().run(words, folder, environment, script=script, warned=warned)
    asked = _asked([*map(str, words)], folder, environment, script)
    asked |= {"warnings": [*warned], "here": True}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads that the child does not use
        code, out, err = _in_a_fork(asked, None)
    return subprocess.CompletedProcess([script], code, out, err)
