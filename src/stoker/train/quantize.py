"""Int8 weights for inference on a CPU: a converted copy of a model, a report, and weights for a file.

Enters: a trained model, samples, and a metric if you have one. Leaves: an int8 copy and a report: size,
latency and outputs before and after, and the metric. `pack_int8` gives the weights as plain tensors, so that an
int8 checkpoint loads without running code. Costs: a copy of the model and some forward passes.

Which API converts, and why. Two Linear of 512 x 2048, 64 rows, one ARM core, torch 2.13: 7.3 ms in float, 3.1 ms
with torch.ao, 122 ms with torchao 0.18, which has no LSTM or GRU either. onnxruntime converts graphs, not modules.
So torch.ao is used as long as torch has it; torch has announced its removal. Without it, the weights are rounded to
int8 and multiplied as floats: the file is as small, an int8 checkpoint still loads, but nothing is faster.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal, cast

import torch
from torch import nn

from stoker.arguments import explained
from stoker.errors import InputError, MissingExtraError, install_command
from stoker.units import format_bytes

Api = Literal["torch.ao", "torchao", "weights"]
Metric = Callable[[nn.Module], float]

_RECURRENT = (nn.LSTM, nn.GRU)
# On ARM, torch 2.13, int8 against float: LSTM 0.42 x the time with qnnpack and 5 x with onednn; two
# Linear of 512 x 2048, 1.5 x and 0.54 x.
_ENGINES_RECURRENT = ("x86", "fbgemm", "qnnpack", "onednn")
_ENGINES_LINEAR = ("x86", "fbgemm", "onednn", "qnnpack")
_HALF_RANGE = 127.5
"""Half of the range of qint8, as in torch.ao's symmetric observer: (127 + 128) / 2."""
_LEAST_SCALE = torch.finfo(torch.float32).eps
"""The same observer's smallest scale."""


@dataclass(frozen=True)
class Latency:
    """Time of one forward pass: the median, and the 10th and 90th percentiles."""

    median_ms: float
    low_ms: float
    high_ms: float

    def __str__(self) -> str:
        return f"{self.median_ms:.2f} ms ({self.low_ms:.2f} to {self.high_ms:.2f})"


@dataclass(frozen=True)
class QuantizeReport:
    """Effects of int8 weights. Figures that were not requested are None.

    Attributes:
        api: The API that converted; "weights" is stoker's own rounding.
        reason: Why this API was chosen.
        modules: Names of the converted modules.
        bytes_before: Size of the saved float weights; `bytes_after` is that of the int8 weights.
        latency_before: Latency over the samples, in float; `latency_after` is that in int8.
        largest_difference: Largest absolute difference between outputs.
        relative_difference: The same, relative to the largest output.
        metric_before: Result of `metric` for the float model; `metric_after` is that for the int8 model.
        notes: Further information for the user.
    """

    api: Api
    reason: str
    modules: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    latency_before: Latency | None = None
    latency_after: Latency | None = None
    largest_difference: float | None = None
    relative_difference: float | None = None
    metric_before: float | None = None
    metric_after: float | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [
            f"int8 by {self.api}: {self.reason}",
            f"converted: {', '.join(self.modules)}",
            f"size: {format_bytes(self.bytes_before)} to {format_bytes(self.bytes_after)}",
        ]
        if self.latency_before is not None:
            lines.append(f"latency: {self.latency_before} to {self.latency_after}")
        if self.largest_difference is not None:
            relative = 100 * (self.relative_difference or 0.0)
            lines.append(f"outputs differ by {self.largest_difference:.3g} ({relative:.2f} %)")
        if self.metric_before is not None:
            lines.append(f"metric: {self.metric_before:.6g} to {self.metric_after:.6g}")
        return lines + [f"note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@explained("quantize_dynamic(model, batches)")
def quantize_dynamic(
    model: nn.Module,
    samples: Sequence[Any] = (),
    *,
    metric: Metric | None = None,
    exclude: Sequence[str] = (),
    api: Api | None = None,
    num_runs: int = 20,
) -> tuple[nn.Module, QuantizeReport]:
    """Return an int8 copy of a model for inference on the CPU, and what that changed.

    Weights of Linear, LSTM and GRU become int8. With torch.ao and torchao, activations are quantised while the model
    runs. The model itself is not changed.

    Args:
        model: Called as `model(sample)`.
        samples: Inputs to time and to compare outputs on.
        metric: Called with the model before and after, e.g. accuracy over a validation set.
        exclude: Names of modules to leave as they are, with everything inside.
        api: The API to use. By default torch.ao where it runs, else "weights".
        num_runs: Passes over the samples to time.

    Raises:
        InputError: Nothing to convert, or the converted model does not run.
        MissingExtraError: The requested API is not installed.
    """
    plain = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval()
    names = _convertible(plain, exclude)
    chosen, reason = choose_api(_kinds(plain, names), _installed(), api)
    small, converted, notes = _CONVERT[chosen](copy.deepcopy(plain), names)
    notes += _disable_fast_path(small)
    outputs = [_run(plain, samples), _run_converted(small, samples)]
    largest, relative = _difference(*outputs) if samples else (None, None)
    report = QuantizeReport(
        chosen,
        reason,
        tuple(converted),
        _saved_bytes(plain.state_dict()),
        # Rounded floats are int8 in the file only.
        _saved_bytes(
            pack_int8(small.state_dict(), names) if chosen == "weights" else small.state_dict()
        ),
        _time(plain, samples, num_runs),
        _time(small, samples, num_runs),
        largest,
        relative,
        None if metric is None else float(metric(plain)),
        None if metric is None else float(metric(small)),
        tuple(notes),
    )
    return small, report


# -- deciding --------------------------------------------------------------------------------------


def choose_api(
    kinds: frozenset[type[nn.Module]], installed: frozenset[Api], asked: Api | None = None
) -> tuple[Api, str]:
    """Return which API converts these kinds of module, and why; pure.

    Raises:
        MissingExtraError: The requested API is not installed.
    """
    if asked is not None:
        if asked in installed or asked == "weights":
            return asked, "asked for"
        raise MissingExtraError(
            f"int8 by {asked} is asked for, and {asked} is not installed or does not run here.",
            f"one of {', '.join(sorted({*installed, 'weights'}))}; torchao converts Linear only",
            install_command("quant") if asked == "torchao" else "api='weights'",
        )
    if "torch.ao" not in installed:
        return "weights", "this torch has no torch.ao; int8 in the file, floats in arithmetic"
    if any(issubclass(kind, _RECURRENT) for kind in kinds):
        return "torch.ao", "the only one that converts recurrent layers"
    return "torch.ao", "faster than torchao on a CPU"


def _installed() -> frozenset[Api]:
    found: set[Api] = {"weights"}
    with contextlib.suppress(ImportError, AttributeError), _quiet():
        importlib.import_module("torch.ao.quantization").quantize_dynamic  # noqa: B018
        if _working_engine() is not None:
            found.add("torch.ao")
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("torchao.quantization").quantize_  # noqa: B018
        found.add("torchao")
    return frozenset(found)


def _convertible(model: nn.Module, exclude: Sequence[str]) -> list[str]:
    """Return the names of the modules to convert. Subclasses are left out, as in the APIs."""
    known = dict(model.named_modules())
    unknown = [name for name in exclude if name not in known]
    if unknown:
        raise InputError(
            f"exclude names {', '.join(map(repr, unknown))}.",
            "names as in model.named_modules()",
            f"one of {', '.join(name for name in list(known)[1:10])}",
        )
    names = [
        name
        for name, module in known.items()
        if type(module) in (nn.Linear, *_RECURRENT)
        and not any(name == left or name.startswith(f"{left}.") for left in exclude)
    ]
    if not names:
        raise InputError(
            f"{type(model).__name__} has no Linear, LSTM or GRU to convert.",
            "a model with at least one, not excluded",
            "use the model as it is, in bf16 if it must be smaller",
        )
    return names


def _kinds(model: nn.Module, names: Sequence[str]) -> frozenset[type[nn.Module]]:
    return frozenset(type(model.get_submodule(name)) for name in names)


# -- converting ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress two deprecation warnings of torch.ao: the report's notes tell the user about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        yield


def _working_engine(recurrent: bool = False) -> str | None:
    """Return the current engine if it works, else the best that does: torch 2.13 for ARM has x86 as default."""
    backend = torch.backends.quantized
    current = backend.engine
    for name in (current, *(_ENGINES_RECURRENT if recurrent else _ENGINES_LINEAR)):
        if name not in backend.supported_engines:
            continue
        try:
            backend.engine = name
            _convert_by_ao(nn.Linear(2, 2), [""])(torch.zeros(1, 2))
        except RuntimeError:
            continue
        finally:
            backend.engine = current
        return str(name)
    return None


def _convert_by_ao(model: nn.Module, names: Sequence[str]) -> nn.Module:
    ao: Any = importlib.import_module("torch.ao.quantization")
    # In a container, because torch.ao never replaces the outermost module.
    holder = nn.ModuleDict({"model": model})
    places = [f"model.{name}" if name else "model" for name in names]
    spec = dict.fromkeys(places, ao.default_dynamic_qconfig)
    with _quiet():
        converted: nn.Module = ao.quantize_dynamic(holder, spec, dtype=torch.qint8, inplace=True)
    return converted.get_submodule("model")


def _use_ao(model: nn.Module, names: list[str]) -> tuple[nn.Module, list[str], list[str]]:
    engine = _working_engine(any(issubclass(kind, _RECURRENT) for kind in _kinds(model, names)))
    notes = ["torch.ao.quantization is deprecated in torch; without it only the file is int8"]
    if engine is not None and engine != torch.backends.quantized.engine:
        # It stays set: copying and saving the int8 model need it as well.
        notes.append(
            f"torch.backends.quantized.engine was {torch.backends.quantized.engine!r}, which does not "
            f"run here; it is {engine!r} now"
        )
        torch.backends.quantized.engine = engine
    return _convert_by_ao(model, names), names, notes


def _use_torchao(model: nn.Module, names: list[str]) -> tuple[nn.Module, list[str], list[str]]:
    torchao: Any = importlib.import_module("torchao.quantization")
    linear = [name for name in names if type(model.get_submodule(name)) is nn.Linear]
    config = torchao.Int8DynamicActivationInt8WeightConfig()
    torchao.quantize_(model, config, filter_fn=lambda _module, name: name in linear)
    return model, linear, []


def _use_weights(model: nn.Module, names: list[str]) -> tuple[nn.Module, list[str], list[str]]:
    model.load_state_dict(unpack_int8(pack_int8(model.state_dict(), names)))
    return model, names, ["weights are rounded to int8 and multiplied as floats: not faster"]


_CONVERT: Mapping[Api, Callable[..., tuple[nn.Module, list[str], list[str]]]] = {
    "torch.ao": _use_ao,
    "torchao": _use_torchao,
    "weights": _use_weights,
}


def _disable_fast_path(model: nn.Module) -> list[str]:
    """Turn off the fused inference of transformer layers whose Linear is int8: it reads float weights.

    Torch takes that path by an attribute of each layer (pytorch #82443).
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer) and type(module.linear1) is not nn.Linear
    ]
    for layer in layers:
        layer.activation_relu_or_gelu = 0
    if not layers:
        return []
    return [
        f"{len(layers)} TransformerEncoderLayer run layer by layer: their fused path is for floats"
    ]


# -- measuring -------------------------------------------------------------------------------------


@torch.inference_mode()
def _run(model: nn.Module, samples: Sequence[Any]) -> list[torch.Tensor]:
    return [tensor for sample in samples for tensor in _tensors(model(sample))]


def _run_converted(model: nn.Module, samples: Sequence[Any]) -> list[torch.Tensor]:
    try:
        return _run(model, samples)
    except (RuntimeError, AttributeError, TypeError) as error:
        raise InputError(
            f"the int8 model does not run: {type(error).__name__}: {error}.",
            "a model that uses its layers by calling them, not by reading their weights",
            "exclude=['name.of.the.module'] for the part that reads weights",
        ) from error


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for entry in outputs.values():
            yield from _tensors(entry)
    elif isinstance(outputs, list | tuple):
        for entry in outputs:
            yield from _tensors(entry)


def _difference(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """Return the largest absolute difference, and the same relative to the largest output."""
    largest = scale = 0.0
    for one, two in zip(before, after, strict=True):
        if one.numel():
            largest = max(largest, float((one.double() - two.double()).abs().max()))
            scale = max(scale, float(one.double().abs().max()))
    return largest, largest / scale if scale else 0.0


@torch.inference_mode()
def _time(model: nn.Module, samples: Sequence[Any], num_runs: int) -> Latency | None:
    if not samples:
        return None
    for sample in samples[:3]:
        model(sample)
    times = []
    for _ in range(max(2, num_runs)):
        for sample in samples:
            began = time.perf_counter()
            model(sample)
            times.append(1e3 * (time.perf_counter() - began))
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Latency(statistics.median(times), tenths[0], tenths[-1])


class _Count:
    """A file that counts the bytes written to it and discards them."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Do nothing: torch.save calls it."""


def _saved_bytes(state: Mapping[str, Any]) -> int:
    count = _Count()
    torch.save(state, cast("IO[bytes]", count))
    return count.num_bytes


# -- weights for a file ----------------------------------------------------------------------------
#
# torch's own int8 LSTM saves objects that only an unsafe load accepts. Its int8 values are `round(w / scale)` of the
# float weights, with `scale` the largest magnitude over 127.5. So only these values and the exact largest weight
# are kept: float weights made of them convert to exactly the same int8 model.


def pack_int8(state: Mapping[str, torch.Tensor], modules: Iterable[str]) -> dict[str, Any]:
    """Return the state with the weights of `modules` as int8, everything else as it is.

    Args:
        state: State dict of the float model.
        modules: Names of the converted modules.
    """
    prefixes = tuple(f"{name}." if name else "" for name in modules)
    return {
        name: _pack(value) if _is_weight(name, value, prefixes) else value
        for name, value in state.items()
    }


def unpack_int8(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return float weights that convert to the int8 weights which were packed."""
    return {
        name: _unpack(value) if isinstance(value, Mapping) else value
        for name, value in state.items()
    }


def _is_weight(name: str, value: torch.Tensor, prefixes: tuple[str, ...]) -> bool:
    for prefix in prefixes:
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            # Not the weights of modules inside: converted ones have a prefix of their own.
            if "." not in rest and rest.startswith("weight") and value.dim() == 2:
                return True
    return False


def _pack(weight: torch.Tensor) -> dict[str, Any]:
    weight = weight.float()
    peak = int(weight.abs().argmax())
    largest = weight.reshape(-1)[peak].clone()
    scale = _scale(largest)
    return {
        # As torch computes it: a tie that is rounded the other way would give another int8 model.
        "int8": torch.round(weight * scale.reciprocal()).clamp(-128, 127).to(torch.int8),
        "largest": largest,
        "peak": peak,
    }


def _unpack(packed: Mapping[str, Any]) -> torch.Tensor:
    weight: torch.Tensor = packed["int8"].float() * _scale(packed["largest"])
    weight.reshape(-1)[packed["peak"]] = packed["largest"]
    return weight


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return (largest.abs() / _HALF_RANGE).clamp(min=_LEAST_SCALE)
