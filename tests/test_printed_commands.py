"""Commands that stoker prints work when they are pasted, whatever is in the names of files and columns."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stoker
from source_trees import nodes
from stoker.cli import main
from stoker.display import command, quoted
from stoker.errors import StokerError

PACKAGE = Path(stoker.__file__).parent
NAME = "x y';$(touch pwned)`touch pwned`\"&|<>*!#~"
# No file name has a NUL, and no byte of one is half a character unless it is not UTF-8 at all.
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def in_bash(*words: str) -> list[str]:
    """Return the words that bash makes of a command line."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"], capture_output=True, check=True
    )
    return [word.decode("utf-8", "surrogateescape") for word in done.stdout.split(b"\0")[:-1]]


@given(st.lists(NAMES, min_size=1, max_size=30))
@example(
    [NAME, "", "-x", "a\nb", "\x1b[31m", "\u202e", "'", "\\", "\\'\x07", "\udcff\udc80", "$'x'"]
)
@example(["\x011", "\x1b0", "\u009b31m", "é\u2028密", "~/x", "a=b", "{a,b}", "[a]", "!!"])
def test_a_quoted_word_is_the_word_in_a_shell(words):
    assert in_bash(*map(quoted, words)) == words
    assert in_bash(command(*words)) == words


@given(NAMES)
@example("-x")
@example("-rf ~")
def test_a_path_is_never_an_option(name):
    path = Path(name.replace("/", "") or "x")
    (word,) = in_bash(quoted(path))
    assert not word.startswith("-")
    assert Path(word) == path


@given(NAMES)
def test_a_printed_command_is_one_line(name):
    assert len(quoted(name).splitlines()) <= 1
    assert len(shlex.split(quoted(name.replace("'", "").replace("\\", "")))) == 1


# -- every place that prints one -------------------------------------------------------------

PROGRAMS = (
    r"stoker|ls|df|du|dd|cd|cp|mv|rm|sed|cat|head|tail|file|find|fuser|gzip|gunzip|unzip|iconv|expand|mkdir|chmod"
    r"|ssh|pip|python3?|torchrun|dask|findmnt|kill|export|git|curl|wget|tar"
)
# A value right behind an option, or behind a program that begins a text or follows a comma, a semicolon or "or".
TYPED = re.compile(
    rf"--[a-z][a-z-]*[ =]['\"]?\0|(?:^|[,;:(`] (?:or |then )?|\bor )(?:{PROGRAMS}) [^\0,;.]*\0"
)
OURS = {
    # Numbers, versions, and names that are our own.
    "present", "num_processes", "near", "best", "share", "made", "len(states)", "first", "near[0]",
    "options.on_bad", "options.bad_budget", "torch.__version__", "stoker.__version__", "fact['stoker']",
    "_EXTRA", "extra", "budget", "recipe or 'tabular'", "_MAKE_ONE", "kind", "ours[0]", "task.version",
    "self.payload.highest_bin", "source.max_mz", "survey.highest_bin",
}  # fmt: skip
SPOKEN = {
    # Sentences about what was given, and titles.
    "augment/preview.py: --size \0x\0 and the store's images are \0x\0.",
    "augment/preview.py: --masks \0 is one file for \0 images.",
    "augment/preview.py: --masks \0 with the store \0.",
    "cli/augment.py: --preset \0 and --config \0.",
    "cli/inspect.py: stoker inspect \0",
    "cli/data_options.py: --size \0 and --keep-encoded were given.",
    "cli/monitor.py: stoker monitor  \0",
    "cli/tune.py: stoker tune \0",
    "ownership.py: stoker needs this name for \0",
    "packing/gate.py: --repair \0 was given, but the store has no float table 'features'.",
    "runs/run_page.py: stoker report: \0",
    "store/remote.py: stoker needs this name for a copy of \0",
}


def unquoted_values(code: str) -> set[str]:
    """Return the texts of commands in which a value has not been quoted."""
    found = set()
    for node in nodes(code, ast.JoinedStr):
        text = "".join(
            part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
        )
        values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        for match in TYPED.finditer(text):
            value = values[text[: match.end()].count("\0") - 1]
            ours = ast.unparse(value.value) in OURS and value.conversion == -1
            if not (_is_quoted(value.value) or ours):
                found.add(text)
    return found


def _is_quoted(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "quoted",
        "command",
        "display.command",
        "look_in",
    )


def test_names_in_printed_commands_are_quoted():
    found = {
        f"{path.relative_to(PACKAGE)}: {text}"
        for path in PACKAGE.rglob("*.py")
        for text in unquoted_values(path.read_text())
    }
    assert found == SPOKEN


@pytest.mark.parametrize(
    "code",
    ['f"ls {path}"', 'f"try --drop {name!r}"', 'f"nothing, or rm -r {x}, too"', 'f"stoker inspect {a} {quoted(b)}"',
     'f"--html={present!r}"', "f\"--repair '{x}'\"", 'f"x: {a}; or dd if={b}"'],
)  # fmt: skip
def test_the_rule_can_fail(code):
    assert unquoted_values(code)
    assert not unquoted_values(re.sub(r"{(\w+)(?:!r)?}", r"{quoted(\1)}", code))


def bare_values(node: ast.AST) -> list[str]:
    """Return what a text is made of, without what stands inside `quoted` or `command`."""
    if isinstance(node, ast.expr) and _is_quoted(node):
        return []
    own = [ast.unparse(node.value)] if isinstance(node, ast.FormattedValue) else []
    return own + [text for child in ast.iter_child_nodes(node) for text in bare_values(child)]


def test_a_fix_names_no_path_as_it_is():
    """A path in the third part of an error is `quoted`, or part of a `command`."""
    paths = re.compile(
        r"(?:str\()?(?:self\.)?_?(?:path|file|folder|out|source|store|config|html|masks|target\.\w+)\b.*"
    )
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for call in nodes(path.read_text(), ast.Call):
            if not ast.unparse(call.func).endswith(("Error", "Problem")):
                continue
            fixes = [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "fix")]
            for fix in fixes:
                said = [
                    *bare_values(fix),
                    *([ast.unparse(fix)] if ast.unparse(fix).startswith("str(") else []),
                ]
                found |= {
                    f"{path.relative_to(PACKAGE)}: {text}" for text in said if paths.fullmatch(text)
                }
    assert found == {
        "loader/columns.py: store.num_samples",
        "sources/arrays.py: str(path)",  # its repr, in a line of Python
        "store/remote_fetch.py: file",  # store.json, or a shard whose name was checked
    }


# -- hostile names, through the verbs --------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{NAME}.csv").write_text(
        '"a","' + NAME.replace('"', '""') + '"\n' + "".join(f"{n},x{n}\n" for n in range(40))
    )
    (tmp_path / "nan.csv").write_text('"a","' + NAME.replace('"', '""') + '"\n1,nan\n2,3\n4,\n' * 1)
    (tmp_path / NAME).mkdir()
    (tmp_path / f"{NAME}.gz").write_bytes(b"\x1f\x8bdamaged")
    (tmp_path / f"{NAME}.msp.gz").write_bytes(b"\x1f\x8b" + b"damaged" * 9)
    (tmp_path / f"{NAME}_M5.csv.gz").write_bytes(b"\x1f\x8bdamaged")
    (tmp_path / f"{NAME}16.msp").write_bytes("Name: a\nNum Peaks: 1\n1 2\n".encode("utf-16"))
    (tmp_path / f"{NAME}.yaml").write_bytes(b"recipe: \xff")
    (tmp_path / f"{NAME}tab.yaml").write_bytes(b"recipe:\n\tname: x\n")
    (tmp_path / "x.msp").write_text("Name: a\nNum Peaks: 1\n1 2\n")
    np.savez(tmp_path / "two.npz", **{NAME: np.ones((4, 2)), f"{NAME}2": np.ones(4)})
    with h5py.File(tmp_path / f"{NAME}.h5", "w") as file:
        file["text"] = "no numbers"
    return tmp_path


WORDS = [
    ["inspect", f"{NAME}/none"], ["inspect", f"{NAME}.csv", "--rows", "4"], ["inspect", f"{NAME}.h5"],
    ["verify", f"{NAME}/none"], ["plan", f"{NAME}/none"], ["pack", "table", f"{NAME}.csv", "out"],
    ["pack", "table", f"{NAME}/none", "out"], ["pack", "table", NAME, "out"], ["pack", "table", "nan.csv", "out"],
    ["pack", "table", f"{NAME}.csv"], ["pack", "arrays", "two.npz", "out", "--names", "a"],
    ["pack", "arrays", f"{NAME}/none", "out"], ["pack", "images", NAME, "out"],
    ["pack", "images", f"{NAME}/none", "out"], ["pack", "bars", f"{NAME}_M5.csv.gz", "out", "--windows", "M5=8"],
    ["pack", "bars", f"{NAME}.csv", "out"], ["pack", "bars", f"{NAME}/none_M5.csv", "out"],
    ["pack", "massspec", "--msp", f"{NAME}.msp.gz", "out"], ["pack", "massspec", "--msp", f"{NAME}16.msp", "out"],
    ["pack", "massspec", "--msp", "x.msp", "--mol-dir", f"{NAME}/none", "out"],
    ["pack", "segmentation", "--images", f"{NAME}/none", "--masks", NAME, "out"],
    ["config", "check", f"{NAME}.yaml"], ["config", "check", f"{NAME}tab.yaml"], ["config", "check", f"{NAME}/none"],
    ["report", f"{NAME}/none"], ["report", NAME], ["monitor", f"{NAME}/none", "--once"],
    ["config", "migrate", f"{NAME}tab.yaml", f"{NAME}/none/new.yaml"], ["predict", NAME, "store", "x.parquet"],
    ["predict", f"{NAME}/none", "store", "x.parquet"], ["predict", f"{NAME}.onnx", "store", "x.parquet"],
    ["augment", "preview", f"{NAME}/none", "x.png"], ["augment", "preview", NAME, "x.png"],
    ["augment", "preview", "x", NAME], ["augment", "preview", "x", f"{NAME}/none/x.png"],
    ["augment", "preview", "x", f"{NAME}.jpg"], ["augment", "pictures", f"{NAME}/none"],
    ["doctor", "--config", "x", "--trace", NAME], ["export", "x.pt", f"{NAME}.onnx", "--int8"],
    ["tune", "--config", f"{NAME}.yaml", "--out", f"{NAME}.csv"],
    ["tune", "--config", f"{NAME}.yaml", "--out", f"{NAME}/none/x.yaml"],
    ["doctor", "--config", "x", "--html", NAME], ["doctor", "--", f"./{NAME}.py"],
    ["train", "--set", "training.lr=1", "--set", f"training.lr={NAME}"],
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_a_name_stays_one_word_in_what_is_to_be_typed(folder, words):
    try:
        main.app(words, standalone_mode=False)
    except StokerError as error:
        fix = error.fix
    else:
        pytest.fail("it was not refused")
    assert not (folder / "pwned").exists()
    typed = [word for word in shlex.split(fix) if "touch" in word]
    assert typed
    for word in typed:
        assert NAME in word, fix
    first = fix.partition(",")[0]
    program = first.split()[0]
    if program in (
        "ls",
        "df",
        "gzip",
        "unzip",
        "mkdir",
        "file",
        "iconv",
        "expand",
    ) and shutil.which(program):
        subprocess.run(["bash", "-c", fix.partition(", ")[0]], capture_output=True, check=False)
    assert not (folder / "pwned").exists()
