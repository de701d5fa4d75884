"""The plan: which data is kept in GPU memory and which in RAM, and why; decided before anything is loaded.

Enters: facts of a store, free bytes of GPU memory and RAM, the cost of the model. Leaves: a
frozen `Plan`: the tier, the sizes, and a reason for every line of bytes. Costs microseconds; pure, without torch.

Tiers; the plan takes the first one that fits:
resident   all data on the device, compact: windows are cut from rows that are stored once.
chunked    a ring of two or more slots; the next chunk loads while this one trains.
streamed   batches are built in pinned host memory and copied; no data stays on the device.

The given amounts of memory are hard limits: the lines of a plan never add up to more. More memory never gives a
worse tier. Without a GPU the device is the RAM, and the same rules hold there.

Files: `facts.py` bytes of stores and models, `budget.py` what fits at a batch size, `decision.py` the plan.
"""

from __future__ import annotations

from stoker.plan.budget import MIN_CHUNK_BATCHES, TIERS, Tier
from stoker.plan.decision import FALLBACK_SHARE, GPU_SHARE, Plan, make_plan
from stoker.plan.facts import (
    FieldFacts,
    ModelCost,
    StoreFacts,
    array_facts,
    estimate_model,
    store_facts,
)

__all__ = [
    "FALLBACK_SHARE", "GPU_SHARE", "MIN_CHUNK_BATCHES", "TIERS", "FieldFacts", "ModelCost", "Plan",
    "StoreFacts", "Tier", "array_facts", "estimate_model", "make_plan", "store_facts",
]  # fmt: skip
