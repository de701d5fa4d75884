"""The walks of docs/extending.md run as they are written, each in a folder of its own."""

import re
import sys
from pathlib import Path

import pytest
from docs_build.blocks import code_blocks

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
WALKS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
OURS = ["A source of your own", "An augmentation op", "A finding of the doctor", "A config key"]


@pytest.mark.parametrize("title", OURS)
def test_a_walk_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    state: dict = {}
    ran = 0
    for block in code_blocks(WALKS[title]):
        if block.language != "python":
            continue
        if block.file_name:
            Path(block.file_name).write_text(block.text)
        else:
            code = block.text
            exec(compile(code, "docs/extending.md", "exec"), state)
            ran += 1
    for name in set(sys.modules) - before:  # a file of the walk must not answer for the next
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]
    assert ran


@pytest.mark.parametrize("title", [*OURS, "A recipe of your own"])
def test_an_addition_to_stoker_touches_three_files_at_most(title):
    (said,) = re.findall(r"\*\*In stoker itself\*\*(.*?)\n\n", WALKS[title] + "\n\n", re.DOTALL)
    named = re.findall(r"`((?:src|docs|tests)/[\w/*.]+)`", said)
    assert 0 < len(named) <= 3, named
    for path in named:
        assert any(ROOT.glob(path.replace("NAME", "*"))), path


def test_the_zoom_equals_the_affine_op_that_it_is():
    """Two ways, one answer: the op of the page draws and resamples like `RandomAffine` with a scale alone."""
    import torch

    from stoker.augment import Compose, RandomAffine

    state: dict = {}
    (block,) = [b for b in code_blocks(WALKS["An augmentation op"]) if b.language == "python"]
    code = block.text
    exec(compile(code, "docs/extending.md", "exec"), state)
    images = torch.randint(0, 256, (8, 3, 33, 21), dtype=torch.uint8)
    one, other = (
        Compose([op], seed=3)(images)
        for op in (state["RandomZoom"]((0.8, 1.6)), RandomAffine(scale=(0.8, 1.6)))
    )
    assert torch.equal(one, other)
