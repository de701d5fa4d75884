"""The scripts of the benchmark: small training jobs in many styles, each with its true cause and its fixed twin.

`python benchmarks/doctor/cases.py FOLDER` writes them all as files. A script is a cause (what is slow: `Plant`) put
into a style (how people write training loops). `--fixed` runs the twin: the same job with the cause removed and nothing
else changed. Scripts know nothing of stoker, except those that use its loader.

Without a GPU `Busy` stands for one: a step that takes its time and leaves the cores alone.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

HEAD = '''"""{title}"""

import gc
import json
import os
import sys
import tempfile
import time
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

FIXED = "--fixed" in sys.argv
STEPS = int(os.environ.get("STEPS", 120))
CORES = len(os.sched_getaffinity(0))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
FOLDER = tempfile.mkdtemp()
torch.set_num_threads(1)
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")


class Busy(nn.Module):
    def __init__(self, milliseconds):
        super().__init__()
        self.milliseconds = milliseconds
        self.register_buffer("square", torch.eye(8192 if CUDA else 1), persistent=False)

    def forward(self, x):
        if not x.is_cuda:
            time.sleep(self.milliseconds / 1e3)
            return x
        square = self.square
        # 2.8 ms each on an H200: loading, which takes no less, is the slower part of a script that is to wait for it.
        for _ in range(int(self.milliseconds / 3)):
            square = square @ self.square
        return x + 0 * square[0, 0]


def make_model(width={width}, milliseconds={busy}):
    return nn.Sequential(Busy(milliseconds), nn.Flatten(), nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))


'''

DATA = {
    # name: (code that defines `data`, width of a sample)
    "memory": (
        """
        class Data(Dataset):
            def __init__(self):
                self.values = torch.randn(2048, 64)
                self.labels = torch.randn(2048, 1)

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return self.values[index], self.labels[index]
        """,
        64,
    ),
    "numpy": (
        """
        class Data(Dataset):
            def __len__(self):
                return 4096

            def __getitem__(self, index):
                signal = np.random.default_rng(index).standard_normal(4000)
                spectrum = np.abs(np.fft.rfft(signal * np.hanning(4000)))
                features = np.histogram(np.sort(spectrum), 64)[0]
                return torch.tensor(features, dtype=torch.float32), torch.tensor([float(index % 2)])
        """,
        64,
    ),
    "json": (
        """
        LINE = json.dumps({"values": list(range(3000)), "label": 1.0})

        class Data(Dataset):
            def __len__(self):
                return 4096

            def __getitem__(self, index):
                row = json.loads(LINE)
                return torch.tensor(row["values"][:64], dtype=torch.float32), torch.tensor([row["label"]])
        """,
        64,
    ),
    "zlib": (
        """
        PACKED = zlib.compress(np.tile(np.arange(512, dtype=np.float32), 120).tobytes(), 1)

        class Data(Dataset):
            def __init__(self):
                self.ready = torch.arange(64, dtype=torch.float32)

            def __len__(self):
                return 4096

            def decode(self):
                return torch.from_numpy(np.frombuffer(zlib.decompress(PACKED), np.float32)[:64].copy())

            def __getitem__(self, index):
                return self.ready if FIXED else self.decode(), torch.tensor([float(index % 2)])
        """,
        64,
    ),
    "disk": (
        """
        class Data(Dataset):
            def __init__(self):
                self.values = torch.randn(512, 64)

            def __len__(self):
                return 4096

            def read(self, index):
                if not FIXED:
                    time.sleep(0.002)  # a network file system
                return self.values[index % 512]

            def __getitem__(self, index):
                return self.read(index), torch.tensor([float(index % 2)])
        """,
        64,
    ),
    "augment": (
        """
        class Data(Dataset):
            def __init__(self):
                self.images = torch.randn(256, 1, 48, 48)

            def __len__(self):
                return 4096

            def augment(self, image):
                if FIXED:
                    return image
                for turns in range(6):
                    image = torch.rot90(torch.flip(image, [-1]), turns % 4, [-2, -1]).contiguous()
                    image = nn.functional.avg_pool2d(image[None], 3, 1, 1)[0] * 1.1 - 0.1
                return image

            def __getitem__(self, index):
                return self.augment(self.images[index % 256]), torch.tensor([float(index % 2)])
        """,
        48 * 48,
    ),
    "collate": (
        """
        class Data(Dataset):
            def __init__(self):
                self.values = np.random.default_rng(0).standard_normal((512, 1500)).astype(np.float32)

            def __len__(self):
                return 4096

            def __getitem__(self, index):
                return self.values[index % 512], index % 2


        def collate(samples):
            labels = torch.tensor([[float(label)] for _, label in samples])
            if FIXED:
                return torch.from_numpy(np.stack([values for values, _ in samples])), labels
            rows = [[float(value) for value in values] for values, _ in samples]
            return torch.tensor(rows), labels
        """,
        1500,
    ),
    "gzip_h5": (
        """
        import h5py

        with h5py.File(f"{FOLDER}/img.h5", "w") as file:
            values = np.random.default_rng(0).integers(0, 9, (512, 4096)).astype(np.float32)
            packed = {} if FIXED else {"compression": "gzip", "chunks": (1, 4096)}
            file.create_dataset("x", data=values, **packed)


        class Data(Dataset):
            file = None

            def __len__(self):
                return 4096

            def __getitem__(self, index):
                if self.file is None:
                    self.file = h5py.File(f"{FOLDER}/img.h5", "r")
                return torch.from_numpy(self.file["x"][index % 512]), torch.tensor([float(index % 2)])
        """,
        4096,
    ),
    "chunked_h5": (
        """
        import h5py

        with h5py.File(f"{FOLDER}/img.h5", "w") as file:
            values = np.random.default_rng(0).standard_normal((4096, 1024)).astype(np.float32)
            file.create_dataset("x", data=values, **({} if FIXED else {"chunks": (4096, 16)}))


        class Data(Dataset):
            file = None

            def __len__(self):
                return 4096

            def __getitem__(self, index):
                if self.file is None:
                    self.file = h5py.File(f"{FOLDER}/img.h5", "r")
                return torch.from_numpy(self.file["x"][index * 37 % 4096]), torch.tensor([float(index % 2)])
        """,
        1024,
    ),
    "double": (
        """
        class Data(Dataset):
            def __init__(self):
                kind = np.float32 if FIXED else np.float64
                self.values = np.random.default_rng(0).standard_normal((2048, 512)).astype(kind)

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return self.values[index], self.values[index, :1]


        def make_model():
            layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())]
            model = nn.Sequential(*layers, nn.Linear(512, 1))
            return model if FIXED else model.double()
        """,
        512,
    ),
    "double_large": (
        """
        class Data(Dataset):
            def __init__(self):
                kind = np.float32 if FIXED else np.float64
                self.values = np.random.default_rng(0).standard_normal((2048, 512)).astype(kind)

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return self.values[index], self.values[index, :1]


        class Curves(nn.Module):
            def forward(self, x):
                x = x.repeat(2048 if CUDA else 1, 1)
                for _ in range(8):
                    x = nn.functional.gelu(x) + 0.1 * x
                return x.reshape(-1, 32, 512).mean(0)


        def make_model():
            model = nn.Sequential(nn.Linear(512, 512), Curves(), nn.Linear(512, 1))
            return model if FIXED else model.double()
        """,
        512,
    ),
    "single_large": (
        """
        torch.set_float32_matmul_precision("high" if FIXED else "highest")


        class Data(Dataset):
            def __init__(self):
                self.values = torch.randn(2048, 512)

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return self.values[index], self.values[index, :1]


        class Tokens(nn.Module):
            def forward(self, x):
                return x.reshape(len(x), -1, 64).repeat(1, 16, 64)


        def make_model():
            layers = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU())]
            return nn.Sequential(Tokens(), *layers, nn.Linear(4096, 1), nn.Flatten(), nn.Linear(128, 1))
        """,
        512,
    ),
    "nan": (
        """
        class Data(Dataset):
            def __init__(self):
                self.values = torch.randn(2048, 64)
                self.values[5::40, 7] = 0.0 if FIXED else float("nan")

            def __len__(self):
                return len(self.values)

            def __getitem__(self, index):
                return self.values[index], self.values[index, :1]
        """,
        64,
    ),
    "stream": (
        """
        class Data(IterableDataset):
            def __iter__(self):
                info = torch.utils.data.get_worker_info()
                first, step = (0, 1) if info is None else (info.id, info.num_workers)
                for index in range(first, 1 << 30, step):
                    if not FIXED:
                        time.sleep(0.002)  # waits for a server
                    yield torch.full((64,), float(index % 9)), torch.tensor([float(index % 2)])
        """,
        64,
    ),
}

AFTER = {
    # what a loop does after an update; `loss`, `output`, `model`, `step`
    "": "pass",
    "items": "if not FIXED:\n    seen = [float(value) for row in output.detach().repeat(1, 400) for value in row]",
    "values": "if not FIXED:\n    seen = [float(value) for value in output.detach().flatten().repeat(16)]",
    "gc": "if not FIXED:\n    gc.collect()",
    "save": "if not FIXED or step % 1000 == 999:\n"
    "    torch.save({'model': model.state_dict(), 'more': torch.zeros(700_000)}, f'{FOLDER}/last.pt')",
    "empty_cache": "if not FIXED:\n    torch.cuda.empty_cache()",
    "evaluate": "if not FIXED or step % 10 == 0:\n    model.eval()\n    with torch.no_grad():\n"
    "        held = model(torch.zeros(32, 64, device=output.device)).mean()\n    model.train()",
    "validate": "if not FIXED or step % 10 == 0:\n    with torch.no_grad():\n"
    "        held = model(torch.zeros(32, 64, device=output.device)).mean()\n    HELD.append(held)",
    "again": "if not FIXED or step % 10 == 0:\n"
    "    right = model(torch.zeros(32, 64, device=output.device)) > 0.5\n    HELD.append(right.sum())",
    "seldom": "if step % 60 == 40:\n    model.eval()\n    with torch.no_grad():\n"
    "        held = model(torch.zeros(32, 64, device=output.device)).mean()\n    model.train()",
    "plot": "if step % (40 if FIXED else 20) == 15:\n    with open(f'{FOLDER}/plot', 'w') as plot:\n"
    '        plot.writelines(f\'<circle r="{at % 7}" cx="{at * 0.37:.3f}"/>\' for at in range(120_000))',
    "leak": "if not FIXED:\n    KEPT.append((loss, torch.zeros(60_000)))",
    "log": "if not FIXED:\n    with open(f'{FOLDER}/log', 'a') as log:\n"
    "        for name, value in model.named_parameters():\n"
    "            log.write(name + ''.join(repr(value.detach().cpu().numpy().tolist()) for _ in range(6)) + '\\n')",
}

STYLES = {
    "neighbours": """
        class Neighbours(nn.Module):
            def __init__(self):
                super().__init__()
                self.features = nn.Embedding(4096, 64)
                self.table = torch.randint(4096, (4096, 10))
                self.lists = [set(row) for row in self.table.tolist()]

            def forward(self, nodes):
                if FIXED:
                    return self.features(self.table.to(nodes.device)[nodes]).mean(1)
                chosen = [sorted(self.lists[node]) for node in nodes.tolist()]
                places = {{node: at for at, node in enumerate(sorted(set().union(*map(set, chosen))))}}
                rows = [[places[node] for node in row] + [places[row[0]]] * (10 - len(row)) for row in chosen]
                found = torch.tensor(list(places), device=nodes.device)
                return self.features(found)[torch.tensor(rows, device=nodes.device)].mean(1)


        model = nn.Sequential(Neighbours(), make_model()).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        nodes = torch.randint(4096, (STEPS, 1024), device=DEVICE)
        for step in range(STEPS):
            output = model(nodes[step])
            loss = output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step, loss, output, model)
        """,
    "plain": """
        data = Data()
        loader = DataLoader(data, {arguments})
        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = 0
        while step < STEPS:
            for x, y in loader:
                x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "epochs": """
        def train_one_epoch(model, loader, optimizer, left):
            model.train()
            for step, (inputs, targets) in enumerate(loader):
                if step >= left:
                    break
                outputs = model(inputs.to(DEVICE, non_blocking=True))
                loss = nn.functional.mse_loss(outputs, targets.to(DEVICE, non_blocking=True))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                after(step, loss, outputs, model)
            return step + 1


        @torch.no_grad()
        def validate(model, loader):
            model.eval()
            for number, (inputs, targets) in enumerate(loader):
                inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)
                nn.functional.mse_loss(model(inputs), targets)
                if number == 3:
                    break


        def main():
            train_loader = DataLoader(Data(), {arguments})
            val_loader = DataLoader(torch.utils.data.TensorDataset(torch.randn(256, {width}), torch.randn(256, 1)), 32)
            model = make_model().to(DEVICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            done = 0
            while done < STEPS:
                done += train_one_epoch(model, train_loader, optimizer, STEPS - done)
                validate(model, val_loader)


        main()
        """,
    "teacher": """
        loader = DataLoader(Data(), {arguments})
        model, teacher = make_model().to(DEVICE), make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = 0
        while step < STEPS:
            for x, _ in loader:
                x = x.to(DEVICE, non_blocking=True)
                with torch.no_grad():
                    wanted = teacher(x)
                output = model(x)
                loss = nn.functional.mse_loss(output, wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "adversarial": """
        loader = DataLoader(Data(), {arguments})
        painter, critic = nn.Linear(16, {width}).to(DEVICE), make_model().to(DEVICE)
        learns = torch.optim.Adam(critic.parameters(), lr=1e-4)
        paints = torch.optim.Adam(painter.parameters(), lr=1e-4)
        step = 0
        while step < STEPS:
            for real, _ in loader:
                real = real.to(DEVICE, non_blocking=True)
                with torch.no_grad():
                    made = painter(torch.randn(len(real), 16, device=DEVICE))
                loss = nn.functional.softplus(critic(made) - critic(real)).mean()
                learns.zero_grad()
                loss.backward()
                learns.step()
                output = critic(painter(torch.randn(len(real), 16, device=DEVICE)))
                loss = nn.functional.softplus(-output).mean()
                paints.zero_grad()
                loss.backward()
                paints.step()
                after(step, loss, output, critic)
                step += 1
                if step >= STEPS:
                    break
        """,
    "labels": """
        loader = DataLoader(Data(), {arguments})
        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = 0
        while step < STEPS:
            for x, _ in loader:
                x = x.to(DEVICE, non_blocking=True)
                model.eval()
                with torch.no_grad():
                    guess = model(x).sigmoid()
                model.train()
                output = model(x + 0.1)
                loss = nn.functional.binary_cross_entropy_with_logits(output, (guess > 0.5).float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "agent": """
        class Agent:
            def __init__(self):
                self.model = make_model().to(DEVICE)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
                self.memory, self.state = [], torch.zeros({width}, device=DEVICE)

            def act(self):
                with torch.no_grad():
                    value = self.model(self.state[None])
                self.memory.append((self.state, value[0]))
                self.state = self.state + 0.1 * torch.tanh(value[0])

            def learn(self, step):
                chosen = self.memory[-{batch}:]
                states, values = (torch.stack(part) for part in zip(*chosen))
                output = self.model(states)
                loss = nn.functional.mse_loss(output, values + 0.01)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                after(step, loss, output, self.model)


        agent = Agent()
        for step in range(STEPS):
            agent.act()
            agent.learn(step)
        """,
    "accumulate": """
        loader = DataLoader(Data(), {arguments})
        model = make_model().to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        step = number = 0
        while step < STEPS:
            for x, y in loader:
                output = model(x.to(DEVICE, non_blocking=True))
                loss = nn.functional.mse_loss(output, y.to(DEVICE, non_blocking=True)) / 2
                loss.backward()
                number += 1
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    after(step, loss, output, model)
                    step += 1
                    if step >= STEPS:
                        break
        """,
    "class": """
        class Fitter:
            def __init__(self, model, loader):
                self.model, self.loader = model.to(DEVICE), loader
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
                self.step = 0

            def batches(self):
                while True:
                    yield from self.loader

            def update(self, batch):
                x, y = (part.to(DEVICE, non_blocking=True) for part in batch)
                output = self.model(x)
                loss = (output - y).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                after(self.step, loss, output, self.model)
                self.step += 1

            def fit(self):
                for batch in self.batches():
                    self.update(batch)
                    if self.step >= STEPS:
                        return


        Fitter(make_model(), DataLoader(Data(), {arguments})).fit()
        """,
    "compiled": """
        loader = DataLoader(Data(), {arguments})
        model = make_model().to(DEVICE)
        fast = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = 0
        while step < STEPS:
            for x, y in loader:
                output = fast(x.to(DEVICE, non_blocking=True))
                loss = nn.functional.mse_loss(output, y.to(DEVICE, non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "lightning": """
        import logging
        import warnings

        try:
            import lightning
        except ImportError:
            import pytorch_lightning as lightning

        warnings.filterwarnings("ignore")
        for name in ("lightning.pytorch", "pytorch_lightning"):
            logging.getLogger(name).setLevel(logging.ERROR)


        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = make_model()

            def training_step(self, batch, number):
                x, y = batch
                self.output = self.net(x)
                self.loss = nn.functional.mse_loss(self.output, y)
                return self.loss

            def on_train_batch_end(self, outputs, batch, number):
                after(self.global_step, self.loss, self.output, self.net)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1e-4)


        lightning.Trainer(
            max_steps=STEPS, max_epochs=-1, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(Module(), DataLoader(Data(), {arguments}))
        """,
    "accelerate": """
        from accelerate import Accelerator

        accelerator = Accelerator()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Data(), {arguments}))
        step = 0
        while step < STEPS:
            for x, y in loader:
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "hf": """
        from transformers import Trainer, TrainerCallback, TrainingArguments
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()


        class Wrapped(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = make_model()

            def forward(self, x, labels):
                self.output = self.net(x)
                self.loss = nn.functional.mse_loss(self.output, labels)
                return {{"loss": self.loss, "logits": self.output}}


        class Told(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **_):
                after(state.global_step, model.loss, model.output, model)


        class Named(Data):
            def __getitem__(self, index):
                x, y = super().__getitem__(index)
                return {{"x": x, "labels": y}}


        class OwnLoader(Trainer):
            def get_train_dataloader(self):
                return DataLoader(Named(), {arguments})


        OwnLoader(
            model=Wrapped(),
            args=TrainingArguments(
                output_dir=FOLDER, max_steps=STEPS, report_to=[], save_strategy="no", logging_strategy="no",
                disable_tqdm=True, learning_rate=1e-4, logging_nan_inf_filter={nan_filter},
            ),
            train_dataset=Named(),
            callbacks=[Told()],
        ).train()
        """,
    "generator": """
        def batches(data, size={batch}):
            order = np.random.default_rng(0)
            while True:
                rows = [data[int(index)] for index in order.integers(0, len(data), size)]
                yield torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        source = DataLoader(Data(), {arguments}) if FIXED and "{name}" else batches(Data())
        step = 0
        while step < STEPS:
            for x, y in source:
                output = model(x.to(DEVICE, non_blocking=True))
                loss = nn.functional.mse_loss(output, y.to(DEVICE, non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
                step += 1
                if step >= STEPS:
                    break
        """,
    "get_batch": """
        data = Data()


        def get_batch(step, size={batch}):
            rows = [data[(step * size + at) % len(data)] for at in range(size)]
            x, y = (torch.stack(part) for part in zip(*rows))
            if CUDA:
                x, y = x.pin_memory(), y.pin_memory()
            return x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)


        model = make_model().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = DataLoader(data, {arguments}) if FIXED and "{name}" else None
        source = (batch for _ in range(STEPS) for batch in loader)
        for step in range(STEPS):
            batch = get_batch(step) if loader is None else next(source)
            x, y = (part.to(DEVICE, non_blocking=True) for part in batch)
            output = model(x)
            loss = nn.functional.mse_loss(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step, loss, output, model)
        """,
    "memmap": """
        TOKENS = np.memmap(f"{{FOLDER}}/tokens.bin", np.uint16, "w+", shape=(4_000_000,))
        TOKENS[:] = np.arange(len(TOKENS)) % 50_000


        def get_batch(size={batch}, block=64):
            starts = np.random.randint(0, len(TOKENS) - block - 1, size)
            if not FIXED and "{slow}":
                # Counts words anew for every batch.
                np.unique(np.sort(np.array(TOKENS[:250_000])), return_counts=True)
            x = torch.stack([torch.from_numpy(TOKENS[at : at + block].astype(np.float32)) for at in starts])
            x = (x.pin_memory() if CUDA else x).to(DEVICE, non_blocking=True) / 5e4
            return x, x[:, :1]


        model = make_model().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for step in range(STEPS):
            x, y = get_batch()
            output = model(x)
            loss = nn.functional.mse_loss(output, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after(step, loss, output, model)
        """,
    "arrays": """
        ARRAYS = {{"x": np.random.default_rng(0).standard_normal((4096, 64)), "y": np.zeros((4096, 1))}}
        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for step in range(STEPS):
            chosen = np.random.randint(0, 4096, {batch})
            if not FIXED and "{slow}":
                # Standardises all of the data, for every batch.
                whole = (ARRAYS["x"] - ARRAYS["x"].mean(0)) / np.sort(ARRAYS["x"], 0).std(0)
            else:
                whole = ARRAYS["x"]
            x = torch.tensor(whole[chosen], dtype=torch.float32, device=DEVICE)
            y = torch.tensor(ARRAYS["y"][chosen], dtype=torch.float32, device=DEVICE)
            output = model(x)
            loss = nn.functional.mse_loss(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step, loss, output, model)
        """,
    "tar": """
        import io
        import tarfile

        with tarfile.open(f"{{FOLDER}}/shard.tar", "w") as shard:
            for number in range(256):
                body = zlib.compress(np.full(60_000 if "{slow}" else 64, number, np.float32).tobytes(), 1)
                info = tarfile.TarInfo(f"{{number:06}}.z")
                info.size = len(body)
                shard.addfile(info, io.BytesIO(body))
        READY = torch.arange(64, dtype=torch.float32)


        def samples():
            while True:
                with tarfile.open(f"{{FOLDER}}/shard.tar") as shard:
                    for member in shard:
                        raw = shard.extractfile(member).read()
                        if FIXED and "{slow}":
                            yield READY
                        else:
                            yield torch.frombuffer(bytearray(zlib.decompress(raw)), dtype=torch.float32)[:64]


        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        stream = samples()
        for step in range(STEPS):
            x = torch.stack([next(stream) for _ in range({batch})]).to(DEVICE) / 256
            output = model(x)
            loss = output.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step, loss, output, model)
        """,
    "stoker": """
        import stoker

        with __import__("h5py").File(f"{{FOLDER}}/data.h5", "w") as file:
            file["x"] = np.random.default_rng(0).standard_normal((4096, 64)).astype(np.float32)
            file["y"] = np.zeros((4096, 1), np.float32)
        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        step = 0
        with stoker.Loader(f"{{FOLDER}}/data.h5", {batch}, as_tuple=("x", "y"), device=str(DEVICE)) as loader:
            while step < STEPS:
                for x, y in loader:
                    if not FIXED and "{slow}":
                        # Smooths the batch on the CPU, value by value.
                        rows = [[sum(row[at : at + 3]) / 3 for at in range(64)] for row in x.tolist()]
                        x = torch.tensor(rows, device=DEVICE)
                    output = model(x)
                    loss = nn.functional.mse_loss(output, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    after(step, loss, output, model)
                    step += 1
                    if step >= STEPS:
                        break
        """,
    "prefetch": """
        import stoker

        data = Data()


        def batches():
            for first in range(0, 1 << 30, {batch}):
                rows = [data[(first + at) % len(data)] for at in range({batch})]
                yield torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


        model = make_model().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with stoker.prefetch(batches(), DEVICE) as ahead:
            for step, (x, y) in enumerate(ahead):
                if step >= STEPS:
                    break
                output = model(x)
                loss = nn.functional.mse_loss(output, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                after(step, loss, output, model)
        """,
    "launches": """
        layers = [layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(64, 1)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        X, Y = torch.randn(4096, 64, device=DEVICE), torch.randn(4096, 1, device=DEVICE)
        x, y = X[:{batch}].clone(), Y[:{batch}].clone()
        told = getattr(sys, "stopwatch_note", lambda: None)


        def update():
            output = model(x)
            loss = nn.functional.mse_loss(output, y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            return output


        if FIXED:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    update()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                update()
        for step in range(STEPS):
            first = step * {batch} % 4096
            x.copy_(X[first : first + {batch}])
            y.copy_(Y[first : first + {batch}])
            if FIXED:
                graph.replay()
                told()
            else:
                update()
            if step % 20 == 19:
                torch.cuda.synchronize()
        """,
    "pageable": """
        HELD = [torch.randn({batch}, 262_144) for _ in range(6)]
        if FIXED:
            HELD = [held.pin_memory() for held in HELD]
        model = nn.Sequential(nn.Linear(262_144, 16), nn.ReLU(), nn.Linear(16, 1)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for step in range(STEPS):
            x = HELD[step % 6].to(DEVICE, non_blocking=True)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            after(step, loss, x, model)
        """,
    "ranks": """
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        # Milliseconds of rank 0, of rank 1, and of each if the work is divided evenly.
        WORK = (4, 12, 8) if "{slow}" else (4, 4, 4)


        def work(rank, world, port):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo", rank=rank, world_size=world)
            torch.set_num_threads(1)
            model = DistributedDataParallel(make_model(milliseconds=WORK[rank if not FIXED else 2]))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            loader = DataLoader(Data(), {arguments})
            step = 0
            while step < STEPS:
                for x, y in loader:
                    output = model(x)
                    loss = nn.functional.mse_loss(output, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    after(step, loss, output, model)
                    step += 1
                    if step >= STEPS:
                        break
            dist.destroy_process_group()


        if __name__ == "__main__":
            import socket

            CUDA = False
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
            torch.multiprocessing.start_processes(work, (2, port), nprocs=2, start_method="fork")
        """,
}


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        name: Of its file.
        causes: Names of the findings that are true; empty if it is healthy.
        style: How the loop is written.
        data: How samples are made (`DATA`).
        arguments: Of the DataLoader, as Python.
        after: What follows every update (`AFTER`).
        also: Findings that are right as well, where a cause has two names.
        batch: Samples per step; `fixed_batch` in the twin.
        busy: Milliseconds of the model.
        has_gain: Whether the twin is meant to be faster.
        notebook: Whether it runs as a cell of a notebook does, without a file.
        slow: Whether a style that has a slow way of its own uses it.
        needs_gpu: Whether its cause exists on a GPU only.
        without_gpu: Whether its cause exists without a GPU only.
    """

    name: str
    causes: tuple[str, ...]
    style: str
    data: str = "memory"
    arguments: str = "batch_size=32"
    after: str = ""
    also: tuple[str, ...] = ()
    batch: int = 32
    fixed_batch: int | None = None
    busy: float = 5.0
    has_gain: bool = True
    notebook: bool = False
    slow: bool = False
    needs_gpu: bool = False
    without_gpu: bool = False

    def source(self) -> str:
        """Return the script."""
        code, width = DATA[self.data]
        values = {
            "arguments": self.arguments,
            "width": width,
            "batch": self.batch,
            "slow": "slow" if self.slow else "",
            "nan_filter": "not FIXED" if self.slow else "False",
            "name": "slow" if self.causes else "",
        }
        after = "\n".join(AFTER[part] for part in self.after.split("+"))
        body = textwrap.dedent(STYLES[self.style]).format(**values)
        title = f"{self.style} loop, {self.data} data: {', '.join(self.causes) or 'healthy'}."
        text = HEAD.format(title=title, width=width, busy=self.busy)
        text += textwrap.dedent(code).strip() + "\n\n\nKEPT, HELD = [], []\n\n\n"
        text += (
            "def after(step, loss, output, model):\n" + textwrap.indent(after, "    ") + "\n\n\n"
        )
        text += body.strip() + "\n"
        if self.notebook:
            cell = "compile(source, '<ipython-input-3-0f1e>', 'exec')"
            text = f"source = {text!r}\nexec({cell}, {{'__name__': '__main__'}})\n"
        return text


_FEW = "batch_size=32, num_workers=0 if not FIXED else min(4, CORES)"
_ONE = "batch_size=32, num_workers=1 if not FIXED else min(4, CORES), persistent_workers=True"
_PINNED = "batch_size=32, pin_memory=CUDA"
_ALL = "batch_size=32, num_workers=CORES, persistent_workers=True"
_TWO = "batch_size=32, num_workers=2, persistent_workers=True"
_FOUR = "batch_size=4, num_workers=2, persistent_workers=True"
_MANY = "batch_size=32, num_workers=0 if FIXED else 4 * CORES"
_OWN = ", collate_fn=collate"
_SHORT = "batch_size=32, num_workers=2, persistent_workers=FIXED, sampler=range(256)"
_NEW = "batch_size=32, num_workers=min(4, CORES), persistent_workers=True"

NONE, ONE, DECODE, DISK = "no-workers", "starved-by-loader", "decode-bound", "disk-bound"
BETWEEN, SYNC = "slow-between-steps", "sync-every-step"
EVALUATES, LONG = "evaluates-each-step", "long-steps"


def _loading() -> list[Case]:
    cases = [
        Case(f"no_workers_{style}_{data}", (NONE,), style, data, _FEW, batch=32 * (1 + (style == "accumulate")))
        for style, data in (
            ("plain", "numpy"), ("epochs", "json"), ("accumulate", "numpy"), ("class", "json"), ("compiled", "numpy"),
            ("lightning", "numpy"), ("accelerate", "json"), ("hf", "numpy"),
        )
    ]  # fmt: skip
    cases.append(Case("no_workers_notebook", (NONE,), "plain", "numpy", _FEW, notebook=True))
    cases += [
        Case(f"one_worker_{style}", (ONE,), style, data, _ONE)
        for style, data in (
            ("plain", "numpy"), ("epochs", "json"), ("lightning", "numpy"), ("accelerate", "numpy"), ("hf", "json"),
        )
    ]  # fmt: skip
    cases += [
        Case("too_many_workers", (ONE,), "plain", "memory", _MANY, busy=0.5),
        Case("decode_plain", (DECODE,), "plain", "zlib", _ALL, busy=1),
        Case("decode_class", (DECODE,), "class", "zlib", _ALL, busy=1),
        Case("decode_lightning", (DECODE,), "lightning", "zlib", _ALL, busy=1),
        Case("disk_plain", (DISK,), "plain", "disk", _TWO, also=(ONE,)),
        Case("disk_epochs", (DISK,), "epochs", "disk", _TWO, also=(ONE,)),
        Case("disk_lightning", (DISK,), "lightning", "disk", _TWO, also=(ONE,)),
        Case("disk_stream", (DISK,), "plain", "stream", _TWO, also=(ONE,)),
        Case("augment_plain", ("augment-on-cpu",), "plain", "augment", _ALL, busy=1, also=(ONE,)),
        Case("augment_accelerate", ("augment-on-cpu",), "accelerate", "augment", _ALL, busy=1, also=(ONE,)),
        Case("collate_plain", ("python-collate",), "plain", "collate", _ALL + _OWN, busy=1, also=(ONE,)),
        Case("collate_epochs", ("python-collate",), "epochs", "collate", _ALL + _OWN, busy=1, also=(ONE,)),
        Case("gzip_plain", ("hdf5-compressed",), "plain", "gzip_h5", _TWO, busy=2, also=(ONE,)),
        Case("gzip_lightning", ("hdf5-compressed",), "lightning", "gzip_h5", _TWO, busy=2, also=(ONE,)),
        Case("chunks_plain", ("hdf5-chunks",), "plain", "chunked_h5", _FOUR, busy=2, batch=4, also=(ONE,)),
        Case("chunks_class", ("hdf5-chunks",), "class", "chunked_h5", _FOUR, busy=2, batch=4, also=(ONE,)),
        Case("restarted_epochs", ("workers-restarted",), "epochs", "memory", _SHORT),
        Case("restarted_class", ("workers-restarted",), "class", "memory", _SHORT),
    ]  # fmt: skip
    return cases


def _between() -> list[Case]:
    return [
        Case("between_get_batch", (BETWEEN,), "get_batch", "numpy", _NEW),
        Case("between_get_batch_json", (BETWEEN,), "get_batch", "json", _NEW),
        Case("between_generator", (BETWEEN,), "generator", "numpy", _NEW),
        Case("between_notebook", (BETWEEN,), "get_batch", "json", _NEW, notebook=True),
        Case("between_memmap", (BETWEEN,), "memmap", slow=True),
        Case("between_arrays", (BETWEEN,), "arrays", slow=True),
        Case("between_tar", (BETWEEN,), "tar", slow=True),
        Case("between_stoker", (BETWEEN,), "stoker", slow=True, also=(SYNC,)),
        Case(
            "between_log",
            (BETWEEN,),
            "plain",
            after="log",
        ),
    ]


def _stepping() -> list[Case]:
    ready = "batch_size=32"
    return [
        Case("items_plain", (SYNC,), "plain", after="items"),
        Case("items_epochs", (SYNC,), "epochs", after="items"),
        Case("items_lightning", (SYNC,), "lightning", after="items"),
        Case("tiny_batch_plain", ("batch-too-small",), "plain", arguments="batch_size=2 if not FIXED else 64",
             batch=2, fixed_batch=64, busy=0),
        Case("tiny_batch_accelerate", ("batch-too-small",), "accelerate", arguments="batch_size=2 if not FIXED else 64",
             batch=2, fixed_batch=64, busy=0),
        Case("evaluates_plain", (EVALUATES,), "plain", after="evaluate"),
        Case("evaluates_get_batch", (EVALUATES,), "get_batch", after="evaluate"),
        Case("validates_plain", (EVALUATES,), "plain", after="validate"),
        Case("validates_class", (EVALUATES,), "class", after="validate"),
        Case("validates_compiled", (EVALUATES,), "compiled", after="validate"),
        Case("computes_again", (EVALUATES,), "epochs", after="again"),
        Case("long_plain", (LONG,), "plain", after="plot"),
        Case("long_epochs", (LONG,), "epochs", after="plot"),
        Case("python_neighbours", ("python-in-model",), "neighbours", batch=1024),
        Case("empty_cache", ("empty-cache-each-step",), "plain", after="empty_cache", has_gain=False),
        Case("gc_plain", ("gc-each-step",), "plain", after="gc"),
        Case("gc_lightning", ("gc-each-step",), "lightning", after="gc"),
        Case("gc_hf", ("gc-each-step",), "hf", after="gc"),
        Case("saves_plain", ("saves-too-often",), "plain", after="save"),
        Case("saves_epochs", ("saves-too-often",), "epochs", after="save"),
        Case("double_plain", ("double-precision",), "plain", "double", ready, without_gpu=True),
        Case("double_class", ("double-precision",), "class", "double", ready, without_gpu=True),
        Case("leak_plain", ("memory-creep",), "plain", after="leak", has_gain=False),
        Case("leak_epochs", ("memory-creep",), "epochs", after="leak", has_gain=False),
        Case("nan_plain", ("bad-values",), "plain", "nan", has_gain=False),
        Case("nan_lightning", ("bad-values",), "lightning", "nan", has_gain=False),
        Case("uneven_ranks", ("imbalanced-ranks",), "ranks", slow=True, batch=64),
    ]  # fmt: skip


def _two() -> list[Case]:
    return [
        Case("two_workers_gc", (NONE, "gc-each-step"), "plain", "numpy", _FEW, "gc"),
        Case("two_one_worker_items", (ONE, SYNC), "class", "numpy", _ONE, "items"),
        Case("two_collate_save", ("python-collate", "saves-too-often"), "plain", "collate", _ALL + _OWN, "save",
             busy=1, also=(ONE,)),
        Case("two_gzip_gc", ("hdf5-compressed", "gc-each-step"), "epochs", "gzip_h5", _TWO, "gc", busy=2, also=(ONE,)),
        Case("two_get_batch_gc", (BETWEEN, "gc-each-step"), "get_batch", "numpy", _NEW, "gc"),
        Case("two_disk_save", (DISK, "saves-too-often"), "plain", "disk", _TWO, "save", also=(ONE,)),
        Case("two_augment_items", ("augment-on-cpu", SYNC), "plain", "augment", _ALL, "items", busy=1, also=(ONE,)),
        Case("two_workers_leak", (NONE, "memory-creep"), "plain", "numpy", _FEW, "leak"),
        Case("two_nan_save", ("bad-values", "saves-too-often"), "plain", "nan", after="save"),
    ]  # fmt: skip


def _healthy() -> list[Case]:
    quiet = _PINNED  # without a GPU it is the same as without pin_memory
    return [
        Case("healthy_plain", (), "plain", arguments=quiet, busy=10),
        Case("healthy_workers", (), "plain", "zlib", "batch_size=4, num_workers=2, persistent_workers=True", busy=20,
             batch=4),
        Case("healthy_epochs", (), "epochs", arguments=quiet, busy=10),
        Case("healthy_accumulate", (), "accumulate", arguments=quiet, busy=10, batch=64),
        Case("healthy_class", (), "class", arguments=quiet, busy=10),
        Case("healthy_compiled", (), "compiled", arguments=quiet, busy=10),
        Case("healthy_lightning", (), "lightning", arguments=quiet, busy=10),
        Case("healthy_accelerate", (), "accelerate", arguments=quiet, busy=10),
        Case("healthy_hf", (), "hf", arguments=quiet, busy=10),
        Case("healthy_get_batch", (), "get_batch", arguments=quiet, busy=10),
        Case("healthy_generator", (), "generator", arguments=quiet, busy=10),
        Case("healthy_evaluation", (), "get_batch", arguments=quiet, busy=10, after="seldom"),
        Case("healthy_memmap", (), "memmap", busy=10),
        Case("healthy_arrays", (), "arrays", busy=10),
        Case("healthy_tar", (), "tar", busy=20, batch=8),
        Case("healthy_stoker", (), "stoker", busy=10),
        Case("healthy_prefetch", (), "prefetch", busy=10),
        Case("healthy_notebook", (), "get_batch", arguments=quiet, busy=10, notebook=True),
        Case("healthy_teacher", (), "teacher", arguments=quiet, busy=10),
        Case("healthy_adversarial", (), "adversarial", arguments=quiet, busy=10),
        Case("healthy_labels", (), "labels", arguments=quiet, busy=10),
        Case("healthy_agent", (), "agent", busy=10),
        Case("healthy_ranks", (), "ranks", arguments=quiet, batch=64),
    ]  # fmt: skip


def _on_a_gpu() -> list[Case]:
    return [
        Case("gpu_launches", ("launch-bound",), "launches", needs_gpu=True),
        Case("gpu_pageable", ("pageable-copies",), "pageable", needs_gpu=True),
        Case("gpu_double", ("double-precision",), "plain", "double_large", _PINNED, needs_gpu=True),
        Case("gpu_single", ("full-precision",), "plain", "single_large", _PINNED, needs_gpu=True),
        Case(
            "gpu_single_class",
            ("full-precision",),
            "class",
            "single_large",
            _PINNED,
            needs_gpu=True,
        ),
        Case("gpu_nan_filter", (SYNC,), "hf", arguments=_PINNED, slow=True, needs_gpu=True),
        Case("gpu_values", (SYNC,), "plain", after="values", arguments=_PINNED, needs_gpu=True),
        Case(
            "gpu_values_class", (SYNC,), "class", after="values", arguments=_PINNED, needs_gpu=True
        ),
    ]


CASES: tuple[Case, ...] = (
    *_loading(),
    *_between(),
    *_stepping(),
    *_two(),
    *_healthy(),
    *_on_a_gpu(),
)
BY_NAME = {case.name: case for case in CASES}


def write_scripts(folder: Path) -> None:
    """Write every script into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        (folder / f"{case.name}.py").write_text(case.source(), encoding="utf-8")


if __name__ == "__main__":
    write_scripts(Path(sys.argv[1]))
    print(f"{len(CASES)} scripts in {sys.argv[1]}")
