"""How `make test` shares the test files among its workers: whole files, the long ones first.

A file's fixtures are made once, and so are imports and parsed sources for the files of one share. The shares that take
long begin first, so that no worker is busy with one when the others have ended. The order below is by the CPU seconds
of a run; a file that is not named comes later, in its own share.
"""

from __future__ import annotations

import os
from functools import cache

TOGETHER = {
    "imports": (
        "every_pair", "frameworks_lightning", "frameworks_capture", "frameworks_huggingface",
        "frameworks_adapted", "frameworks_accelerate", "examples",
        "doctor_attach", "doctor_between", "doctor_endings", "doctor_samples",
    ),  # Lightning and transformers are 7 s of imports
    "sources": (
        "advice", "ownership", "architecture", "facts", "printed_commands", "registry", "terminal", "words",
        "bad_machine",
    ),  # to parse the package and walk through it is 2 s
    "graphs": ("export", "recipe_images"),  # the exporter is 3 s of imports
}  # fmt: skip
LONG_FIRST = (
    "imports", "sources", "augment_fused", "graphs", "ranks", "cluster", "demo", "docs_site", "run", "doctor_job",
    "gallery", "tune", "shipped_configs", "predict", "report_page", "wrong_graphs", "msp", "remote_store", "lifetime",
    "doctor_cases", "cli", "bounds", "cli_doctor", "recipe_forex", "tune_command", "trainer_edges", "packing",
    "config_effects", "recipe_massspec", "recipe_tabular", "trainer", "docs_code", "secrets", "monitor",
    "massspec_answers", "augment_workers", "loader_edges", "capture_function", "update", "staging",
    "capture_accumulated", "elastic", "plan", "compat_massspec", "recipe_segmentation", "commit", "no_lookahead",
    "trainer_manners", "forked_workers", "massspec", "compat_basics", "store", "compat_migrate", "order",
    "quality_page", "completion", "segmentation_answers", "next_commands", "accounts", "stranger_optimizers",
    "stranger_habits", "gather_ahead", "foreign_position", "checkpoint", "walk_forward", "doctor_page",
    "proof_campaigns", "config", "augment_ahead", "capture_guards", "doctor_benchmark", "proof_growth", "mutate",
    "loader", "raw_bars", "cli_train", "pictures_loader", "array_table_sources", "baselines", "stranger_models",
    "config_mistakes", "documents", "trainer_resuming", "extending", "lanes", "augment_preview", "raw_tables",
    "quality", "bars", "series_source", "drawing", "split_edges", "compat_chunk_loader", "machine", "answers_bars",
    "one_plan", "augment_bench", "pack_from", "molecules", "optimizers_captured", "stranger_steps", "loader_turns",
    "compat_massspec_memory", "pictures_damage",
)  # fmt: skip
_SHARES = {
    name: (share, place) for share, names in TOGETHER.items() for place, name in enumerate(names)
}


@cache
def share_of(file: str) -> str:
    """Return the share of a test file, which is given by its path."""
    return _place(file)[0]


@cache
def rank_of(file: str) -> tuple[int, str, int]:
    """Return what puts the long shares first and the files of one beside each other, in its order."""
    share, place = _place(file)
    number = LONG_FIRST.index(share) if share in LONG_FIRST else len(LONG_FIRST)
    return number, share, place


def _place(file: str) -> tuple[str, int]:
    name = os.path.basename(file).removeprefix("test_").removesuffix(".py")  # noqa: PTH119
    return _SHARES.get(name, (name, 0))


def shares_of(files: list[str]) -> list[list[list[int]]]:
    """Return the places of tests, given by their files, by share and file in the order in which workers take them."""
    found: dict[str, dict[str, list[int]]] = {}
    for number in sorted(range(len(files)), key=lambda number: rank_of(files[number])):
        share = found.setdefault(share_of(files[number]), {})
        share.setdefault(files[number], []).append(number)
    return [[*share.values()] for share in found.values()]
