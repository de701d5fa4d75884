"""The demo: the same model trained both ways, the same losses, figures that hang together."""

from __future__ import annotations

import h5py
import pytest
import torch

from stoker.demo import TRAINED, WINDOWS, run_demo, train_both_ways
from stoker.report import Silent
from stoker.store.reader import open_store


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("demo")
    yield folder, run_demo(folder, weeks=4)
    torch.set_num_threads(before)


def test_both_ways_train_the_same_model_on_the_same_batches(demo):
    _, result = demo
    assert result.naive.num_samples == result.trained.num_samples == 1024
    # Equal losses in every epoch: same first weights, same samples, same order, same updates.
    assert result.naive.losses == pytest.approx(result.trained.losses, rel=1e-4)
    assert result.trained.losses[-1] < result.trained.losses[0]
    for way in (result.naive, result.trained):
        assert len(way.seconds) == len(way.losses) == 3
        assert way.samples_per_second == pytest.approx(way.num_samples / min(way.seconds))
        assert 0 <= way.wait_share < 1


def test_reading_both_ways_gives_the_same_bytes(demo):
    folder, result = demo
    assert result.series.window_bytes == result.materialised.window_bytes
    assert result.materialised.stored_bytes > 20 * result.series.stored_bytes
    assert result.plan.tier == "resident"
    assert not (folder / "windows.h5").exists()


def test_other_windows_give_other_losses(demo, tmp_path):
    # The plain way really reads its file: windows of zeros train another model.
    folder, result = demo
    with open_store(folder / "store") as store:
        count = store.num_samples
        with h5py.File(tmp_path / "w.h5", "w") as file:
            for name, window in WINDOWS:
                if name in TRAINED:
                    file.create_dataset(name, (count, window, store.fields[name].shape[0]), "f4")
            file["targets"] = store.read_rows("targets", 0, count)
        naive, trained = train_both_ways(store, tmp_path / "w.h5", seed=0)
    assert trained.losses == pytest.approx(result.trained.losses, rel=1e-4)
    assert abs(naive.losses[0] - trained.losses[0]) > 1e-5


def test_the_windows_file_goes_even_when_the_demo_is_cut(tmp_path):
    class CutError(Exception):
        pass

    class Cut(Silent):
        def say(self, line):
            if line.startswith("training"):
                raise CutError

    with pytest.raises(CutError):
        run_demo(tmp_path, weeks=4, progress=Cut())
    assert not (tmp_path / "windows.h5").exists()
    assert (tmp_path / "store" / "store.json").exists()
