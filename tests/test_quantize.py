"""Int8 for inference: which API and why, what it changes, and what it refuses."""

from __future__ import annotations

import copy
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from stoker.errors import InputError, MissingExtraError
from stoker.train import quantize
from stoker.train.quantize import (
    Latency,
    QuantizeReport,
    choose_api,
    pack_int8,
    quantize_dynamic,
    unpack_int8,
)


@pytest.fixture(autouse=True)
def same_engine():
    """The engine that a conversion sets is global; other tests get theirs back."""
    before = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = before


class Forecaster(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.lstm = nn.LSTM(8, width, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        sequence, (hidden, _) = self.lstm(x)
        return {"direction": self.head(sequence[:, -1]), "state": [hidden]}


def samples(num=2):
    torch.manual_seed(2)
    return [torch.randn(4, 12, 8) for _ in range(num)]


def test_lstm_and_linear_become_int8_with_sizes_latencies_and_differences():
    torch.manual_seed(1)
    model = Forecaster().train()
    before = copy.deepcopy(model.state_dict())
    small, report = quantize_dynamic(model, samples(), num_runs=3)
    assert report.api == "torch.ao"
    assert report.modules == ("lstm", "head")
    assert "recurrent" in report.reason
    assert type(small.lstm).__module__.startswith("torch.ao.nn.quantized.dynamic")
    assert type(small.head).__module__.startswith("torch.ao.nn.quantized.dynamic")
    assert report.bytes_after < 0.35 * report.bytes_before
    assert 0 < report.relative_difference < 0.05
    for latency in (report.latency_before, report.latency_after):
        assert 0 < latency.low_ms <= latency.median_ms <= latency.high_ms
    assert report.metric_before is report.metric_after is None
    assert any("deprecated" in note for note in report.notes)
    # The model that was given is as it was, training mode included.
    assert model.training
    assert type(model.lstm) is nn.LSTM
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_the_reported_difference_is_that_of_the_outputs():
    torch.manual_seed(1)
    model, data = Forecaster(), samples(3)
    small, report = quantize_dynamic(model, data, num_runs=2)
    model.eval()
    with torch.inference_mode():
        pairs = [
            (one, two)
            for x in data
            for one, two in zip(
                (model(x)["direction"], model(x)["state"][0]),
                (small(x)["direction"], small(x)["state"][0]),
                strict=True,
            )
        ]
    largest = max(float((one - two).abs().max()) for one, two in pairs)
    assert report.largest_difference == pytest.approx(largest, rel=1e-5)


def test_a_metric_is_taken_before_and_after():
    torch.manual_seed(1)
    data = samples()
    seen = []

    def metric(model):
        seen.append(type(model.head))
        with torch.inference_mode():
            return model(data[0])["direction"].argmax(1).float().mean()

    _, report = quantize_dynamic(Forecaster(), metric=metric)
    assert seen[0] is nn.Linear
    assert seen[1] is not nn.Linear
    assert isinstance(report.metric_before, float)
    assert isinstance(report.metric_after, float)
    assert report.latency_before is report.largest_difference is None


def test_the_deprecation_is_answered_and_no_other_warning_is_hidden():
    class Noisy(Forecaster):
        def forward(self, x):
            warnings.warn("mine", DeprecationWarning, stacklevel=2)
            return super().forward(x)

    quantize_dynamic(Forecaster(), samples(1), num_runs=1)  # warnings are errors here
    with pytest.warns(DeprecationWarning, match="mine"):
        quantize_dynamic(Noisy(), samples(1), num_runs=1)


@pytest.mark.parametrize("root", [nn.Linear(6, 4), nn.LSTM(6, 4), nn.GRU(6, 4)])
def test_a_lone_layer_is_converted_too(root):
    small, report = quantize_dynamic(root, [torch.randn(3, 5, 6)], num_runs=1)
    assert type(small) is not type(root)
    assert report.modules == ("",)
    assert report.largest_difference < 0.2


def test_a_half_precision_model_is_measured_in_float32():
    small, report = quantize_dynamic(nn.Linear(6, 4).half(), [torch.randn(5, 6)], num_runs=1)
    assert small(torch.randn(5, 6)).dtype == torch.float32
    assert report.bytes_before > 0


def test_excluded_modules_stay_as_they_are():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    small, report = quantize_dynamic(model, [torch.randn(2, 4)], exclude=["1"], num_runs=1)
    assert report.modules == ("0",)
    assert type(small[1][0]) is nn.Linear
    with pytest.raises(InputError, match="exclude names 'nine'"):
        quantize_dynamic(model, exclude=["nine"])
    with pytest.raises(InputError, match="no Linear, LSTM or GRU"):
        quantize_dynamic(model, exclude=["0", "1"])


def test_transformer_layers_run_although_their_fused_path_reads_float_weights():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    _, report = quantize_dynamic(model, [torch.randn(2, 5, 16)], num_runs=1)
    assert report.relative_difference < 0.1
    assert any("2 TransformerEncoderLayer" in note for note in report.notes)


def test_a_model_that_reads_weights_itself_is_refused_with_what_to_exclude():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return x @ self.inner.weight.t()

    with pytest.raises(InputError, match="the int8 model does not run") as caught:
        quantize_dynamic(Reader(), [torch.randn(2, 3)])
    assert "exclude=" in caught.value.fix


@pytest.mark.parametrize("model", [nn.Conv1d(1, 1, 1), nn.Sequential(), nn.ReLU()])
def test_nothing_to_convert_is_an_error(model):
    with pytest.raises(InputError, match="no Linear, LSTM or GRU") as caught:
        quantize_dynamic(model)
    assert caught.value.allowed
    assert caught.value.fix


# -- the choice ----------------------------------------------------------------------------------

LSTM, LINEAR = frozenset({nn.LSTM, nn.Linear}), frozenset({nn.Linear})
BOTH, AO, TORCHAO = (
    frozenset({"torch.ao", "torchao"}),
    frozenset({"torch.ao"}),
    frozenset({"torchao"}),
)


@pytest.mark.parametrize(
    ("kinds", "installed", "asked", "api", "words"),
    [
        (LSTM, BOTH, None, "torch.ao", "only one that converts recurrent"),
        (LINEAR, BOTH, None, "torch.ao", "faster than torchao"),
        (LINEAR, AO, None, "torch.ao", "faster than torchao"),
        (LSTM, TORCHAO, None, "weights", "no torch.ao"),
        (LINEAR, frozenset(), None, "weights", "no torch.ao"),
        (LINEAR, BOTH, "torchao", "torchao", "asked for"),
        (LINEAR, frozenset(), "weights", "weights", "asked for"),
    ],
)
def test_the_api_is_chosen_with_its_reason(kinds, installed, asked, api, words):
    chosen, reason = choose_api(kinds, installed, asked)
    assert chosen == api
    assert words in reason


@pytest.mark.parametrize(
    ("installed", "asked", "fix"), [(AO, "torchao", "[quant]'"), (TORCHAO, "torch.ao", "weights")]
)
def test_where_the_one_asked_for_is_not_here_the_error_has_three_parts(installed, asked, fix):
    with pytest.raises(MissingExtraError) as caught:
        choose_api(LINEAR, installed, asked)
    assert f"int8 by {asked}" in caught.value.given
    assert "weights" in caught.value.allowed
    assert fix in caught.value.fix


@pytest.mark.parametrize("gone", ["package", "engine"])
def test_a_torch_without_torch_ao_makes_the_file_as_small(gone, monkeypatch):
    """What torch has announced: the weights are rounded as torch.ao rounds them, and arithmetic is float."""
    model = Forecaster()
    _, by_ao = quantize_dynamic(model, samples(), num_runs=1)
    if gone == "package":
        monkeypatch.setitem(sys.modules, "torch.ao.quantization", None)
    else:
        monkeypatch.setattr(quantize, "_working_engine", lambda *_: None)
    small, report = quantize_dynamic(model, samples(), num_runs=1)
    assert report.api == "weights"
    assert report.modules == by_ao.modules
    assert report.bytes_after < 0.35 * report.bytes_before
    assert 0 < report.relative_difference < 0.05
    assert type(small.lstm) is nn.LSTM
    state = unpack_int8(pack_int8(model.state_dict(), report.modules))
    assert all(torch.equal(value, state[name]) for name, value in small.state_dict().items())


def test_an_engine_that_does_not_run_is_replaced_and_said(monkeypatch):
    real = quantize._convert_by_ao
    broken = torch.backends.quantized.engine

    def convert(model, names):
        if torch.backends.quantized.engine == broken:
            raise RuntimeError("unknown architecture")
        return real(model, names)

    if quantize._working_engine() is None or len(torch.backends.quantized.supported_engines) < 2:
        pytest.skip("this torch has one engine")
    monkeypatch.setattr(quantize, "_convert_by_ao", convert)
    small, report = quantize_dynamic(nn.Linear(2, 2), [torch.randn(3, 2)], api="torch.ao")
    assert torch.backends.quantized.engine != broken
    assert any(f"was '{broken}', which does not run here" in note for note in report.notes)
    assert torch.equal(copy.deepcopy(small)(torch.ones(1, 2)), small(torch.ones(1, 2)))


def test_torchao_converts_linear_only(monkeypatch):
    """Its calls, on a stand-in: torchao itself is an extra that tests do not install."""
    calls = []

    def quantize_(model, config, filter_fn):
        calls.append((config, [n for n, m in model.named_modules() if filter_fn(m, n)]))
        with torch.no_grad():
            for name in calls[-1][1]:
                layer = model.get_submodule(name)
                layer.weight.copy_((layer.weight * 64).round() / 64)

    fake = types.ModuleType("torchao.quantization")
    fake.quantize_, fake.Int8DynamicActivationInt8WeightConfig = quantize_, lambda: "int8"
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    _, report = quantize_dynamic(model, [torch.randn(3, 4)], api="torchao", num_runs=1)
    assert report.api == "torchao"
    assert calls == [("int8", ["0", "2"])]
    assert report.largest_difference > 0
    _, report = quantize_dynamic(Forecaster(), samples(1), api="torchao", num_runs=1)
    assert report.modules == ("head",)


def test_the_report_reads_well():
    report = QuantizeReport(
        "torch.ao", "why", ("lstm",), 4_520_000, 1_150_000, Latency(2, 1.5, 3), Latency(1, 0.5, 2),
        0.01, 0.002, 0.8, 0.79, ("careful",),
    )  # fmt: skip
    assert report.lines() == [
        "int8 by torch.ao: why",
        "converted: lstm",
        "size: 4.31 MiB to 1.10 MiB",
        "latency: 2.00 ms (1.50 to 3.00) to 1.00 ms (0.50 to 2.00)",
        "outputs differ by 0.01 (0.20 %)",
        "metric: 0.8 to 0.79",
        "note: careful",
    ]
    assert report.to_json()["latency_after"] == {"median_ms": 1, "low_ms": 0.5, "high_ms": 2}
    assert QuantizeReport("torchao", "w", ("a",), 2, 1).lines()[3:] == []
