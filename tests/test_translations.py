"""README and quick start in four languages stay in step: the same commands, numbers, links, section by section.

What a translation says cannot be compared; what it must not change can: code without its comments, numbers,
names between backticks, and where links lead.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from docs_build.blocks import Block, code_blocks, prose
from docs_build.pages import LANGUAGES

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [
    pytest.param(english, english_to.format(code), code, id=f"{code}-{Path(english).stem.lower()}")
    for english, english_to in (
        ("README.md", "README.{}.md"),
        ("docs/quickstart.md", "docs/{}/quickstart.md"),
    )
    for code in LANGUAGES
]
LETTERS = {"ja": r"[ぁ-んァ-ヶ]", "zh": r"[一-鿿]", "ru": r"[а-яё]"}


def sections(name: str) -> list[str]:
    """The text in front of the first heading of level two, and behind each."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.split(r"^## ", text, flags=re.MULTILINE)


def code_of(block: Block) -> list[str]:
    """A block's lines without comments; a first line that names a file stays."""
    if block.file_name:
        return [f"# {block.file_name}", *code_of(Block("python", block.text.partition("\n")[2], 0))]
    return [re.sub(r"(^|\s+)# .*$", "", line).rstrip() for line in block.text.splitlines()]


def numbers(text: str) -> Counter[str]:
    """Numbers as they are written: 12,944 and 0.14; those in links, and the heading's own, count too."""
    return Counter(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\]\([^)]*\)", "]", text)))


def names(text: str) -> Counter[str]:
    return Counter(re.findall(r"`([^`]+)`", text))


def links(text: str, code: str | None) -> Counter[str]:
    """Where links lead, seen from the English page; links between languages do not count."""
    found = re.findall(r"\]\(([^)]+)\)", text)
    if code is not None:
        found = [link.replace(f"docs/{code}/", "docs/").removeprefix("../") for link in found]
    return Counter(link for link in found if not re.fullmatch(r"README(\.\w+)?\.md", link))


@pytest.mark.parametrize(("english", "other", "code"), PAIRS)
def test_a_translation_has_the_same_code(english, other, code):
    ours = [code_of(block) for block in code_blocks("\n".join(sections(english)))]
    theirs = [code_of(block) for block in code_blocks("\n".join(sections(other)))]
    assert len(ours) == len(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert its == mine


@pytest.mark.parametrize(("english", "other", "code"), PAIRS)
def test_a_translation_has_the_same_numbers_names_and_links(english, other, code):
    ours, theirs = sections(english), sections(other)
    assert len(ours) == len(theirs), "sections"
    for mine, its in zip(ours, theirs, strict=True):
        where = f"{other}, section {its.splitlines()[0]!r}"
        assert numbers(prose(its)) == numbers(prose(mine)), where
        assert names(prose(its)) == names(prose(mine)), where
        assert links(prose(its), code) == links(prose(mine), None), where


@pytest.mark.parametrize(("english", "other", "code"), PAIRS)
def test_a_translation_is_one(english, other, code):
    """Every section is in its language: paragraphs that nobody translated would show."""
    for section in sections(other):
        for paragraph in prose(section).split("\n\n")[1:]:
            words = re.sub(r"`[^`]*`|\]\([^)]*\)|\W", "", paragraph)
            if len(words) > 40:
                found = len(re.findall(LETTERS[code], paragraph, re.IGNORECASE))
                assert found > len(words) / 6, paragraph


def test_every_language_is_linked_from_the_top_of_every_readme():
    codes = {"en": "README.md"} | {code: f"README.{code}.md" for code in LANGUAGES}
    for own, name in codes.items():
        top = "\n".join((ROOT / name).read_text(encoding="utf-8").splitlines()[:4])
        assert set(re.findall(r"\]\((README[\w.]*)\)", top)) == {
            other for code, other in codes.items() if code != own
        }


def test_a_change_in_english_alone_is_noticed():
    line = Block("", "stoker plan STORE --ram 32GB   # why\n", 1)
    assert code_of(line) == ["stoker plan STORE --ram 32GB"]
    assert code_of(line) != code_of(Block("", "stoker plan STORE --ram 64GB   # なぜ\n", 1))
    assert numbers("5.5 × faster, 12,944 windows") == numbers("12,944 окон, в 5.5 × быстрее")
    assert numbers("5.5 ×") != numbers("5.6 ×")
