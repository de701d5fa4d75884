"""Plain words in the source: no term of the private dialect comes back, and code with threads says its contract."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import stoker
from source_trees import parsed

PACKAGE = Path(stoker.__file__).parent
RETIRED = re.compile(
    r"(?<![A-Za-z])(?:doors?|rungs?|footings?|lookouts?|handfuls?|crew|foreman|workshop)(?![A-Za-z])",
    re.IGNORECASE,
)
ALLOWED = {("train/update.py", "rung")}  # a field of run logs that exist
CODES = re.compile(r"\bS[0-4](?:-\d+)?\b(?!,? (?:or|bucket))")
ROOT = PACKAGE.parent.parent
MODULES = {
    "loader": {"rest", "takes"},
    "augment": {"dice"},
    "train": {"lookout", "ending", "fitness", "judging", "carry", "place", "pieces", "window"},
    "recipes": {"watch"},
}
WITH_CONTRACT = [
    *("loader/ring.py", "loader/staging.py", "loader/slabs.py", "loader/prefetch.py"),
    *("train/graphs/trainer_step.py", "train/update.py", "train/heartbeat.py", "train/ranks.py"),
    *("doctor/probe/__init__.py", "doctor/probe/recorder.py"),
]


def retired_words(name: str, text: str) -> set[str]:
    found = {word.lower() for word in RETIRED.findall(text)}
    return {word for word in found if (name, word) not in ALLOWED}


def test_no_retired_word_is_in_the_source():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if words := retired_words(name, path.read_text(encoding="utf-8")):
            found[name] = words
    assert found == {}


def test_no_retired_word_is_in_the_benchmarks_and_the_notes_for_contributors():
    paths = [ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.py")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert {
        name: words for name, text in texts.items() if (words := retired_words(name, text))
    } == {}


def test_codes_of_the_documents_stand_in_their_room_and_on_their_page_only():
    found = {}
    folders = [PACKAGE, *(ROOT / name for name in ("benchmarks", "docs", "docs_build", "examples"))]
    for path in (path for folder in folders for path in folder.rglob("*.*")):
        ours = path.suffix in {".py", ".md", ".yaml"} and "compat" not in path.parts
        if not ours or path.name == "documents.md":
            continue
        if codes := CODES.findall(path.read_text(encoding="utf-8")):
            found[path.relative_to(ROOT).as_posix()] = codes
    assert found == {}
    assert CODES.findall("as S4 did (S0-12), on S3 or anything") == ["S4", "S0-12"]


def test_the_rule_can_fail():
    assert retired_words("x.py", "next_rung = Footing()  # doors") == {"rung", "footing", "doors"}
    assert retired_words("x.py", "wrung, outdoors, backdoor") == set()


def test_no_module_has_a_retired_name():
    for room, names in MODULES.items():
        assert not names & {path.stem for path in (PACKAGE / room).glob("*.py")}


@pytest.mark.parametrize("name", WITH_CONTRACT)
def test_code_with_threads_opens_with_its_contract(name):
    text = ast.get_docstring(parsed((PACKAGE / name).read_text(encoding="utf-8"))) or ""
    assert re.search(r"\b(?:[Cc]ontract|Threads)\b", text)
    assert re.search(r"(?i)\b(?:success|failure|error)\b", text)
