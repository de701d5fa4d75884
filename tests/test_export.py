"""Trained models for other programs: onnxruntime says what torch says, weights come back bit for bit."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import stoker
from run_makers import OPTIONS, make_store, settings_for
from stoker.cli.main import app
from stoker.errors import CorruptError, InputError, MissingExtraError, StoreError
from stoker.loader.loader import Loader
from stoker.ownership import SIGNATURE
from stoker.recipes.catalogue import as_augments, choose_recipe, describe_job, fingerprint
from stoker.recipes.contract import Layout, Sizes
from stoker.recipes.export import graph as export_onnx
from stoker.recipes.export.graph import Deployed, Repairs, deploy
from stoker.recipes.export.trained import export_trained
from stoker.recipes.inference import load_trained, quantize_trained
from stoker.store.repairs import apply_repairs, fit_repairs, parse_repair
from stoker.train.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread", "one_registry")

# The teacher, and images of any size, take long to trace: tests/campaign/test_export_long.py
EXPORTED = ["forex", "massspec", "segmentation", "tabular", "windows", "series"]
COLUMNS = list("abcdefg")
REPAIRS = ["fill:median@a,b", "clip@a", "asinh@c", "robust@b,d", "min-denominator:e=f/g,min=0.5"]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def fitted_repairs():
    rows = np.random.default_rng(5).normal(size=(500, 7)) * [1, 5, 300, 0.1, 1, 1, 1]
    return fit_repairs([parse_repair(text) for text in REPAIRS], rows.astype("f4"), COLUMNS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Per kind a store, a checkpoint whose weights were never trained, and its model; made once."""
    folder, known = tmp_path_factory.mktemp("made"), {}

    def get(kind):
        if kind not in known:
            base = kind.removesuffix("-all")
            # A second timeframe doubles the trace, which takes ten seconds: campaign/test_export_long.py
            fewer = ['recipe.options.timeframes=["M5"]'] if kind == "forex" else []
            store = make_store(base, folder / f"{kind}-store")
            chosen = choose_recipe(settings_for(base, store.path, folder / kind, *fewer))
            job = chosen.make_job(store, 0)
            facts = describe_job(chosen.recipe, job, store)
            if kind == "tabular":
                facts["repairs"] = {"features": [repair.to_json() for repair in fitted_repairs()]}
            identity = {
                "recipe": chosen.key,
                "options": chosen.kept,
                "facts": facts,
                "settings": {"seed": 0},
                "data": fingerprint(store),
            }
            state = {"model": job.model.state_dict()}
            saved = Checkpoints(folder / kind).save(state, 7, 1, {"loss": 0.5}, identity)
            known[kind] = store, load_trained(saved.path)
        return known[kind]

    return get


@pytest.fixture(scope="module")
def exported(made, tmp_path_factory):
    """Per kind its ONNX file and what was said about it, made once."""
    folder, known = tmp_path_factory.mktemp("exported"), {}

    def get(kind):
        if kind not in known:
            store, trained = made(kind)
            fixed = None
            if (
                kind == "segmentation"
            ):  # free sizes take twice as long: campaign/test_export_long.py
                fixed = Sizes(batch=3, image=store.fields["images"].shape[1:])
            path = folder / f"{kind}.onnx"
            known[kind] = export_trained(trained, path, fixed)
        return known[kind]

    return get


def open_session(path):
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def batch_of(store, trained, num, augment=None):
    fields, samples = trained.made.fields, np.arange(num)
    with Loader(store, num, "cpu", fields=fields, samples=samples, augment=augment) as loader:
        return next(iter(loader))


# -- the same predictions --------------------------------------------------------------------------


# An export takes seconds: a model of windows and one of rows stay in `make test`.
VARIANTS = {"massspec", "windows", "series", "segmentation"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind in VARIANTS)) for kind in EXPORTED],
)
def test_onnxruntime_says_what_stoker_predict_says(kind, made, exported):
    compare_predictions(kind, made, exported)


def compare_predictions(kind, made, exported):
    store, trained = made(kind)
    session = open_session(exported(kind).path)
    for num in (3,) if kind == "segmentation" else (1, 3, 17):
        raw = batch_of(store, trained, num)
        ready = batch_of(store, trained, num, as_augments(trained.made.augment))
        if kind == "tabular":
            raw["features"][0, :3] = torch.tensor([np.nan, np.inf, -1e30])
            values = apply_repairs(raw["features"].numpy(), fitted_repairs(), COLUMNS)
            ready["features"] = torch.from_numpy(values)
        inputs = trained.made.unpack(ready)
        # Spectra and graphs are packed in the store: a graph takes them as they are unpacked.
        values = inputs if kind.startswith("massspec") else raw
        feed = {
            name: values[about["field"]].numpy() for name, about in exported(kind).inputs.items()
        }
        found = dict(zip(exported(kind).outputs, session.run(None, feed), strict=True))
        wanted = trained.made.predict(trained.model, inputs)
        for name, value in wanted.items():
            if value.is_floating_point():
                np.testing.assert_allclose(found[name], value.numpy(), **CLOSE)
            else:
                assert (found[name] == value.numpy()).mean() > 0.99  # a tie may fall either way
            assert found[name].dtype == value.numpy().dtype
            assert len(found[name]) == num
        if kind == "segmentation":
            np.testing.assert_allclose(found["scores"], trained.model(inputs).numpy(), **CLOSE)


def test_windows_may_have_any_length(made, exported):
    graph, session = deploy(made("forex")[1], Sizes()), open_session(exported("forex").path)
    for bars in (1, 50):
        values = graph.draw({"batch": 2, "bars_M5": bars})
        names = [port.name for port in graph.ports]
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        for found, wanted in zip(session.run(None, feed), graph(*values), strict=True):
            np.testing.assert_allclose(found, wanted.numpy(), **CLOSE)


def test_the_file_says_what_it_is_and_nothing_of_this_machine(exported, made):
    report = exported("tabular")
    known = open_session(report.path).get_modelmeta()
    about = known.custom_metadata_map
    assert known.producer_name == "stoker"
    assert about["stoker.version"] == stoker.__version__
    assert about["stoker.recipe"] == "tabular"
    assert json.loads(about["stoker.options"])["hidden"] == [16]
    assert json.loads(about["stoker.blueprint"]) == made("tabular")[1].facts
    assert json.loads(about["stoker.inputs"]) == report.inputs
    assert json.loads(about["stoker.checkpoint"])["metrics"] == {"loss": 0.5}
    assert len(json.loads(about["stoker.repairs"])["features"]) == len(REPAIRS)
    assert report.inputs["features"]["shape"] == ["batch", 7]
    assert "a, b, c" in report.inputs["features"]["about"]
    assert any("give raw values" in note for note in report.notes)
    for kind in ("forex", "tabular"):
        raw = exported(kind).path.read_bytes()
        assert b"site-packages" not in raw
        assert b"recipes/" not in raw


def test_repairs_can_be_left_to_the_caller(made):
    trained = made("tabular")[1]
    inside, outside = deploy(trained, Sizes()), deploy(trained, Sizes(), repairs=False)
    assert (inside.repaired, outside.repaired) == (("features",), ())
    raw = 10 * torch.randn(5, 7)
    repaired = torch.from_numpy(apply_repairs(raw.numpy(), fitted_repairs(), COLUMNS))
    torch.testing.assert_close(inside(raw)[1], outside(repaired)[1])


wide = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.lists(st.lists(wide, min_size=7, max_size=7), min_size=1, max_size=4))
def test_repairs_of_tensors_are_those_of_the_store(rows):
    values = np.array(rows, "f4")
    wanted = apply_repairs(values, fitted_repairs(), COLUMNS)
    found = Repairs(fitted_repairs(), COLUMNS)(torch.from_numpy(values)).numpy()
    np.testing.assert_allclose(found, wanted, rtol=3e-7, atol=0)


def test_names_of_inputs_and_outputs_never_meet(made):
    trained = made("series")[1]
    graph = deploy(trained, Sizes())
    assert [port.name for port in graph.ports] == ["M5", "M5_gap"]

    class Renamed(Deployed):
        def columns(self, *values):
            return {"M5": super().columns(*values)["value"]}

    layout = Layout(graph.ports, trained.made.unpack, trained.made.predict)
    assert [port.name for port in Renamed(trained, layout, True).ports] == ["input_M5", "M5_gap"]


# -- nothing half done -----------------------------------------------------------------------------


def test_a_graph_that_differs_is_not_written(made, exported, tmp_path, monkeypatch):
    import onnx_ir

    model = onnx_ir.load(exported("tabular").path)
    monkeypatch.setattr(export_onnx, "_trace", lambda graph, opset: model)
    monkeypatch.setattr(export_onnx, "_difference", lambda found, wanted: 0.2)
    older = f"older, {SIGNATURE}"
    (tmp_path / "old.onnx").write_text(older)
    with pytest.raises(RuntimeError, match=r"differs from torch by 0\.2"):
        export_trained(made("tabular")[1], tmp_path / "old.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["old.onnx"]
    assert (tmp_path / "old.onnx").read_text() == older
    (tmp_path / "old.onnx").write_text("mine")
    with pytest.raises(InputError, match="stoker did not write it"):
        export_trained(made("tabular")[1], tmp_path / "old.onnx")


def test_a_difference_is_seen():
    ones = np.ones((2, 3), "f4")
    assert export_onnx._difference(ones, ones) == 0
    assert export_onnx._difference(ones, 2 * ones) == 0.5
    assert export_onnx._difference(ones[:1], ones) == np.inf
    assert not export_onnx._difference(ones * np.nan, ones) <= export_onnx._TOLERANCE


@pytest.mark.parametrize(
    ("kind", "out", "options", "words"),
    [
        ("tabular", "model.pt", {}, ["'.pt'", r"\.onnx", r"\.safetensors"]),
        ("tabular", "model", {}, ["no ending", "model.onnx"]),
        ("tabular", "m.onnx", {"opset": 11}, ["--opset is 11", "18 to 23"]),
        ("tabular", "m.onnx", {"sizes": Sizes(batch=0)}, ["--batch is 0", "dynamic"]),
        ("massspec", "m.onnx", {"sizes": Sizes(image=(8, 8))}, ["--size", "takes no images"]),
    ],
)
def test_what_cannot_be_exported_says_why_and_what_to_do(kind, out, options, words, made, tmp_path):
    with pytest.raises(InputError) as caught:
        export_trained(made(kind)[1], tmp_path / out, **options)
    for word in words:
        assert word.replace("\\", "") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_int8_weights_stay_where_they_are(made, tmp_path):
    before = torch.backends.quantized.engine
    try:
        quantize_trained(made("tabular")[1], tmp_path / "int8.pt")
        with pytest.raises(InputError, match="checkpoint of float weights"):
            export_trained(load_trained(tmp_path / "int8.pt"), tmp_path / "m.onnx")
    finally:
        torch.backends.quantized.engine = before


def test_missing_packages_are_named_with_the_extra_that_brings_them(made, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[onnx\]"):
        export_trained(made("tabular")[1], tmp_path / "m.onnx")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"\[safetensors\]"):
        export_trained(made("tabular")[1], tmp_path / "m.safetensors")


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIONS)
def test_weights_come_back_bit_for_bit(kind, made, tmp_path):
    store, trained = made(kind)
    report = export_trained(trained, tmp_path / "w.safetensors")
    assert report.size_bytes == report.path.stat().st_size
    again = load_trained(report.path)
    old, new = trained.loaded.state["model"], again.loaded.state["model"]
    assert sorted(old) == sorted(new)
    for name, value in old.items():
        assert new[name].dtype == value.dtype
        assert new[name].shape == value.shape
        assert new[name].numpy().tobytes() == value.numpy().tobytes()
    assert again.loaded.identity == trained.loaded.identity
    assert again.loaded.saved.step == 7
    assert again.loaded.saved.metrics == {"loss": 0.5}
    inputs = trained.made.unpack(batch_of(store, trained, 5, as_augments(trained.made.augment)))
    first, second = (each.made.predict(each.model, inputs) for each in (trained, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_anybody_can_read_the_weights_and_their_metadata(made, tmp_path):
    path = tmp_path / "w.safetensors"
    export_trained(made("tabular")[1], path)
    assert set(load_file(path)) == set(made("tabular")[1].model.state_dict())
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert json.loads(header["recipe"]) == "tabular"
    assert json.loads(header["options"])["hidden"] == [16]
    assert json.loads(header["facts"])["num_features"] == 7


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_changed_bit_is_never_believed(place, bit, made, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    sound, damaged = folder / "sound.safetensors", folder / "damaged.safetensors"
    if not sound.exists():
        export_trained(made("series")[1], sound)
    raw = bytearray(sound.read_bytes())
    raw[int(place * len(raw))] ^= 1 << bit
    damaged.write_bytes(raw)
    with pytest.raises((CorruptError, InputError)):
        load_trained(damaged)


def test_other_files_are_refused_by_name(made, tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="not written by stoker"):
        load_trained(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("not at all")
    with pytest.raises(CorruptError, match=r"text\.safetensors"):
        load_trained(tmp_path / "text.safetensors")
    with pytest.raises(StoreError, match="no such file"):
        load_trained(tmp_path / "nothing.safetensors")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        export_trained(made("tabular")[1], tmp_path / "file" / "w.safetensors")


def test_a_folder_and_a_graph_are_no_checkpoints(tmp_path):
    with pytest.raises(InputError, match=r"is a folder(.|\n)*Try: ls "):
        load_trained(tmp_path)
    (tmp_path / "best.pt").touch()
    with pytest.raises(InputError, match=r"is a folder(.|\n)*best\.pt"):
        load_trained(tmp_path)
    with pytest.raises(InputError, match=r"a graph for other programs(.|\n)*m\.safetensors"):
        load_trained(tmp_path / "m.onnx")


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [("--batch", "4"), ("--opset", "18"), ("--size", "8x8"), ("--no-repairs",)]
)
def test_options_of_a_graph_are_not_passed_over_for_weights(option, made, tmp_path):
    checkpoint = str(made("series")[1].loaded.saved.path)
    done = CliRunner().invoke(app, ["export", checkpoint, str(tmp_path / "w.safetensors"), *option])
    assert isinstance(done.exception, InputError)
    assert option[0] in done.exception.given
    assert not (tmp_path / "w.safetensors").exists()


def test_the_command_writes_both_and_prints_what_it_wrote(made, tmp_path):
    checkpoint, path = str(made("series")[1].loaded.saved.path), tmp_path / "new" / "m.onnx"
    asked = ["export", checkpoint, str(path), "--batch", "4", "--opset", "18"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.exception
    assert "input  M5: float32 (4, 12, 3)" in shown.stdout
    assert "opset 18" in shown.stdout
    assert "onnxruntime differs from torch by" in shown.stdout
    session = open_session(path)
    assert [port.shape for port in session.get_inputs()] == [[4, 12, 3], [4, 12]]
    assert [port.shape for port in session.get_outputs()] == [[4, 2]]
    asked = ["export", checkpoint, str(tmp_path / "w.safetensors"), "--json"]
    facts = json.loads(CliRunner().invoke(app, asked).stdout)
    assert facts["recipe"] == "tabular"
    assert facts["path"] == str(tmp_path / "w.safetensors")
    wrong = CliRunner().invoke(app, ["export", checkpoint, "m.onnx", "--batch", "many"])
    assert "--batch is 'many'" in str(wrong.exception)


# -- the page ------------------------------------------------------------------------------------


def test_the_examples_of_the_page_run(made, exported, tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parent.parent / "docs" / "export.md").read_text("utf-8")
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").symlink_to(exported("tabular").path)
    export_trained(made("tabular")[1], "model.safetensors")
    state: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "docs/export.md", "exec"), state)
    assert state["chances"].shape == (5, 3)
    assert state["recipe"] == "tabular"
    weights = made("tabular")[1].model.parameters()
    assert state["num_weights"] == sum(weight.numel() for weight in weights)
    for kind in EXPORTED:
        graph = deploy(made(kind)[1], Sizes())
        for name in (*graph.outputs, *(port.name for port in graph.ports)):
            assert f"`{name}`" in page or kind in ("forex", "series"), name
