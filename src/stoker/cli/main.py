"""The command `stoker`: its verbs, and how errors end it.

Importing this file loads typer and nothing heavy: every verb imports what it needs when it runs,
so that `stoker --help` answers in well under half a second.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import stoker
from stoker import lifetime, stalls
from stoker.address import HIDDEN_WORDS, keep_secrets
from stoker.cli import (
    augment,
    bench,
    config,
    demo,
    doctor,
    export,
    inspect,
    machine,
    meant,
    monitor,
    pack,
    plan,
    predict,
    renamed,
    report,
    terminal,
    train,
    tune,
    verify,
)
from stoker.cli.terminal import STDOUT, echo, make_console, print_json, styled
from stoker.display import printable
from stoker.errors import (
    EXIT_DONE,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OURS,
    FileError,
    OtherRankError,
    StokerError,
    file_error,
    missing_package,
    unusable_name,
    with_causes,
)
from stoker.strict_json import parse_json

_ORDER = (
    "pack", "inspect", "verify", "plan", "augment",
    "train", "tune", "predict", "export", "config",
    "doctor", "monitor", "report", "machine", "demo",
)  # fmt: skip


class _Verbs(TyperGroup):
    """Lists the verbs in the order of use; typer alone puts groups such as `pack` last."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  as click calls it
        """Return the listed verbs, then those that are hidden."""
        return sorted(self.commands, key=lambda name: (*_ORDER, name).index(name))


app = typer.Typer(
    name="stoker",
    cls=_Verbs,
    help="Keeps a GPU fed: packs raw files into a compact, checked store, and trains from it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DATA, _TRAINING, _LOOKING = "Data", "Training", "Diagnosis and monitoring"
app.add_typer(pack.app, name="pack", rich_help_panel=_DATA)
app.command("inspect", rich_help_panel=_DATA)(inspect.inspect)
app.command("verify", rich_help_panel=_DATA)(verify.verify)
app.command("plan", rich_help_panel=_DATA)(plan.plan)
app.add_typer(augment.app, name="augment", rich_help_panel=_DATA)
app.command("train", rich_help_panel=_TRAINING)(train.train)
app.command("tune", rich_help_panel=_TRAINING)(tune.tune)
app.command("predict", rich_help_panel=_TRAINING)(predict.predict)
app.command("export", rich_help_panel=_TRAINING)(export.export)
app.add_typer(config.app, name="config", rich_help_panel=_TRAINING)
# Options behind a script's name belong to the script.
app.command(
    "doctor", context_settings={"allow_interspersed_args": False}, rich_help_panel=_LOOKING
)(doctor.doctor)
app.command("monitor", rich_help_panel=_LOOKING)(monitor.monitor)
app.command("report", rich_help_panel=_LOOKING)(report.report)
app.command("machine", rich_help_panel=_LOOKING)(machine.machine)
app.command("demo", rich_help_panel=_LOOKING)(demo.demo)
# Not listed: a documented command for one kind of data, and spellings of earlier versions.
app.add_typer(bench.app, name="bench", hidden=True)
for _answer in (renamed.quantize, renamed.profile, renamed.migrate_config):
    _old = _answer.__name__.replace("_", "-")
    app.command(_old, hidden=True, context_settings=renamed.PASS_ON)(_answer)


def _version(asked: bool) -> None:
    if asked:
        echo(f"stoker {stoker.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


class _EndedBySignal(BaseException):
    """SIGTERM or SIGHUP: every `finally` and `with` on the way out is run, then the signal takes effect."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end_well() -> None:
    """End child processes and remove temporary files with this command."""

    def raise_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # the command is ending already
        raise _EndedBySignal(number)

    lifetime.is_command = True
    lifetime.end_forked_children_with_this_process()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under `nohup` SIGHUP stays ignored
            signal.signal(number, raise_signal)


def run() -> NoReturn:
    """Run the command line and end the process with the exit code of `errors.py`."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # In the locale de_DE.ISO-8859-1 a class "日本" would end the command; Python does so for stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    _end_well()
    stalls.start_watch(lambda text: echo(f"warning: {text}", err=True))
    words = _typed()
    for word in words:
        keep_secrets(word)
    try:
        # Named, so that completion and usage are those of `stoker` under `python -m stoker` too.
        code = _command_line()(words, prog_name="stoker", standalone_mode=False)
    except _EndedBySignal as ended:
        # As if it had not been caught: a shell, `timeout` or a scheduler sees which signal it was.
        with contextlib.suppress(OSError):
            _flush_output()
        lifetime.end_normally()
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
        code = 128 + ended.number
    except OtherRankError as error:
        code = error.exit_code
    except StokerError as error:
        _show_traceback(error)
        code = _tell(error)
    except (KeyboardInterrupt, typer.Abort):  # newer typers return 130 instead
        code = EXIT_INTERRUPTED
    except SystemExit:
        # Outside of its standalone mode typer exits in one case only: the reader of our output
        # went away. That is not an error, and nobody is left to read one.
        code = EXIT_DONE
    except Exception as error:  # noqa: BLE001  the last line of defence: report, do not crash
        code = _usage(error, words)
        if code is None:
            known = _known(error)
            code = _our_fault(error) if known is None else _tell(known)
    if code == EXIT_INTERRUPTED:
        # The process is ending: Python restores the signal at its exit, and one more Ctrl-C would change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not _other_rank():
            _complain("interrupted; what was finished is kept")
    try:
        _flush_output()
    except OSError as error:
        code = _tell(file_error(error, STDOUT) or FileError(f"{STDOUT}: {error}."))
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


def _open_missing_streams() -> None:
    """Open /dev/null for each closed standard stream: the next opened file would take its number.

    The output of a child process would then go into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # Opened in rising order, so that each gets the lowest number, which is its own.
            os.open(os.devnull, os.O_RDWR if number else os.O_RDONLY)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _command_line() -> Callable[..., object]:
    """Return the whole command; each of its `--json` options sets `terminal.json_is_promised`.

    No option takes the next option as its value: `--html --json` would write a file called "--json".
    """
    whole = typer.main.get_command(app)
    waiting: list[Any] = [whole]
    while waiting:
        one = waiting.pop()
        waiting.extend(getattr(one, "commands", {}).values())
        if one.callback is not None:
            one.callback = _without_end_of_file(one.callback)
        options = {name for each in one.params for name in each.opts if name.startswith("-")}
        for each in one.params:
            if "--json" in each.opts:
                each.is_eager, each.callback = True, _promise_json
            elif each.param_type_name == "option" and not each.is_flag:
                each.callback = _refusing(options, each.callback)
    return whole


def _refusing(options: set[str], follow: Callable[..., object] | None) -> Callable[..., object]:
    """Return a callback that refuses `options` as a value of another option, and then calls `follow`."""

    def check(context: Any, option: Any, value: Any) -> object:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if str(one) in options:
                shape = option.metavar or "VALUE"
                message = f"'{one}' is an option itself. Type a value before it: {option.opts[0]} {shape} {one}"
                raise typer.BadParameter(message, ctx=context, param=option)
        return value if follow is None else follow(context, option, value)

    return check


def _without_end_of_file(verb: Callable[..., object]) -> Callable[..., object]:
    """Return `verb` with RuntimeError instead of EOFError, which typer takes for Ctrl-D."""

    @functools.wraps(verb)
    def run_verb(*given: Any, **options: Any) -> object:
        try:
            return verb(*given, **options)
        except EOFError as error:
            raise RuntimeError(f"a file ended too early: {error}") from error

    return run_verb


def _promise_json(context: object, option: object, value: bool) -> bool:  # noqa: ARG001  as click calls it
    terminal.json_is_promised = value
    return value


def _flush_output() -> None:
    """Flush stdout; a full disk behind `>` is an error like any other."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # Pending output is discarded, so that Python does not try to write it again at exit.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        if not isinstance(error, BrokenPipeError):  # whose reader went away
            raise


def _typed() -> list[str]:
    """Return the words after `stoker`; a stoker process passes words with passwords by the environment."""
    hidden = os.environ.pop(HIDDEN_WORDS, None)
    return sys.argv[1:] if hidden is None else list(parse_json(hidden))


def _known(error: Exception) -> StokerError | None:
    """Return the message for an error caused by the machine or the input; None for a bug in stoker."""
    for found in with_causes(error):
        known: StokerError | None = None
        if isinstance(found, StokerError):
            known = found
        elif isinstance(found, ImportError):
            known = missing_package(found)
        elif isinstance(found, ValueError):
            known = unusable_name(found)
        known = known or file_error(found)
        if known is not None:
            return known
    return None


def _tell(error: StokerError) -> int:
    """Print an error: as text on stderr, and as the document that `--json` promises on stdout."""
    _complain(str(error))
    if terminal.json_is_promised and not _other_rank():
        parts = {"given": error.given, "allowed": error.allowed, "fix": error.fix}
        print_json({"error": {**parts, "details": error.details, "exit_code": error.exit_code}})
    return error.exit_code


def _usage(error: Exception, typed: list[str]) -> int | None:
    """Print an error in the typed command and return the exit code; None for any other error."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    # Newer typers carry a click of their own, so the base class is found by its name.
    bases = {base.__name__ for base in type(error).__mro__}
    if "ClickException" not in bases:
        return None
    words = error.format_message()  # type: ignore[attr-defined]
    error.format_message = lambda: printable(words)  # type: ignore[attr-defined]
    error.show()  # type: ignore[attr-defined]
    if better := meant.advise(typer.main.get_command(app), error, typed):
        echo(f"Try: {better}", err=True)
    return EXIT_INPUT


def _complain(message: str) -> None:
    """Print an error on stderr; its lines are our own, names in it have none."""
    first, *rest = f"{_other_rank()}{message}".split("\n")
    console = make_console(stderr=True, soft_wrap=True)
    console.print(styled("error: ", "bold red") + styled(first))
    for line in rest:
        console.print(line)


def _other_rank() -> str:
    """Return a prefix that names this rank; "" for the first."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"rank {rank}: "


def _show_traceback(error: Exception) -> None:
    """Print the traceback if STOKER_TRACEBACK asks for it."""
    if os.environ.get("STOKER_TRACEBACK"):
        import traceback

        for line in "".join(traceback.format_exception(error)).splitlines():
            echo(line, err=True)


def _our_fault(error: Exception) -> int:
    _show_traceback(error)
    notes = "".join(f"\n{printable(note)}" for note in getattr(error, "__notes__", ()))
    _complain(
        f"{type(error).__name__}: {printable(str(error))}{notes}\n"
        "This is a fault in stoker, not in your input. STOKER_TRACEBACK=1 before the command shows where."
    )
    return EXIT_OURS
