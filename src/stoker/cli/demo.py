"""`stoker demo`: the whole story on data it makes, in about a minute."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import JsonOption, verb
from stoker.cli.terminal import Bar, known, make_console, make_table, print_json
from stoker.display import command
from stoker.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.demo.story import DemoResult


@verb
def demo(
    *,
    folder: Path = Path("stoker-demo"),
    weeks: Annotated[int, typer.Option(min=4, max=520)] = 9,
    as_json: JsonOption = False,
) -> None:
    """Try it all on made-up bars: pack, plan, train with and without stoker, doctor, tune, report.

    Options:
        folder: Where the data and the store go.
        weeks: Weeks of one-minute bars to make.
    """
    from stoker.demo.story import run_demo

    began = time.perf_counter()
    with Bar(quiet=as_json) as bar:
        result = run_demo(folder, weeks, progress=bar)
    seconds = time.perf_counter() - began
    if as_json:
        print_json(_facts(result, seconds))
    else:
        _print(result, folder, seconds)


def _facts(result: DemoResult, seconds: float) -> dict[str, object]:
    manifest, trained, examined = result.packed.manifest, result.trained, result.examined
    return {
        "store": str(result.packed.path),
        "num_samples": manifest.num_samples,
        "rows": {name: count for shard in manifest.shards for name, count in shard.rows.items()},
        "findings": [finding.to_json() for finding in result.inspection.findings],
        "series": asdict(result.series),
        "materialised": asdict(result.materialised),
        "plan": {"tier": result.plan.tier, "reasons": list(result.plan.reasons)},
        "naive": {**asdict(result.naive), "samples_per_second": result.naive.samples_per_second},
        "trained": {**asdict(trained), "samples_per_second": trained.samples_per_second},
        "doctor": {"usual": examined.usual.to_json(), "ours": examined.ours.to_json()},
        "run": {
            "dir": str(result.run.run_dir),
            "samples_per_second": [report.samples_per_second for report in result.run.epochs],
            "wait_shares": [report.wait_share for report in result.run.epochs],
        },
        "tuned": result.tuned.to_json(),
        "report": str(result.page),
        "seconds": round(seconds, 2),
    }


def _print(result: DemoResult, folder: Path, seconds: float) -> None:
    from stoker.cli.pack import print_result
    from stoker.demo.story import DOCTOR_PAGE

    print_result(result.packed)
    console = make_console(soft_wrap=True)
    for line in result.inspection.lines()[:5]:
        console.print(f"  {line}")
    if not result.inspection.findings:
        console.print("quality gate: nothing wrong, every value is finite and of usable size")
    console.print(f"plan: {result.plan.reasons[0]}")
    _print_reading(console, result)
    _print_training(console, result)
    _print_examined(console, result)
    _print_tuned(console, result)
    console.print(f"the doctor's page: {(folder / DOCTOR_PAGE).resolve()}")
    console.print(f"report of the run: {result.page.resolve()}")
    console.print(f"done in {format_seconds(seconds)}. Next:")
    for words in (
        command("stoker", "doctor", "--config", folder / "demo.yaml"),
        "stoker doctor -- python YOUR_SCRIPT.py",
        command("stoker", "inspect", folder / "store", "--html", "page.html"),
        command("stoker", "train", "--config", folder / "demo.yaml", "--run-dir", folder / "again"),
    ):
        console.print(f"  {words}")


def _print_reading(console: Console, result: DemoResult) -> None:
    old, new = result.materialised, result.series
    both, smaller = (old, new), old.stored_bytes / new.stored_bytes
    rows = [
        ("stored", *(format_bytes(one.stored_bytes) for one in both), f"{smaller:.0f} x smaller"),
        ("read", *(format_seconds(one.seconds) for one in both), f"{old.seconds / new.seconds:.1f} x faster"),
        ("window bytes", *(format_rate(one.window_bytes, one.seconds) for one in both), ""),
        ("samples/s", *(format_count(int(one.num_samples / one.seconds)) for one in both), ""),
    ]  # fmt: skip
    heads = ("", "materialised windows", "stoker series", "ratio")
    console.print(make_table("one epoch of windows, batch 128, from the page cache", heads, rows))


def _print_training(console: Console, result: DemoResult) -> None:
    from stoker.demo.training import TRAINED

    old, new = result.naive, result.trained
    title = (
        f"training a small forex model ({', '.join(TRAINED)}) on the CPU: same weights, "
        f"{old.num_samples:,} samples, batches; fastest of {len(old.seconds)} epochs, in turn"
    )
    rates = old.samples_per_second, new.samples_per_second
    rows = [
        ("samples/s", *(f"{rate:,.0f}" for rate in rates), f"{rates[1] / rates[0]:.1f} x faster"),
        ("waited for batches", f"{old.wait_share:.0%}", f"{new.wait_share:.0%}", ""),
        ("loss at the end", f"{old.losses[-1]:.5f}", f"{new.losses[-1]:.5f}", ""),
    ]
    console.print(make_table(title, ("", "h5py, DataLoader, loop", "stoker", "ratio"), rows))
    console.print("What is left of stoker's time is the model's own work on this CPU.")


def _print_examined(console: Console, result: DemoResult) -> None:
    """Print the doctor's findings, and its prediction beside the measured rate."""
    from stoker.demo.story import OURS, USUAL

    examined = result.examined
    for name, consultation in ((USUAL, examined.usual), (OURS, examined.ours)):
        console.print(f"doctor on {name}, run as it is: {consultation.verdict}")
    share = examined.usual.measurements.wait_share
    rows = [
        (
            USUAL,
            known(examined.rate(examined.usual), ",.0f"),
            "" if share is None else f"{share:.0%}",
        ),
        ("predicted, if batches cost nothing", known(examined.predicted, ",.0f"), ""),
        (f"{OURS}, measured", known(examined.rate(examined.ours), ",.0f"), ""),
    ]
    heads = ("", "samples/s", "waited for batches")
    console.print(make_table("what the doctor saw and predicted", heads, rows))


def _print_tuned(console: Console, result: DemoResult) -> None:
    tuned = result.tuned
    rows = [
        (
            str(point.shape.batch_size), known(point.rate, ",.0f"),
            "" if point.spread is None else f"{point.spread:.0%}",
        )
        for point in tuned.curve
    ]  # fmt: skip
    title = f"tune: the same job by its config, {result.run.notes[0]}"
    console.print(make_table(title, ("batch", "samples/s", "spread"), rows, left=()))
    changes = ", ".join(f"{name} {value}" for name, value in tuned.changes.items())
    gain = "" if tuned.gain is None else f", {tuned.gain:.2f} x the config's rate"
    console.print(f"taken: {changes or 'the config as it is'}{gain}")
