"""Batches, outputs and gradients of unusual kinds: detection's lists, mappings with attributes, sparse ones."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import nn

from stoker.errors import InputError
from stoker.train.batches import Feed, Work, count_rows, map_tensors
from stoker.train.evaluation import Evaluator
from stoker.train.precision import choose_precision
from stoker.train.step import Step, as_float32, clip_values, coalesce_gradients, make_guarded
from stoker.train.trainer import Trainer
from training_makers import DEVICES, make_model

# Said once in a process by torch 2.11, by whatever makes the first sparse tensor on a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

CPU = torch.device("cpu")


class Output(OrderedDict):
    """As transformers has it: items are attributes."""

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class Attributes(dict):
    """The idiom whose attributes are its items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Sealed(dict):
    def __setitem__(self, name, value):
        raise TypeError("sealed")


class Unchanging(dict):
    def __copy__(self):
        return self


class Shared(UserDict):
    """A mapping whose copies share their items."""

    def __copy__(self):
        made = type(self)()
        made.data = self.data
        return made


class Heads(NamedTuple):
    logits: torch.Tensor
    name: str


@dataclass(frozen=True)
class Record:
    logits: torch.Tensor
    rest: list = dataclasses.field(default_factory=list)
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "doubled", self.logits * 2)


@dataclass
class Strange:
    """A dataclass that `replace` cannot make again."""

    logits: torch.Tensor
    scale: dataclasses.InitVar[float]

    def __post_init__(self, scale):
        self.scaled_by = scale


# -- how many samples ----------------------------------------------------------------------------


def boxes(*counts):
    return [{"boxes": torch.rand(count, 4), "labels": torch.zeros(count)} for count in counts]


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (torch.zeros(5, 2), 5),
        (torch.zeros(()), 1),
        ({"a": torch.zeros(5), "b": torch.zeros(6)}, 5),
        ([torch.zeros(5), torch.zeros(6)], 5),
        (boxes(0, 2, 3), 3),
        (tuple(boxes(7, 2)), 2),
        ({"images": boxes(7, 2, 1)}, 3),
        (({"a": torch.zeros(5)}, torch.zeros(6)), 5),
        (Heads(torch.zeros(5), "x"), 5),
        (Record(torch.zeros(5)), None),  # an object of the user's
        ({"name": "text", "y": torch.zeros(5)}, 5),
        (None, None),
        ("text", None),
        ([1, 2], None),
        ([], None),
    ],
)
def test_samples_are_counted(value, want):
    assert count_rows(value) == want


def make_work(inputs, targets):
    return Feed([], CPU, unpack=lambda batch: batch).make_work((inputs, targets))


@pytest.mark.parametrize("targets", [None, [], ["a", "b"], torch.zeros(0, 6)])
def test_inputs_are_counted_where_targets_hold_no_row(targets):
    assert make_work(torch.zeros(4, 3), targets).num_samples == 4


def test_a_batch_without_a_tensor_is_refused_in_words():
    with pytest.raises(InputError, match=r"inputs are a str and whose targets are a NoneType"):
        make_work("text", None)


def test_a_batch_without_rows_stays_one():
    assert make_work(torch.zeros(0, 3), torch.zeros(0)).num_samples == 0


def test_a_list_of_samples_is_not_cut_through_its_boxes():
    """As many boxes in every image as there are images: rows of tensors, and none of the batch."""
    assert not Work(torch.zeros(3, 2), boxes(3, 3, 3), 3).can_cut
    assert not Work([{"image": torch.zeros(2, 2)}] * 2, torch.zeros(2), 2).can_cut
    assert Work(torch.zeros(3, 2), {"y": torch.zeros(3)}, 3).can_cut


class Graph:
    """As PyTorch Geometric has it: tensors that only their own class finds, and moves."""

    def to(self, device, non_blocking=False):
        return self


@pytest.mark.parametrize("inputs", [Record(torch.zeros(3)), [Graph()], {"graph": Graph()}])
def test_a_batch_whose_objects_hold_tensors_is_not_cut(inputs):
    """Its targets would be cut, and what is in the object would not."""
    assert not Work(inputs, torch.zeros(3), 3).can_cut
    assert Work({"x": torch.zeros(3), "names": ["a", "b", "c"], "n": 3}, torch.zeros(3), 3).can_cut


def test_an_object_that_goes_with_a_batch_stays_itself():
    record = Record(torch.arange(4.0))
    part = Work(torch.zeros(4), (record, torch.arange(4.0)), 4).part(1, 3)
    assert part.targets[0] is record
    assert part.targets[1].tolist() == [1, 2]


def detection_batches():
    """Four batches of eight images; the first image of the second one has no box."""
    torch.manual_seed(0)
    return [(torch.randn(8, 6), boxes(0 if number == 1 else 3, *[3] * 7)) for number in range(4)]


def train_plainly(loader, val=None, criterion=None, unpack=None, model=None, **options):
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"epochs": 1, "precision": "fp32", **options}
    criterion = criterion or (lambda outputs, targets: outputs.square().mean())
    return Trainer(model, loader, val, criterion, optimizer, None, config, "cpu", unpack=unpack)


def test_detection_trains_and_validates_every_image():
    seen = []

    def criterion(outputs, targets):
        seen.append(len(targets))
        return outputs.square().mean()

    history = train_plainly(detection_batches(), detection_batches(), criterion).fit()
    assert history.epochs[0].num_samples == 32
    assert seen == [8] * 8


def test_a_judge_forwards_a_batch_whose_first_image_has_no_box():
    model = make_model()
    precision = choose_precision("fp32", CPU, model)
    weights = []

    def criterion(outputs, targets):
        weights.append(float(len(targets)))
        return outputs.mean()

    batches = detection_batches()
    found = Evaluator(model, criterion, None, precision, CPU).evaluate(Feed(batches, CPU))
    assert weights == [8.0] * 4
    with torch.no_grad():
        want = torch.stack([model.eval()(inputs).mean() for inputs, _ in batches]).mean()
    assert found["loss"] == pytest.approx(float(want), abs=1e-6)


def test_training_without_targets():
    batches = [inputs for inputs, _ in detection_batches()]
    trainer = train_plainly(batches, batches, unpack=lambda batch: (batch, None))
    history = trainer.fit()
    assert history.epochs[0].num_samples == 32
    assert history.losses[-1] < history.losses[0]


# -- mappings, named tuples and dataclasses stay what they are --------------------------------------


def half(*shape):
    return torch.ones(*shape, dtype=torch.bfloat16)


def test_a_mapping_with_attributes_keeps_them():
    given = Output(logits=half(2), extra=(half(1), "text"))
    made = as_float32(given)
    assert type(made) is Output
    assert list(made) == ["logits", "extra"]
    assert made.logits is made["logits"]
    assert made.logits.dtype == made.extra[0].dtype == torch.float32
    assert given.logits.dtype == given["logits"].dtype == torch.bfloat16


def test_attributes_that_are_the_items_follow_them():
    given = Attributes(logits=half(2), name="a")
    made = as_float32(given)
    assert type(made) is Attributes
    assert made.logits.dtype == made["logits"].dtype == torch.float32
    assert made.name == "a"
    assert given.logits.dtype == torch.bfloat16


def test_what_a_subclass_of_dict_has_beside_its_items_stays():
    made = as_float32(defaultdict(list, logits=half(2)))
    assert made["new"] == []
    assert made["logits"].dtype == torch.float32


@pytest.mark.parametrize(
    "kind", [Sealed, Unchanging, MappingProxyType, UserDict, Shared], ids=lambda kind: kind.__name__
)
def test_mappings_that_cannot_be_made_again_become_dicts(kind):
    given = kind({"logits": half(2)})
    made = as_float32(given)
    assert type(made) is dict
    assert made["logits"].dtype == torch.float32
    assert given["logits"].dtype == torch.bfloat16


def test_plain_containers_are_new_ones_of_their_kind():
    for given in ({"a": torch.ones(2)}, [torch.ones(2)], (torch.ones(2),), Heads(half(2), "a")):
        made = map_tensors(lambda tensor: tensor, given)
        assert type(made) is type(given)
        assert made is not given


def test_dataclasses_are_made_again():
    made = as_float32(Record(half(2), [{"a": half(1)}]))
    assert type(made) is Record
    tensors = (made.logits, made.rest[0]["a"], made.doubled)
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert as_float32(Record) is Record


def test_a_dataclass_in_which_nothing_changes_is_not_made_again():
    given = Record(torch.ones(2), [torch.ones(1)])
    assert as_float32(given) is given


def test_a_dataclass_that_replace_refuses_is_copied():
    given = Strange(half(2), 3.0)
    made = as_float32(given)
    assert made.logits.dtype == torch.float32
    assert made.scaled_by == 3.0
    assert given.logits.dtype == torch.bfloat16


def test_transformers_outputs():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.SequenceClassifierOutput(logits=half(2, 3), hidden_states=(half(1), half(1)))
    made = as_float32(given)
    assert type(made) is type(given)
    assert made.loss is None
    assert made.logits is made["logits"] is made[0]
    assert made.logits.dtype == made.hidden_states[1].dtype == torch.float32
    assert given.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Output, Record, lambda logits: Heads(logits, "a")])
def test_a_criterion_sees_the_output_it_knows_in_float32(kind):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_model()

        def forward(self, x):
            return kind(logits=self.net(x))

    seen = set()

    def criterion(outputs, targets):
        seen.add(outputs.logits.dtype)
        return nn.functional.mse_loss(outputs.logits, targets)

    batches = [(torch.randn(8, 6), torch.randn(8, 1))] * 2
    train_plainly(batches, batches, criterion, model=Wrapped(), precision="bf16").fit()
    assert seen == {torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Output, Record])
def test_unusual_batches_arrive_on_the_device(kind):
    batches = [(kind(logits=torch.arange(4.0)), torch.zeros(4))]
    (work,) = Feed(batches, torch.device("cuda"))
    assert type(work.inputs) is kind
    assert work.inputs.logits.is_cuda
    assert work.inputs.logits.tolist() == [0, 1, 2, 3]
    assert work.num_samples == 4


# -- sparse gradients ----------------------------------------------------------------------------


def make_embedder(sparse, device="cpu"):
    torch.manual_seed(0)
    embedding = nn.Embedding(10, 4, sparse=sparse)
    return nn.Sequential(embedding, nn.Flatten(), nn.Linear(8, 1)).to(device)


def token_batches():
    """Rows come several times in each batch."""
    torch.manual_seed(1)
    return [(torch.randint(0, 5, (8, 2)), 5 * torch.randn(8, 1)) for _ in range(6)]


def train_embedder(sparse, kind, device="cpu", run_dir=None, only_first=False, **options):
    model = make_embedder(sparse, device)
    optimizer = kind((model[0] if only_first else model).parameters())
    config = {"epochs": 2, "precision": "fp32", "capture": "off", **options}
    loss = nn.functional.mse_loss
    trainer = Trainer(
        model, token_batches(), None, loss, optimizer, None, config, device, run_dir=run_dir
    )
    return trainer, trainer.fit(resume=run_dir is not None).losses


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, lr=0.05, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("momentum", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
@pytest.mark.parametrize("steps", [1, 4])
def test_sparse_gradients_train_as_dense_ones_do(device, clip, momentum, steps):
    options = {"clip_norm": clip, "accumulation_steps": steps}
    _, want = train_embedder(False, sgd(**momentum), device, **options)
    trainer, got = train_embedder(True, sgd(**momentum), device, **options)
    assert got == pytest.approx(want, rel=1e-4)
    assert not trainer._step.guarded


@pytest.mark.parametrize("device", DEVICES)
def test_sparse_adam_with_clipping(device):
    def run(model, clip):
        optimizer = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
        for inputs, targets in token_batches():
            inputs, targets = inputs.to(device), targets.to(device)
            nn.functional.mse_loss(model(inputs), targets).backward()
            weight = model[0].weight
            dense = weight.grad.to_dense()
            weight.grad *= min(1.0, clip / (float(dense.norm()) + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
        return model[0].weight

    want = run(make_embedder(True, device), 0.5)
    kind = lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1)  # noqa: E731
    trainer, _ = train_embedder(True, kind, device, only_first=True, clip_norm=0.5, epochs=1)
    torch.testing.assert_close(trainer.model[0].weight, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sparse_training_goes_on_after_a_resume(tmp_path, nesterov):
    kind = sgd(momentum=0.9, nesterov=nesterov)
    _, want = train_embedder(True, kind)
    _, first = train_embedder(True, kind, run_dir=tmp_path, epochs=1)
    _, second = train_embedder(True, kind, run_dir=tmp_path, epochs=2)
    assert first + second == pytest.approx(want, rel=1e-5)


def make_sparse(rows, values):
    """Return a gradient of three rows, as an embedding leaves it."""
    indices = torch.tensor([rows], dtype=torch.int64, device=values.device)
    return torch.sparse_coo_tensor(indices, values, (3, 2), check_invariants=True)


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_is_that_of_the_summed_rows(device):
    weight = nn.Parameter(torch.zeros(3, 2, device=device))
    values = torch.tensor([[3.0, 0.0], [-3.0, 4.0], [0.0, 3.0]], device=device)
    weight.grad = make_sparse([0, 0, 2], values)
    dense = nn.Parameter(torch.zeros(1, device=device))
    dense.grad = torch.full((1,), 12.0, device=device)
    frozen = nn.Parameter(torch.zeros(1, device=device))
    parts = coalesce_gradients([weight, dense, frozen])
    norm = torch.nn.utils.get_total_norm(parts)
    assert float(norm) == pytest.approx(13.0)
    clip_values(parts, 6.5, norm)
    assert weight.grad.is_sparse
    want = torch.tensor([[0, 2], [0, 0], [0, 1.5]], device=device)
    torch.testing.assert_close(weight.grad.to_dense(), want)
    assert float(dense.grad) == pytest.approx(6.0, rel=1e-5)


def test_a_gradient_without_rows_has_the_norm_zero():
    weight = nn.Parameter(torch.zeros(3, 2))
    weight.grad = make_sparse([], torch.zeros(0, 2))
    assert float(torch.nn.utils.get_total_norm(coalesce_gradients([weight]))) == 0.0


def pretend_gpu(monkeypatch, capturing):
    """Let steps on the CPU take the way they take on a GPU."""
    begin = Step.__init__

    def pretend(self, parts):
        begin(self, parts)
        self._on_gpu = True

    monkeypatch.setattr(Step, "__init__", pretend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)


def test_sparse_gradients_are_not_captured(monkeypatch):
    pretend_gpu(monkeypatch, capturing=True)
    with pytest.raises(RuntimeError, match="another size at every step"):
        train_embedder(True, sgd())


@pytest.mark.parametrize("device", [*DEVICES, "as on a GPU"])
def test_a_sparse_gradient_that_is_not_finite_is_left_out(monkeypatch, device):
    if device == "as on a GPU":
        pretend_gpu(monkeypatch, capturing=False)
        device = "cpu"
    model = make_embedder(True, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = token_batches()
    batches[2] = (batches[2][0], batches[2][1] * float("nan"))
    config = {"epochs": 1, "nonfinite": "skip", "precision": "fp32"}
    loss = nn.functional.mse_loss
    trainer = Trainer(model, batches, None, loss, optimizer, None, config, device)
    trainer.fit()
    assert trainer._step.num_skipped == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_adam_says_itself_that_it_takes_no_sparse_gradients():
    with pytest.raises(RuntimeError, match="SparseAdam"):
        train_embedder(True, torch.optim.AdamW)


def test_dense_gradients_stay_fused():
    trainer, _ = train_embedder(False, sgd(momentum=0.9))
    assert trainer._step.guarded
    assert all(group["fused"] for group in trainer.optimizer.param_groups)
    assert make_guarded(trainer.optimizer, CPU) == "SGD runs fused"


class Doubled(namedtuple("Doubled", "x y")):
    """A named tuple whose constructor takes something else than its parts."""

    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x, x * 2)


def test_a_named_tuple_with_a_constructor_of_its_own_is_kept():
    moved = map_tensors(lambda tensor: tensor + 1, {"a": [Doubled(torch.ones(2))]})["a"][0]
    assert type(moved) is Doubled
    assert moved.x.tolist() == [2, 2]
    assert moved.y.tolist() == [3, 3]
