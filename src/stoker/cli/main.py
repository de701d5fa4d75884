"""The command `stoker`: its verbs, and what an error ends with.

Importing this file loads typer and nothing heavy: every verb imports what it needs when it runs,
so that `stoker --help` answers in well under half a second.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

import stoker
from stoker.cli import (
    augment,
    bench,
    config,
    demo,
    doctor,
    export,
    inspect,
    machine,
    migrate,
    monitor,
    pack,
    plan,
    predict,
    profile,
    quantize,
    report,
    train,
    tune,
    verify,
)
from stoker.errors import (
    EXIT_DONE,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OURS,
    OtherRankError,
    StokerError,
)

app = typer.Typer(
    name="stoker",
    help="Keeps a GPU fed: packs raw files into a compact, checked store, and trains from it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DATA, _TRAINING, _LOOKING = "Data", "Training", "Why it is slow, and how it goes"
app.add_typer(pack.app, name="pack", rich_help_panel=_DATA)
app.command("inspect", rich_help_panel=_DATA)(inspect.inspect)
app.command("verify", rich_help_panel=_DATA)(verify.verify)
app.command("plan", rich_help_panel=_DATA)(plan.plan)
app.add_typer(augment.app, name="augment", rich_help_panel=_DATA)
app.command("train", rich_help_panel=_TRAINING)(train.train)
app.command("tune", rich_help_panel=_TRAINING)(tune.tune)
app.command("predict", rich_help_panel=_TRAINING)(predict.predict)
app.command("quantize", rich_help_panel=_TRAINING)(quantize.quantize)
app.command("export", rich_help_panel=_TRAINING)(export.export)
app.add_typer(config.app, name="config", rich_help_panel=_TRAINING)
app.command("migrate-config", rich_help_panel=_TRAINING)(migrate.migrate_config)
# What stands behind the first word of a script's command belongs to the script, dashes or not.
app.command(
    "doctor", context_settings={"allow_interspersed_args": False}, rich_help_panel=_LOOKING
)(doctor.doctor)
app.command("profile", rich_help_panel=_LOOKING)(profile.profile)
app.command("monitor", rich_help_panel=_LOOKING)(monitor.monitor)
app.command("report", rich_help_panel=_LOOKING)(report.report)
app.command("machine", rich_help_panel=_LOOKING)(machine.machine)
app.add_typer(bench.app, name="bench", rich_help_panel=_LOOKING)
app.command("demo", rich_help_panel=_LOOKING)(demo.demo)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stoker {stoker.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


def run() -> NoReturn:
    """Run the command line and end the process with the exit code of `errors.py`."""
    try:
        # Named, so that completion and usage are those of `stoker` under `python -m stoker` too.
        code = app(prog_name="stoker", standalone_mode=False)
    except OtherRankError as error:
        code = error.exit_code
    except StokerError as error:
        _complain(str(error))
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):  # newer typers return 130 instead
        code = EXIT_INTERRUPTED
    except SystemExit:
        # Without its standalone mode typer ends by itself in one case only: the reader of our
        # output went away. That is not an error, and nobody is left to tell.
        code = EXIT_DONE
    except Exception as error:  # noqa: BLE001  the last line of defence: report, do not crash
        code = _usage(error)
        if code is None:
            _our_fault(error)
            code = EXIT_OURS
    if code == EXIT_INTERRUPTED:
        # It ends already: one more Ctrl-C would only change how (Python gives the signal back at its end).
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not _other_rank():
            _complain("interrupted; what was finished is kept")
    sys.exit(code if isinstance(code, int) else EXIT_DONE)


def _usage(error: Exception) -> int | None:
    """Print a mistake in the command's words; None when `error` is something else."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    # Newer typers carry a click of their own, so the base class is found by its name.
    bases = {base.__name__ for base in type(error).__mro__}
    if "ClickException" not in bases:
        return None
    error.show()  # type: ignore[attr-defined]
    return EXIT_INPUT


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    first, _, rest = f"{_other_rank()}{message}".partition("\n")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text("error: ", style="bold red") + Text(first))
    if rest:
        console.print(Text(rest))


def _other_rank() -> str:
    """Return who speaks, where it is not the first of several processes."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"rank {rank}: "


def _our_fault(error: Exception) -> None:
    if os.environ.get("STOKER_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    _complain(
        f"{type(error).__name__}: {error}{notes}\n"
        "This is a fault in stoker, not in your input. STOKER_TRACEBACK=1 before the command shows where."
    )
