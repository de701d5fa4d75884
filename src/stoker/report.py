"""Sinks: progress for people, pages for browsers. Imports nothing above `errors` and `units`."""

from __future__ import annotations

from typing import Protocol, Self


class Progress(Protocol):
    """Somebody who wants to know how far a long job is. Used as a context manager."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Begin a stage of `total` `unit`s (None when unknown)."""

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""

    def say(self, line: str) -> None:
        """A line for the user that is not progress."""


class Silent:
    """A `Progress` that keeps quiet: the default everywhere below the command line."""

    def start(self, label: str, total: int | None, unit: str) -> None:
        """Ignore."""

    def advance(self, count: int = 1) -> None:
        """Ignore."""

    def say(self, line: str) -> None:
        """Ignore."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None
