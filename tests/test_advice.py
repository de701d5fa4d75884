"""What an error says to type is typed: a `Try:` that is refused again fails here.

Each part of the package has cases that are refused, and every way that their advice names is typed
(`advice_typing`). The places that give an advice are read from the source (`advice_sites`): one that no case
reaches fails too, unless `UNTYPED` says why it cannot be typed here. `PENDING` holds the places that were there
before this test and have no case yet: it may only become shorter.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from advice_cases_commands import COMMANDS
from advice_cases_python import PYTHON, namespace
from advice_folder import make_folder, restore
from advice_sites import PACKAGE, all_sites
from advice_typing import Case, NotTypedError, ReachedError, recording, type_advice
from advice_untyped import PENDING, UNTYPED
from stoker.packing.workers import Workers

pytestmark = pytest.mark.usefixtures("one_thread")
# Of the names, not of `all_sites()`, which reads the whole package: every collection would pay for it.
AREAS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})
LONG = (
    "stoker.train.trainer.Trainer.fit",
    "stoker.train.launch.launch",
    "stoker.tune.job._Search",
    "stoker.doctor.trace._make_profiler",
    "stoker.compat.massspec_memory._in_new_process",
    "stoker.doctor.attach._watch",
    "stoker.doctor.outside._read_stacks",
    "stoker.doctor.ablation.examine",
    "stoker.demo.story._make_plan",
    "stoker.recipes.export.graph._trace",
    "stoker.cli.config._print_settings",
)


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("advice") / "template"
    folder.mkdir()
    make_folder(folder)
    return folder


@pytest.fixture
def in_copy(template, tmp_path, monkeypatch) -> Iterator[Any]:
    """Return what types a case in a copy of the folder, with the long work cut off."""

    def reached(*args: object, **named: object) -> None:
        for started in args:
            if isinstance(started, subprocess.Popen):  # a script that the doctor would watch
                started.kill()
                started.wait()
        raise ReachedError

    originals = {name.rpartition(".")[2]: pkgutil.resolve_name(name) for name in LONG}
    for name in LONG:
        monkeypatch.setattr(name, reached)
    # It shows samples of a store that is there, and can refuse nothing any more.
    monkeypatch.setattr("stoker.cli.pack._write_page", lambda result: {})
    monkeypatch.setattr("stoker.cli.pack.print_result", lambda *given, **named: None)
    made = Workers.__init__

    def in_this_process(self: Workers, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self.isolated = False

    monkeypatch.setattr(Workers, "__init__", in_this_process)
    home, path = Path.cwd(), [*sys.path]
    copy = tmp_path / "copy"
    shutil.copytree(template, copy, symlinks=True)

    def type_case(case: Case):
        os.chdir(copy)
        with monkeypatch.context() as patch, recording():
            for name, value in case.env.items():
                patch.setenv(name, value)
            try:
                return type_advice(case, namespace)
            finally:
                os.chdir(home)
                sys.path[:] = path  # a recipe of one's own is looked for in the folder
                for name in [*sys.modules]:  # what a case has put in the place of a library
                    if isinstance(sys.modules[name], SimpleNamespace):
                        del sys.modules[name]
                restore(template, copy)

    yield type_case
    os.chdir(home)
    # A module that a case was the first to import has taken what stood in the place of the work.
    for module in [module for name, module in sys.modules.items() if name.startswith("stoker.")]:
        for name in [name for name, value in vars(module).items() if value is reached]:
            setattr(module, name, originals[name])


# They have 239 of 905 cases and take longest: most of them pack. All are typed in `make campaign`.
SHORTENED = ("recipes", "sources")


@pytest.mark.parametrize(
    "area",
    [pytest.param(area, marks=[pytest.mark.slow] * (area in SHORTENED)) for area in AREAS],
)
def test_what_an_error_says_to_type_is_not_refused_again(area, in_copy):
    failures, typed = [], set()
    for case in [*COMMANDS.get(area, ()), *PYTHON.get(area, ())]:
        try:
            typed |= in_copy(case)
        except NotTypedError as error:
            failures.append(f"{case}\n    {error}")
    there = {site for site in all_sites() if site.file.partition("/")[0] == area}
    left = {str(site) for site in there - typed}
    excused, waiting = left & {*UNTYPED}, left & {*PENDING}
    print(
        f"{area}: {len(there & typed)} of {len(there)} typed, {len(excused)} cannot be, {len(waiting)} have no case yet"
    )
    assert not failures, "\n".join(failures)
    missing = sorted(left - excused - waiting)
    assert not missing, "no case types the advice of:\n" + "\n".join(missing)
    done = {str(site) for site in there & typed} - left
    assert not done & {*UNTYPED, *PENDING}, "typed by now: take it out of advice_untyped.py"


@pytest.mark.parametrize("area", SHORTENED)
def test_every_third_advice_of_the_long_ones_is_not_refused_again(area, in_copy):
    for case in [*COMMANDS.get(area, ()), *PYTHON.get(area, ())][::3]:
        in_copy(case)


def test_what_cannot_be_typed_has_a_reason_and_still_exists():
    assert {*UNTYPED, *PENDING} <= {str(site) for site in all_sites()}
    assert not {*UNTYPED} & {*PENDING}
    assert all(len(reason.split()) > 2 for reason in UNTYPED.values())
