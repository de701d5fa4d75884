"""Why a step is captured or eager, in words: for the notes of a run, and for the error of capture="on"."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import torch

import stoker
from stoker.errors import InputError
from stoker.report import Note, Topic

FOLLOWED = (
    "; a tensor on the device that is changed in place (beta.fill_(0.5)) is followed, and what only the loop counts "
    "belongs in an object of its own"
)
"""Advice for a setting that changes at nearly every step, as the end of a sentence."""


def describe_failure(error: BaseException, handled: BaseException | None = None) -> str:
    """Return the error that ended a capture, and the last line outside torch and stoker that led to it.

    torch ends a failed capture with an error of its own ("operation failed due to a previous error"), raised while
    the relevant error was being handled.

    Args:
        error: The error that was caught around the capture.
        handled: The error that the caller was handling before the capture; it is unrelated.
    """
    while error.__context__ is not None and error.__context__ is not handled:
        error = error.__context__
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    ours = tuple(f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, stoker))
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*ours, "<"))
    ]
    if not theirs:
        return said
    return f"{said}; {Path(theirs[-1].filename).name}:{theirs[-1].lineno}: {theirs[-1].line}"


def refuse_eager(reason: str) -> InputError:
    """Return the error for capture="on" and a step that cannot be captured."""
    return InputError(
        f"capture is 'on', but {reason}.",
        "a step that can be captured",
        "capture='auto', which goes on eagerly and says so",
    )


def step_note(
    words: str, *, captured: bool, slowdown: float | None = None, fallback: bool = False
) -> Note:
    """Return the note on how steps run: as one CUDA graph, or eagerly.

    Args:
        words: How steps run, and why.
        captured: Whether they run as a graph.
        slowdown: Time of an eager step / time of a replay, where both were measured.
        fallback: Whether steps run eagerly although capture was wanted.
    """
    values = {"captured": captured, "how": words, "slowdown": slowdown, "fallback": fallback}
    return Note(f"step {words}", Topic.STEP, values)
