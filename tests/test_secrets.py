"""A store behind a password, from the first look to the report: nothing that is printed or written repeats it."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest

import warm_stoker
from run_makers import make_store
from stoker.address import HIDDEN_WORDS
from stoker.cli import main
from stoker.store import remote
from stoker.store.reader import open_store
from stoker.train import launch

pytest.importorskip("aiohttp")

USER, PASSWORD = "anna", "Hü@7/x: y%#Kr0k"
WORDS = ("Hü", "H%C3%BC", "Kr0k", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()[:12])
CONFIG = """\
recipe:
  name: tabular
  store: {store}
  options: {{hidden: [16]}}
training: {{epochs: 2, batch_size: 16, lr: 0.003}}
run: {{dir: {run}}}
"""


class Guarded(SimpleHTTPRequestHandler):
    """Serves a folder to those who know the password."""

    def log_message(self, *words) -> None:
        pass

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != wanted:
            # Many servers repeat what they were asked.
            self.send_error(401, f"not for {self.headers.get('Authorization')}")
            return
        super().do_GET()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The address of a store, with the password in it."""
    folder = tmp_path_factory.mktemp("served")
    make_store("tabular", folder / "store").close()

    def handler(*arguments):
        return Guarded(*arguments, directory=str(folder))

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{server.server_port}/store"
        server.shutdown()
        thread.join(60)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "secret-cache"
    monkeypatch.setenv("STOKER_CACHE", str(folder))
    monkeypatch.setattr(remote, "_PAUSE_SECONDS", 0.02)
    return folder


def assert_hidden(text: str) -> None:
    for word in WORDS:
        assert word not in text, text


def assert_nothing_written(folder: Path) -> None:
    """Look at every byte of every file that others may read, and at every name."""
    found = 0
    for path in folder.rglob("*"):
        assert_hidden(str(path))
        if path.is_file() and path.name != "secret.yaml":
            found += 1
            content = path.read_bytes()
            for word in WORDS:
                assert word.encode() not in content, path
    assert found


def stoker(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm_stoker.stoker(*words, cwd=cwd, env={**os.environ, "COLUMNS": "160", **variables})


@pytest.fixture(scope="module")
def trained(served, tmp_path_factory) -> Path:
    """A folder with a run that was trained from the guarded store."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "secret.yaml").write_text(CONFIG.format(store=served, run="run"))
    variables = {"STOKER_CACHE": str(tmp_path_factory.getbasetemp() / "secret-cache")}
    done = stoker("train", "--config", "secret.yaml", "--device", "cpu", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    (folder / "printed").write_text(done.stdout + done.stderr)
    return folder


def test_a_run_from_a_guarded_store_leaves_no_trace_of_the_password(trained, served):
    printed = (trained / "printed").read_text()
    shown = "http://***@" + served.partition("@")[2]
    assert f"store: {shown}" in printed
    assert f"stoker predict run/best.pt '{shown}' predictions.parquet" in printed
    assert "(*** is a password that is not shown)" in printed
    assert_hidden(printed)
    assert_nothing_written(trained)


def call(capsys, *words: object, code: int = 0) -> str:
    """Run a verb in this process; return all that it printed."""
    try:
        main.app([*map(str, words)], standalone_mode=False)
        ended = 0
    except main.StokerError as error:
        print(error)
        ended = error.exit_code
    except main.typer.Exit as done:
        ended = done.exit_code
    out, err = capsys.readouterr()
    assert ended == code, out + err
    assert_hidden(out + err)
    return out + err


def test_no_verb_shows_or_writes_the_password(trained, served, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained / "run")
    (tmp_path / "secret.yaml").write_text(CONFIG.format(store=served, run="new"))
    host = served.partition("@")[2]
    for words in (
        ["inspect", served, "--html", "inspect.html"], ["inspect", served, "--json"],
        ["verify", served], ["verify", served, "--json"],
        ["plan", served], ["plan", served, "--json"],
        ["report", "run", "--out", "report.html"], ["report", "run", "--json", "--out", "r2.html"],
        ["config", "check", "secret.yaml"], ["config", "check", "secret.yaml", "--json"],
        ["config", "show", "secret.yaml"], ["config", "show", "secret.yaml", "--all"],
        ["predict", "run/best.pt", served, "predictions.parquet", "--split", "test"],
        ["monitor", "run", "--once", "--json"],
    ):  # fmt: skip
        said = call(capsys, *words)
        if words[0] not in ("report", "predict", "monitor"):
            assert f"http://***@{host}" in said
    assert "# (*** is a password that is not shown)" in said or words[0] == "monitor"
    for words in (
        ["pack", "table", served, "out"], ["pack", "arrays", "x.npy", served],
        ["train", "--config", "secret.yaml", "--store", f"{served}-none", "--device", "cpu"],
        ["train", "--config", "secret.yaml", "--set", f"recipe.name={served}"],
        ["train", "--config", "secret.yaml", "--set", f"training.lr={served}"],
        ["inspect", f"{served}/nothing"], ["plan", served.replace(quote(PASSWORD, safe=""), "wrong")],
        ["inspect", f"simplecache::{served}/nothing"], ["inspect", f"zip://x::{served}.zip"],
        ["predict", served, "store", "out.parquet"], ["export", served, "out.pt", "--int8"],
        ["augment", "preview", served, "out.png"], ["machine", served], ["report", served],
        ["config", "check", served], ["config", "migrate", served, "new.yaml"],
        ["pack", "bars", served, "out"], ["pack", "images", served, "out"],
        ["pack", "massspec", "--msp", served, "--mol-dir", served, "out"],
        ["pack", "segmentation", "--images", served, "--masks", served, "out"],
        ["bench", "memory", "--msp", served], ["monitor", served, "--once"],
        ["doctor", "--", "no-such-command", served], ["tune", "--config", served],
    ):  # fmt: skip
        said = call(capsys, *words, code=2)
        assert said
    assert_nothing_written(tmp_path)


def test_a_tuned_config_keeps_the_address_for_its_owner_only(served, tmp_path, capsys):
    from stoker.doctor.job_config import JobConfig

    plain = tmp_path / "plain.yaml"
    plain.write_text(CONFIG.format(store="store", run="run"))
    job = JobConfig.read(plain, store=served)
    job.with_changes({"training.batch_size": 32}, ["Tuned\nrecipe: x"]).write(
        tmp_path / "secret.yaml"
    )
    assert JobConfig.read(tmp_path / "secret.yaml").settings.store == served
    assert stat.S_IMODE((tmp_path / "secret.yaml").stat().st_mode) == 0o600
    JobConfig.read(plain).write(tmp_path / "other.yaml")
    assert stat.S_IMODE((tmp_path / "other.yaml").stat().st_mode) & 0o044 == 0o044 & ~_umask()
    assert stoker("config", "migrate", "secret.yaml", "new.yaml", cwd=tmp_path).returncode == 0
    assert stat.S_IMODE((tmp_path / "new.yaml").stat().st_mode) == 0o600


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_the_cache_keeps_only_its_owner_reads(served, cache):
    with open_store(served) as store:
        assert_hidden(store.name + " ".join(store.notes) + str(store.path))
        home = store.path.parent
        kept = store.path / remote.ORIGIN_NAME
    assert json.loads(kept.read_text())["url"] == served
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    # The name of the folder is no fast test of a password.
    assert home.name.rpartition("-")[2] not in (
        remote.xxhash.xxh3_64_hexdigest(text.encode())[:8] for text in (served, PASSWORD)
    )


def test_an_address_as_it_was_shown_is_refused_with_what_to_do(served):
    with pytest.raises(main.StokerError, match="its password was left out") as caught:
        open_store(served.replace(served.partition("@")[0], "http://***"))
    assert caught.value.fix.startswith("write user:password in the place of the stars")


@pytest.mark.parametrize("letter", ["/", "?", "#"])
def test_an_address_that_reads_in_two_ways_is_refused_and_never_looked_up(letter, monkeypatch):
    def look_up(*_):
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(main.StokerError, match="can be read in two ways") as caught:
        open_store(f"http://anna:Hü{letter}Kr0k@127.0.0.1:1/store")
    assert_hidden(str(caught.value))
    assert "%2F" in caught.value.allowed


def test_the_printed_way_to_write_a_password_works(served):
    with pytest.raises(main.StokerError) as caught:
        open_store("http://anna:a/b@127.0.0.1:1/store")
    line, _, _ = caught.value.fix.partition(", which")
    line = line.replace("getpass()", "input()")  # it wants a terminal
    done = subprocess.run(
        ["sh", "-c", line], input=PASSWORD, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == quote(PASSWORD, safe="")


def test_tracebacks_are_printed_without_the_password(served, tmp_path):
    program = (
        "import sys\nfrom stoker.cli import main, verify\n"
        "def broken(path): raise RuntimeError(f'{path} {sys.argv[2]!r}') from ValueError(sys.argv[2])\n"
        "import stoker.store.reader\nstoker.store.reader.open_store = broken\nmain.run()\n"
    )
    odd = "http://anna:Hü Kr0k@host/x"
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", odd],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "STOKER_TRACEBACK": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: http:/***@host/x" in done.stderr
    assert_hidden(done.stderr + done.stdout)


def test_an_uncaught_error_of_a_protocol_does_not_repeat_the_password(tmp_path):
    """Python prints the causes of an error as well."""
    for address in (
        f"http://anna:{quote(PASSWORD, safe='')}@127.0.0.1:1/store",
        "s3://anna:HüKr0k@bucket/x", "ftp://anna:HüKr0k@127.0.0.1:1/x", "nothing://anna:HüKr0k@host/x",
        "simplecache::http://anna:HüKr0k@127.0.0.1:1/x",
    ):  # fmt: skip
        script = tmp_path / "script.py"
        script.write_text(f"from stoker import open_store\nopen_store({address!r})")
        done = warm_stoker.shared().run([], tmp_path, script=script)
        assert "in open_store" in done.stderr
        said = done.stderr.replace(script.read_text().splitlines()[1], "")
        assert done.returncode == 1
        assert_hidden(said)


# -- other processes ---------------------------------------------------------------------------


def test_processes_that_we_start_do_not_show_the_password(served, monkeypatch):
    """The words go by the environment, which only the owner of a process may read."""
    started = []

    def run(words, num_processes, logs):
        del num_processes, logs
        child = [sys.executable, "-c", "import time; time.sleep(60)", *words]
        with subprocess.Popen(child) as process:
            while not (line := " ".join(psutil.Process(process.pid).cmdline())).startswith(
                sys.executable
            ):
                time.sleep(0.01)
            process.kill()
        started.append((line, os.environ.get(HIDDEN_WORDS)))
        return 0, ""

    monkeypatch.setattr(launch, "_run", run)
    monkeypatch.setenv(HIDDEN_WORDS, "")
    monkeypatch.setenv("STOKER_RESTARTS", "0")  # which it sets, for good
    typed = ["train", "--store", served, "--set", "recipe.store=http://u:Hü Kr0k@h/x", "--json"]
    assert launch.launch(typed, 2, 0, print) == 0
    ((line, hidden),) = started
    assert_hidden(line)
    assert "train --store http://***@127.0.0.1" in line
    monkeypatch.setenv(HIDDEN_WORDS, hidden)
    assert main._typed() == typed
    assert HIDDEN_WORDS not in os.environ
    monkeypatch.setattr(sys, "argv", ["stoker", "plan"])
    assert main._typed() == ["plan"]


def test_every_process_that_we_start_is_known():
    """Whoever adds a child process sees to it that no password stands in its words, and adds it here."""
    package = Path(main.__file__).parent.parent
    starts = (
        "subprocess.run(",
        "subprocess.Popen(",
        "elastic_launch(",
        "os.exec",
        "os.spawn",
        "os.system",
    )
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(start in path.read_text() for start in starts)
    }
    assert found == {
        "doctor/outside.py",  # py-spy and a process number
        "doctor/attach.py",  # somebody's own command, as typed
        "lifetime.py",  # a folder and a process number
        "packing/workers.py",  # no words; the work comes through a pipe
        "compat/massspec_memory.py",  # likewise
        "train/launch.py",  # words with secrets go by the environment
    }
