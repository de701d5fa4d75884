"""What the probe costs: steps of 2 and 10 ms, and on a GPU a small GPT whose step is launch-bound, alone and under the
doctor in turns; and whether the step that the doctor reports is the step without it.

    python benchmarks/doctor/overhead.py [--turns 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEPS = 300
HEAD = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
"""
CPU = """
width, depth = {width}, {depth}
model = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
loader = DataLoader(TensorDataset(torch.randn(3200, width), torch.randn(3200, width)), batch_size=32)
step = 0
while step < {steps}:
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            loss.item()
"""
GPT = """
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 8), nn.Linear(128, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
data = torch.randint(0, 256, (1_000_000,))

def get_batch():
    starts = torch.randint(0, len(data) - 129, (16,))
    x = torch.stack([data[at : at + 128] for at in starts])
    return x.pin_memory().to("cuda", non_blocking=True)

for step in range({steps}):
    x = get_batch()
    loss = nn.functional.cross_entropy(model(x).view(-1, 256), x.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        loss.item()
"""
SCRIPTS = {
    "2 ms": HEAD + CPU.format(width=96, depth=6, steps=STEPS),
    "10 ms": HEAD + CPU.format(width=512, depth=8, steps=STEPS),
    "GPT on a GPU": HEAD + GPT.format(steps=STEPS),
}


def step_seconds(script: Path, folder: Path, doctor: bool) -> tuple[float, float | None]:
    """Return the median step by the stopwatch, and the one that the doctor reports."""
    times, report = folder / "times", folder / "doctor.json"
    words = [sys.executable, str(HERE / "stopwatch.py"), str(times), str(script)]
    if doctor:
        words = [sys.executable, "-m", "stoker", "doctor", "--out", str(report), "--", *words]
    env = {**os.environ, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1"}
    if "cuda" not in script.read_text():
        env.pop("STOPWATCH_LOCK", None)  # of the GPU, which it does not use
    subprocess.run(words, env=env, check=True, capture_output=True, timeout=300)
    ends = json.loads(times.read_text())["times"][40:]
    times.unlink()
    told = (
        json.loads(report.read_text())["measurements"]["step_seconds"]["median"] if doctor else None
    )
    return statistics.median(b - a for a, b in itertools.pairwise(ends)), told


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--only", default="", help="parts of the names to run, by commas")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    result: dict[str, Any] = {}
    for name, source in SCRIPTS.items():
        if "GPU" in name and not torch.cuda.is_available():
            continue
        if not any(part in name for part in asked.only.split(",")):
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            script = folder / "script.py"
            script.write_text(source)
            turns = [
                (step_seconds(script, folder, False)[0], *step_seconds(script, folder, True))
                for _ in range(asked.turns)
            ]
        alone, doctored, told = (statistics.median(column) for column in zip(*turns, strict=True))
        result[name] = {
            "alone_ms": alone * 1e3,
            "doctored_ms": doctored * 1e3,
            "reported_ms": told * 1e3,
            "overhead": doctored / alone - 1,
            "reported_error": told / alone - 1,
        }
        print(name, result[name], flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
