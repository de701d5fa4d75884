"""CUDA graphs on paper: what is recorded on the CPU is replayed kernel by kernel, with the host's numbers frozen.

As with a real graph, a recording changes nothing, a replay runs no Python of the step, reads its inputs and writes
its outputs at the addresses of the recording, and repeats every number that the host put in. What a real capture
refuses (waiting for the device) goes through here, with the answer frozen: so wrong graphs can be planted.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.train import trainer
from stoker.train.graphs import function, graphed_step, host_draws, trainer_step


class PaperGraph:
    """The calls of a step, in order."""

    recording: graphed_step.GraphedStep

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for call, args, kwargs, results in self.calls:
                made = call(*args, **kwargs)
                given = {_storage(value) for value in _tensors((args, kwargs))}
                for old, new in zip(_tensors(results), _tensors(made), strict=True):
                    if _storage(old) not in given:  # not a view, nor changed in place
                        old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return what a call was given or has returned; torch's own walk through it was a third of all replays."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [found for each in value for found in _tensors(each)]


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout != torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that a call changes in place."""
    names = func._schema.arguments
    given = {one.name: value for one, value in zip(names, args, strict=False)} | kwargs
    return [given[one.name] for one in names if one.is_write and one.name in given]


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: PaperGraph) -> None:
        super().__init__()
        self._graph = graph
        self.changed: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable:
            # What is only read may be a chunk that a thread of the loader fills again.
            given = [
                t for t in _tensors(_written(func, args, kwargs or {})) if t.layout == torch.strided
            ]
            memory = [tensor.untyped_storage() for tensor in given]  # `p.data = ...` may replace it
            self.changed += [(each, each.clone()) for each in memory]
        results = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.rand.default:  # a draw on the host is in no graph
            self._graph.calls.append((func, args, kwargs or {}, results))
        return results


@contextlib.contextmanager
def _record(paper: PaperGraph, pool, stream, capture_error_mode):
    """Record, and undo what was computed: a capture computes nothing on the device."""
    owner = PaperGraph.recording
    tensors = list(owner._state.tensors())
    kept = [tensor.detach().clone() for tensor in tensors]
    try:
        with (recorder := _Recorder(paper)):
            yield
    finally:
        with torch.no_grad():
            for memory, before in reversed(recorder.changed):
                if memory.nbytes() != before.nbytes():
                    memory.resize_(before.nbytes())
                memory.copy_(before)
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)


def use_paper_graphs(monkeypatch) -> None:
    """Let steps on the CPU be captured on paper until the test ends."""
    original = graphed_step.GraphedStep._capture

    def capture_on_paper(self):
        PaperGraph.recording = self
        return original(self)

    def warm_up(self, work):
        self._set_static(work)
        with self._learning():
            result = self._graphed_part()
        self._rest()
        return result

    for module in (graphed_step, trainer_step, function, trainer):
        monkeypatch.setattr(module, "has_graphs", lambda device: True)
    monkeypatch.setattr(host_draws, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(graphed_step, "_side_stream", lambda _: None)
    monkeypatch.setattr(graphed_step.GraphedStep, "_capture", capture_on_paper)
    monkeypatch.setattr(graphed_step.GraphedStep, "_warm_up", warm_up)
    monkeypatch.setattr(graphed_step.GraphedStep, "_copy_generator", lambda _: None)
    monkeypatch.setattr(graphed_step.GraphedStep, "_heal", lambda *_: None)
    # Where there is a GPU, torch's Adam asks whether its counts are on it while a step is captured.
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, name, lambda self: None, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PaperGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", _record)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)


def losses_with_a_change(step, batches, late: int, change) -> list[float]:
    """Return the loss of each batch; before batch `late`, `change` is called and a captured step must be a graph."""
    losses = []
    for number, batch in enumerate(batches):
        if number == late:
            assert getattr(step, "is_captured", True), step.reason
            change()
        losses.append(float(step(batch)))
    return losses


class Jitter:
    """An augmentation in torch alone, drawn from a counter on the device, as `Compose` is on a GPU.

    On a CPU, `Compose` draws by numpy and looks at what it drew, which no graph could repeat.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.counter = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, images, masks=None, *, rows=None):
        taken = images if rows is None else images.index_select(0, rows)
        epoch, step = self.counter.unbind()
        places = torch.arange(len(taken), device=taken.device) + 7 * step + 131 * epoch
        self.counter[1:].add_(1)
        factor = 0.5 + 0.5 * torch.sin(places * 1.7).view(-1, 1, 1, 1)
        return taken.float() / 255 * factor

    def mix(self, images, labels):
        """Return images each mixed with its neighbour, as `MixUp` does."""
        return self(images * 255) + images.roll(1, 0), labels

    def seek(self, epoch, step=0):
        self.counter.copy_(torch.tensor([epoch, step]))

    def validation(self):
        return Plain()

    def state_dict(self):
        return dict(zip(("epoch", "step"), self.counter.tolist(), strict=True))

    def load_state_dict(self, state):
        self.seek(state["epoch"], state["step"])


class Plain(Jitter):
    """What `Jitter` leaves when nothing is random."""

    def __call__(self, images, masks=None, *, rows=None):
        taken = images if rows is None else images.index_select(0, rows)
        return taken.float() / 255
