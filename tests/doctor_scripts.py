"""Scripts that the doctor watches in the tests, and one warm process that runs them all once."""

from __future__ import annotations

import textwrap
from importlib.util import find_spec
from types import SimpleNamespace

from doctor_runs import run_warm

HEAD = """
import os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

def update(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

def rounds(loader):
    while True:
        yield from loader
"""

LIGHT = """
import os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
model = nn.Linear(8, 1)

def update(x, y):
    nn.functional.mse_loss(model(x), y).backward()

def rounds(loader):
    while True:
        yield from loader
"""
"""Without an optimizer, whose first one imports two seconds of torch: for what needs a process of its own."""


def script(folder, name, body, head=HEAD):
    path = folder / f"{name}.py"
    path.write_text(head + textwrap.dedent(body))
    return path


SEEN = {
    "accumulation": """
        for number, (x, y) in zip(range(160), rounds(DataLoader(data, batch_size=8))):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    """,
    "two_optimizers": """
        other = nn.Linear(8, 1)
        second = torch.optim.Adam(other.parameters())
        for _, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=8))):
            update(x, y)
            other(x).sum().backward()
            second.step()
    """,
    "no_loader": """
        for number in range(40):
            update(*data[number : number + 16])
    """,
    "inference": """
        with torch.no_grad():
            for _, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=32))):
                model(x)
                time.sleep(0.002)
    """,
    "no_optimizer": """
        for _, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=32))):
            model(x).sum().backward()
    """,
    "validation": """
        train, held_out = DataLoader(data, batch_size=8), DataLoader(data, batch_size=64)
        for epoch in range(4):
            for x, y in train:
                update(x, y)
            for x, y in held_out:
                time.sleep(0.3)
                model(x)
    """,
    "new_loader_every_epoch": """
        for epoch in range(4):
            for x, y in DataLoader(data, batch_size=16):
                update(x, y)
    """,
    "own_profiler": """
        with torch.profiler.profile(schedule=torch.profiler.schedule(wait=7, warmup=1, active=2)) as p:
            for _, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=8))):
                update(x, y)
                p.step()
        assert len(p.key_averages())
    """,
    "forks_and_children": """
        import subprocess
        for number, (x, y) in enumerate(rounds(DataLoader(data, batch_size=8))):
            update(x, y)
            if number == 20:
                if os.fork() == 0:
                    os._exit(0)
                os.wait()
                subprocess.run([sys.executable, "-c", "pass"], check=True)
            if number == 40:
                break
    """,
    "losses_that_are_not": """
        for number, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=8))):
            (update(x, y) * float("nan")).item()
    """,
    "iterable": """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                for number in range(10_000):
                    time.sleep(0.001)
                    yield torch.full((8,), float(number)), torch.zeros(1)
        for _, (x, y) in zip(range(40), DataLoader(Stream(), batch_size=4, num_workers=1)):
            update(x, y)
    """,
    "compiled": """
        graphs = []
        compiled = torch.compile(model, backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True)
        for _, (x, y) in zip(range(40), rounds(DataLoader(data, batch_size=8))):
            loss = nn.functional.mse_loss(compiled(x.to(torch.float32)), y)
            loss.backward()
            optimizer.step()
            float(loss)
        assert len(graphs) == 1, graphs
    """,
    "crash": """
        for number, (x, y) in enumerate(rounds(DataLoader(data, batch_size=8))):
            update(x, y)
            if number == 40:
                sys.stderr = open(os.devnull, "w")
                raise RuntimeError("no")
    """,
    "killed": """
        for number, (x, y) in enumerate(rounds(DataLoader(data, batch_size=8))):
            update(x, y)
            if number == 60:
                time.sleep(1.6)  # a kill loses the last second
                os.kill(os.getpid(), 9)
    """,
    "accelerate": """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
        for epoch in range(2):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
    """,
    "lightning": """
        import lightning as L

        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(8, 1)

            def training_step(self, batch, index):
                return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1e-3)

        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(Module(), DataLoader(data, batch_size=8))
    """,
    "validating": """
        class Slow(TensorDataset):
            def __getitem__(self, index):
                time.sleep(0.004)
                return super().__getitem__(index)
        train = DataLoader(data, batch_size=8)
        held_out = DataLoader(Slow(*data.tensors), batch_size=64)
        for epoch in range(2):
            for x, y in train:
                update(x, y)
            for x, y in held_out:
                model(x)
    """,
    "reading": """
        values = torch.ones(128)
        for number, (x, y) in zip(range(30), rounds(DataLoader(data, batch_size=8))):
            update(x, y)
            for value in values:
                value.item()
    """,
    "slow": """
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 160

            def __getitem__(self, index):
                time.sleep(0.08 if index % 4 == 0 else 0.001)
                return torch.zeros(8), torch.zeros(1)

        for x, y in DataLoader(Slow(), batch_size=4):
            update(x, y)
    """,
    "whole": """
        class Whole(torch.utils.data.Dataset):
            def __len__(self):
                return 160

            def __getitems__(self, indices):
                assert type(indices) is list, type(indices)
                return [(torch.zeros(8), torch.zeros(1)) for _ in indices]

        class Tuples(TensorDataset):
            def __getitem__(self, index):
                assert type(index) is int, type(index)
                return super().__getitem__(index)

        for x, y in DataLoader(Whole(), batch_size=4):
            update(x, y)
        tuples = [(n, n + 1) for n in range(40)]
        data = Tuples(torch.zeros(64, 8), torch.zeros(64, 1))
        for x, y in DataLoader(data, batch_sampler=tuples):
            update(x, y)
    """,
    "get_batch": """
        def get_batch():
            time.sleep(0.03)
            return torch.randn(8, 4), torch.zeros(8, 1)
        class Busy(nn.Linear):
            def forward(self, x):
                time.sleep(0.005)  # long enough for samples of the thread to meet it
                return super().forward(x)
        model = Busy(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(50):
            x, y = get_batch()
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "generator": """
        def made():
            while True:
                time.sleep(0.03)
                yield torch.randn(8, 4), torch.zeros(8, 1)
        class Busy(nn.Linear):
            def forward(self, x):
                time.sleep(0.005)  # long enough for samples of the thread to meet it
                return super().forward(x)
        model = Busy(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _, (x, y) in zip(range(50), made()):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
    "slow_model": """
        class Slow(nn.Linear):
            def forward(self, x):
                time.sleep(0.03)
                return super().forward(x)
        model = Slow(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(50):
            loss = nn.functional.mse_loss(model(torch.ones(8, 4)), torch.zeros(8, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    """,
}
OPTIONAL = {name for name in ("accelerate", "lightning") if find_spec(name) is None}


def watched(folder, scripts=SEEN):
    """Run scripts from one warm process, and return what the probe saw of each, with their `paths`."""
    bodies = {name: body for name, body in scripts.items() if name not in OPTIONAL}
    paths = {name: script(folder, f"a_{name}", body) for name, body in bodies.items()}
    words = {name: str(path.with_suffix("")) for name, path in paths.items()}
    came = run_warm(
        words.values(),
        0,
        folder / "seen",
        {words[name] for name in ("crash", "killed") if name in words},
    )
    return SimpleNamespace(**{name: came[word] for name, word in words.items()}, paths=paths)
