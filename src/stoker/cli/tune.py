"""`stoker tune --config FILE`: the fastest settings of a ready job, found by running them.

Enters: a config and options that override it. Leaves: on stderr each try; on stdout the curve, the result and
what to type next, or one JSON document; with `--out` the tuned config, with `--html` a page. Costs 3 to 5 s
for each try: usually half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.cli.options import (
    ConfigOption,
    DeviceOption,
    JsonOption,
    SetOption,
    StoreOption,
    require_output,
    require_page,
    verb,
)
from stoker.cli.terminal import Bar, make_console, make_table, print_commands, print_json
from stoker.display import command
from stoker.errors import InputError
from stoker.ownership import write_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker.config import Settings
    from stoker.tune.job import Tuned
    from stoker.tune.trial import Measured


@verb
def tune(
    *,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    device: DeviceOption = None,
    out: Path | None = None,
    force: bool = False,
    grow_update: bool = False,
    seconds: Annotated[float, typer.Option("--seconds-per-try")] = 3.0,
    html: Path | None = None,
    as_json: JsonOption = False,
) -> None:
    """Find the batch size, accumulation, capture and chunk size that train fastest and fit in memory.

    Options:
        out: Write the tuned config here.
        force: Let --out replace a file.
        grow_update: Also take batches larger than the samples per update: faster, but another training.
        seconds: Seconds measured at each setting.
        html: Write a page with the curve.
    """
    if config is None:
        raise InputError(
            "there is nothing to tune.",
            "a config with a recipe and a store",
            "stoker tune --config tabular --store STORE --out tuned.yaml",
        )
    require_output(out, "--out", [config], force=force)
    require_page(html, "--html")
    require_output(html, "--html", [config])

    from stoker.doctor.job_config import JobConfig
    from stoker.train.ranks import Ranks
    from stoker.tune.job import tune_job
    from stoker.tune.trial import Effort

    job = JobConfig.read(config, overrides or (), store)
    effort = Effort(seconds)
    with Bar(quiet=as_json) as bar:
        tuned = tune_job(
            job.settings, device=device, effort=effort, grow_update=grow_update, progress=bar
        )
    if not Ranks.current().is_first:
        return
    # At the keys that decide these settings in this config.
    changes = {job.key_of(key): value for key, value in tuned.changes.items()}
    if out is not None:
        job.with_changes(changes, _notes(config, tuned)).write(out, replace=force)
    if html is not None:
        from stoker.tune.tuned_page import tuned_page

        page = tuned_page(f"stoker tune {config}", tuned, _facts(job.settings, tuned))
        write_text(html, page)
    if as_json:
        keys = {"keys": changes, "out": None if out is None else str(out)}
        print_json(tuned.to_json() | keys)
    else:
        words = _job_words(config, overrides or [], store, changes) if out is None else [out]
        _print(tuned, _next(words, job.settings, device), out, html)


def _notes(config: Path, tuned: Tuned) -> list[str]:
    """Return the measurements as comments for the tuned config."""
    from stoker.tune.job import describe
    from stoker.tune.tuned_page import verdict

    return [
        f"Tuned from {config} by `stoker tune`:",
        verdict(tuned),
        *(f"  {describe(point)}" for point in tuned.curve),
        *(f"  {tried.option} {tried.value}: {describe(tried.measured)}" for tried in tuned.options),
        *tuned.notes,
    ]


def _job_words(
    config: Path, overrides: list[str], store: Path | None, changes: Mapping[str, Any]
) -> list[str | Path]:
    """Return the config and the options for the tuned settings where no file was written."""
    words: list[str | Path] = [config]
    words += [] if store is None else ["--store", store]
    kept = [text for text in overrides if text.partition("=")[0].strip() not in changes]
    for text in [*kept, *(f"{key}={value}" for key, value in changes.items())]:
        words += ["--set", text]
    return words


def _next(words: Sequence[str | Path], settings: Settings, device: str | None) -> str:
    """Return the command that trains with the result, in a folder where no run has begun."""
    from stoker.recipes.run import fresh_folder, run_folder

    folder = run_folder(settings)
    fresh = fresh_folder(folder)
    more: list[str | Path] = ["--run-dir", fresh] if fresh != folder else []
    more += ["--device", device] if device is not None else []
    return command("stoker", "train", "--config", *words, *more)


# -- printing --------------------------------------------------------------------------------------


def _facts(settings: Settings, tuned: Tuned) -> dict[str, str]:
    def rate(done: Measured) -> str:
        return "n/a" if done.rate is None else f"{done.rate:,.0f} samples/s"

    return {
        "Recipe": settings.recipe.name or "n/a",
        "Store": settings.recipe.store or "n/a",
        "Configured": rate(tuned.before),
        "Tuned, run longer": rate(tuned.final),
        "Data": tuned.final.tier,
        "Step": tuned.final.step,
    }


def _print(tuned: Tuned, next_command: str, out: Path | None, html: Path | None) -> None:
    from stoker.tune.tuned_page import (
        CURVE_HEADER,
        OPTION_HEADER,
        curve_cells,
        option_cells,
        verdict,
    )

    console = make_console(width=160)
    console.print(_table("batch sizes", CURVE_HEADER, curve_cells(tuned), num_left=0))
    if tuned.options:
        console.print(_table("other settings", OPTION_HEADER, option_cells(tuned), num_left=2))
    for name, why in tuned.left_alone.items():
        console.print(f"{name}: not tried, {why}", soft_wrap=True)
    console.print(verdict(tuned), soft_wrap=True)
    for note in tuned.notes:
        console.print(note, soft_wrap=True)
    for what, path in (("tuned config", out), ("page", html)):
        if path is not None:
            console.print(f"{what} written to {path}", soft_wrap=True)
    if tuned.changes or out is not None:
        console.print("Next:")
        print_commands(console, [next_command])


def _table(title: str, header: Sequence[str], rows: list[tuple[str, ...]], num_left: int) -> Any:
    table = make_table(title, header, left=(*range(num_left), len(header) - 1))
    for row in rows:
        table.add_row(*row, style="bold" if "taken" in row[-1] else None)
    return table
