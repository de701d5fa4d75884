"""Facts are values, sentences are printed at the edge.

No code reads a sentence to decide: a note, a reason or a message is for people. This test reads the source
for string tests and cuts on anything that is named like one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from source_trees import nodes
from stoker.report import INCIDENTS, LogLine, Note, RunEnd, Topic, read_note

SOURCES = Path(__file__).resolve().parent.parent / "src" / "stoker"
CUTS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find"}
SENTENCE = re.compile(r"(^|_)(notes?|reasons?|messages?|said|words|why|remedy|remedies|fix)$")

ALLOWED = {
    # The one reader of logs from before notes had topics and endings had fields.
    ("report.py", "words in text"),
    # cuBLAS, cuDNN and the CPU's allocator raise a plain RuntimeError, Python a plain ValueError for a NUL in a
    # name: nothing else tells them from others.
    ("train/oom.py", "text in str(seen)"),
    ("errors.py", "str(error).startswith('embedded null')"),
    # The name of an enumeration's member: these modules do not import torch.
    ("doctor/probe/operators.py", "str(event.device_type()).endswith('CPU')"),
    ("doctor/probe/trials.py", "str(event.device_type()).endswith('CPU')"),
    ("doctor/probe/unused.py", "str(event.device_type()).endswith('CPU')"),
    # Where words are printed: what the remedy says is not said twice.
    ("doctor/findings_page.py", "changes not in finding.remedy"),
    # One of three words; the same on every rank.
    ("train/trainer.py", "shutdown.reason == 'interrupted'"),
    # What a user typed, and a process's command line.
    ("sources/bars/files.py", "str(text).partition('=')"),
    ("lifetime.py", "b'resource_tracker' not in words"),
}


def is_sentence(node: ast.AST) -> bool:
    """Whether an expression is words for people, by its name; or the text of an object, by `str`."""
    if isinstance(node, ast.Subscript):
        return is_sentence(node.value)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "str" and not is_path(node.args[0])
    if isinstance(node, ast.Attribute):
        return SENTENCE.search(node.attr) is not None or node.attr == "given"
    return isinstance(node, ast.Name) and SENTENCE.search(node.id) is not None


def is_path(node: ast.AST) -> bool:
    return "path" in ast.unparse(node) or "dtype" in ast.unparse(node)


def readings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every expression that looks into a sentence.

    `note in notes` asks a list for a whole sentence and reads none, so names in the plural are searched only
    for literal texts.
    """
    for node in nodes(source, ast.Call, ast.Compare):
        if isinstance(node, ast.Call):
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in CUTS
                and is_sentence(node.func.value)
            ):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node.ops[0], ast.In | ast.NotIn):
            held = node.comparators[0]
            is_many = ast.unparse(held).endswith(("notes", "reasons"))
            is_literal = isinstance(node.left, ast.Constant | ast.JoinedStr)
            is_words = isinstance(node.left, ast.Name) and node.left.id == "words"
            if is_words or (is_sentence(held) and (is_literal or not is_many)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node.ops[0], ast.Eq | ast.NotEq):
            sides = [node.left, *node.comparators]
            is_literal = any(isinstance(side, ast.Constant) and side.value for side in sides)
            if is_literal and any(isinstance(s, ast.Attribute) and is_sentence(s) for s in sides):
                yield node.lineno, ast.unparse(node)


def test_nobody_decides_by_the_words_of_a_note():
    found = {
        (path.relative_to(SOURCES).as_posix(), text): line
        for path in sorted(SOURCES.rglob("*.py"))
        for line, text in readings(path.read_text())
    }
    new = [f"{file}:{line}: {text}" for (file, text), line in found.items()
           if (file, text) not in ALLOWED]  # fmt: skip
    assert not new, "make the fact a value, and print words at the edge:\n" + "\n".join(new)
    assert not ALLOWED - set(found), "no longer needed"


def test_the_search_finds_what_it_is_for():
    bad = [
        "if note.startswith('step '): pass",
        "self.reasons[name].startswith('default')",
        "reason.removesuffix(')').partition(' (')",
        "if 'unfold' in known.given: pass",
        "if words in note: pass",
        "str(error).startswith('CUDA')",
        "if 'memory' in str(error): pass",
        "if layout.said != 'separator comma': pass",
    ]
    fine = [
        "if note not in self.notes: pass",
        "if name in settings.reasons: pass",
        "if topic in INCIDENTS: pass",
        "if error.fix == '': pass",
        "path.name.startswith('step-')",
    ]
    assert [text for text in bad if not list(readings(text))] == []
    assert [text for text in fine if list(readings(text))] == []


# -- notes and endings ----------------------------------------------------------------------------


def logged(event: str, values: dict) -> LogLine:
    return LogLine(0.0, event, None, None, values)


@given(st.text(), st.sampled_from(Topic), st.dictionaries(st.just("captured"), st.booleans()))
def test_a_note_is_read_as_it_was_written(text, topic, values):
    note = Note(text, topic, values)
    assert read_note(logged("note", note.to_json())) == note


@given(st.text(), st.one_of(st.none(), st.text(), st.lists(st.integers()), st.integers()))
def test_what_is_no_known_note_decides_nothing(text, topic):
    found = read_note(logged("note", {"text": text, "topic": topic}))
    assert found is not None
    assert found.text == text
    assert read_note(logged("telemetry", {"text": text})) is None
    assert read_note(logged("note", {"text": 3})) is None


def test_older_logs_get_their_topic_from_their_words():
    def topic(text: str) -> Topic:
        found = read_note(logged("note", {"text": text}))
        assert found is not None
        return found.topic

    assert topic("memory ran out with 3 GB in use") is Topic.MEMORY
    assert topic("the loss of step 3 is nan") is Topic.LOSS
    assert topic("resumed at epoch 1, step 7") is Topic.RESUMED
    assert topic("precision fp32: the device is the CPU") not in INCIDENTS
    found = read_note(logged("note", {"text": "store: /a/b"}))
    assert found == Note("store: /a/b", Topic.STORE, {"store": "/a/b"})


@given(st.builds(RunEnd, st.sampled_from(["done", "terminated", "failed"]), st.text()))
def test_an_ending_is_read_as_it_was_written_now_and_before(end):
    assert RunEnd.read(logged("end", {"ended": end.ended, "error": end.error})) == end
    if end.ended == "failed":
        assert RunEnd.read(logged("end", {"ended": f"failed: {end.error}"})) == end
    assert RunEnd.read(logged("note", {"ended": end.ended})) is None
