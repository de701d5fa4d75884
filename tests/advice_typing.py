"""Types what an error says to type, as a user would: into the shell, the command, the config or the Python call.

A case is refused, its `Try:` is split into the ways that it names, and each way is typed. It fails where a way is
refused again, where it is no command or Python at all, or where nothing in the advice could be typed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from advice_sites import PACKAGE, PROGRAMS, Site, all_sites, parsed, ways_of
from stoker.config import yaml_lines
from stoker.config.tree import key_schemas, sections
from stoker.errors import StokerError

# What the placeholders of the help pages stand for, in the folder that every case gets.
PLACES = {
    "STORE": "store", "FOLDER": "pictures", "IMAGES": "pictures", "MASKS": "masks", "OUT": "made",
    "CONFIG": "config.yaml", "FILE.npy": "a.npy", "CKPT": "run/best.pt", "FILE": "new-file", "NAME": "new-name",
    "LIBRARY.msp": "library.msp", "MOLS": "mols", "FILE.csv": "table.csv", "runs/NAME/best.pt": "run/best.pt",
    "OUT.safetensors": "out.safetensors", "KIND": "table", "COLUMN": "label", "RECIPE": "tabular",
}  # fmt: skip
_LOOKS = (
    "ls",
    "df",
    "head",
    "gzip",
    "unzip",
    "file",
    "fuser",
    "dd",
    "command",
    "expand",
    "iconv",
    "du",
)


@dataclass
class Case:
    """Something that is refused.

    Args:
        wrong: Words of a `stoker` command; or Python whose last line is refused.
        setup: Python that is run first, in the folder of the case.
        at: The word or text in `wrong` that an advice without a name replaces.
        fill: What the placeholders of this advice stand for, beside `PLACES`.
        into: The function that keywords of the advice belong to, where it is not the outermost.
        then: Part of a later refusal that is right, after what was advised was taken.
        env: Variables of the environment.
    """

    wrong: list[str] | str
    setup: str = ""
    at: str = ""
    fill: Mapping[str, str] = field(default_factory=dict)
    into: str = ""
    then: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.wrong if isinstance(self.wrong, str) else f"stoker {shlex.join(self.wrong)}"


@dataclass
class Record:
    """An advice that was made, and the lines of the package on the stack."""

    fix: str
    lines: tuple[tuple[str, int], ...]


_records: list[Record] = []


def _lines_on_stack() -> tuple[tuple[str, int], ...]:
    found = []
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{PACKAGE}{os.sep}"):
            found.append((name[len(str(PACKAGE)) + 1 :], frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Note where every error and every problem of a config is made."""
    of_error, of_problem = StokerError.__init__, yaml_lines.Problem.__init__

    def error(self: StokerError, *args: Any, **named: Any) -> None:
        of_error(self, *args, **named)
        _records.append(Record(self.fix, _lines_on_stack()))

    def problem(self: Any, *args: Any, **named: Any) -> None:
        of_problem(self, *args, **named)
        _records.append(Record(self.fix, _lines_on_stack()))

    StokerError.__init__, yaml_lines.Problem.__init__ = error, problem
    try:
        yield
    finally:
        StokerError.__init__, yaml_lines.Problem.__init__ = of_error, of_problem
        _records.clear()


class ReachedError(BaseException):
    """The long work that a command does after everything that it could refuse."""


class NotTypedError(AssertionError):
    """An advice that could not be typed, or was refused."""


def type_advice(case: Case, namespace: Callable[[], dict[str, Any]]) -> set[Site]:
    """Provoke the error of a case, type each way that its advice names, and return the sites that gave it.

    The working folder is the case's own; `namespace` makes the names that its Python begins with.
    """
    _records.clear()
    trial = _Trial(case, namespace)
    refused = trial.run(case.wrong, fresh=True)
    if refused is None:
        raise NotTypedError("it was not refused")
    if not isinstance(refused, StokerError):
        raise NotTypedError(f"refused by {type(refused).__name__}: {refused}")
    sites = {
        site
        for record in _records
        if record.fix in _fixes(refused)
        for file, line in record.lines
        for site in _sites_of(file)
        if site.first <= line <= site.last
    }
    ways = ways_of(refused.fix)
    if not ways:
        raise NotTypedError(f"nothing to type in {refused.fix!r}")
    # Some say the same for the command line and for Python.
    fitting = [way for way in ways if way.startswith("--") != isinstance(case.wrong, str)]
    for way in (fitting or ways) if isinstance(case.wrong, str) else ways:
        again = trial.type(way)
        if again is not None and not (case.then and case.then in str(again)):
            raise NotTypedError(f"{way!r} was typed: {type(again).__name__}: {again}")
    return sites


@cache
def _sites_of(file: str) -> tuple[Site, ...]:
    return tuple(site for site in all_sites() if site.file == file)


def _fixes(error: BaseException | None) -> set[str]:
    """Return the advice of an error and of those that it was made from."""
    own = {error.fix} if isinstance(error, StokerError) else set()
    return own | (_fixes(error.__cause__) if error is not None and error.__cause__ else set())


class _Trial:
    def __init__(self, case: Case, namespace: Callable[[], dict[str, Any]]) -> None:
        self.case, self.namespace = case, namespace
        self.names: dict[str, Any] = {}

    def run(self, what: list[str] | str, fresh: bool = False, first: str = "") -> Exception | None:
        """Return what was raised, or None."""
        if fresh:
            self.names = self.namespace()
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                if fresh:
                    exec(self.case.setup, self.names)
                if isinstance(what, str):
                    exec(first, self.names)
                    exec(what, self.names)
                else:
                    _run_command(what)
        except ReachedError:
            return None
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def type(self, way: str) -> Exception | None:
        """Type one way and return how it was refused, or None."""
        way = self._filled(way)
        program = way.partition(" ")[0]
        if program == "stoker":
            return self.run(shlex.split(way)[1:])
        if program in PROGRAMS:
            return self._shell(way)
        variable = re.fullmatch(r"(STOKER_\w+|PYTHONPATH)=(\S+)", way)
        if variable:
            if variable[1] == "PYTHONPATH":  # read when Python starts, which it has
                sys.path.insert(0, str(Path(variable[2]).absolute()))
            before = os.environ.get(variable[1])
            os.environ[variable[1]] = variable[2]
            try:
                return self.run(self.case.wrong, fresh=True)
            finally:
                os.environ.pop(variable[1])
                if before is not None:
                    os.environ[variable[1]] = before
        if isinstance(self.case.wrong, str):
            return self._python(way)
        return self.run(self._words(way))

    def _filled(self, way: str) -> str:
        if way.startswith("OUT "):
            return way
        places = {**PLACES, **self.case.fill}
        for name, word in sorted(places.items(), key=lambda item: -len(item[0])):
            way = re.sub(rf"(?<![\w.]){re.escape(name)}(?![\w=])", word, way)
        return way

    def _shell(self, line: str) -> Exception | None:
        package = re.fullmatch(r"pip install '?([\w-]+)(?:\[([\w-]+)\])?'?", line)
        if package:  # nothing is installed here: the extra must exist, and the name be a package's
            known = tomllib.loads((PACKAGE.parent.parent / "pyproject.toml").read_text())["project"]
            ok = package[2] is None or package[2] in known["optional-dependencies"]
            return None if ok else NotTypedError(f"there is no extra {package[2]!r}")
        inside = line.startswith("rm ") and f" {Path.cwd()}/" in line and ".." not in line
        if not inside and line.partition(" ")[0] not in (
            *_LOOKS,
            "mkdir",
            "gunzip",
            "sed",
            "python",
            "python3",
            "mv",
        ):
            raise NotTypedError(f"{line!r} is not run here")
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=env, timeout=200, check=False
        )
        if done.returncode:
            # `gzip -t` and `unzip -t` say no of a file that is damaged, which is their answer.
            if re.match(r"(gzip|unzip) -t", line) and "No such file" not in done.stderr:
                return None
            return RuntimeError(f"exit {done.returncode}: {done.stderr}")
        if line.partition(" ")[0] in _LOOKS or "visititems(print)" in line:
            return None
        return self.run(self.case.wrong, fresh=isinstance(self.case.wrong, str))

    # -- commands --------------------------------------------------------------------------------

    def _words(self, way: str) -> list[str]:
        assert isinstance(self.case.wrong, list)
        words = list(self.case.wrong)
        left_out = re.fullmatch(r"leave (\S+) out", way)
        if left_out:
            return _without(words, left_out[1])
        if way.startswith("--"):
            for option, values in _options(shlex.split(way)):
                if option == "--set":
                    words = _without_override(words, values[0].partition("=")[0])
                if option == "--set" or option not in words:
                    before = words.index("--") if "--" in words else len(words)
                    words[before:before] = [option, *values]
                else:
                    words[words.index(option) + 1 : words.index(option) + 1 + len(values)] = values
            return words
        overrides = [at for at, word in enumerate(words) if words[at - 1 : at] == ["--set"]]
        if overrides and not self.case.at:
            words[overrides[-1]] = retyped(words[overrides[-1]], way)
            return words if words[overrides[-1]] else words[: overrides[-1] - 1]
        typed = shlex.split(way.removeprefix("OUT "))
        if self.case.at not in words:
            raise NotTypedError(f"no place for {way!r}")
        at = words.index(self.case.at)
        return [*words[:at], *typed, *words[at + 1 :]]

    # -- Python ------------------------------------------------------------------------------------

    def _python(self, way: str) -> Exception | None:
        wrong = self.case.wrong
        assert isinstance(wrong, str)
        *before, last = ast.parse(wrong).body
        head = "\n".join(map(ast.unparse, before))
        left_out = re.fullmatch(r"leave (\w+) out", way)
        if left_out:
            for call in _calls(last):
                call.keywords = [word for word in call.keywords if word.arg != left_out[1]]
            return self.run(f"{head}\n{ast.unparse(last)}", fresh=True)
        if self.case.at:
            if wrong.count(self.case.at) != 1:
                raise NotTypedError(f"{self.case.at!r} is no place in {wrong!r}")
            return self.run(wrong.replace(self.case.at, way), fresh=True)
        call = parsed(way)
        if call is None:
            raise NotTypedError(f"{way!r} is no Python")
        if call.keywords and not call.args:
            _merge(self._call(last, self.case.into), call)
            return self.run(f"{head}\n{ast.unparse(last)}", fresh=True)
        if not call.args:  # a statement, then the same again
            return self.run(wrong, fresh=True, first=way)
        typed = call.args[0]
        if isinstance(typed, ast.Call) and any(map(_is_dots, typed.args)):
            _merge(self._call(last, _name(typed)), typed)
            return self.run(f"{head}\n{ast.unparse(last)}", fresh=True)
        if isinstance(typed, ast.Call) and any(_name(one) == _name(typed) for one in _calls(last)):
            found = self._call(last, _name(typed))
            found.func, found.args, found.keywords = typed.func, typed.args, typed.keywords
            return self.run(f"{head}\n{ast.unparse(last)}", fresh=True)
        # An expression over a name: it takes the place of that name.
        given = [
            node.id
            for node in ast.walk(typed)
            if isinstance(node, ast.Name) and node.id in _names(last)
        ]
        if not given:
            raise NotTypedError(f"{way!r} has no place in {wrong!r}")
        return self.run(wrong, fresh=True, first=f"{head}\n{given[0]} = {ast.unparse(typed)}")

    def _call(self, tree: ast.AST, name: str) -> ast.Call:
        for call in _calls(tree):
            if not name or _name(call) == name:
                return call
        raise NotTypedError(f"there is no call of {name!r}")


def retyped(override: str, way: str) -> str:
    """Return a `KEY=VALUE` with the key or the value that was advised; "" where it is to be deleted."""
    key, _, value = override.partition("=")
    name, colon, better = way.partition(": ")
    if way.startswith("delete "):
        return ""
    if colon and re.fullmatch(r"[\w.]+", name):
        return f"{name}={better}"
    return (
        f"{way}={value}"
        if way in {*key_schemas(), *sections()}
        or ("." in key and way.startswith("recipe.options."))
        else f"{key}={way}"
    )


@cache
def _command() -> Any:
    import typer

    from stoker.cli import main

    return typer.main.get_command(main.app)


def _run_command(words: Sequence[str]) -> None:
    code = _command().main(list(words), prog_name="stoker", standalone_mode=False)
    if isinstance(code, int) and code:
        raise RuntimeError(f"exit code {code}")


def _options(words: list[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            found.append((option, [value] if value else []))
        else:
            found[-1][1].append(word)
    return found


def _without(words: list[str], option: str) -> list[str]:
    at = words.index(option)
    takes = at + 1 < len(words) and not words[at + 1].startswith("--")
    return words[:at] + words[at + 1 + takes :]


def _without_override(words: list[str], key: str) -> list[str]:
    """Return the words without the `--set` of a key, of its section, or of something without a value."""
    kept: list[str] = []
    for word in words:
        if kept[-1:] == ["--set"]:
            name, equals, _ = word.partition("=")
            if name == key or not equals or name in sections():
                kept.pop()
                continue
        kept.append(word)
    return kept


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_dots(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _merge(call: ast.Call, typed: ast.Call) -> None:
    given = {word.arg for word in typed.keywords}
    call.keywords = [word for word in call.keywords if word.arg not in given] + typed.keywords
