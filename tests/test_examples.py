"""Every example runs, quickly, on a machine without a GPU, and stays short."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest
import torch

from warm_stoker import run_script_here

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "accelerate_loader.py": r"14 updates, last loss 0\.\d+; from the saved state 15 batches are left",
    "captured_accelerate.py": r"loss 0\.\d+; (eager: there are no CUDA graphs on the CPU|captured)",
    "captured_huggingface.py": r"mean loss 0\.\d+; (eager: there are no CUDA graphs on the CPU|captured)",
    "captured_lightning.py": r"loss 0\.\d+; (eager: there are no CUDA graphs on the CPU|captured)",
    "captured_loop.py": r"loss 0\.\d+; (eager: there are no CUDA graphs on the CPU|captured)",
    "cifar10.py": r"\d+\.\d% right after 2 epochs in \d",
    "huggingface_trainer.py": r"40 updates; resumed, the weights are the same: True",
    "keep_your_dataloader.py": r"epoch 1: 20 batches on (cpu|cuda:0), last loss \d",
    "lightning_loader.py": r"doctor: a step takes .*\n(.*\n)*120 updates; Done: 3 epochs\. Last loss 0\.\d",
    "own_hdf5.py": r"24 batches, 3000 samples, last loss \d",
    "stateful_dataloader.py": r"(.*missing adds up to 0\.0\n){2}",
    "tokens.py": r"resident: .* 5 batches trained",
    "windows.py": r"\d+ batches from [\d,]+ bytes; last loss 0\.\d",
}
NEEDS = {
    "accelerate_loader.py": "accelerate",
    "cifar10.py": "PIL",
    "captured_accelerate.py": "accelerate",
    "captured_huggingface.py": "transformers",
    "captured_lightning.py": "lightning",
    "huggingface_trainer.py": "transformers",
    "lightning_loader.py": "lightning",
    "stateful_dataloader.py": "torchdata",
}
# Of these packages with torch 2.13, not ours to mend.
THEIR_WARNINGS = (
    "ignore:`isinstance(treespec, LeafSpec)` is deprecated",
    "ignore:'set_vital' is deprecated",
    "ignore:The 'train_dataloader' does not have many workers",
)


def test_every_example_is_listed_here():
    assert sorted(path.name for path in FOLDER.glob("*.py")) == sorted(SAYS)


@pytest.fixture(scope="module")
def imported():
    """Have here what the examples import, so that none of their forks imports it for seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "accelerate", "lightning.pytorch", "transformers.trainer"):
            if importlib.util.find_spec(name.partition(".")[0]):
                importlib.import_module(name)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


# Their captured steps are those of captured_lightning.py and captured_loop.py; both frameworks have other examples.
REPEATED = {"captured_accelerate.py", "captured_huggingface.py"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in sorted(SAYS)],
)
def test_example_runs_and_says_what_it_did(name, tmp_path, imported):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    warned = ["error", *(THEIR_WARNINGS if name in NEEDS else ())]
    done = run_script_here(FOLDER / name, tmp_path, environment, warned)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
    assert done.stderr == ""
    theirs = (
        "torchinductor",
        "ompi.",
    )  # torch's cache; a folder of MPI, which Lightning asks for ranks
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(theirs)]
    assert left == [], "an example leaves nothing behind"


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_is_short(name):
    most = 69 if name == "cifar10.py" else 60 if "loader" in name or "trainer" in name else 41
    assert len((FOLDER / name).read_text().splitlines()) < most
