"""Verbs: arguments, options and their help, from signature and docstring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from stoker.cli.options import verb


@dataclass(frozen=True)
class Reading:
    """How it is read.

    Attributes:
        sep: Between cells, which may be
            anything.
        is_sorted: Whether it is sorted.
    """

    sep: str = ","
    is_sorted: bool = False


@dataclass(frozen=True)
class Other(Reading):
    """The same with another default."""

    sep: str = ";"


def make(seen: dict[str, object]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @verb
    def read(
        files: list[Path],
        *,
        reading: Reading,
        also: Other,
        sep: str = "",
        least: Annotated[int, typer.Option("--at-least", min=2)] = 2,
    ) -> None:
        """Read files.

        Options:
            files: What to read.
            least: Fewest rows.
        """
        seen.update(locals())

    return app


def test_help_is_that_of_the_docstrings():
    shown = CliRunner().invoke(make({}), ["--help"], env={"COLUMNS": "160", "NO_COLOR": "1"})
    for words in ("Read files.", "What to read.", "Between cells, which may be anything."):
        assert words in shown.output
    assert "--at-least" in shown.output
    assert "Options:" not in shown.output
    assert "--no-is-sorted" not in shown.output


def test_an_option_of_two_groups_is_one_option():
    seen: dict[str, object] = {}
    done = CliRunner().invoke(make(seen), ["a", "b", "--sep", "|", "--is-sorted"])
    assert done.exit_code == 0, done.output
    assert seen["files"] == [Path("a"), Path("b")]
    assert (seen["reading"], seen["also"]) == (Reading("|", True), Other("|", True))
    assert (seen["sep"], seen["least"]) == ("|", 2)


@pytest.mark.parametrize("words", [[], ["a", "--at-least", "1"], ["a", "--least", "3"]])
def test_what_does_not_fit_is_refused(words):
    assert CliRunner().invoke(make({}), words).exit_code == 2
