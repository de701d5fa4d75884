"""`pack_from(samples, out)`: anything that Python can make samples of becomes a store.

Enters: a torch Dataset, a list, arrays, or anything that yields samples. Leaves: a store, as `pack` makes it. Costs:
see `sources/dataset.py`; nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import InputError
from stoker.packing.driver import PackOptions, PackResult, pack
from stoker.report import Progress, Silent
from stoker.sources.dataset import samples_source

_WORKER_SECONDS = 5.0
"""Work of less than this is done in this process: workers that import torch start in seconds."""


def pack_from(
    samples: Any,
    out: str | Path,
    *,
    ragged: Sequence[str] = (),
    options: PackOptions | None = None,
    progress: Progress | None = None,
) -> PackResult:
    """Make a store of Python samples.

    Samples are dicts of values, tuples of them, or single values: numbers, arrays, tensors, pictures, text. Where they
    can be asked for by number (`__len__` and `__getitem__`), worker processes build the parts, and an interrupted pack
    goes on with the parts that were finished. Samples of an iterable are taken one after the other, in this process.

    Args:
        samples: A Dataset, a list of samples, a dict or tuple of arrays, or anything that yields samples.
        out: The store's folder.
        ragged: Fields with another number of rows in every sample. 64 samples are looked at to find them; name those
            that they do not show.
        options: As for `pack`. With `on_bad="quarantine"` samples that raise an error are left out and listed.
        progress: Told what is being done.

    Returns:
        As `pack` does. A store that is there is kept if the dataset pickles to the same bytes and 64 of its samples
        are the same; `PackOptions(force_recreate=True)` packs it again.

    Raises:
        InputError: Samples do not have the same fields, types or shapes.
    """
    options, progress = options or PackOptions(), progress or Silent()
    if isinstance(ragged, str):
        raise InputError(f"ragged is {ragged!r}.", "a list of names", f"ragged=[{ragged!r}]")
    with samples_source(samples, ragged) as (source, is_portable):
        if not is_portable:
            if options.cluster:
                raise InputError(
                    f"{source.name} cannot be sent to the workers of a cluster.",
                    "a dataset that can be pickled, and whose samples can be asked for by number",
                    "options=PackOptions()",
                )
            if options.jobs != 1 and source.num_samples is not None:
                progress.say(f"{source.name} cannot be pickled: it is read in this process alone")
            options = replace(options, jobs=1)
        elif not options.jobs and not options.cluster:
            seconds = source.sample_seconds * (source.num_samples or 0)
            if seconds < _WORKER_SECONDS:
                options = replace(options, jobs=1)
        return pack(source, out, options, progress)
