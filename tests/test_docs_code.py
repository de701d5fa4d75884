"""The code of the docs is real: Python runs, commands parse, files that a page names by content are made."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from docs_build.blocks import Block, code_blocks, prose, stoker_commands
from docs_build.pages import LANGUAGES
from docs_build.verbs import command_tree, leaves, subcommands

from warm_stoker import shared

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.relative_to(ROOT).parts[1:2] not in [(code,) for code in LANGUAGES]
}

# Pages whose Python is run by the tests of their own subject, and those tests.
RUN_ELSEWHERE = {
    page: path.name
    for path in sorted((ROOT / "tests").glob("test_*.py"))
    for page in re.findall(
        r'exec\(compile\(\w+, "(docs/[\w/]+\.md)", "exec"\)', path.read_text("utf-8")
    )
    if path.name != Path(__file__).name
}


def python_pages() -> list[str]:
    return [
        name
        for name, text in PAGES.items()
        if any(block.language == "python" for block in code_blocks(text))
        and name not in RUN_ELSEWHERE
        and name != "docs/quickstart.md"
    ]


# -- what pages need ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bars(tmp_path_factory) -> Path:
    """A week of made bars, packed: `store`, `bars/EURUSD_*.csv`."""
    from stoker import PackOptions, pack
    from stoker.demo.story import make_bars
    from stoker.sources.bars import BarsSource

    folder = tmp_path_factory.mktemp("bars")
    make_bars(folder / "bars", weeks=1, seed=0)
    windows = (("M1", 480), ("M5", 288), ("M15", 96), ("H1", 24), ("H4", 6))
    pack(BarsSource((folder / "bars",), windows=windows), folder / "store", PackOptions(jobs=1))
    return folder


def _store(name: str):
    def prepare(folder: Path, bars: Path) -> dict:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(bars / "store")
        return {}

    return prepare


def _recipe(kind: str, name: str):
    def prepare(folder: Path, bars: Path) -> dict:
        from run_makers import make_store

        make_store(kind, folder / name).close()
        return {"batch_size": 2, "device": "cpu"}

    return prepare


def _loading(folder: Path, bars: Path) -> dict:
    with h5py.File(folder / "train.h5", "w") as file:
        file["features"] = np.zeros((300, 6, 4), "f4")
        file["targets"] = np.zeros((300, 2), "f4")
    lstm = torch.nn.LSTM(11, 4, batch_first=True)
    if torch.cuda.is_available():  # where a Loader puts its batches by itself
        lstm.cuda()
    _store("store")(folder, bars)
    return {
        "your_dataloader": [(torch.zeros(2, 3), torch.ones(2))],
        "step": lambda inputs, targets: None,
        "lstm": lstm,
        "loss_of": lambda output, targets: output.sum() + targets.sum(),
    }


def _bars(folder: Path, bars: Path) -> dict:
    import gzip

    (folder / "prices").symlink_to(bars / "bars")
    text = (bars / "bars" / "EURUSD_M15.csv").read_bytes()
    (folder / "EURUSD_M15.csv.gz").write_bytes(gzip.compress(text))
    return {"attributes": json.loads((bars / "store" / "store.json").read_text())["attributes"]}


def _quality(folder: Path, bars: Path) -> dict:
    values = np.random.default_rng(0).normal(size=(200, 2)).astype("f4")
    return {
        "columns": ["a", "b"],
        "pieces": [(0, values[:100]), (100, values[100:])],
        "values": values,
        "training_rows": values[:150],
    }


def _spectra(folder: Path, bars: Path) -> dict:
    from molecule_makers import msp_record

    (folder / "nist.msp").write_text(msp_record("a") + "\n" + msp_record("b") + "\n")
    return {}


def _configs(folder: Path, bars: Path) -> dict:
    return {}


def _data(folder: Path, bars: Path) -> dict:
    (folder / "data").mkdir()
    return {}


NEEDS = {
    "docs/bars.md": _bars,
    "docs/config.md": _configs,
    "docs/formats.md": _store("stoker-demo/store"),
    "docs/loading.md": _loading,
    "docs/machine.md": _data,
    "docs/msp.md": _spectra,
    "docs/quality.md": _quality,
    "docs/recipes/forex.md": _recipe("forex", "eurusd.store"),
    "docs/recipes/massspec.md": _recipe("massspec", "OUT"),
    "docs/recipes/segmentation.md": _recipe("segmentation", "OUT"),
    "docs/recipes/tabular.md": _recipe("tabular", "flows.store"),
    "docs/scaling.md": _loading,
    "docs/store.md": _store("stoker-demo/store"),
}

# What a page says for real data or a GPU, and its small twin here.
SMALLER = {
    "docs/loading.md": {
        '"cuda"': '"cpu"',
        "range(10)": "range(1)",
        "num_lanes=16": "num_lanes=4",
        "Loader(store, 16": "Loader(store, 4",
    },
    "docs/recipes/forex.md": {'"d_model": 64': '"d_model": 8'},
}


def _carry(state: dict) -> None:
    """The second example of the forex page is about a job that carries its state."""
    from stoker import Loader, open_store
    from stoker.recipes.forex.recipe import ForexRecipe

    store = open_store("eurusd.store")
    options = {"d_model": 8, "stateful": True, "carried": ["M5"], "lanes": 2}
    state["job"] = job = ForexRecipe().make_job(store, options, seed=0)
    lanes, samples = job.lanes, job.samples["train"]
    state["loader"] = Loader(
        store, 2, "cpu", fields=job.fields, samples=samples, order=job.order, lanes=lanes
    )


BETWEEN = {("docs/recipes/forex.md", 1): _carry}


# -- Python ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", python_pages())
def test_python_of_a_page_runs(page, bars, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state: dict = NEEDS[page](tmp_path, bars) if page in NEEDS else {}
    blocks = [block for block in code_blocks(PAGES[page]) if block.language == "python"]
    ran = 0
    for number, block in enumerate(blocks):
        if block.not_run is not None:
            continue
        BETWEEN.get((page, number), lambda state: None)(state)
        text = block.text
        for here, there in SMALLER.get(page, {}).items():
            text = text.replace(here, there)
        # Empty lines in front, so that an error names the line of the page.
        exec(compile("\n" * (block.line - 1) + text, page, "exec"), state)
        ran += 1
    assert ran


DIFF = next(block for block in code_blocks(PAGES["README.md"]) if block.language == "diff")


@pytest.mark.parametrize("side", "-+")
def test_the_change_of_the_readme_runs_before_and_after(side, tmp_path, monkeypatch):
    """Both versions of the loop see every sample once an epoch, on the device, in full batches."""

    class Windows(torch.utils.data.Dataset):
        def __init__(self, path):
            with h5py.File(path) as file:
                self.features, self.targets = file["features"][:], file["targets"][:]

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, i):
            return self.features[i], self.targets[i]

    monkeypatch.chdir(tmp_path)
    with h5py.File("train.h5", "w") as file:
        file["features"] = np.arange(300 * 6, dtype="f4").reshape(300, 6)
        file["targets"] = np.arange(300, dtype="i8")
    seen: list[torch.Tensor] = []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def step(features, targets):
        assert features.device.type == targets.device.type == device.type
        assert torch.equal(features[:, 0], targets * 6.0)
        seen.append(targets.cpu())

    lines = [line for line in DIFF.text.splitlines() if line[0] in (side, " ")]
    assert (
        len([line for line in DIFF.text.splitlines() if line[0] == side]) == {"-": 3, "+": 2}[side]
    )
    code = "\n".join(line[1:] for line in lines)
    names = {"Windows": Windows, "device": device, "step": step}
    exec(compile(code, "README.md", "exec"), names)
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(300).repeat_interleave(2))
    assert [len(one) for one in seen] == [128, 128, 44] * 2


def test_the_readme_is_short_and_says_how_to_install():
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 88
    first_screen = text.partition("\n## ")[0]
    assert "pip install --editable . --constraint constraints.txt" in first_screen
    assert "![" in first_screen
    for picture in re.findall(r"!\[[^]]+\]\((\S+)\)", text):
        assert (ROOT / picture).stat().st_size < 150_000


def test_the_python_of_every_page_is_run_somewhere():
    here = {*python_pages(), "docs/quickstart.md"}
    with_python = {
        name
        for name, text in PAGES.items()
        if any(block.language == "python" for block in code_blocks(text))
    }
    assert here | set(RUN_ELSEWHERE) >= with_python
    assert len(RUN_ELSEWHERE) >= 8
    assert len(here) >= 14


def test_blocks_that_are_not_run_have_a_reason():
    skipped = [
        f"{page}:{block.line}: {block.not_run}"
        for page, text in PAGES.items()
        for block in code_blocks(text)
        if block.not_run is not None
    ]
    print(*skipped, sep="\n")
    assert all(len(line.rpartition(": ")[2]) >= 8 for line in skipped)
    assert len(skipped) <= 6, "too much of the docs is not run"
    marks = sum(text.count("<!-- not run") for text in PAGES.values())
    assert marks == len(skipped), "a mark stands directly above its block"


# -- commands ----------------------------------------------------------------------------------------

TREE = command_tree()
UNLISTED = {"bench": TREE.commands["bench"]}
"""Documented, and not in `stoker --help`. Old spellings are not here: the docs use the new ones."""


def below(command):
    """Return the verbs below a command that the docs may use."""
    return subcommands(command) | (UNLISTED if command is TREE else {})


def parse(words: list[str]) -> None:
    """Hold a command against stoker's own parser, without running it."""
    command = TREE
    name = ["stoker"]
    while below(command) and words and not words[0].startswith("-"):
        name.append(words[0])
        command = below(command)[words[0]]
        words = words[1:]
    if below(command):
        assert words, f"{' '.join(name)} needs a verb"
    words = ["1" if word == "N" else word.partition("|")[0] for word in words]
    context = command.make_context(" ".join(name), words)
    context.close()


def commands() -> list[tuple[str, Block, list[str]]]:
    return [
        (page, block, words)
        for page, text in PAGES.items()
        for block in code_blocks(text)
        for words in stoker_commands(block)
    ]


def test_commands_of_the_docs_are_those_of_the_parser():
    wrong = []
    for page, block, words in commands():
        try:
            parse(list(words))
        except Exception as error:  # noqa: BLE001  all of them are told at once
            said = getattr(error, "message", None) or repr(error)
            wrong.append(f"{page}:{block.line}: stoker {' '.join(words)}: {said}")
    assert not wrong, "\n".join(wrong)
    assert len(commands()) > 50


@pytest.mark.parametrize(
    "words", ["packk a b", "train --confg x", "plan --batch-size many s", "pack"]
)
def test_a_wrong_command_would_be_found(words):
    with pytest.raises(Exception, match=r"packk|confg|integer|valid int|needs a verb"):
        parse(words.split())


def test_commands_in_running_text_exist():
    """`stoker VERB --option` between backticks: the verb exists, and so do its options."""
    known = {
        words: {
            option for param in command.params for option in (*param.opts, *param.secondary_opts)
        }
        for words, command in [*leaves(TREE), *leaves(UNLISTED["bench"], ("bench",))]
    }
    root = {"--version", "--install-completion", "--show-completion", "--help"}
    wrong, seen = [], 0
    for page, text in PAGES.items():
        for code in re.findall(r"`stoker ([^`]+)`", prose(text)):
            words = re.sub(r"[\[\]…]", " ", code).replace("\n", " ").split()
            seen += 1
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            verbs = [verb for verb in known if tuple(words[: len(verb)]) == verb]
            verbs = verbs or [verb for verb in known if words[0] == verb[0]]
            allowed = root.union(*(known[verb] for verb in verbs))
            placeholder = words[0].isupper() or words[0].startswith("--")
            if not (verbs or placeholder) or (options - allowed and "--" not in words):
                wrong.append(f"{page}: `stoker {code}`")
    assert not wrong, "\n".join(wrong)
    assert seen > 50


# -- the quick start, from its first line to its last -----------------------------------------------


def _run_line(line: str, folder: Path) -> str:
    """Run one command of the page: stoker's own in this process, scripts and the doctor's in forks."""
    from typer.testing import CliRunner

    from stoker.cli.main import app

    verb, *words = shlex.split(line)
    if verb == "stoker" and words[0] != "doctor":
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
        return result.output
    script = "" if verb == "stoker" else folder / words.pop(0)
    assert verb in ("stoker", "python"), line
    done = shared().run(words, folder, script=script, forks_scripts=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_the_quick_start_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = {}
    for block in code_blocks(PAGES["docs/quickstart.md"]):
        if block.not_run is not None:
            continue
        if block.file_name:
            Path(block.file_name).write_text(block.text)
        elif block.language == "bash":
            said |= {line: _run_line(line, tmp_path) for line in block.text.splitlines()}
        elif block.language == "python":
            exec(compile(block.text, "docs/quickstart.md", "exec"), {})
    (predicted,) = (text for line, text in said.items() if "stoker predict" in line)
    assert "400 rows of class, probability" in predicted
    (verdict,) = (text for line, text in said.items() if "stoker doctor" in line)
    (waiting,) = re.findall(r"(\d+)% of it waiting for data", verdict)
    assert int(waiting) > 50
    assert Path("runs/first/report.html").exists()
    assert len(said) >= 11


# -- other blocks ------------------------------------------------------------------------------------


def test_yaml_of_the_docs_is_yaml():
    blocks = [
        block for text in PAGES.values() for block in code_blocks(text) if block.language == "yaml"
    ]
    assert len(blocks) >= 3
    assert all(isinstance(yaml.safe_load(block.text), dict) for block in blocks)


def test_the_refusal_of_a_newer_store_is_worded_as_the_page_says(tmp_path):
    from stoker.errors import StoreError
    from stoker.store.manifest import FORMAT_VERSION, read_manifest

    assert f"now {FORMAT_VERSION}" in PAGES["docs/formats.md"]
    (tmp_path / "store.json").write_text('{"format_version": 3}')
    with pytest.raises(StoreError) as refused:
        read_manifest(tmp_path)
    lines = str(refused.value).replace(str(tmp_path), "store").splitlines()
    for line in lines:
        assert line in PAGES["docs/formats.md"]
    assert len(lines) == 3
