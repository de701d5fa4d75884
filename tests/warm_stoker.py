"""`stoker …` without its start: each command runs in a fork of one process that has loaded what commands load.

A start of Python with torch, and the first training step of a process, cost three to five seconds; a fork
costs a tenth of one. A command here has its own process, streams, folder and environment, and ends as it
would by itself: its exit functions run. Tests about the process (signals, closed streams, terminals, what
is imported) start one of their own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import selectors
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

FIRST_USE = (
    "h5py", "pyarrow.csv", "pyarrow.parquet", "torch._dynamo", "torch.onnx", "torch.utils.data",
    "rich.console", "rich.progress", "rich.table", "typer.rich_utils", "pydantic.type_adapter",
    "stoker.recipes.run", "stoker.report", "stoker.store.inspection", "stoker.store.quality_page",
)  # fmt: skip


def serve() -> None:
    """Run the commands that come as lines of JSON, and answer each with its exit code."""
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
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    whole = typer.main.get_command(stoker.cli.main.app)  # a fork may change its copy
    typer.main.get_command = lambda app: whole
    gc.collect()
    gc.freeze()  # a fork that collects would copy all pages
    for line in sys.stdin:
        pipes = os.pipe(), os.pipe()
        pid = os.fork()
        if not pid:
            _run(json.loads(line), stoker.cli.main.run, [end for _, end in pipes])
        for _, end in pipes:
            os.close(end)
        texts = _read([end for end, _ in pipes])
        status = os.waitpid(pid, 0)[1]
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)


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


def _run(asked: dict, main, ends: list[int]) -> None:
    """Be the command that is asked for; end the process."""
    import resource
    import threading
    import time

    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *ends]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    time.tzset()
    for option in [*os.environ.get("PYTHONWARNINGS", "").split(","), *asked["warnings"]]:
        if option:
            warnings._setoption(option)
    for name in asked["blocked"]:
        sys.modules[name] = None
    if asked["limit"]:
        # A .pyc that is cut by the limit would be read by everybody after us.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"],) * 2)
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


class Server:
    """The process whose forks are the commands."""

    def __init__(self):
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import warm_stoker; "
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code}sys.path.pop(0); warm_stoker.serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def run(
        self,
        words,
        folder: Path | str | None = None,
        environment: dict[str, str] | None = None,
        limit: int = 0,
        blocked=(),
        script: Path | str = "",
        warned=(),
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
        """
        words = [*map(str, words)]
        asked = {"words": words, "folder": str(folder or Path.cwd()), "limit": limit}
        asked["environment"] = dict(os.environ if environment is None else environment)
        asked |= {"blocked": [*blocked], "script": str(script), "warnings": [*warned]}
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            code, out, err = json.loads(self._process.stdout.readline())
        except BaseException:
            self._process.kill()  # what it would answer next belongs to this command
            raise
        return subprocess.CompletedProcess(words, code, out, err)

    def lives(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


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
