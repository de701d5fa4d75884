"""Two processes over gloo under one framework: `python framework_ranks.py FRAMEWORK FILE FOLDER`.

Each rank writes `rank-N.json`: the samples of every batch of an unbroken run, of a run that was cut and of
what followed it from the checkpoint that the first rank wrote; and losses and weights of two epochs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from framework_makers import BATCH, RATE, flat, makes, step_loss
from training_makers import make_model

CUT = 2


def write(folder, rank, **seen):
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(seen))


def under_accelerate(path, folder):
    from accelerate import Accelerator

    from stoker.frameworks.accelerate import load_for

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with load_for(accelerator, makes(path, drop_last=True)) as loader:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for _ in range(2):
            for batch in loader:
                loss = step_loss(model, batch["features"], batch["targets"])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    with load_for(accelerator, makes(path)) as loader:
        whole = [batch.positions.tolist() for epoch in range(2) for batch in loader]
    with load_for(accelerator, makes(path)) as loader:
        accelerator.register_for_checkpointing(loader)
        first = [batch.positions.tolist() for batch, _ in zip(loader, range(CUT), strict=False)]
        loader.seek(0, CUT)  # `zip` has asked for one more
        accelerator.save_state(f"{folder}/state", safe_serialization=False)
    accelerator.wait_for_everyone()
    accelerator._custom_objects.clear()
    with load_for(accelerator, makes(path)) as loader:
        accelerator.register_for_checkpointing(loader)
        accelerator.load_state(f"{folder}/state")
        rest = [batch.positions.tolist() for batch in loader]
    weights = flat(accelerator.unwrap_model(model)).tolist()
    rank = accelerator.process_index
    write(folder, rank, whole=whole, first=first, rest=rest, losses=losses, weights=weights)


def under_lightning(path, folder):
    import lightning.pytorch as pl

    from stoker.frameworks.lightning import OomLadderCallback, StokerData

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.body, self.seen, self.losses = make_model(), [], []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch.positions.tolist())
            loss = step_loss(self.body, batch["features"], batch["targets"])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    class Keeping(pl.Callback):
        """Writes down what a rank has seen, which is gone with its process; saves where the run is cut."""

        def __init__(self, name):
            self.name = name

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if self.name == "first" and trainer.global_step == CUT:
                trainer.save_checkpoint(f"{folder}/cut.ckpt")

        def on_train_end(self, trainer, module):
            file = Path(folder) / f"rank-{trainer.global_rank}.json"
            seen = json.loads(file.read_text()) if file.exists() else {}
            seen[self.name] = module.seen
            if self.name == "exact":
                seen |= {"losses": module.losses, "weights": flat(module.body).tolist()}
            write(folder, trainer.global_rank, **seen)

    def fit(name, max_steps=-1, max_epochs=2, ckpt=None, **options):
        ladder = OomLadderCallback()
        trainer = pl.Trainer(
            strategy="ddp_fork", devices=2, accelerator="cpu", max_epochs=max_epochs,
            max_steps=max_steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[Keeping(name), ladder],
        )  # fmt: skip
        trainer.fit(Net(), datamodule=StokerData(makes(path, **options)), ckpt_path=ckpt)

    torch.set_num_threads(1)
    fit("exact", drop_last=True)
    fit("whole")
    fit("first", max_steps=CUT)
    fit("rest", max_epochs=1, ckpt=f"{folder}/cut.ckpt")


def under_huggingface(path, folder):
    from transformers import Trainer, TrainingArguments

    from stoker.frameworks.huggingface import StokerTrainerMixin

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()

        def forward(self, input_values, labels):
            return {"loss": step_loss(self.body, input_values, labels)}

    class Training(StokerTrainerMixin, Trainer):
        losses: list[float]

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    torch.set_num_threads(1)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, dataloader_drop_last=True, num_train_epochs=2,
        learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=0.0, optim="sgd",
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Training(
        Net(), arguments, train_loader=makes(path, batch=None),
        fields={"features": "input_values", "targets": "labels"},
    )  # fmt: skip
    trainer.losses = []
    trainer.train()
    weights = flat(trainer.accelerator.unwrap_model(trainer.model)).tolist()
    write(folder, arguments.process_index, losses=trainer.losses, weights=weights)


if __name__ == "__main__":
    framework, file, target = sys.argv[1:4]
    if framework == "lightning":
        under_lightning(file, target)
    else:
        # Imported before the fork, once for both.
        import torch._dynamo
        from accelerate import debug_launcher
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)  # of tests, where this is a fork
        if framework == "huggingface":
            from transformers import Trainer  # noqa: F401

            from stoker.frameworks import huggingface  # noqa: F401

        run = under_accelerate if framework == "accelerate" else under_huggingface
        debug_launcher(run, (file, target), num_processes=2)
