"""Folders of runs as `stoker train` leaves them, made up: logs, telemetry, a doctor's findings."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from stoker.report import RunLog
from stoker.runs.reading import DOCTOR_NAME, LOG_NAME
from stoker.runs.telemetry import TELEMETRY_NAME

BEGAN = 1_790_000_000.0
GB = 10**9
MACHINE = {
    "cpu": "AMD EPYC 9654", "cores_usable": 16, "ram_total_bytes": 128 * GB, "ram_limit_bytes": None,
    "disk": {"filesystem": "ext4", "bandwidth_class": "nvme"},
    "gpus": [{"index": 0, "name": "NVIDIA H200", "memory_total_bytes": 150 * GB}],
    "driver": "580.1", "torch": "2.11.0", "torch_cuda": "13.0", "python": "3.11.9", "os": "Linux",
}  # fmt: skip
PLAN = {
    "tier": "resident",
    "lines": [
        {
            "where": "gpu",
            "what": "features",
            "num_bytes": 12 * GB,
            "reason": "all rows, as float16",
        },
        {"where": "ram", "what": "staging", "num_bytes": 2**28, "reason": "4 pinned slabs"},
    ],
    "reasons": ["resident: 12.0 GB of data fit into 112 GB", "batch size 512: as asked"],
}
FINDINGS = [
    {
        "name": "sync-every-step",
        "title": "The host waits for the device at every step",
        "evidence": ["loss.item() at train.py:41, 1 per step", "2.1 ms of 5.6 ms per step"],
        "remedy": "Read losses every 50 steps: --set training.read_every=50",
        "gain": {"low": 1.3, "likely": 1.6, "high": 1.8},
    }
]


class Clock:
    """Time that goes on when told to."""

    def __init__(self, now: float = BEGAN) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_run(
    folder: Path,
    *,
    rate: float = 20_000.0,
    epochs: int = 8,
    epoch_seconds: float = 30.0,
    wait_share: float = 0.05,
    num_gpus: int = 1,
    batch_size: int = 512,
    name: str = "accuracy",
    notes: tuple[str, ...] = (),
    finished: bool = True,
    findings: list | None = None,
    seed: int = 0,
) -> Path:
    """Write the folder of a run; `num_gpus` 0 is a run on the CPU."""
    rng, clock = random.Random(seed), Clock()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        RunLog(folder / LOG_NAME, clock=clock) as log,
        RunLog(folder / TELEMETRY_NAME, clock=clock) as telemetry,
    ):
        settings = {
            "recipe": "tabular",
            "epochs": epochs,
            "batch_size": batch_size,
            "store": "data",
        }
        log.write("config", {"settings": settings, "reasons": {"batch_size": "--set"}})
        log.write("plan", PLAN)
        log.write("machine", MACHINE)
        telemetry.write("begin", {"pid": 4242, "host": "elsewhere"})
        for note in ("recipe tabular on cuda", "data resident: all data is on the GPU", *notes):
            log.write("note", {"text": note}, step=0, epoch=0)
        steps = max(1, round(rate * epoch_seconds / batch_size))
        for epoch in range(epochs):
            _write_epoch(log, telemetry, clock, rng, epoch, steps, rate, epoch_seconds, wait_share,
                         num_gpus, name)  # fmt: skip
        if finished:
            telemetry.write("end", {"ended": "done"})
            result = {
                "best": "step.pt",
                "baseline": {name: 0.5},
                "val": {name: 0.97},
                "test": {name: 0.96},
            }
            log.write("result", result, step=steps * epochs)
    if findings is not None:
        (folder / DOCTOR_NAME).write_text(json.dumps({"findings": findings}))
    return folder


def _write_epoch(
    log, telemetry, clock, rng, epoch, steps, rate, seconds, wait_share, num_gpus, name
) -> None:  # fmt: skip
    looks = 15
    for look in range(looks):
        clock.now += seconds / looks
        progress = epoch + (look + 1) / looks
        loss = 2.3 * math.exp(-progress / 2) + 0.08 + rng.gauss(0, 0.01)
        run = {
            "samples": int(rate * seconds * progress), "epoch": epoch, "loss": loss,
            "trained_seconds": seconds * progress, "waited_seconds": seconds * progress * wait_share,
            "samples_per_second": rate * rng.gauss(1, 0.03), "wait_share": wait_share * rng.gauss(1, 0.2),
            "allocated_bytes": int(18.2 * GB) if num_gpus else None,
            "reserved_bytes": int((22 + rng.random()) * GB) if num_gpus else None,
        }  # fmt: skip
        values = {
            "gpus": [_gpu(index, rng) for index in range(num_gpus)],
            "process": {
                "pid": 4242,
                "cpu_cores": 1.4 + rng.random(),
                "resident_bytes": int(5.3 * GB),
            },
            "run": run,
        }
        telemetry.write("telemetry", values, epoch=epoch)
        log.write("steps", {"loss": loss, "count": 50}, step=int(steps * progress), epoch=epoch)
    clock.now += seconds / 10
    report = {
        "epoch": epoch, "train_loss": loss, "metrics": {"loss": loss * 1.1, name: 1 - loss / 5},
        "num_samples": int(rate * seconds), "seconds": seconds, "wait_share": wait_share,
        "samples_per_second": rate,
    }  # fmt: skip
    log.write("epoch", report, step=steps * (epoch + 1), epoch=epoch + 1)


def _gpu(index: int, rng: random.Random) -> dict:
    return {
        "index": index, "name": "NVIDIA H200", "memory_used_bytes": int((24 + rng.random()) * GB),
        "memory_total_bytes": 150 * GB, "utilization_percent": min(100, int(rng.gauss(91, 3))),
        "memory_utilization_percent": 40, "power_watts": rng.gauss(540, 20), "power_limit_watts": 700.0,
        "temperature_celsius": int(rng.gauss(66, 1)),
        "throttle_reasons": ["power cap"] if rng.random() < 0.2 else [],
        "pcie_generation": 5, "pcie_width": 16,
        "pcie_received_bytes_per_second": rng.gauss(3.1, 0.2) * GB,
        "pcie_sent_bytes_per_second": rng.gauss(0.2, 0.02) * GB,
    }  # fmt: skip
