"""Every way of getting batches under every condition: the doctor is right, or it says that it cannot judge.

    python benchmarks/doctor/matrix.py [--only get_batch,memmap] [--under busy,ranks] [--state FOLDER] [--out FILE]

Each script makes its batches slowly, 15 ms beside a model of 4 ms, and runs under `stoker doctor`. Right is a finding
about loading or the code between steps; "cannot judge" is allowed; anything else is wrong, above all "nothing to fix".
CUDA graphs need a GPU and are not run without one. A source whose package is missing is listed as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from harness import machine_facts  # noqa: E402

STEPS, SECONDS, LOADING = 70, 170, ("slow-between-steps", "no-workers", "starved-by-loader")
LOADING += ("decode-bound", "disk-bound", "augment-on-cpu", "python-collate")

HEAD = """
import io, os, sys, tarfile, tempfile, time
import numpy as np
import torch
from torch import nn
torch.set_num_threads(1)
FOLDER, STEPS = tempfile.mkdtemp(), int(os.environ["STEPS"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def work(x):
    until = time.thread_time() + 0.015
    while time.thread_time() < until:
        np.sort(np.random.default_rng(0).standard_normal(2000))
    return torch.as_tensor(np.asarray(x), dtype=torch.float32).reshape(-1, 64)

class Busy(nn.Module):
    def forward(self, x):
        time.sleep(0.004)
        return x
"""
SOURCES = {
    "get_batch": """
        def get_batch():
            return work(np.zeros((32, 64)))
        take = get_batch
        """,
    "generator": """
        def batches():
            while True:
                yield work(np.zeros((32, 64)))
        take = batches().__next__
        """,
    "stoker.Loader": """
        import h5py, stoker
        with h5py.File(f"{FOLDER}/a.h5", "w") as file:
            file["x"] = np.zeros((4096, 64), np.float32)
        loader = stoker.Loader(f"{FOLDER}/a.h5", 32, as_tuple=("x",))
        def endless():
            while True:
                for (x,) in loader:
                    yield work(x.cpu())
        take = endless().__next__
        """,
    "prefetch": """
        import stoker
        def made():
            while True:
                yield work(np.zeros((32, 64)))
        take = iter(stoker.prefetch(made(), DEVICE)).__next__
        """,
    "datasets": """
        import datasets
        data = datasets.Dataset.from_dict({"x": [[0.0] * 64] * 512})
        data.set_transform(lambda rows: {"x": list(work(rows["x"]))})
        def endless():
            while True:
                for rows in data.iter(batch_size=32):
                    yield torch.stack(rows["x"])
        take = endless().__next__
        """,
    "WebDataset": """
        import webdataset
        with webdataset.TarWriter(f"{FOLDER}/a.tar") as tar:
            for number in range(64):
                tar.write({"__key__": f"{number:04}", "x.npy": np.zeros((32, 64), np.float32)})
        every = {"shardshuffle": False, "nodesplitter": lambda shards: shards}  # each rank reads all
        shards = webdataset.WebDataset(f"{FOLDER}/a.tar", **every).decode()
        shards = shards.map(lambda one: work(one["x.npy"]))
        def endless():
            while True:
                yield from shards
        take = endless().__next__
        """,
    "memmap": """
        tokens = np.memmap(f"{FOLDER}/t", np.uint16, "w+", shape=(500_000,))
        def take():
            at = np.random.randint(0, 400_000)
            return work(tokens[at : at + 2048].astype(np.float32))
        """,
    "dict of arrays": """
        arrays = {"x": np.zeros((4096, 64), np.float32)}
        def take():
            return work(arrays["x"][np.random.randint(0, 4096, 32)])
        """,
}
LOOP = """
def train(wrap=lambda model: model, times=1, validate=False):
    net = nn.Sequential(Busy(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)).to(DEVICE)
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters())
    other = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(128, 64)), 32)
    for step in range(STEPS):
        for _ in range(times):
            loss = model(take().to(DEVICE)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if validate and step % 10 == 9:
            with torch.no_grad():
                for (x,) in other:
                    net(x.to(DEVICE))
"""
CONDITIONS = {
    "busy machine": "train()",
    "zero workers": "train()",
    "notebook cell": "train()",
    "torch.compile": 'train(lambda model: torch.compile(model, backend="eager"))',
    "CUDA graphs": "x = torch.zeros(32, 64, device=DEVICE)\n"
    "train(lambda model: torch.cuda.make_graphed_callables(model, (x,)))",
    "several ranks": """
def ranks(rank, port):
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    train(torch.nn.parallel.DistributedDataParallel)
    dist.destroy_process_group()

import socket
with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    port = found.getsockname()[1]
torch.multiprocessing.start_processes(ranks, (port,), nprocs=2, start_method="fork")
""",
    "accumulation": "train(times=2)",
    "validation in between": "train(validate=True)",
}  # fmt: skip


def source(getting: str, condition: str) -> str:
    """Return a script."""
    text = f"{HEAD}\n{textwrap.dedent(SOURCES[getting])}\n{LOOP}\n{CONDITIONS[condition]}\n"
    if condition == "notebook cell":
        cell = "compile(source, '<ipython-input-7-1a2b>', 'exec')"
        return f"source = {text!r}\nexec({cell}, {{'__name__': '__main__'}})\n"
    return text


def judge(found: dict[str, Any] | None) -> str:
    """Return "right", "cannot judge", "not run" or what was said instead."""
    if found is None or not found["measurements"]["steps"]:
        return "not run"
    names = [one["name"] for one in found["findings"]]
    if names:
        return "right" if names[0] in LOADING else f"wrong: {names[0]}"
    return "cannot judge" if found["unjudged"] else f"wrong: {found['verdict']}"


def examine(getting: str, condition: str) -> dict[str, Any]:
    """Run one script under the doctor."""
    with tempfile.TemporaryDirectory() as made:
        script, out = Path(made) / "script.py", Path(made) / "doctor.json"
        script.write_text(source(getting, condition), encoding="utf-8")
        spin = [sys.executable, "-c", "while True: pass"]
        others = 2 * len(os.sched_getaffinity(0)) if condition == "busy machine" else 0
        spinning = [subprocess.Popen(spin) for _ in range(others)]
        try:
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "stoker", "doctor", "--seconds", str(SECONDS)),
                    *("--out", str(out), "--", sys.executable, str(script)),
                ],
                env={**os.environ, "STEPS": str(STEPS), "OMP_NUM_THREADS": "1", "TMPDIR": made},
                capture_output=True,
                text=True,
                timeout=SECONDS * 3,
                check=False,
            )
        finally:
            for one in spinning:
                one.kill()
                one.wait()
        found = json.loads(out.read_text()) if out.exists() else None
        told = judge(found)
        said = found["verdict"] if found else done.stderr[-300:]
        return {
            "told": told,
            "verdict": said if told != "not run" else (done.stderr or said)[-300:],
        }


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="parts of the names, by commas")
    parser.add_argument("--under", default="", help="parts of the conditions, by commas")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "doctor-matrix")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.state.mkdir(parents=True, exist_ok=True)
    pairs = [(getting, condition) for getting in SOURCES for condition in CONDITIONS]
    random.Random(2).shuffle(pairs)
    table: dict[str, dict[str, Any]] = {getting: {} for getting in SOURCES}
    for getting, condition in pairs:
        name = f"{getting}, {condition}"
        if not any(part in name for part in asked.only.split(",")) or not any(
            part in condition for part in asked.under.split(",")
        ):
            continue
        kept = asked.state / f"{name}.json"
        if kept.exists():
            result = json.loads(kept.read_text())
        elif condition == "CUDA graphs" and not torch.cuda.is_available():
            result = {"told": "not run", "verdict": "no GPU"}
        else:
            result = examine(getting, condition)
            kept.write_text(json.dumps(result))
        table[getting][condition] = result
        print(f"{name}: {result['told']} ({result['verdict'][:200]})", flush=True)
        if asked.out is not None:
            document = {"benchmark": "doctor_matrix", "machine": machine_facts(), "result": table}
            asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
