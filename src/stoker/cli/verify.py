"""`stoker verify STORE`: every checksum and the manifest."""

from __future__ import annotations

import time

import typer

from stoker.address import shown
from stoker.cli.options import JsonOption, StoreArgument, verb
from stoker.cli.terminal import Bar, echo, print_json
from stoker.errors import EXIT_INPUT
from stoker.units import format_bytes, format_rate


@verb
def verify(store: StoreArgument, *, as_json: JsonOption = False) -> None:
    """Check every byte of a store against its checksums; exit code 2 if anything is wrong."""
    from stoker.store.reader import open_store

    began = time.perf_counter()
    with open_store(store) as opened, Bar(quiet=as_json) as bar:
        bar.start("verifying", opened.num_bytes, "bytes")
        report = opened.verify(bar.advance)
    seconds = time.perf_counter() - began
    if as_json:
        facts = {
            "path": shown(store),
            "ok": not report.problems,
            "checksummed": report.checksummed,
            "num_bytes": report.num_bytes,
            "problems": list(report.problems),
            "seconds": round(seconds, 3),
        }
        print_json(facts)
    else:
        for problem in report.problems:
            echo(f"bad: {problem}")
        what = (
            "checksums verified"
            if report.checksummed
            else "bytes readable; a plain HDF5 file has no checksums"
        )
        verdict = f"{len(report.problems)} problems" if report.problems else f"sound: {what}"
        echo(
            f"{shown(store)}: {verdict}, {format_bytes(report.num_bytes)} at {format_rate(report.num_bytes, seconds)}"
        )
    if report.problems:
        raise typer.Exit(EXIT_INPUT)
