"""What a prompt and a notebook show of the objects people hold: one short line, and an escaped table."""

from __future__ import annotations

import numpy as np
import pytest

from stoker import Loader, PackOptions, pack
from stoker.sources.arrays import ArraysSource
from stoker.store.reader import Store


@pytest.fixture
def made(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((50, 3), "f4"), **{"<b>y": np.arange(50)})
    return pack(ArraysSource((tmp_path / "a.npz",)), tmp_path / "store", PackOptions(jobs=1))


def test_short_lines_and_escaped_tables(made):
    with Loader(made.path, 8, "cpu") as loader:
        batch = next(iter(loader))
        shown = [made, loader, loader.store, loader.plan, batch]
        for each in shown:
            line = repr(each)
            assert line.startswith(type(each).__name__)
            assert "\n" not in line
            assert len(line) < 400
            page = each._repr_html_()
            assert "<table>" in page
            assert "<b>y" not in page.replace("<b>" + type(each).__name__, "")
        assert "50" in repr(loader)
        assert "(8, 3) float32 on cpu" in repr(batch)
        assert isinstance(loader.store, Store)
        assert "resident" in repr(loader.plan)
