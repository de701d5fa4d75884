"""Reads GPUs through NVML; no other file calls it.

Enters: pynvml or a stand-in, and `CUDA_VISIBLE_DEVICES`. Leaves: frozen `Gpu` readings. Costs
30–100 ms to start NVML, then 0.2 ms per GPU and reading (measured on an H200).
PCIe traffic is read from byte counters, in 0.1 ms, if they are wide enough. On an H200 they wrap within 0.1 s, so
`sample_traffic` measures the traffic of 20 ms in each direction: 41 ms in all, 1.3 ms of them on a core.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

# Names in words of the bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h).
THROTTLE_WORDS: Mapping[int, str] = {
    0x001: "idle", 0x002: "application clocks setting", 0x004: "power cap",
    0x008: "hardware slowdown", 0x010: "sync boost", 0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown", 0x080: "hardware power brake",
    0x100: "display clock setting",
}  # fmt: skip

# Bytes/s of one lane in one direction after line coding; generation 6 in FLIT mode.
_PCIE_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
# Fields of nvmlDeviceGetFieldValues: bytes that the GPU received and sent since the driver started.
_PCIE_RECEIVED, _PCIE_SENT = 198, 197
# Counters of nvmlDeviceGetPcieThroughput, which returns KB/s.
_SENT, _RECEIVED = 0, 1
# Types of field values that do not wrap within seconds; 32 bits wrap after 0.1 s on a full link.
_LONG_VALUES = {2: "ulVal", 3: "ullVal"}
_FAILED = object()


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it at one moment. None: the driver did not say.

    Attributes:
        index: NVML's index, in PCI bus order.
        uuid: NVML's identifier, as `CUDA_VISIBLE_DEVICES` accepts it.
        name: Marketing name.
        memory_total_bytes: Whole device memory.
        memory_free_bytes: Free now, for all processes together.
        compute_capability: (major, minor).
        pcie_generation: Now; an idle GPU goes down to 1.
        pcie_generation_max: What card and slot can do together.
        pcie_width: Lanes now.
        pcie_width_max: Lanes that card and slot have.
        pcie_received_bytes: Into the GPU since its driver started; two readings give a rate.
        pcie_sent_bytes: Out of it.
        power_watts: Drawn, averaged over 1 s on recent GPUs.
        power_limit_watts: Enforced limit.
        temperature_celsius: Of the GPU die.
        throttle_reasons: Why clocks are not at their top, in words; empty when they are.
        utilization_percent: Share of time with at least one kernel; says nothing about how much
            of the GPU that kernel used.
        memory_utilization_percent: Share of time the memory was read or written.
        visible: Whether `CUDA_VISIBLE_DEVICES` lets this process see it. Numbers in it are read
            in PCI bus order, as with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_received_bytes: int | None = None
    pcie_sent_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    visible: bool | None = None

    @property
    def pcie_bytes_per_second(self) -> float | None:
        """Most the slot can carry in one direction, at its best generation and width."""
        lane = _PCIE_LANE_BYTES.get(self.pcie_generation_max or 0)
        if lane is None or self.pcie_width_max is None:
            return None
        return lane * self.pcie_width_max


class GpuReader:
    """Reads every GPU through NVML, once or repeatedly. Use as a context manager.

    One `read()` takes 0.2 ms per GPU and starts no work on it. Not thread-safe. A value that
    cannot be read is None, with one line in `notes`; this class raises no exceptions.

    Attributes:
        driver: Driver version; None outside of the context, or if unknown.
        notes: Values that could not be read, and why.
    """

    def __init__(self, nvml: Any = None, environ: Mapping[str, str] | None = None) -> None:
        self._nvml = nvml
        self._visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        self._handles: dict[int, Any] = {}
        self._started = False
        self.driver: str | None = None
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                self.notes.append("no GPU readings: the package nvidia-ml-py is not installed")
                return self
        self._started = (
            self._ask("no GPU readings, NVML cannot be started", "nvmlInit", failed=_FAILED)
            is not _FAILED
        )
        if not self._started:
            return self
        self.driver = _text(self._ask("driver version", "nvmlSystemGetDriverVersion"))
        for index in range(self._ask("number of GPUs", "nvmlDeviceGetCount") or 0):
            handle = self._ask(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                self._handles[index] = handle
        return self

    def __exit__(self, *error: object) -> None:
        if self._started:
            self._started = False
            self._ask("stop NVML", "nvmlShutdown")

    def read(self) -> tuple[Gpu, ...]:
        """Return every GPU as it is now; empty without NVML or outside the context."""
        if not self._started:
            return ()
        readings = [self._read_one(index, handle) for index, handle in self._handles.items()]
        return tuple(readings)

    def sample_traffic(self, index: int) -> tuple[float | None, float | None]:
        """Return bytes per second into and out of a GPU, each over the next 20 ms; waits for that long."""
        handle = self._handles.get(index)
        if not self._started or handle is None:
            return None, None
        what, name = f"GPU {index}: PCIe traffic", "nvmlDeviceGetPcieThroughput"
        seen = (self._ask(what, name, handle, way) for way in (_RECEIVED, _SENT))
        received, sent = (None if rate is None else rate * 1024.0 for rate in seen)
        return received, sent

    def _read_one(self, index: int, handle: Any) -> Gpu:
        def ask(what: str, name: str, *arguments: Any) -> Any:
            return self._ask(f"GPU {index}: {what}", name, handle, *arguments)

        memory = ask("memory", "nvmlDeviceGetMemoryInfo")
        rates = ask("utilisation", "nvmlDeviceGetUtilizationRates")
        power = ask("power", "nvmlDeviceGetPowerUsage")
        limit = ask("power limit", "nvmlDeviceGetEnforcedPowerLimit")
        uuid = _text(ask("uuid", "nvmlDeviceGetUUID"))
        capability = ask("compute capability", "nvmlDeviceGetCudaComputeCapability")
        fields = [_PCIE_RECEIVED, _PCIE_SENT]
        counted = ask("PCIe traffic", "nvmlDeviceGetFieldValues", fields)
        received, sent = (None, None) if counted is None else map(_counter, counted)
        return Gpu(
            index=index,
            uuid=uuid,
            name=_text(ask("name", "nvmlDeviceGetName")),
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_free_bytes=None if memory is None else int(memory.free),
            compute_capability=None if capability is None else (capability[0], capability[1]),
            pcie_generation=ask("PCIe generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_max=ask("best PCIe generation", "nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width=ask("PCIe width", "nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=ask("best PCIe width", "nvmlDeviceGetMaxPcieLinkWidth"),
            pcie_received_bytes=received,
            pcie_sent_bytes=sent,
            power_watts=None if power is None else power / 1000,
            power_limit_watts=None if limit is None else limit / 1000,
            temperature_celsius=ask("temperature", "nvmlDeviceGetTemperature", 0),
            throttle_reasons=self._throttle(index, handle),
            utilization_percent=None if rates is None else int(rates.gpu),
            memory_utilization_percent=None if rates is None else int(rates.memory),
            visible=_is_visible(self._visible, index, uuid),
        )

    def _throttle(self, index: int, handle: Any) -> tuple[str, ...] | None:
        what = f"GPU {index}: throttle reasons"
        # Bindings before 12.535 know the older name only.
        new, old = (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        )
        bits = self._ask(what, new if hasattr(self._nvml, new) else old, handle)
        if bits is None:
            return None
        words = [word for bit, word in THROTTLE_WORDS.items() if bits & bit]
        unknown = bits & ~sum(THROTTLE_WORDS)
        return tuple(words + ([f"other ({unknown:#x})"] if unknown else []))

    def _ask(self, what: str, name: str, *arguments: Any, failed: Any = None) -> Any:
        expected = getattr(self._nvml, "NVMLError", OSError)
        try:
            function: Callable[..., Any] = getattr(self._nvml, name)
            return function(*arguments)
        except (expected, OSError, AttributeError, TypeError, ValueError) as error:
            note = f"{what}: {error}"
            if note not in self.notes:
                self.notes.append(note)
            return failed


def _text(value: str | bytes | None) -> str | None:
    # Bindings before 11.5 return bytes.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _counter(field: Any) -> int | None:
    """Return the value of an NVML counter; None if this GPU has none that is wide enough."""
    name = _LONG_VALUES.get(field.valueType)
    return None if field.nvmlReturn != 0 or name is None else int(getattr(field.value, name))


def _is_visible(variable: str | None, index: int, uuid: str | None) -> bool | None:
    if variable is None:
        return True
    for word in (part.strip() for part in variable.split(",")):
        if word.isdigit():
            if int(word) == index:
                return True
        elif word.startswith(("GPU-", "MIG-")):
            if uuid is None:
                return None
            if uuid.startswith(word):
                return True
        else:
            return False  # CUDA stops at the first word it cannot read
    return False
