"""Checkpoints: bit for bit, whole or absent, verified, of one run and one process at a time."""

from __future__ import annotations

import errno
import io
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import warm_stoker
from stoker.errors import CorruptError, InputError, StoreError
from stoker.ownership import MARK_NAME
from stoker.train import checkpoint_file
from stoker.train.checkpoint import (
    Checkpoints,
    capture_rng,
    differences,
    load_checkpoint,
    restore_rng,
)
from stoker.train.run_folder import RunLock

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def same(one, two):
    """Whether two states are the same, bit for bit and type for type."""
    if isinstance(one, torch.Tensor):
        if type(two) is not torch.Tensor or one.dtype != two.dtype or one.shape != two.shape:
            return False
        raw = [t.detach().cpu().contiguous().flatten() for t in (one, two)]
        return raw[0].numel() == 0 or torch.equal(*(t.view(torch.uint8) for t in raw))
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return repr(one) == repr(two)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


states = st.dictionaries(
    st.text() | st.integers(),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**2030), 2**2030)
        | st.floats()
        | st.text()
        | st.complex_numbers()
        | tensors(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
            | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(state=states)
def test_any_allowed_state_comes_back_bit_for_bit(tmp_path_factory, state):
    kept = Checkpoints(tmp_path_factory.mktemp("c"))
    kept.save(state, 1, 0)
    assert same(kept.load().state, state)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 4, num_layers=2)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 2).to(torch.float16)
        self.tied = self.head
        self.register_buffer("count", torch.zeros((), dtype=torch.uint8))

    def forward(self, x):
        return self.norm(self.lstm(x)[0][-1]).sum()


def train_parts(device):
    torch.manual_seed(3)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.lstm.parameters(), lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        ],
        [2],
    )
    scaler = torch.amp.GradScaler(device)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(5, 6, 3, device=device)).backward()
        optimizer.step()
        scheduler.step()
    return net, optimizer, scheduler, scaler


@pytest.mark.parametrize("device", DEVICES)
def test_model_optimizer_scheduler_scaler_and_loader_come_back(tmp_path, device):
    parts = dict(
        zip(("model", "optimizer", "scheduler", "scaler"), train_parts(device), strict=True)
    )
    state = {name: part.state_dict() for name, part in parts.items()}
    state["loader"] = {"epoch": 2, "chunks": [[0, 5], [5, 9]], "order": {"seed": 1, "rank": None}}
    state["augmentation"] = {"generator": torch.get_rng_state(), "draws": 17}
    state["rng"] = capture_rng()
    kept = Checkpoints(tmp_path)
    kept.save(state, step=3, epoch=1, metrics={"loss": 0.5})
    loaded = kept.load().state
    assert same(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    fresh = dict(zip(parts, train_parts(device), strict=True))
    for name, part in fresh.items():
        part.load_state_dict(loaded[name])
        assert same(part.state_dict(), state[name]), name


def test_a_milestone_scheduler_and_a_size_are_allowed(tmp_path):
    state = {
        "milestones": Counter({2: 2, 5: 1}),
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "view": MappingProxyType({"a": 1}),
        "sparse": torch.eye(3).to_sparse(),
    }
    Checkpoints(tmp_path).save(state, 0, 0)
    loaded = Checkpoints(tmp_path).load().state
    assert loaded["milestones"] == state["milestones"]
    assert loaded["shape"] == state["shape"]
    assert loaded["dtype"] is torch.bfloat16
    assert loaded["view"] == {"a": 1}
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


class Money(float):
    pass


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": [1, np.float64(2)]}}, r"state\.a\.b\[1\] is a numpy\.float64"),
        ({"b": b""}, r"state\.b is a builtins\.bytes"),
        ({"n": [2**3000]}, r"state\.n\[0\] is a builtins\.int"),
        ({"a": np.zeros(2)}, r"state\.a is a numpy\.ndarray"),
        ({"f": (print,)}, r"state\.f\[0\] is a builtins\.builtin_function"),
        ({"p": Path()}, r"state\.p is a pathlib"),
        ({"d": defaultdict(list)}, r"state\.d is a collections\.defaultdict"),
        ({"s": {1, 2}}, r"state\.s is a builtins\.set"),
        ({"m": Money(1)}, r"state\.m is a .*Money"),
        ({"t": torch.empty(3, device="meta")}, r"state\.t is a torch\.Tensor on the meta device"),
        ({"k": {(1, 2): 3}}, r"state\.k has the key \(1, 2\), a tuple"),
        ({"k": {True: 3}}, "a bool"),
    ],
)
def test_what_could_not_be_loaded_is_refused_at_the_save_with_its_place(tmp_path, state, place):
    with pytest.raises(InputError, match=place) as caught:
        Checkpoints(tmp_path).save(state, 1, 0)
    assert caught.value.allowed
    assert caught.value.fix
    assert {path.name for path in tmp_path.iterdir()} <= {MARK_NAME}


def test_the_file_is_an_ordinary_torch_file(tmp_path):
    saved = Checkpoints(tmp_path).save({"x": torch.arange(3)}, 120, 4, {"loss": 1.0}, {"lr": 0.1})
    assert saved.path.name == "step-000000120.pt"
    plain = torch.load(saved.path, weights_only=True)
    assert plain["state"]["x"].tolist() == [0, 1, 2]
    assert plain["identity"] == {"lr": 0.1}
    with zipfile.ZipFile(saved.path) as archive:
        assert archive.testzip() is None
        assert json.loads(archive.comment)["is"]["step"] == 120


def test_nothing_but_weights_is_ever_unpickled(tmp_path, monkeypatch):
    asked = []
    real = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.append(k) or real(*a, **k))
    Checkpoints(tmp_path).save({}, 1, 0)
    Checkpoints(tmp_path).load()
    assert [options["weights_only"] for options in asked] == [True]


def test_a_small_view_of_a_large_tensor_is_saved_by_itself(tmp_path):
    chunk = torch.randn(1_000_000)
    whole = torch.randn(1000)
    state = {"row": chunk[10:20], "halves": [whole[:500], whole[500:]], "graph": chunk[:2] * 1}
    saved = Checkpoints(tmp_path).save(state, 1, 0)
    assert saved.size_bytes < 20_000
    loaded = Checkpoints(tmp_path).load().state
    assert same(loaded, state)
    first, second = loaded["halves"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_tensor_with_a_graph_is_saved_as_its_values(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    Checkpoints(tmp_path).save({"p": weight, "q": weight * 2}, 1, 0)
    loaded = Checkpoints(tmp_path).load().state
    assert loaded["q"].tolist() == [2, 2]
    assert not loaded["p"].requires_grad
    assert not loaded["q"].requires_grad


# -- which are kept ------------------------------------------------------------------------------


def steps(kept):
    return [saved.step for saved in kept.list()]


def test_the_last_and_the_best_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, keep_last=2, monitor="loss")
    for step, loss in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
        kept.save({"step": step}, step, 0, {"loss": loss})
    assert steps(kept) == [1, 3, 4]
    assert kept.latest().step == 4
    assert kept.best().step == 1
    assert load_checkpoint(tmp_path / "best.pt").state == {"step": 1}
    assert (tmp_path / "best.pt").samefile(kept.best().path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != MARK_NAME) == [
        "best.pt", "step-000000001.pt", "step-000000003.pt", "step-000000004.pt",
    ]  # fmt: skip


@given(
    losses=st.lists(
        st.none() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, 2.0]),
        min_size=1,
        max_size=6,
    ),
    keep=st.integers(1, 3),
    maximise=st.booleans(),
)
def test_keeping_agrees_with_a_plain_count(tmp_path_factory, losses, keep, maximise):
    kept = Checkpoints(tmp_path_factory.mktemp("c"), keep, "m", maximise)
    for step, loss in enumerate(losses):
        kept.save({}, step, 0, {} if loss is None else {"m": loss})
    scored = [(s, v) for s, v in enumerate(losses) if v is not None and v == v]
    pick = max if maximise else min
    best = pick(scored, key=lambda item: item[1])[0] if scored else None
    last = list(range(len(losses)))[-keep:]
    assert steps(kept) == sorted({*last, *([] if best is None else [best])})
    assert (kept.best().step if kept.best() else None) == best
    assert (kept.folder / "best.pt").exists() == (best is not None)


def test_after_going_back_the_newest_is_the_one_saved_last(tmp_path):
    kept = Checkpoints(tmp_path, keep_last=3)
    for step in (10, 20, 30, 15):
        kept.save({"step": step}, step, 0)
    assert kept.latest().step == 15
    assert steps(kept) == [20, 30, 15]


def test_the_same_step_is_replaced_and_the_best_follows(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save({"v": 1}, 7, 0, {"loss": 1.0})
    kept.save({"v": 2}, 7, 0, {"loss": 2.0})
    assert kept.load().state == {"v": 2}
    assert load_checkpoint(tmp_path / "best.pt").state == {"v": 2}


def test_without_hard_links_the_best_is_a_symlink_and_without_any_its_step(tmp_path, monkeypatch):
    def refuse(*_args):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    kept = Checkpoints(tmp_path, keep_last=1)
    kept.save({"v": 1}, 1, 0, {"loss": 1.0})
    assert (tmp_path / "best.pt").is_symlink()
    assert load_checkpoint(tmp_path / "best.pt").state == {"v": 1}
    monkeypatch.setattr(Path, "symlink_to", refuse)
    kept.save({"v": 2}, 2, 0, {"loss": 0.5})
    kept.save({"v": 3}, 3, 0, {"loss": 0.7})
    assert not (tmp_path / "best.pt").exists()
    assert kept.best().step == 2
    assert steps(kept) == [2, 3]


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    kept = Checkpoints(tmp_path / "none")
    assert kept.latest() is None
    assert kept.best() is None
    assert kept.list() == ()
    with pytest.raises(StoreError, match="no checkpoint in"):
        kept.load()
    with pytest.raises(StoreError, match="cannot read the checkpoint"):
        kept.load(tmp_path / "no.pt")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: Checkpoints(folder, keep_last=0), "keep_last is 0"),
        (lambda folder: Checkpoints(folder).save({}, -1, 0), "step is -1"),
        (
            lambda folder: Checkpoints(folder).save(
                {}, 1, 0, {f"{k:040d}": 0.5 for k in range(2000)}
            ),
            "metrics of a checkpoint take",
        ),
        (lambda folder: Checkpoints(folder).save({}, 1, 0, {}, {"f": print}), "identity"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(tmp_path, make, words):
    with pytest.raises(InputError, match=words) as caught:
        make(tmp_path)
    assert caught.value.fix
    assert {path.name for path in tmp_path.iterdir()} <= {MARK_NAME}


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    kept = Checkpoints(tmp_path)
    for step in (1, 2):
        kept.save({"x": torch.arange(50) + step}, step, 0)
    return kept


def test_every_truncation_is_refused_and_the_previous_one_is_suggested(two):
    newest = two.latest().path
    whole = newest.read_bytes()
    for size in sorted({*random.Random(0).sample(range(len(whole)), 40), 0, 1, len(whole) - 1}):
        newest.write_bytes(whole[:size])
        with pytest.raises(CorruptError) as caught:
            two.load(newest)
        assert str(newest) in caught.value.given
        assert "step-000000001.pt" in caught.value.fix
        with pytest.raises(CorruptError, match="step-000000002"):
            two.latest()
        assert steps(two) == [1]
        assert two.damaged() == (newest,)
    assert two.load(two.list()[-1].path).state["x"][0] == 1


def test_every_flipped_bit_is_refused(two):
    newest = two.latest().path
    whole = newest.read_bytes()
    for place in [*range(0, len(whole), 7), *range(len(whole) - 400, len(whole))]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << (place % 8)
        newest.write_bytes(flipped)
        with pytest.raises(CorruptError) as caught:
            two.load(newest)
        assert str(newest) in caught.value.given
        assert "step-000000001.pt" in caught.value.fix
    newest.write_bytes(whole + b"\0")
    with pytest.raises(CorruptError):
        two.load(newest)


def test_an_older_damaged_file_does_not_stop_the_newest(two):
    two.list()[0].path.write_bytes(b"PK")
    assert two.load().saved.step == 2


def test_a_damaged_only_checkpoint_says_so(tmp_path):
    kept = Checkpoints(tmp_path)
    path = kept.save({}, 1, 0).path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="there is no other checkpoint"):
        kept.load()
    kept.save({"v": 2}, 2, 0)
    assert kept.load().state == {"v": 2}


def test_a_torch_file_that_stoker_did_not_write_is_refused(two):
    buffer = io.BytesIO()
    torch.save({"state": {}, "identity": {}}, buffer)
    path = two.folder / "foreign.pt"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(CorruptError, match="stoker did not write it"):
        two.load(path)


# -- full disks and kills ------------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 10, 700, 2500])
def test_a_full_disk_leaves_the_older_ones_and_no_temporary_file(two, monkeypatch, room):
    before = {path.name: path.read_bytes() for path in two.folder.iterdir()}
    real, left = checkpoint_file._HashedFile._put, [room]

    def put(self, data):
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    monkeypatch.setattr(checkpoint_file._HashedFile, "_put", put)
    with pytest.raises(StoreError, match="No space left on device") as caught:
        two.save({"x": torch.arange(1000)}, 3, 0, {"loss": 0.1})
    assert "df -h" in caught.value.fix
    assert {path.name: path.read_bytes() for path in two.folder.iterdir()} == before
    monkeypatch.undo()
    assert two.load().saved.step == 2
    assert two.save({}, 3, 0).step == 3


@pytest.mark.parametrize("length", [1, 7, 22, 23, 4096])
def test_a_file_is_the_same_however_its_bytes_arrive(length):
    """Also where the archive's end record comes in pieces."""
    end = checkpoint_file._END.pack(checkpoint_file._END_MAGIC, *[0] * 7)
    content, files = bytes(range(256)) * 2 + end, []
    for step in (len(content), length):
        hashed = checkpoint_file._HashedFile(file := io.BytesIO())
        pieces = [content[at : at + step] for at in range(0, len(content), step)]
        assert [hashed.write(piece) for piece in pieces] == [*map(len, pieces)]
        hashed.finish({"step": 1})
        files.append(file.getvalue())
    assert files[0] == files[1]
    assert files[0].startswith(content[: -len(end)])


def test_a_disk_that_fails_at_the_sync_leaves_the_older_ones(two, monkeypatch):
    def fail(_file):
        raise OSError(errno.EIO, "Input/output error")

    before = sorted(path.name for path in two.folder.iterdir())
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        two.save({}, 3, 0)
    assert sorted(path.name for path in two.folder.iterdir()) == before


def test_the_kernel_refusing_a_write_inside_torchs_writer_is_survived(tmp_path):
    """A real failed write (a file size limit), not an injected one: nothing may crash or stay."""
    code = (
        "import resource, signal, sys, torch\n"
        "from stoker.train.checkpoint import Checkpoints\n"
        "from stoker.errors import StoreError\n"
        "kept = Checkpoints(sys.argv[1])\n"
        "kept.save({'x': torch.zeros(100)}, 1, 0)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "try:\n kept.save({'x': torch.zeros(100_000), 'y': torch.ones(9)}, 2, 0)\n"
        "except StoreError as error:\n sys.exit(0 if 'too large' in str(error) else str(error))\n"
        "sys.exit('saved')\n"
    )
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(code)
    done = warm_stoker.shared().run([folder], script=script)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in folder.iterdir()} == {MARK_NAME, "step-000000001.pt"}


def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        Checkpoints(tmp_path / "f").save({}, 1, 0)


SAVER = """
import os, sys, torch
from stoker.train.checkpoint import Checkpoints
torch.set_num_threads(1)

def save_for_ever():
    kept = Checkpoints(sys.argv[1], keep_last=2)
    latest = kept.latest()
    step = latest.step + 1 if latest else 0
    while True:
        state = {"x": torch.full((1_500_000,), float(step)), "step": step}
        kept.save(state, step, 0, {"loss": float((step * 7) % 11)})
        os.write(1, f"saved {step}\\n".encode())
        step += 1

save_for_ever()
"""


def kill_during_saves(folder, kills, seed):
    """Kill a saving process at random moments; whatever it left must load, as new as it said."""
    rng, highest = random.Random(seed), -1
    script = folder.parent / "saver.py"
    script.write_text(SAVER)
    for number in range(kills):
        saver = warm_stoker.Started([folder], script=script)
        # The very first save has nothing to fall back to: it may finish.
        lines = [saver.stdout.readline()] if number == 0 else []
        time.sleep(rng.uniform(0, 0.06))
        saver.kill()
        rest, said = saver.communicate()
        assert saver.returncode == -signal.SIGKILL, said
        lines += rest.splitlines()
        highest = max([highest, *(int(line.split()[1]) for line in lines)])
        check_what_is_left(Checkpoints(folder), highest)
    Checkpoints(folder).save({}, 10**6, 0)
    assert [path.name for path in folder.glob(".*")] == [MARK_NAME], "leftovers stay behind"


def check_what_is_left(kept, highest):
    loaded = kept.load()
    assert loaded.saved.step >= highest
    assert (loaded.state["x"] == loaded.saved.step).all()
    assert kept.damaged() == ()
    for saved in kept.list():
        assert kept.load(saved.path).state["step"] == saved.step
    assert load_checkpoint(kept.folder / "best.pt").state["step"] <= loaded.saved.step


def test_kill_9_during_saves_always_leaves_a_whole_checkpoint(tmp_path):
    kill_during_saves(tmp_path / "run", kills=12, seed=0)


def test_leftovers_of_a_kill_are_removed_by_the_next_save_only(two):
    leftover = two.folder / ".step-000000003.pt.0123abcd.tmp"
    others = [two.folder / name for name in (".step-notes.tmp", ".thesis.tex.0123abcd.tmp")]
    for path in (leftover, *others):
        path.write_bytes(b"half")
    Checkpoints(two.folder).load()
    assert leftover.exists()
    two.save({}, 3, 0)
    assert not leftover.exists()
    assert all(path.exists() for path in others)


# -- what is not ours ------------------------------------------------------------------------------


def test_checkpoints_of_other_runs_and_files_of_others_stay(tmp_path):
    other = Checkpoints(tmp_path / "other")
    copied = tmp_path / "run" / "step-000000001.pt"
    copied.parent.mkdir()
    shutil.copy(other.save({"v": 0}, 1, 0).path, copied)
    mine = tmp_path / "run" / "step-000000002.pt"
    torch.save({"thesis": 1}, mine)
    kept = Checkpoints(tmp_path / "run", keep_last=1)
    for step in (3, 4, 5):
        kept.save({"v": step}, step, 0)
    assert copied.exists()
    assert torch.load(mine) == {"thesis": 1}
    assert not (tmp_path / "run" / "step-000000003.pt").exists()
    with pytest.raises(InputError, match=r"step-000000002\.pt exists, and stoker did not write it"):
        kept.save({"v": 2}, 2, 0)
    assert torch.load(mine) == {"thesis": 1}


def test_somebody_elses_best_is_refused_by_name_and_never_replaced(tmp_path):
    torch.save({"thesis": 1}, tmp_path / "best.pt")
    kept = Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"holds 'best\.pt', which stoker did not write"):
        kept.check_names()
    kept.save({"v": 1}, 1, 0, {"loss": 1.0})
    assert torch.load(tmp_path / "best.pt") == {"thesis": 1}


# -- identity ------------------------------------------------------------------------------------


def test_facts_that_a_later_version_adds_do_not_keep_an_older_run_from_going_on(tmp_path):
    kept = Checkpoints(tmp_path)
    kept.save({"v": 1}, 1, 0, identity={"recipe": "massspec", "facts": {"num_bins": 10}})
    more = {"recipe": "massspec", "facts": {"num_bins": 10, "condition_ranges": [[0.0, 1.0]]}}
    assert kept.load_for(more).changes == ()
    for other in (
        {"num_bins": 20, "condition_ranges": []},
        {"condition_ranges": [[0.0, 1.0]]},
    ):
        with pytest.raises(InputError, match="of another run"):
            kept.load_for({"recipe": "massspec", "facts": other})


def test_a_checkpoint_of_another_run_is_refused_key_by_key(tmp_path):
    kept = Checkpoints(tmp_path)
    old = {"train": {"lr": 0.1, "betas": (0.9, 0.999), "seed": 0}, "model": {"width": 128}, "a": 1}
    kept.save({"v": 1}, 1, 0, identity=old)
    assert kept.load_for(old).state == {"v": 1}
    new = {
        "train": {"lr": 0.2, "betas": [0.9, 0.999], "seed": False},
        "model": {"width": None, "depth": 2},
    }
    with pytest.raises(InputError) as caught:
        kept.load_for(new)
    assert caught.value.details == (
        "a: 1 in the checkpoint, absent now",
        "model.depth: absent in the checkpoint, 2 now",
        "model.width: 128 in the checkpoint, null now",
        "train.lr: 0.1 in the checkpoint, 0.2 now",
        "train.seed: 0 in the checkpoint, false now",
    )
    assert str(tmp_path) in caught.value.given
    assert "new run directory" in caught.value.fix


def test_paths_and_nan_are_fine_in_an_identity(tmp_path):
    identity = {"store": Path("/data/x"), "scale": math.nan, "n": 1}
    Checkpoints(tmp_path).save({}, 1, 0, identity=identity)
    assert Checkpoints(tmp_path).load_for({**identity, "n": 1.0}).identity["store"] == "/data/x"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=2), json_values))
def test_an_identity_does_not_differ_from_itself(identity):
    assert differences(identity, json.loads(json.dumps(identity))) == []
    assert len(differences({**identity, "new key": 1}, identity)) == 1


# -- the lock ------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from stoker.train.run_folder import RunLock
lock = RunLock(sys.argv[1]).acquire()
print(os.getpid(), flush=True)
if len(sys.argv) > 2 and os.fork() == 0:
    print("forked", flush=True)
    time.sleep(60)
time.sleep(60)
"""


def hold(folder, *extra):
    script = folder.parent / "holder.py"
    script.write_text(HOLDER)
    child = warm_stoker.Started([folder, *extra], script=script)
    assert int(child.stdout.readline()) == child.pid
    return child


def test_a_second_process_is_told_who_has_the_run_directory(tmp_path):
    child = hold(tmp_path / "run")
    try:
        with (
            pytest.raises(StoreError, match=f"in use by process {child.pid} on ") as caught,
            RunLock(tmp_path / "run"),
        ):
            pass
        assert "another run directory" in caught.value.fix
    finally:
        child.close()
    with RunLock(tmp_path / "run"):
        assert f"process {os.getpid()} on" in (tmp_path / "run" / "lock").read_text()


def test_a_forked_worker_that_outlives_its_killed_parent_does_not_keep_the_lock(tmp_path):
    child = hold(tmp_path / "run", "fork")
    assert child.stdout.readline() == "forked\n"
    with pytest.raises(StoreError), RunLock(tmp_path / "run"):
        pass
    child.kill()
    child.wait()
    with RunLock(tmp_path / "run"):
        pass
    child.close()


def hold_nothing(folder, queue):
    try:
        with RunLock(folder):
            queue.put("got it")
    except StoreError:
        queue.put("refused")


def test_the_parent_keeps_the_lock_when_a_forked_child_ends(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with RunLock(tmp_path):
        for _ in range(2):
            child = context.Process(target=hold_nothing, args=(tmp_path, queue))
            child.start()
            assert queue.get() == "refused"
            child.join()
    with RunLock(tmp_path) as lock:
        lock.release()
        lock.release()
        with RunLock(tmp_path):
            pass


def test_a_run_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(StoreError, match="cannot write the run directory"):
        RunLock(tmp_path / "f").acquire()


# -- generators ----------------------------------------------------------------------------------


def draw(device):
    return (
        [random.random(), random.gauss(0, 1)],
        np.random.normal(size=3).tolist(),
        torch.randn(3).tolist(),
        torch.randn(3, device=device).tolist(),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_generators_draw_the_same_after_a_restore(tmp_path, device):
    draw(device)  # an odd number of normals leaves half a pair behind, in Python and in numpy
    Checkpoints(tmp_path).save({"rng": capture_rng()}, 1, 0)
    first = draw(device)
    assert draw(device) != first
    assert restore_rng(Checkpoints(tmp_path).load().state["rng"]) == ()
    assert draw(device) == first


@pytest.mark.parametrize("kind", [tuple, list])
def test_generators_of_older_checkpoints_draw_the_same(kind):
    """They have Python's state as 625 numbers."""
    random.gauss(0, 1)
    version, numbers, gauss = random.getstate()
    state = {**capture_rng(), "python": kind((version, kind(numbers), gauss))}
    first = draw("cpu")
    assert restore_rng(state) == ()
    assert draw("cpu") == first


def test_generators_of_missing_devices_are_named():
    state = capture_rng()
    known = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()
    notes = restore_rng({**state, "cuda": [known] * 99})
    assert len(notes) == 1
    assert "99 CUDA generators" in notes[0]


@pytest.mark.gpu
def test_dropout_of_a_cudnn_lstm_draws_the_same_after_a_restore():
    lstm = torch.nn.LSTM(4, 32, num_layers=2, dropout=0.5).cuda()
    x = torch.randn(7, 3, 4, device="cuda")
    lstm(x)
    state = capture_rng()
    first = [lstm(x)[0] for _ in range(2)]
    restore_rng(state)
    again = [lstm(x)[0] for _ in range(2)]
    assert not torch.equal(*first)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
