"""The training step: rows a second of a small MLP, and what the Trainer costs over a bare loop.

    python benchmarks/step.py [--rows 2850000]

Peer: a torch DataLoader with 8 workers and a plain eager loop at the same batch size. torch_graph: the same
step with torch's own update as one CUDA graph, over a batch that never changes. Limit: stoker's graph
replayed with nothing in between. Overhead: the same step in a hand-written loop over
the same loader, three times: eager where the host is the limit (a small LSTM: every microsecond of Python is
seen), eager where the GPU is, and captured, which is what the Trainer does by default. Captured once more over a
graph with torch's own update.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import nn

from harness import publish, seconds_of, side_by_side
from stoker.loader.loader import Loader
from stoker.train.split_update import SplitUpdate, split_tensors
from stoker.train.trainer import Trainer

FEATURES = 256


def write_file(path: Path, rows: int) -> None:
    block = np.random.default_rng(0).normal(size=(50_000, FEATURES)).astype("f4")
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (rows, FEATURES), "f4")
        for low in range(0, rows, len(block)):
            features[low : low + len(block)] = block[: min(len(block), rows - low)]
        file["targets"] = np.random.default_rng(1).integers(0, 3, rows)


def make_mlp(device) -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Linear(FEATURES, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 3),
    )
    return nn.Sequential(*layers).to(device)


def sync(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def one_step(model, optimizer, features, targets, pieces: bool = False) -> torch.Tensor:
    """A step as people write it; with the update in pieces, as the Trainer records it."""
    loss = nn.functional.cross_entropy(model(features), targets)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = nn.utils.get_total_norm(split_tensors(gradients) if pieces else gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    with SplitUpdate() if pieces else contextlib.nullcontext():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def peer_rate(path: Path, batch: int, device, workers: int, steps: int) -> float:
    with h5py.File(path) as file:
        count = min(400_000, len(file["features"]))
        data = torch.utils.data.TensorDataset(
            torch.from_numpy(file["features"][:count]), torch.from_numpy(file["targets"][:count])
        )
    loader = torch.utils.data.DataLoader(
        data, batch, shuffle=True, num_workers=workers, pin_memory=device.type == "cuda"
    )
    model = make_mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    began = 0.0
    for number, (features, targets) in enumerate(loader):
        if number == 20:
            sync(device)
            began = time.perf_counter()
        features = features.to(device, non_blocking=True)
        one_step(model, optimizer, features, targets.to(device, non_blocking=True))
        if number == 20 + steps:
            break
    sync(device)
    return (number - 20) * batch / (time.perf_counter() - began)


def trainer_rate(path: Path, batch: int, device, capture: str, rows: int) -> dict:
    model = make_mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with Loader(path, batch, device, order="shuffled", samples=np.arange(rows)) as loader:
        trainer = Trainer(
            model,
            loader,
            None,
            nn.functional.cross_entropy,
            optimizer,
            None,
            {
                "epochs": 3,
                "precision": "fp32",
                "capture": capture,
                "read_every": 200,
                "clip_norm": 1.0,
            },
            device,
        )
        history = trainer.fit()
        graph = None if trainer._captured is None else trainer._captured._graph
        limit = None if graph is None else replay_rate(graph, batch)
    best = max(report.samples_per_second for report in history.epochs[1:])
    captured = trainer._captured
    return {
        "rows_per_second": best,
        "limit_rows_per_second": limit,
        "wait_share": history.epochs[-1].wait_share,
        "step": "eager" if captured is None else captured.reason,
    }


def replay_rate(graph: torch.cuda.CUDAGraph, batch: int) -> float:
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2000):
        graph.replay()
    torch.cuda.synchronize()
    return 2000 * batch / (time.perf_counter() - began)


def torch_graph_rate(batch: int, device) -> float | None:
    """The step as a graph over one fixed batch, by torch alone."""
    if device.type != "cuda":
        return None
    model = make_mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    features = torch.randn(batch, FEATURES, device=device)
    targets = torch.randint(0, 3, (batch,), device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one_step(model, optimizer, features, targets)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(model, optimizer, features, targets)
    return replay_rate(graph, batch)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 3)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), -1, 16))[0][:, -1])


class Wide(nn.Module):
    """Work for the GPU: the host is far ahead of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 4096),
            nn.ReLU(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, 3),
        )

    def forward(self, x):
        return self.layers(x)


def in_turns(bare, trained, device, turns: int) -> dict:
    """Seconds of an epoch in a bare loop and in the Trainer, in turns; the median of their ratios."""

    def to_the_end(run) -> None:
        run()
        sync(device)

    sync(device)
    ways = [partial(seconds_of, partial(to_the_end, run)) for run in (bare, trained)]
    pairs = np.array(side_by_side(ways, turns + 1)[1:])
    ratios = pairs[:, 1] / pairs[:, 0]
    best = pairs.min(axis=0).tolist()
    return {
        "bare": best[0],
        "trainer": best[1],
        "ratio": float(np.median(ratios)),
        "of_the_best": best[1] / best[0],
        "quartiles": np.quantile(ratios, (0.25, 0.75)).tolist(),
    }


def overhead(
    path: Path, device, rows: int, make, batch: int, capture: str, turns: int, pieces: bool = False
) -> dict:
    """What the Trainer costs over a hand-written loop with the same step over the same loader.

    Captured, the Trainer updates in pieces; the hand-written loop does so too if it is told to.
    """
    model = make().to(device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    with Loader(
        path, batch, device, order="shuffled", samples=np.arange(rows), drop_last=True
    ) as loader:
        config = {"epochs": 1, "precision": "fp32", "capture": capture, "clip_norm": 1.0}
        trainer = Trainer(
            model, loader, None, nn.functional.cross_entropy, optimizer, None, config, device
        )
        trainer.train_epoch(0)

        def eager() -> None:
            losses = [
                one_step(model, optimizer, batch["features"], batch["targets"]) for batch in loader
            ]
            torch.stack(losses).tolist()

        def trained() -> None:
            loader.set_epoch(0)
            trainer.train_epoch(0)

        bare = eager if capture == "off" else replay_loop(model, optimizer, loader, pieces)

        def from_the_start() -> None:
            loader.set_epoch(0)
            bare()

        return in_turns(from_the_start, trained, device, turns)


def replay_loop(model, optimizer, loader, pieces: bool):
    """The hand-written form of the captured step: copy the indices, replay, keep the loss."""
    static = next(iter(loader.index_batches())).indices.clone()

    def step() -> torch.Tensor:
        batch = loader.assemble(static)
        return one_step(model, optimizer, batch["features"], batch["targets"], pieces)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def run() -> None:
        losses = []
        for index in loader.index_batches():
            static.copy_(index.indices)
            graph.replay()
            losses.append(loss.clone())
        torch.stack(losses).tolist()

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=2_850_000 if on_gpu else 60_000)
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    result: dict = {"rows": args.rows, "device": str(device)}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "rows.h5"
        write_file(path, args.rows)
        for batch in (128, 1024):
            rows = min(args.rows, 1_000_000 if batch == 128 else args.rows)
            entry = {
                "peer_rows_per_second": peer_rate(path, batch, device, 8 if on_gpu else 2, 200),
                "stoker": trainer_rate(path, batch, device, "auto", rows),
                "stoker_eager": trainer_rate(path, batch, device, "off", min(rows, 200_000)),
                "torch_graph_rows_per_second": torch_graph_rate(batch, device),
            }
            ours, limit = (entry["stoker"][f"{name}rows_per_second"] for name in ("", "limit_"))
            entry["times_peer"] = ours / entry["peer_rows_per_second"]
            if on_gpu:
                entry["times_torch_graph"] = ours / entry["torch_graph_rows_per_second"]
            entry["share_of_limit"] = None if limit is None else ours / limit
            result[f"batch_{batch}"] = entry
        rows = min(args.rows, 40_000 if on_gpu else 4_000)
        result["overhead"] = overhead(
            path, device, rows, Recurrent, 256, "off", 40 if on_gpu else 12
        )
        if on_gpu:
            many = min(args.rows, 400_000)
            result["overhead_gpu_bound"] = overhead(path, device, many, Wide, 2048, "off", 6)
            for name, pieces in (("overhead_captured", True), ("captured_over_torch_graph", False)):
                result[name] = overhead(path, device, many, Recurrent, 256, "on", 8, pieces)
    for name, value in result.items():
        print(f"  {name:12s} {value}")
    publish("step", result)


if __name__ == "__main__":
    main()
