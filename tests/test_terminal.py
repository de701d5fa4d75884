"""Names from files and answers of servers on a terminal: shown as they are, never obeyed."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from source_trees import nodes
from stoker import page
from stoker.cli import main
from stoker.cli.terminal import Bar, echo, make_console, print_commands, print_json, styled
from stoker.display import escaped_json, printable
from stoker.errors import InputError, StokerError

TITLE = "\x1b]0;owned\x07"
NAME = f"a{TITLE}\x9b31m\u202e\u2066[red]b:smile:\nTry: rm -rf ~\r\x08\u2028c"
ALLOWED = {"\n"}


def assert_harmless(text: str) -> None:
    """No character that a terminal obeys, and no line that a name has begun."""
    for letter in set(text) - ALLOWED:
        kind = unicodedata.category(letter)
        assert kind not in ("Cc", "Cs", "Zl", "Zp"), ascii(text)
        assert unicodedata.bidirectional(letter) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    assert not any(line.strip(" │┃").startswith("Try: rm") for line in text.splitlines()), text


# -- the edge ----------------------------------------------------------------------------------


@given(st.text())
def test_any_text_becomes_one_harmless_line(text):
    assert_harmless(printable(text))
    assert "\n" not in printable(text)
    assert printable(printable(text)) == printable(text)


def test_every_character_that_a_terminal_obeys_is_shown_escaped():
    letters = [chr(code) for code in range(sys.maxunicode + 1)]
    bad = [each for each in letters if unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp")]
    bad += [each for each in letters if unicodedata.category(each) == "Cf" and _is_unseen(each)]
    assert not [ascii(each) for each in bad if printable(each) == each]
    for kept in ("é", "密", "ش", "🔑", "\u200d", "\u00a0", "a", "\u3000", "\\", "'"):
        assert printable(kept) == kept


def _is_unseen(letter: str) -> bool:
    """Whether a format character has no shape: Arabic number signs and the like have one, and joiners stay."""
    seen = re.compile("[\u0600-\u0605\u06dd\u070f\u0890-\u0891\u08e2\U000110bd\U000110cd\U00013430-\U0001345f"
                      "\U0001bca0-\U0001bca3\u200c\u200d]")  # fmt: skip
    return not seen.match(letter)


@given(st.text(), st.text(), st.text(), st.lists(st.text()))
def test_every_error_is_its_lines_and_no_more(given, allowed, fix, details):
    error = InputError(given, allowed, fix, details)
    assert_harmless(str(error).replace("Try: rm", ""))
    assert len(str(error).split("\n")) == 1 + bool(allowed) + bool(fix) + len(details)


@pytest.mark.parametrize("stderr", [True, False])
def test_lines_tables_and_bars_show_names_as_they_are(capsys, stderr):
    from rich.table import Table

    console = make_console(stderr=stderr)
    table = Table(NAME, "value", title=NAME)
    table.add_row(NAME, styled(NAME, "bold"), style="red")
    console.print(table)
    console.print(NAME, soft_wrap=True)
    console.print(NAME, style="bold")
    print_commands(console, [NAME])
    echo(NAME, err=stderr)
    with Bar() as bar:
        bar.start(NAME, 3, NAME)
        bar.show(NAME)
        bar.say(NAME)
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    assert (out + err).count("[red]b:smile:") >= 5  # no markup, no emoji codes


def test_a_bar_takes_names_as_they_are(capsys):
    from stoker.cli.terminal import _make_bars

    bars = _make_bars()
    bars.add_task("[red]x", total=3, unit="rows", info="[bold]y")
    make_console().print(bars.make_tasks_table(bars.tasks))
    out = capsys.readouterr().out
    assert "[red]x" in out
    assert "[bold]y" in out


def test_json_escapes_what_a_terminal_would_obey(capsys):
    print_json({NAME: [NAME]})
    out = capsys.readouterr().out
    assert_harmless(out)
    assert json.loads(out) == {NAME: [NAME]}
    document = {NAME: ["é密", "\udcff"]}
    text = escaped_json(json.dumps(document, ensure_ascii=False, indent=2))
    assert_harmless(text)
    assert json.loads(text) == document
    assert "é密" in text


def test_pages_hold_no_control_characters():
    html = page.html(NAME, [page.Section("a", NAME, page.facts({NAME: NAME}))], subtitle=NAME)
    assert_harmless(html.replace("\t", " ").replace("\r", " ").replace("Try: rm", ""))


def printing_calls(path: Path) -> set[str]:
    """Return the calls of a file that put text on a terminal, or make text that rich takes as it is."""
    direct = {"print", "typer.echo", "Console", "Text", "Text.from_markup"}
    direct |= {"sys.stdout.write", "sys.stderr.write", "traceback.print_exception"}
    calls = nodes(path.read_text(), ast.Call)
    return {ast.unparse(call.func) for call in calls} & direct


def test_only_one_file_prints():
    """Verbs print through `terminal`; nothing below them prints at all."""
    package = Path(main.__file__).parent.parent
    found = {
        str(path.relative_to(package)): calls
        for path in package.rglob("*.py")
        if (calls := printing_calls(path)) and "probe" not in path.parts
    }
    assert found == {
        "cli/terminal.py": {"typer.echo", "Text"},
        "cli/monitor.py": {"Text"},  # an empty one, filled with cells from `styled`
        "packing/workers.py": {"sys.stderr.write"},  # a child's warning, made printable
        "compat/massspec_memory.py": {"sys.stdout.write"},  # a child's JSON for its parent
    }


# -- files with such names ---------------------------------------------------------------------


def run(monkeypatch, capsys, *words: object) -> str:
    """Run a verb as the shell would; return all that it printed."""
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, words)])
    with pytest.raises(SystemExit):
        main.run()
    out, err = capsys.readouterr()
    assert_harmless(out + err)
    return out + err


def write_csv(path: Path, names: list[str], text: str = "x") -> None:
    quoted = ",".join('"' + name.replace('"', '""') + '"' for name in names)
    rows = "".join(f"{n},{n * n},{text if n % 2 else n}\n" for n in range(40))
    path.write_text(f"{quoted}\n{rows}", newline="")


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """A folder of files whose names and contents are hostile."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / f"{NAME}.csv", ["a", NAME, f"{NAME} too"])
    write_csv(tmp_path / "twice.csv", [NAME, NAME, "c"])
    write_csv(
        tmp_path / "values.csv", ["a", "b", "c"], text=NAME.replace("\n", " ").replace("\r", " ")
    )
    np.savez(tmp_path / "a.npz", **{NAME: np.ones((4, 2)), f"{NAME}2": np.ones(3)})
    np.savez(tmp_path / "nan.npz", **{NAME: np.full((4, 2), np.nan)})
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file[NAME] = np.full((4, 2), np.nan)
        file[f"{NAME}2"] = np.ones(3)
    (tmp_path / "classes" / NAME).mkdir(parents=True)
    (tmp_path / "classes" / NAME / f"{NAME}.png").write_bytes(b"no picture")
    (tmp_path / "EURUSD_M5.csv").write_text(f"{NAME}\n{NAME}")
    (tmp_path / f"{NAME}_M5.csv").write_text(f"{NAME},b,c\n")
    (tmp_path / "a.msp").write_text(
        f"Name: {NAME}\nNum Peaks: {NAME}\n1 2\n\nName: b\nNum Peaks: 1\nx{NAME}\n"
    )
    (tmp_path / "a.yaml").write_text(
        json.dumps({NAME: {NAME: 1}, "recipe": {"name": NAME, NAME: NAME}})
    )
    (tmp_path / f"{NAME}.yaml").write_text("recipe: {name: x}")
    return tmp_path


VERBS = [
    ["inspect", f"{NAME}.csv"], ["inspect", "twice.csv"], ["inspect", "values.csv"], ["inspect", "a.npz"],
    ["inspect", "nan.npz"], ["inspect", "a.h5"], ["inspect", NAME], ["inspect", f"{NAME}.csv", "--target", NAME],
    ["inspect", "a.h5", "--html", f"{NAME}.html"], ["verify", "a.h5"], ["verify", NAME], ["plan", "a.h5"],
    ["plan", NAME], ["pack", "table", f"{NAME}.csv", "out"], ["pack", "table", "twice.csv", "out"],
    ["pack", "table", "values.csv", "out"], ["pack", "table", "values.csv", "out", "--target", NAME],
    ["pack", "table", "values.csv", "out", "--drop", NAME], ["pack", "table", NAME, "out"],
    ["pack", "arrays", "a.npz", "out"], ["pack", "arrays", "nan.npz", "out"], ["pack", "arrays", NAME, "out"],
    ["pack", "arrays", "a.npz", "out", "--names", NAME], ["pack", "images", "classes", "out"],
    ["pack", "images", NAME, "out"], ["pack", "bars", "EURUSD_M5.csv", "out"],
    ["pack", "bars", f"{NAME}_M5.csv", "out"], ["pack", "bars", NAME, "out"],
    ["pack", "massspec", "--msp", "a.msp", "out"], ["pack", "massspec", "--msp", NAME, "out"],
    ["pack", "segmentation", "--images", "classes", "--masks", NAME, "out"],
    ["config", "check", "a.yaml"], ["config", "check", f"{NAME}.yaml"], ["config", "check", NAME],
    ["config", "show", "a.yaml"], ["train", "--config", "a.yaml"], ["train", "--set", NAME],
    ["train", "--config", f"{NAME}.yaml", "--set", f"{NAME}={NAME}"], ["report", NAME], ["monitor", NAME, "--once"],
    ["config", "migrate", "a.yaml", f"{NAME}2.yaml"], ["predict", NAME, NAME, NAME], ["export", NAME, NAME, "--int8"],
    ["export", NAME, NAME], ["doctor", "--", NAME], ["augment", "preview", NAME, NAME],
    ["augment", "preview", "classes", "out.png", "--masks", NAME], ["machine", NAME],
    [NAME], ["inspect", "a.h5", NAME], ["inspect", f"--{NAME}"], ["plan", "a.h5", "--batch-size", NAME],
    ["tune", "--config", "a.yaml", "--out", "a.h5"], ["plan", "a.h5", "--ram", NAME],
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    VERBS,
    ids=[f"{n}-{words[0][:9]}" if words[0].isalpha() else str(n) for n, words in enumerate(VERBS)],
)
def test_no_verb_lets_a_name_speak(hostile, monkeypatch, capsys, words):
    said = run(monkeypatch, capsys, *words)
    assert "fault in stoker" not in said, said


def test_a_server_cannot_speak_to_the_terminal(tmp_path, monkeypatch, capsys):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    pytest.importorskip("aiohttp")
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))

    class Rude(BaseHTTPRequestHandler):
        def log_message(self, *words) -> None:
            pass

        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 403 \x1b]0;owned\x07\x9b31m\r\nContent-Length: 0\r\n\r\n")

    with HTTPServer(("127.0.0.1", 0), Rude) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        said = run(monkeypatch, capsys, "verify", f"http://127.0.0.1:{server.server_port}/store")
        server.shutdown()
    assert "403" in said


def test_a_real_terminal_gets_no_escape_from_a_name(hostile):
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "stoker", "inspect", f"{NAME}.csv"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
    ) as process:  # fmt: skip
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # how a pty says that it is over
                break
            if not piece:
                break
            seen += piece
        process.wait(200)
    os.close(ours)
    text = seen.decode()
    assert "\\x1b]0;owned\\x07" in text
    assert TITLE not in text
    assert "\x9b" not in text
    assert "\u202e" not in text


def test_library_users_get_harmless_errors_too(tmp_path):
    from stoker import open_store

    with pytest.raises(StokerError) as caught:
        open_store(tmp_path / NAME)
    assert_harmless(str(caught.value))
