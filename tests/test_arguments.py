"""Public functions and classes: a wrong argument is answered in three parts, and what is advised can be typed."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

import stoker
from stoker.arguments import explained
from stoker.errors import ArgumentError, InputError
from stoker.recipes.run import run_recipe

MODEL = torch.nn.Linear(3, 1)


def wrong(call, *given, **named) -> ArgumentError:
    with pytest.raises(ArgumentError) as caught:
        call(*given, **named)
    assert isinstance(caught.value, TypeError)
    return caught.value


@pytest.mark.parametrize(
    ("call", "named", "fix"),
    [
        (stoker.GPUAugmentation, {"flip": True}, "horizontal_flip_prob=0.5"),
        (stoker.StrongGPUAugmentation, {"seeds": 7}, "seed=7"),
        (stoker.PackOptions, {"job": 3}, "jobs=3"),
        (stoker.PackOptions, {"jobs": "all"}, "jobs=0"),
        (stoker.PackOptions, {"repairs": 3}, "repairs=()"),
        (stoker.PackOptions, {"nothing_like_it": 3}, "leave nothing_like_it out"),
    ],
)
def test_a_wrong_keyword_is_named_with_what_to_type(call, named, fix):
    told = wrong(call, **named)
    assert next(iter(named)) in told.given
    assert told.fix == fix
    call(**eval(f"dict({fix})") if "=" in fix else {})


@pytest.mark.parametrize("given", [None, 3, [1], MODEL, "nothing/here"], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        stoker.Store,
        stoker.Plan,
        stoker.Machine,
        stoker.TrainSettings,
        stoker.capture,
        stoker.find_max_batch_size,
        stoker.load_config,
        stoker.load_model,
        stoker.make_plan,
        stoker.mix,
        stoker.open_store,
        stoker.pack,
        stoker.pack_from,
        stoker.select_samples,
        stoker.ChunkDataLoader,
        stoker.LazyMassSpecDataset,
        stoker.ProgressiveAugmentation,
        run_recipe,
    ],
    ids=lambda call: call.__name__,
)
def test_a_first_argument_of_another_kind_is_refused_in_three_parts(call, given):
    with pytest.raises(stoker.StokerError) as caught:
        call(given)
    assert caught.value.given
    assert caught.value.fix


def test_what_a_store_and_a_run_are_made_by(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with h5py.File("data.h5", "w") as file:
        file["features"] = np.ones((4, 3))
    fix = wrong(stoker.Store, "data.h5").fix
    assert eval(fix).num_samples == 4
    assert list(stoker.open_store("data.h5", fields="features").fields) == ["features"]
    (tmp_path / "my.yaml").write_text("recipe: {name: tabular}")
    told = wrong(run_recipe, "tabular")
    assert (told.given, told.allowed) == ("settings of run_recipe is 'tabular'.", "a Settings")
    assert told.fix.startswith("run_recipe(")
    assert eval(told.fix[len("run_recipe(") : -1]).recipe.name == "tabular"


@explained("twice(2)")
def twice(number: int, names: tuple[str, ...] = (), *, call=None) -> int:
    if call:
        call()
    "".join(names)
    return number * 2 if isinstance(number, int) else number.nothing


def test_an_error_that_no_argument_explains_passes_as_it_is():
    def fails():
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own") as caught:
        twice(2, call=fails)
    assert type(caught.value) is ValueError
    with pytest.raises(InputError, match="told already"):
        twice(2, call=lambda: (_ for _ in ()).throw(InputError("told already.")))
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'") as inner:
        twice(2, call=lambda: dict.fromkeys((), 1) or twice.__wrapped__(2, x=1))
    assert type(inner.value) is TypeError, (
        "a mistake in the code that is called is not the caller's"
    )
    assert twice(np.int64(2).item()) == 4
    assert wrong(twice, "2").fix == "twice(2)"
    assert wrong(twice, 2, (1,)).given == "names of twice is of the type tuple."
