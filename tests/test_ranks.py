"""Several processes, one training: equal to one process, in the face of every way to lose a rank."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import TCPStore
from typer.testing import CliRunner

import warm_stoker
from rank_scenarios import GLOBAL_BATCH, SCENARIOS
from run_makers import make_store
from stoker.cli.main import app
from stoker.errors import InputError
from stoker.loader.loader import Loader
from stoker.train import heartbeat, launch
from stoker.train.batches import Feed
from stoker.train.ranks import RankLostError, Ranks, is_launched, meet, num_restarts
from stoker.train.recurrent_state import RecurrentState
from stoker.train.trainer import Trainer
from training_makers import make_model, read_rows, write_dirty, write_rows

TESTS = Path(__file__).parent
NUM_ROWS = 203


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(folder: Path, world_size: int, *names: str) -> list[warm_stoker.Started]:
    port = free_port()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        warm_stoker.Started(
            [folder, *names], script=TESTS / "rank_scenarios.py",
            environment=os.environ | common | {
                "RANK": str(rank), "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size),
            },
        )
        for rank in range(world_size)
    ]  # fmt: skip


def run(folder: Path, world_size: int, *names: str) -> list[dict]:
    """Return what each rank found, scenario by scenario."""
    ranks = start(folder, world_size, *names)
    told = ["\n".join(rank.communicate(timeout=240)) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(told)
    return [pickle.loads((folder / f"rank-{rank}.pkl").read_bytes()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    write_rows(made)
    write_dirty(made, 137)
    for kind in ("tabular", "stateful", "massspec"):
        make_store(kind, made / kind).close()
    return made


@pytest.fixture(scope="module")
def two(folder):
    """Everything that two ranks do, in one start."""
    names = [
        "whole", "accumulated", "in parts", "stopped", "stopped time", "dirty", "unequal", "foreign",
        "disagree", "one fails", "tabular", "tabular in parts", "stateful", "massspec", "foreign windows",
        "foreign goes on", "rolled back", "refused", "parts evaluated", "parts stopped", "lowest level",
    ]  # fmt: skip
    return run(folder, 2, *names)


@pytest.fixture(scope="module")
def three(folder, two):
    """What three ranks make of what two have left."""
    return run(folder, 3, "gone on", "gone on time", "one fails")


def alone(folder, name):
    return SCENARIOS[name](folder, Ranks())


def same(found, expected, tolerance=2e-6):
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-5)
    for ours, theirs in zip(found["epochs"], expected["epochs"], strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], rel=2e-5)
        assert ours[2] == pytest.approx(theirs[2], rel=2e-5)


@pytest.mark.parametrize("name", ["whole", "accumulated", "in parts"])
def test_ranks_train_as_one_process_with_the_same_global_batch(folder, two, name):
    expected = alone(folder, "whole" if name == "in parts" else name)
    assert len(expected["losses"]) == 2 * -(-NUM_ROWS // GLOBAL_BATCH)  # the last batch is short
    for found in two:
        same(found[name], expected)


def test_what_is_done_is_said(two):
    assert "ranks the whole model on each of 2 ranks (DDP, gloo)" in two[0]["whole"]["notes"]
    assert "ranks 1/2 of the model on each rank (FSDP2)" in two[0]["in parts"]["notes"]


def test_nothing_of_the_group_is_left_that_could_abort_the_interpreter(three):
    assert [rank["threads left"] for rank in three] == [[]] * 3  # torch keeps FSDP's for good


def test_a_dataloader_of_any_kind_weighs_every_sample_alike(two, folder):
    """Five batches over all ranks are the same gradient as five batches of one process, in another order."""
    features, targets = read_rows(folder / "rows.h5")
    halves = np.array_split(np.arange(NUM_ROWS), 2)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for number in range(5):
            rows = np.concatenate(
                [
                    half[number * -(-len(half) // 5) : (number + 1) * -(-len(half) // 5)]
                    for half in halves
                ]
            )
            loss = torch.nn.functional.mse_loss(model(features[rows]), targets[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.state_dict().values()]).tolist()
    for found in two:
        np.testing.assert_allclose(found["foreign"]["weights"], expected, rtol=0, atol=2e-6)


def samples_of(parts: list[list[int]], epoch: int) -> list[int]:
    return [sample for first, *samples in parts if first == epoch for sample in samples]


@pytest.mark.parametrize("name", ["stopped", "stopped time"])
def test_a_signal_to_one_rank_ends_all_at_the_same_step(two, name):
    first, second = (found[name] for found in two)
    assert first["ended"] == second["ended"] == "terminated"
    assert len(first["taken"]) == len(second["taken"]) >= 12
    assert first["epoch"] == second["epoch"] == 1


@pytest.mark.parametrize("name", ["stopped", "stopped time"])
def test_another_number_of_ranks_goes_on_without_losing_or_repeating_a_sample(two, three, name):
    begun = [row for found in two for row in found[name]["taken"]]
    ended = [row for found in three for row in found[name.replace("stopped", "gone on")]["taken"]]
    for epoch in (0, 1):
        assert sorted(samples_of(begun + ended, epoch)) == list(range(NUM_ROWS))
    assert samples_of(begun, 1)
    assert samples_of(ended, 1)


def test_going_on_with_other_ranks_is_the_same_training(folder, two, three):
    expected = alone(folder, "whole")
    for found in three:
        np.testing.assert_allclose(
            found["gone on"]["weights"], expected["weights"], rtol=0, atol=5e-6
        )
    assert any("2 ranks had saved and 3 continue" in note for note in three[0]["gone on"]["notes"])


def test_a_value_that_breaks_one_rank_is_named_on_all(two):
    for found in two:
        assert "column 4 is nan in sample 137" in found["dirty"]
        assert found["dirty"].startswith("on rank ")


def test_loaders_that_end_at_different_steps_do_not_hang(two):
    for found in two:
        assert "after 5 batches the loaders of 1 of 2 ranks have ended" in found["unequal"]


def test_batches_of_other_sizes_on_other_ranks_weigh_what_they_hold_in_a_window_too(folder, two):
    expected = alone(folder, "foreign windows")
    for found in two:
        same(found["foreign windows"], expected)


def test_a_dataloader_of_each_rank_goes_on_in_its_own_order(two):
    for found in two:
        assert found["foreign goes on"] == [True, True]


def test_going_back_is_the_same_on_all_ranks_and_told_once(folder, two):
    expected = alone(folder, "rolled back")
    for found in (*(ranks["rolled back"] for ranks in two), expected):
        same(found, expected)
        assert any("Went back to epoch" in note for note in found["notes"])
        assert not any("although their losses were" in note for note in found["notes"])


def test_what_ranks_cannot_share_is_refused_on_all(two):
    for found in two:
        said = found["refused"]
        assert "1 parameters were frozen or unfrozen" in said["unfrozen"]
        assert "Trainer(model.module, ...)" in said["wrapped"]
        assert "is for rank 0 of 1, and this is rank 0 of 2" in said["not shared"]
        assert "the training loader's chunks is " in said["chunks"]


def test_a_model_in_parts_is_known_as_itself_whatever_was_done_last(two):
    for found in two:
        assert found["parts evaluated"] == {
            "was sharded": True,
            "is the same": True,
            "survives alone": False,
            "name": "Sequential",
            "kept": None,
        }


def test_a_run_in_parts_goes_on_whole_in_one_process(folder, two):
    found = alone(folder, "whole gone on")
    begun = [row for ranks in two for row in ranks["parts stopped"]["taken"]]
    for epoch in (0, 1):
        assert sorted(samples_of(begun + found["taken"], epoch)) == list(range(NUM_ROWS))
    np.testing.assert_allclose(
        found["weights"], alone(folder, "whole")["weights"], rtol=0, atol=5e-6
    )


def test_all_ranks_stand_on_the_level_of_the_lowest(two):
    for found in two:
        assert found["lowest level"] == (6, None, False)


def test_versions_that_differ_are_named(two):
    for found in two:
        assert "stoker is 0.0 on rank 0" in found["disagree"]
        assert "but 0.1 on rank 1" in found["disagree"]


def test_an_error_of_one_rank_is_the_end_of_all_and_told_once(two, three):
    for ranks in (two, three):
        kinds = [found["one fails"][0] for found in ranks]
        assert kinds == ["OtherRankError"] * (len(ranks) - 1) + ["InputError"]
        assert f"rank {len(ranks) - 1}: this rank cannot." in ranks[0]["one fails"][1]


@pytest.mark.parametrize("kind", ["tabular", "tabular in parts", "stateful", "massspec"])
def test_a_recipe_gives_the_same_on_two_ranks(folder, two, kind, tmp_path):
    name = kind.removesuffix(" in parts")
    for store in ("tabular", "stateful", "massspec"):
        (tmp_path / store).symlink_to(folder / store)
    expected = alone(tmp_path, name)
    for found in two:
        ours = found[kind]
        assert ours["samples"] == expected["samples"]
        np.testing.assert_allclose(ours["losses"], expected["losses"], rtol=1e-3, atol=1e-5)
        assert ours["val"] == pytest.approx(expected["val"], rel=2e-3, abs=1e-4)
        assert ours["test"] == pytest.approx(expected["test"], rel=2e-3, abs=1e-4)
    assert "ranks 2, 2 on this machine: batches of 16 are 8 on each" in two[0][kind]["notes"]


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    from run_makers import settings_for
    from stoker.recipes.run import share_batch

    settings = settings_for("tabular", tmp_path, tmp_path, "training.batch_size=16")
    with pytest.raises(
        InputError, match=r"(?s)3 ranks share it.*batch_size=15, or --set training.batch_size=18"
    ):
        share_batch(settings, 3)


def test_a_restart_goes_on_with_its_own_run_and_refuses_an_older_one(folder, tmp_path, monkeypatch):
    """Torchrun starts again whatever ended: also a command that was refused because of an older run."""
    from run_makers import settings_for
    from stoker.recipes.run import run_recipe

    run_dir = tmp_path / "run"
    settings = settings_for("tabular", folder / "tabular", run_dir, "training.epochs=1")
    assert len(run_recipe(settings).epochs) == 1
    monkeypatch.setenv("STOKER_RESTARTS", "1")
    longer = settings_for("tabular", folder / "tabular", run_dir, "training.epochs=2")
    monkeypatch.setattr("stoker.recipes.run.launched_at", lambda: time.time() + 60)
    with pytest.raises(InputError, match="has checkpoints of an earlier run"):
        run_recipe(longer)
    monkeypatch.setattr("stoker.recipes.run.launched_at", lambda: time.time() - 60)
    assert [report.epoch for report in run_recipe(longer).epochs] == [1]


def test_who_started_this_process():
    assert not is_launched({"RANK": "0"})
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert is_launched(dict.fromkeys(names, "1"))
    assert num_restarts({"STOKER_RESTARTS": "2"}) == 2
    assert num_restarts({"TORCHELASTIC_RESTART_COUNT": "1"}) == 1


@pytest.mark.gpu
def test_the_exchange_of_gradients_is_captured_with_the_step(folder):
    (found,) = run(folder, 1, "captured", "parts on a GPU")
    together, single = found["captured"]["together"], found["captured"]["alone"]
    assert "captured after 11 steps of warm-up" in together["step"]
    assert "agreed with eager steps" in together["step"]
    assert "ranks the whole model on each of 1 ranks (DDP, nccl)" in together["notes"]
    np.testing.assert_allclose(together["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    parts = found["parts on a GPU"]
    for precision, tolerance in (("fp32", 1e-4), ("fp16", 2e-2)):
        np.testing.assert_allclose(
            parts[f"{precision} in parts"]["losses"],
            parts[f"{precision} alone"]["losses"],
            rtol=tolerance,
            atol=tolerance / 10,
        )


# -- one process: as it was before there were several ----------------------------------------------


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_signal_in_validation_ends_the_run_behind_it(folder, epochs):
    model = make_model()

    def loss(outputs, targets):
        if not model.training:
            signal.raise_signal(signal.SIGTERM)
        return torch.nn.functional.mse_loss(outputs, targets)

    loaders = (Loader(folder / "rows.h5", 24, "cpu") for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters())
    history = Trainer(model, *loaders, loss, optimizer, None, {"epochs": epochs}, "cpu").fit()
    assert history.ended == "terminated"
    assert len(history.losses) == 9


class Draws:
    """An augmentation that changes nothing, and knows its place."""

    def __init__(self, stream):
        self.state = {"seed": 0, "epoch": 0, "step": 0, "stream": stream}

    def __call__(self, images):
        return images

    def seek(self, epoch, step=0):
        self.state |= {"epoch": epoch, "step": step}

    def validation(self):
        return self

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


class Counting(torch.optim.SGD):
    """An optimizer with a state that belongs to no parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.01)
        self.state["all"] = {"count": 3}


def test_the_state_of_one_process_is_kept_as_it_is(folder):
    model, draws = make_model(), Draws(7)
    optimizer = Counting(model.parameters())
    data = torch.utils.data.TensorDataset(*read_rows(folder / "rows.h5"))
    loader = torch.utils.data.DataLoader(data, 24)
    loss = torch.nn.functional.mse_loss
    trainer = Trainer(model, loader, None, loss, optimizer, None, {}, "cpu", draws)
    trainer.fit()
    state = trainer.state_dict()
    assert state["model"]._metadata[""] == {"version": 1}
    draws.state["stream"] = 0
    trainer.load_state_dict(state)
    assert draws.state["stream"] == 7
    assert optimizer.state["all"] == {"count": 3}


def test_a_loader_of_one_of_several_ranks_weighs_as_itself_in_one_process(folder):
    with Loader(folder / "rows.h5", 12, "cpu", rank=1, world_size=2) as loader:
        work = next(iter(Feed(loader, torch.device("cpu"))))
    assert (work.num_samples, work.num_together) == (12, None)


class TwoStates:
    def initial_state(self, batch, device):
        return {"rows": torch.zeros(3, batch), "all": torch.zeros(2)}


def test_carried_state_moves_with_its_rows():
    recurrent = RecurrentState(torch.device("cpu"), TwoStates())
    saved = [{"rows": torch.full((3, 2), float(n)), "all": torch.ones(2)} for n in range(2)]
    assert recurrent.part_of(saved, 1, 2) is saved[1]
    for rank in range(4):
        own = recurrent.part_of(saved, rank, 4)
        assert own["rows"].tolist() == [[rank // 2]] * 3
        assert own["all"].tolist() == [1, 1]


# -- a rank that is lost ---------------------------------------------------------------------------


def meet_all(server: TCPStore, late: int) -> list:
    """Let three ranks meet, one of them later than the others."""

    def come(rank):
        time.sleep(0.1 * (rank == late))
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=20))
        return meet(store, rank, 3, 20)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(come, range(3)))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_new_start_finds_nothing_that_the_one_before_has_left(late):
    """torchrun's store outlives the processes that it starts again."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for number in range(2):
        ranks = meet_all(server, late)
        assert not ranks[2].check(["address"])
        ranks[0].set("address", f"{number}")
        assert [rank.get("address") for rank in ranks] == [b"%d" % number] * 3


def test_a_rank_that_does_not_come_is_named():
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RankLostError, match="rank 1 has not come within 0 s"):
        meet(server, 0, 2, 0.1)
    server.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RankLostError, match="rank 0 has not come"):
        meet(server, 1, 2, 0.1)


class FakeStore:
    """What the ranks' heartbeats share."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def set(self, key, value):
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.values[key]

    def multi_get(self, keys):
        return [self.values[key] for key in keys]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def watch(monkeypatch):
    """Return what makes the heartbeats of some ranks in one process, what they said at the end, and their store."""
    store, made, said = FakeStore(), [], {}
    base = type("Base", (), {"clone": lambda self: None})()
    c10d = heartbeat.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_get_default_store", lambda: base)
    monkeypatch.setattr(c10d, "PrefixStore", lambda prefix, base: store)
    monkeypatch.setattr(heartbeat.distributed, "barrier", lambda: None)

    def make(rank, world_size, stall_seconds):
        found = heartbeat.Heartbeat(
            rank, world_size, stall_seconds, lambda words: said.update({rank: words})
        )
        made.append(found)
        return found

    yield make, said, store
    for each in made:
        each.close()


def wait_for(check, seconds=100.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def test_a_rank_that_gives_no_sign_of_life_is_named_by_all_others(watch):
    make, said, store = watch
    ranks = [make(rank, 3, 2.0) for rank in range(3)]
    for each in ranks:
        each.mark("in the step", 1, 37)
    wait_for(lambda: b"batch 37" in store.values["beat/2"])
    ranks[2].close()  # its process stands still
    numbers = itertools.count(38)

    def others_go_on() -> bool:
        for number in (next(numbers),) * 2:
            ranks[number % 2].mark("in the step", 1, number)
        return len(said) == 2

    wait_for(others_go_on)
    for words in said.values():
        assert "rank 2 (" in words
        assert f"process {os.getpid()}, epoch 1, batch 37, in the step) has given no sign" in words


def test_a_rank_that_no_longer_moves_is_named(watch):
    make, said, _ = watch
    ranks = [make(rank, 3, 2.0) for rank in range(3)]
    for each in (ranks[0], ranks[2], *ranks):
        each.mark("waiting for data", 0, 4)
    ranks[0].mark("in the step", 0, 4)
    ranks[2].mark("in the step", 0, 4)
    wait_for(lambda: len(said) == 3)
    for words in said.values():
        assert "no rank has moved for" in words
        assert "furthest behind: rank 1 (" in words
        assert "epoch 0, batch 4, waiting for data" in words
        assert "training.stall_seconds" in words


def test_ranks_that_move_are_left_alone(watch, monkeypatch):
    now = 0.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(heartbeat.Heartbeat, "_watch", lambda self: None)  # this test looks itself
    make, _, _ = watch
    ranks = [make(rank, 2, 1.0) for rank in range(2)]

    def look() -> list[str | None]:
        for each in ranks:
            each._post()
        return [each._find_verdict() for each in ranks]

    for number in range(20):
        ranks[number % 2].mark("in the step", 0, number)
        now += 0.9  # less than the limit; all together are 18 times as much
        assert look() == [None, None]
    now += 0.9
    assert look() == [None, None]
    now += 0.9
    assert all("no rank has moved for 2 s" in words for words in look())


def test_a_rank_that_leaves_word_is_quoted(watch):
    make, _, _ = watch
    first, second = (make(rank, 2, 30) for rank in range(2))
    second.announce_exit("InputError: no such column")
    (words,) = first.find_lost(5)
    assert words.startswith("rank 1 (")
    assert words.endswith("ended: InputError: no such column")
    first.mark("x")
    assert second.find_lost(0.3) == []


CONFIG = """
recipe: {{name: tabular, store: {store}, options: {{hidden: [16], dropout: 0}}}}
training: {{epochs: 400, batch_size: 48, precision: fp32, checkpoint_every_steps: 5, stall_seconds: 20}}
"""


def children_of(process: warm_stoker.Started) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if os.getsid(child.pid) == child.pid  # as torch's launcher starts a rank
    ]


@pytest.mark.parametrize(
    "forked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "started"]
)
def test_a_killed_rank_is_named_the_run_starts_again_and_goes_on(folder, tmp_path, forked):
    """Two processes: one is killed, the other ends and says so, both start again where the run was saved."""
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.format(store=folder / "tabular"))
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = [
        "train",
        "--config",
        config,
        "--run-dir",
        run_dir,
        "--gpus",
        "2",
        "--device",
        "cpu",
        "--max-restarts",
        "2",
    ]
    log.touch()
    process = warm_stoker.Started(
        words, environment=os.environ | {"OMP_NUM_THREADS": "1"}, log=log, forks_ranks=forked
    )
    try:
        wait_for(lambda: list(run_dir.glob("step-*.pt")), 120)
        victim = children_of(process)[1]
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: "resumed at epoch" in log.read_text(), 120)
        wait_for(lambda: log.read_text().count("recipe tabular on cpu") == 2, 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(200) == 0, log.read_text()
    finally:
        process.close()
    told = log.read_text()
    assert "was ended by SIGKILL: starting again from the latest checkpoint (1 of 2)" in told
    assert f"process {victim.pid}, " in told, told
    assert "which cannot go on alone." in told
    assert "terminated: saved in" in told
    assert "--device cpu --gpus 2 --resume" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "2"], "--gpus 2, and this machine has 0"),
        (["--gpus", "5", "--device", "cpu"], "batch_size is 48"),
    ],
)
def test_mistakes_with_gpus_are_found_before_anything_starts(
    folder, tmp_path, monkeypatch, words, said
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("stoker.train.launch.launch", lambda *given: pytest.fail("it was started"))
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.format(store=folder / "tabular"))
    done = CliRunner().invoke(app, ["train", "--config", str(config), *words])
    assert isinstance(done.exception, InputError)
    assert said in str(done.exception)


def test_the_process_that_says_why_counts_before_those_that_ended_with_it(monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fail(*codes):
        failures = {n: ProcessFailure(n, 1000 + n, code, "") for n, code in enumerate(codes)}

        def ended(*_):
            raise ChildFailedError("stoker", failures)

        monkeypatch.setattr(
            "torch.distributed.launcher.api.elastic_launch", lambda config, entry: ended
        )
        return launch._run(["train"], len(codes), tmp_path)

    assert fail(1, 3, 1) == (3, "rank 1 ended with exit code 3")
    assert fail(-9, 1) == (1, "rank 0 was ended by SIGKILL")


def test_a_second_signal_leaves_no_process_behind(monkeypatch, tmp_path):
    from torch.distributed.elastic.multiprocessing.api import SignalException

    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "stoker"])

    def ended(*_):
        raise SignalException("again", signal.SIGINT)

    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, entry: ended
    )
    wait_for(lambda: "stoker" in psutil.Process(left.pid).cmdline())
    assert launch._run(["train"], 2, tmp_path) == (130, "")
    assert left.wait(60) == -signal.SIGKILL


def test_only_what_another_start_can_mend_is_started_again(monkeypatch):
    outcomes, said = [(1, "rank 1 ended with exit code 1"), (0, "")], []
    monkeypatch.setattr(launch, "_run", lambda words, count, logs: outcomes.pop(0))
    monkeypatch.setenv("STOKER_RESTARTS", "0")
    assert launch.launch(["train"], 2, 3, said.append) == 0
    assert said == [
        "rank 1 ended with exit code 1: starting again from the latest checkpoint (1 of 3)"
    ]
    for code in (2, 3, 130):
        outcomes[:] = [(code, f"rank 0 ended with exit code {code}")]
        assert launch.launch(["train"], 2, 3, said.append) == code
    outcomes[:] = [(1, "rank 0 ended with exit code 1")] * 2
    assert launch.launch(["train"], 2, 1, said.append) == 1
    assert len(said) == 2
