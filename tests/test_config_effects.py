"""Every key changes what a job does, or says that it does not: seen in the job, not in `Settings`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import xxhash

from run_makers import make_store
from stoker.config import parse_config, resolve
from stoker.errors import StokerError
from stoker.recipes import run as run_module
from stoker.recipes.catalogue import choose_recipe
from test_config import LEAVES, RAM, another_value, nested
from test_recipe_segmentation import TINY

# What must be written as well for a key to matter.
CONTEXT: dict[str, dict[str, object]] = {
    "data.memory_efficient_mode.enabled": {f"{RAM}.max_training_samples": 16},
    "training.output_bound_mode": {"training.output_bound": 1.0},
    **{
        key: {"data.num_workers": 3}
        for key in LEAVES
        if key.endswith(("prefetch_factor", "persistent_workers"))
    },
    **{
        key: {"training.use_gpu_augmentation": True} for key in LEAVES if "gpu_augmentation." in key
    },
}
# Where "another legal value" needs more thought than its type tells.
VALUES = {
    "recipe.name": "massspec-teacher",
    "recipe.options": {"hidden": [8]},
    "gpu_optimization.chunk_size_gb": 0.001,
    f"{RAM}.max_training_samples": 32,
    "training.use_gpu_augmentation": False,  # unless written, the recipe's own
}
UNREAD = re.compile(
    r"\.(num_workers|prefetch_factor|persistent_workers|pin_memory|use_lazy_loading|lazy_cache_dir"
    r"|precompute_graphs)$"
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("effects")
    kinds = {"tabular": "tabular", "segmentation": "segmentation", "elsewhere": "tabular"}
    for name, kind in kinds.items():
        make_store(kind, folder / name).close()
    return folder


class _StoppedError(Exception):
    """Ends a run where its ranks would meet."""


@pytest.fixture
def observe(stores, monkeypatch):
    """Return what a job on a GPU would be made of, piece by piece; nothing is trained."""
    seen: dict[str, object] = {}

    @contextlib.contextmanager
    def join(device, stall_seconds):
        seen["stall_seconds"] = stall_seconds
        raise _StoppedError
        yield

    monkeypatch.setattr(run_module, "join", join)
    monkeypatch.setattr(run_module, "shard_model", lambda *_: seen.update(sharded=True))
    monkeypatch.setattr(
        run_module, "Trainer", lambda *args, **more: SimpleNamespace(a=args, m=more)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 30, 1 << 30))
    monkeypatch.chdir(stores)

    def look(flat: dict[str, object]) -> tuple[dict[str, object], list[str]]:
        seen.clear()
        settings = resolve(parse_config(nested(flat), "f.yaml"))
        notes = choose_recipe(settings).noted_settings.notes
        with contextlib.suppress(_StoppedError):
            run_module.run_recipe(settings, device="cpu")
        try:
            with run_module.open_run(settings, device="cpu") as run:
                seen.update(_describe(run))
        except StokerError as error:
            seen["refused"] = error.given
        return dict(seen), list(notes)

    return look


def _describe(run) -> dict[str, object]:
    run.device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "Loader", lambda *args, **more: SimpleNamespace(a=args, m=more))
        loader = run.make_train_loader()
    about = {f"loader {name}": repr(value) for name, value in loader.m.items() if name != "plan"}
    plan = loader.m["plan"]  # without what the machine's free RAM decides
    about["loader plan"] = (plan.tier, plan.chunk_rows, plan.num_slots, plan.data_budget_bytes)
    about["loader batch"] = loader.a[1]
    steps = range(-(-len(run.job.samples["train"]) // loader.a[1]))
    trainer = run.make_trainer(steps, None, None, run_dir=None)
    model, _, _, _, optimizer, scheduler, settings, *_ = trainer.a
    about |= asdict(settings)
    weights = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    about["weights"] = xxhash.xxh3_64_hexdigest(b"".join(weights))
    columns = run.store.fields["features"].shape[-1] if run.chosen.recipe.name == "tabular" else 0
    about["outputs"] = model.eval()(torch.full((2, columns), 1e3)).tolist() if columns else None
    about["rate"] = [group["initial_lr"] for group in optimizer.param_groups]
    rates = []
    for _ in range(5):
        optimizer.step()  # there are no gradients: nothing moves but the schedule
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    about["rates"] = rates
    drawn = run.drawn_augmentation
    about["drawn"] = None if drawn is None else repr([vars(op) for op in run.job.augmentation.ops])
    return about | {
        "store": str(run.store.path),
        "folder": str(run.folder),
        "job": run.chosen.recipe.name,
    }


def _small(recipe: str) -> dict[str, object]:
    options = TINY if recipe == "segmentation" else {"hidden": [4]}
    return {"recipe.name": recipe, "recipe.store": recipe, "recipe.options": options,
            "training.batch_size": 16, "training.epochs": 3}  # fmt: skip


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_has_an_effect_or_says_that_it_has_none(key, observe):
    images = "gpu_augmentation" in key
    base = _small("segmentation" if images else "tabular") | CONTEXT.get(key, {})
    if key.endswith(".batch_size") or key == "training.learning_rate":
        base.pop("training.batch_size")
    if key == "recipe.name":
        base.pop("recipe.options")
    value = VALUES.get(key, another_value(LEAVES[key]))
    before, _ = observe(base)
    after, notes = observe(base | {key: value})
    assert "refused" not in before
    idle = [re.split(r" ha(?:s|ve) no effect|: no effect", note) for note in notes]
    said = [about for about, *why in idle if why and key in about]
    if UNREAD.search(key):
        assert len(said) == 1, "a key that nothing reads is noted, once"
        assert after == before, "and changes nothing"
    else:
        assert after != before
        assert not said


@pytest.mark.parametrize("recipe", ["tabular", "segmentation"])
def test_keys_of_other_recipes_are_noted_and_change_nothing(recipe, observe):
    other = (
        {"training.use_gpu_augmentation": True, "gpu_augmentation.contrast": 0.5}
        if recipe == "tabular"
        else {"training.init_gain": 0.5, "training.output_bound": 3.0}
    )
    base = _small(recipe)
    before, none = observe(base)
    after, notes = observe(base | other)
    assert none == []
    assert after == before
    assert any("no effect" in note for note in notes)
