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
        "frameworks_adapted", "frameworks_accelerate", "advice", "examples",
        "doctor_attach", "doctor_between", "doctor_endings", "doctor_samples",
    ),  # Lightning and transformers are 7 s of imports
    "sources": (
        "ownership", "architecture", "facts", "printed_commands", "registry", "terminal", "words", "bad_machine",
    ),  # to parse the package and walk through it is 2 s
    "graphs": ("export", "recipe_images"),  # the exporter is 3 s of imports
}  # fmt: skip
LONG_FIRST = (
    "imports", "augment_fused", "sources", "graphs", "cluster", "docs_site", "run", "demo", "gallery", "predict",
    "wrong_graphs", "ranks", "trainer_manners", "shipped_configs", "lifetime", "recipe_massspec", "bounds",
    "trainer_edges", "report_page", "doctor_job", "msp", "remote_store", "config_effects", "recipe_tabular", "plan",
    "cli_doctor", "recipe_forex", "massspec", "tune", "massspec_answers", "no_lookahead", "cli", "doctor_cases",
    "trainer", "compat_migrate", "packing", "loader_edges", "secrets", "predict_truth", "elastic",
    "segmentation_answers", "capture_accumulated", "recipe_segmentation", "capture_function", "update",
    "compat_massspec", "store", "docs_code", "commit", "compat_basics", "order", "stranger_optimizers", "checkpoint",
    "monitor", "quality_page", "stranger_habits", "array_table_sources", "completion", "proof_growth",
    "augment_workers", "capture_guards", "baselines", "staging", "gather_ahead", "walk_forward", "next_commands",
    "augment_ahead", "foreign_position", "config", "raw_bars", "doctor_benchmark", "doctor_page", "loader", "quality",
    "bars", "drawing", "stranger_models", "config_mistakes", "forked_workers", "cli_train", "pictures_loader",
    "documents", "augment_preview", "series_source", "trainer_resuming", "extending", "lanes", "tune_command",
    "proof_campaigns", "split_edges", "compat_chunk_loader", "machine", "answers_bars", "one_plan", "augment_bench",
    "pack_from", "molecules", "optimizers_captured", "stranger_steps", "loader_turns", "compat_massspec_memory",
    "pictures_damage", "raw_tables", "mutate", "accounts",
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
