"""`stoker train --config FILE`: a ready job from a packed store to evaluated weights.

Enters: a config and options that override it. Leaves: on stderr the choices with their reasons, a bar on a
terminal and a line per epoch; on stdout the tables of the run, or one JSON document; in the run's folder
checkpoints and the log. Costs the training.

Ends with 0, also after SIGTERM (the run is saved); 130 after Ctrl-C (saved too); 3 when a loss was not
finite; 2 when the input cannot be used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.address import as_url
from stoker.cli.options import ConfigOption, DeviceOption, JsonOption, SetOption, StoreOption, verb
from stoker.cli.terminal import (
    Bar,
    echo,
    known,
    make_console,
    make_table,
    print_commands,
    print_evaluation,
    print_json,
)
from stoker.display import command, secret_hint
from stoker.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from stoker.config import Settings
    from stoker.recipes.run import RecipeRun
    from stoker.recipes.walk_forward import WalkForward

_MOST_EPOCHS = 20


@verb
def train(
    *,
    config: ConfigOption = None,
    overrides: SetOption = None,
    store: StoreOption = None,
    run_dir: Path | None = None,
    msp: Path | None = None,
    mol_dir: Path | None = None,
    resume: bool = False,
    folds: Annotated[int | None, typer.Option(min=2)] = None,
    device: DeviceOption = None,
    gpus: Annotated[int | None, typer.Option(min=1)] = None,
    max_restarts: Annotated[int | None, typer.Option(min=0, show_default="3")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a ready job, evaluate its best checkpoint, and compare it with chance.

    Options:
        run_dir: Instead of the config's run.dir.
        msp: Recipes of mass spectra: pack this library into the store first.
        mol_dir: With --msp: folder or zip of MOL files, or one SDF.
        resume: Continue from the run's latest checkpoint.
        folds: Walk-forward evaluation: train this many times, each time on the past of another test span.
        gpus: Train on this many GPUs of this machine; with --device cpu, in this many processes.
        max_restarts: With --gpus: restart at most this often after a process was lost.
    """
    from stoker.recipes import run as runs
    from stoker.recipes.walk_forward import walk_forward

    if max_restarts is not None and gpus is None:
        raise InputError(
            "--max-restarts was given without --gpus.",
            "--max-restarts with --gpus",
            "leave --max-restarts out",
        )
    settings = _settle(config, overrides or [], store, run_dir)
    if msp is not None or mol_dir is not None:
        _pack_first(settings, msp, mol_dir, quiet=as_json)
    words = _typed(config, overrides or [], store, run_dir, device)
    words += ["--folds", str(folds)] if folds is not None else []
    if gpus is not None:
        words += [*["--resume"] * resume, *["--json"] * as_json]
        most = 3 if max_restarts is None else max_restarts
        _train_in_processes(settings, words, gpus, most, device)
        return
    if {"STOKER_RESTARTS", "WORLD_SIZE"} <= os.environ.keys():  # one of the processes of --gpus
        words += ["--gpus", os.environ["WORLD_SIZE"]]
    is_other_rank = os.environ.get("RANK", "0") != "0"
    with Bar(quiet=as_json or is_other_rank) as bar:
        try:
            if folds is not None:
                walk = walk_forward(settings, folds, resume=resume, device=device, progress=bar)
                run = walk.runs[-1]
            else:
                run = runs.run_recipe(settings, resume=resume, device=device, progress=bar)
        except KeyboardInterrupt:
            if not is_other_rank:
                again = command(*words, "--resume")
                bar.say(f"saved; go on with: {again} {secret_hint(again)}".rstrip())
            raise
    if is_other_rank:
        return
    if folds is not None:
        _print_folds(walk, command(*words, "--resume"), as_json=as_json)
    elif as_json:
        print_json(runs.as_json(run))
    else:
        _print(run, settings, command(*words, "--resume"))


def _train_in_processes(
    settings: Settings,
    words: Sequence[str | Path],
    num_processes: int,
    max_restarts: int,
    device: str | None,
) -> None:
    """Check the command, then start it in several processes."""
    import torch

    from stoker.recipes.catalogue import choose_recipe
    from stoker.recipes.run import share_batch
    from stoker.train.launch import launch
    from stoker.train.ranks import is_launched

    if is_launched():
        raise InputError(
            "--gpus in a process that torchrun has started.", "one of the two", "leave --gpus out"
        )
    choose_recipe(settings)
    share_batch(settings, num_processes)
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device or "cuda").startswith("cuda") and num_processes > max(present, device is None):
        raise InputError(
            f"--gpus {num_processes}, and this machine has {present}.",
            f"at most {present}" if present else "processes on the CPU, where there is no GPU",
            f"--gpus {present}" if present else f"--gpus {num_processes} --device cpu",
        )
    code = launch(
        [*map(str, words[1:])], num_processes, max_restarts, lambda line: echo(line, err=True)
    )
    if code:
        raise typer.Exit(code)


def _settle(
    config: Path | None, overrides: list[str], store: Path | None, run_dir: Path | None
) -> Settings:
    from stoker.config import load_config, parse_config, resolve

    read = (
        parse_config("", overrides=overrides) if config is None else load_config(config, overrides)
    )
    settings = resolve(read)
    if store is not None:
        settings = settings.told("recipe.store", as_url(store) or str(store), "--store")
    if run_dir is not None:
        settings = settings.told("run.dir", str(run_dir), "--run-dir")
    return settings


def _pack_first(settings: Settings, msp: Path | None, mol_dir: Path | None, *, quiet: bool) -> None:
    """Pack the given files into the config's store, unless it is up to date."""
    from stoker.cli.pack import print_result
    from stoker.packing import PackOptions, pack
    from stoker.recipes.catalogue import choose_recipe

    recipe = choose_recipe(settings).recipe
    source = recipe.make_source(msp=msp, mol_dir=mol_dir)
    if source is None or settings.recipe.store is None:
        raise InputError(
            f"--msp or --mol-dir was given; the recipe is {recipe.name}, the store {settings.recipe.store}.",
            "a recipe of mass spectra, with a store to pack into",
            f"leave {'--msp' if msp else '--mol-dir'} out" if source is None else "--store STORE",
        )
    options = PackOptions(on_bad="quarantine", bad_budget="10%")
    with Bar(quiet=quiet) as bar:
        result = pack(source, settings.recipe.store, options, bar)
    if not quiet:
        print_result(result)


def _typed(
    config: Path | None,
    overrides: list[str],
    store: Path | None,
    run_dir: Path | None,
    device: str | None,
) -> list[str | Path]:
    """Return the typed command as words, for messages that repeat it."""
    words: list[str | Path] = ["stoker", "train"]
    named = None if store is None else as_url(store) or store
    for name, value in (("--config", config), ("--store", named), ("--run-dir", run_dir)):
        words += [name, value] if value is not None else []
    for text in overrides:
        words += ["--set", text]
    words += ["--device", device] if device is not None else []
    return words


def _print(run: RecipeRun, settings: Settings, again: str) -> None:
    console = make_console(width=200)
    if run.epochs:
        _print_epochs(console, run)
    if run.ended != "done":
        _print_cut(console, run, again)
        return
    _print_metrics(console, run)
    if run.evaluation is not None:
        print_evaluation(console, run.evaluation)
    if run.fallback is not None:
        console.print(run.fallback.text, soft_wrap=True)
    console.print(f"checkpoints and log: {run.run_dir}")
    if run.best is not None:
        best = run.run_dir / "best.pt"
        console.print(f"best: {run.best.name} by {run.monitor[0]}, also named {best}. Next:")
        store = Path(settings.recipe.store or "STORE")
        predict = command(
            "stoker", "predict", best, store, "predictions.parquet", "--split", "test"
        )
        int8 = command("stoker", "export", best, run.run_dir / "int8.pt", "--int8")
        print_commands(console, [predict, int8])


def _print_cut(console: Console, run: RecipeRun, again: str) -> None:
    console.print(f"{run.ended}: saved in {run.run_dir}. Go on with:", soft_wrap=True)
    print_commands(console, [again])


def _print_folds(walk: WalkForward, again: str, *, as_json: bool) -> None:
    from stoker.recipes.run import as_json as plain

    made, last = walk.evaluation, walk.runs[-1]
    if as_json:
        folds = [plain(run) for run in walk.runs]
        print_json({"folds": folds, "evaluation": None if made is None else made.to_json()})
        return
    console = make_console(width=200)
    if made is None:
        if last.ended != "done":
            _print_cut(console, last, again)
        return
    print_evaluation(console, made)
    console.print(f"a run per fold, and the log of all: {walk.folder}")


def _print_epochs(console: Console, run: RecipeRun) -> None:
    shown = run.epochs[-_MOST_EPOCHS:]
    cut = f", the last {len(shown)} of {len(run.epochs)}" if len(shown) < len(run.epochs) else ""
    names = list(shown[-1].metrics)[:6]
    heads = ("epoch", "train loss", *(f"val {name}" for name in names), "samples/s", "waited")
    table = make_table(f"epochs{cut}", heads, left=())
    for report in shown:
        values = [f"{report.metrics[name]:.4g}" for name in names]
        rate = f"{report.samples_per_second:,.0f}"
        table.add_row(
            str(report.epoch + 1), f"{report.train_loss:.4g}", *values, rate, f"{report.wait_share:.0%}"
        )  # fmt: skip
    console.print(table)


def _print_metrics(console: Console, run: RecipeRun) -> None:
    title = f"{run.recipe}: best checkpoint against chance"
    table = make_table(title, ("metric", "chance (val)", "val", "test"))
    names = dict.fromkeys([*run.test, *run.val, *run.baseline])
    if not names:  # ended before its first validation
        return
    for name in names:
        values = [part.get(name) for part in (run.baseline, run.val, run.test)]
        mark = " *" if name == run.monitor[0] else ""
        table.add_row(f"{name}{mark}", *(known(value, ".4g") for value in values))
    table.caption = "* chooses the checkpoint"
    console.print(table)
