# ruff: noqa: E501  a table: one case or advice a line
"""Python that is refused, by the part of the package that refuses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from advice_typing import Case


def namespace() -> dict[str, Any]:
    """Return the names that every piece of Python begins with."""
    import numpy as np
    import torch

    import stoker
    from stoker.loader.loader import Loader
    from stoker.store.fields import Dense
    from store_makers import write_store
    from test_recipe_tabular import class_table

    return {
        "np": np, "torch": torch, "stoker": stoker, "Loader": Loader, "Path": Path, "Dense": Dense,
        "write_store": write_store, "class_table": class_table,
    }  # fmt: skip


IMAGES = "from stoker import GPUAugmentation, MinimalGPUAugmentation, StrongGPUAugmentation; from stoker.augment import *; from stoker.augment.ops import *; import stoker.augment as A; images = torch.zeros(2, 3, 8, 8)"
SERIES = "from stoker.loader.lanes import plan_lanes, plan_store_lanes; from stoker.loader.splits import *"


def _refused(setup: str, *wrong: str, **named: str) -> list[Case]:
    """Return a case for each piece of Python, with one setup."""
    return [Case(each, setup, **named) for each in wrong]


PYTHON: dict[str, list[Case]] = {
    "augment": _refused(
        IMAGES,
        "Compose([RandomHorizontalFlip()], backend='x')",
        "Compose([RandomHorizontalFlip()], ignore_index='x')",
        "Compose([RandomHorizontalFlip()])(images[0])",
        "Compose(RandomHorizontalFlip())",
        "GaussianBlur(2)",
        "Normalize((0.5,), (0,))",
        "ToDtype(torch.int8)",
        "RandomHorizontalFlip(p=2)",
        "RandomCrop(size='x')",
        "RandomResizedCrop(size=0)",
        "GPUAugmentation(mean=(1, 2))",
        "MixUp(0, 10)",
    )
    + _refused(
        IMAGES.replace(
            "images = torch.zeros(2, 3, 8, 8)", "images = torch.zeros(2, 3, 8, 8).requires_grad_()"
        ),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES.replace("torch.zeros(2, 3, 8, 8)", "np.zeros((2, 3, 8, 8), 'f4')"),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES.replace("torch.zeros(2, 3, 8, 8)", "torch.zeros(2, 3, 8, 8).int()"),
        "Compose([RandomHorizontalFlip()])(images)",
    )
    + _refused(
        IMAGES + "; masks = torch.zeros(2, 8, 8)",
        "Compose([RandomHorizontalFlip()])(images, masks)",
    ),
    "loader": _refused(
        SERIES,
        "Loader('store', batch_size=0)",
        "Loader('store', 16, seed='x')",
        "Loader('store', 16, order='x')",
        "Loader('store', 16, device='x')",
        "Loader('store', 16, device='cuda:99')",
        "Loader('store', 16, fields='features')",
        "Loader('store', 16, samples=np.array([0, 1]), drop_last=True)",
        "Loader('store', 16, num_slots=0)",
        "split_randomly(10, ratios=(1, 2, 3))",
    )
    + _refused("mask = samples = np.arange(300) < 40", "Loader('store', 16, samples=mask)")
    + _refused("samples = np.array([0, 0] * 20 + [1])", "Loader('store', 1, samples=samples)")
    + _refused(
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1')", "Loader('store', 16, rank=5)"
    ),
    "train": _refused(
        "from stoker.train.settings import TrainSettings; from stoker import Trainer; model = torch.nn.Linear(3, 2); "
        "optimizer = torch.optim.AdamW(model.parameters()); from stoker.train.checkpoint import Checkpoints",
        "TrainSettings(precision='x')",
        "TrainSettings(clip_norm=-1)",
        "TrainSettings(accumulation_steps=0)",
        "Checkpoints('c', keep_last=0)",
    ),
    "plan": _refused(
        "from stoker.plan import make_plan, estimate_model, store_facts; from stoker.store.reader import open_store; "
        "facts = store_facts(open_store('store').manifest)",
        "make_plan(facts, gpu_memory_bytes=10**9, ram_bytes=10**9, ranks_per_host=0)",
        "estimate_model(-1)",
        "store_facts(open_store('store').manifest, fields=['x'])",
    ),
    "store": _refused(
        "from stoker.store.reader import open_store; from stoker.store.fields import Ragged; "
        "from stoker.store.repairs import *; store = open_store('store')",
        "store.read_rows('x', 0, 1)",
        "store.read_rows('features', 0, 2, out=np.empty(3))",
    ),
    "units.py": _refused(
        "from stoker.units import usable_count\ndef call(n): usable_count('n', n)",
        "call(n=True)",
        "call(n='x')",
        "call(n=0)",
    ),
    "report.py": _refused(
        "from stoker.report import read_run_log",
        "read_run_log('none/run.jsonl')",
    ),
}
