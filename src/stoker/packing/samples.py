"""Samples as the model will get them: pictures with masks, spectra beside the molecule, windows of bars, table rows.

Enters: a store, or the parts of a source. Leaves: facts for a terminal, and a section for a page. Costs: at most 24
samples are drawn and 256 pictures measured; labels are read whole.

Everything is drawn from what is stored, not from the file: a turned mask, a white picture or the wrong molecule shows.
"""

from __future__ import annotations

import base64
import colorsys
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker import page
from stoker.display import first_names
from stoker.packing.window_figures import WARNING, Window, window_facts, window_figure
from stoker.page import Html
from stoker.page.charts import chart_grid
from stoker.sources.images.encoded import decode_bytes
from stoker.sources.molecules.packed import draw_molecule
from stoker.store.fields import Array, ShardData
from stoker.store.inspection import Inspection
from stoker.store.manifest import FieldInfo
from stoker.store.memory import memory_store
from stoker.store.quality_page import quality_page
from stoker.store.reader import Store
from stoker.units import format_count

MAX_DRAWN = 24
MAX_MEASURED = 256
_SIDE = 224
_MAX_BYTES = 64 << 20
_COLUMNS = 12
_IGNORE = 255
_LISTED = 12
_ONE_COLOUR = 0.995
_TEXTS = ("name", "formula", "adduct", "precursor_mz", "collision_energy", "spectrum_kind")


@dataclass
class Samples:
    """Some samples of a store or of raw files."""

    fields: dict[str, FieldInfo] = field(default_factory=dict)  # what each field is
    # samples as field to value: a row, the values of a ragged field, a text or a `Window`; "symbol" is the label
    # of the part with the window
    rows: list[dict[str, Any]] = field(default_factory=list)
    # attributes of the manifest, with names of classes
    attributes: Mapping[str, Any] = field(default_factory=dict)
    num_samples: int = 0  # in the store, not only in `rows`
    # class number to samples; empty where there are no labels
    label_counts: dict[int, int] = field(default_factory=dict)
    mask_counts: dict[int, int] = field(default_factory=dict)  # mask value to pixels

    def take(self, part: ShardData, label: str = "") -> None:
        """Add the samples of one part of a source: a few of each, so that the last part is seen too."""
        if part:
            store = memory_store(part, label)
            self.add(store)
            _add(self.mask_counts, store, "masks")  # a finished store has the sum in its manifest

    def add(self, store: Store) -> None:
        """Add samples of a store, evenly spaced."""
        self.fields = dict(store.fields)
        self.num_samples += store.num_samples
        most = _most(self.fields)
        ends = np.cumsum([shard.num_samples for shard in store.manifest.shards])
        for at in _evenly(store.num_samples, most):
            number = int(np.searchsorted(ends, at, side="right"))
            self.rows.append(_sample(store, at, number, at - int(ends[number])))
        if len(self.rows) > most:
            self.rows = [self.rows[at] for at in _evenly(len(self.rows), most)]
        if (info := self.fields.get("labels")) is not None and not info.shape:
            _add(self.label_counts, store, "labels")
        for value, count in (store.manifest.attributes.get("mask_pixels") or {}).items():
            self.mask_counts[int(value)] = int(count)


def samples_of(store: Store) -> Samples:
    """Return samples of a store, evenly spaced."""
    made = Samples(attributes=store.manifest.attributes)
    made.add(store)
    return made


def _most(fields: Mapping[str, FieldInfo]) -> int:
    """Return how many samples to keep: more if pictures are to be measured; all within 64 MB."""
    row_bytes = sum(
        int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize
        for info in fields.values()
        if info.kind == "dense"
    )
    is_raw = "images" in fields and fields["images"].kind == "dense"
    wanted = MAX_MEASURED if is_raw else MAX_DRAWN
    return max(0, min(wanted, _MAX_BYTES // max(1, row_bytes)))


def _sample(store: Store, at: int, number: int, from_end: int) -> dict[str, Any]:
    """Return sample `at`, which is in the shard `number`; with windows, also the label of the shard.

    `from_end` is the sample's number counted from the end of that shard, below 0.
    """
    row: dict[str, Any] = {}
    shard, channels = store.shards[number], store.manifest.attributes.get("channels", 3)
    # Read as many rows after a window as there are targets.
    targets = store.fields.get("targets")
    ahead = targets.shape[0] if targets is not None and len(targets.shape) == 1 else 0
    for name, info in store.fields.items():
        if info.kind == "series":
            row["symbol"] = store.manifest.shards[number].label
            length, rows = info.window or 0, shard.arrays[f"{name}/rows"]
            end = int(shard.whole(f"{name}/ends")[from_end])
            stop = min(end + ahead, len(rows))
            time = shard.arrays.get(f"{name}/time")
            times = None if time is None else time.read(end - length, stop)
            row[name] = Window(rows.read(end - length, stop), length, times)
        elif info.encoding == "utf8":
            row[name] = store.read_text(name, at)
        elif info.encoding == "picture":  # a mask is (height, width), without channels
            pixels = decode_bytes(store.read_values(name, at), 1 if name == "masks" else channels)
            row[name] = pixels[0] if name == "masks" else pixels
        elif info.kind == "ragged":
            row[name] = store.read_values(name, at)
        else:
            row[name] = store.read_rows(name, at, at + 1)[0]
    return row


def _add(counts: dict[int, int], store: Store, name: str) -> None:
    """Count the values of a field of whole numbers."""
    info = store.fields.get(name)
    if info is None or info.kind != "dense" or info.dtype[1] not in "iu":
        return
    values, found = np.unique(store.read_rows(name, 0, store.num_samples), return_counts=True)
    if len(values) <= 65_536:
        for value, count in zip(values.tolist(), found.tolist(), strict=True):
            counts[value] = counts.get(value, 0) + count


def _evenly(total: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `total`, evenly spaced."""
    places = np.linspace(0, total - 1, min(total, most)) if total else np.empty(0)
    numbers: list[int] = np.unique(places.astype(np.int64)).tolist()
    return numbers


# -- facts ---------------------------------------------------------------------------------------


def sample_facts(samples: Samples) -> dict[str, str]:
    """Return the facts that a user should see first: classes, value ranges, sizes, lengths."""
    facts = window_facts(samples.fields, samples.rows, samples.attributes)
    looked: dict[str, str] = {}  # about these samples; `facts` is about all
    if images := _images(samples):
        looked |= _picture_facts(images)
    if samples.label_counts:
        facts["classes"] = f"{_told_shares(samples, samples.label_counts)} samples"
    if samples.mask_counts:
        facts["mask classes"] = f"{_told_shares(samples, samples.mask_counts)} pixels"
    spectra = [np.asarray(each, np.float64) for each in _present(samples, "mz")]
    if spectra:
        lengths, mz = [len(each) for each in spectra], np.concatenate(spectra)
        median = f"median {np.median(lengths):g}"
        looked["peaks per spectrum"] = f"{min(lengths)} to {max(lengths)}, {median}"
        looked["m/z"] = f"{mz.min():g} to {mz.max():g}" if len(mz) else "no peaks"
        if kinds := samples.attributes.get("spectrum_kinds"):
            told = [f"{count:,} {kind}" for kind, count in kinds.items()]
            facts["kinds of spectra"] = ", ".join(told)
    weights = [float(each) for each in _present(samples, "mol_weight")]
    if weights:
        looked["mass of the molecules"] = f"{min(weights):.4f} to {max(weights):.4f}"
    if len(samples.rows) < samples.num_samples:
        few = format_count(len(samples.rows), "sample")
        info = samples.fields.get("images")
        sure = {"pictures"} if info is not None and info.kind == "dense" else set()
        looked = {
            name: text if name in sure else f"{text} (in {few} that were looked at)"
            for name, text in looked.items()
        }
    return looked | facts


def _picture_facts(images: Sequence[Array]) -> dict[str, str]:
    channels = images[0].shape[0]
    names = ("red", "green", "blue") if channels == 3 else tuple(map(str, range(channels)))
    ranges = []
    for name, *planes in zip(names, *images, strict=True):
        mean = sum(int(plane.sum()) for plane in planes) / sum(plane.size for plane in planes)
        least, most = min(plane.min() for plane in planes), max(plane.max() for plane in planes)
        ranges.append(f"{name if channels > 1 else 'grey'} {least} to {most}, mean {mean:.0f}")
    sizes = sorted({image.shape[1:] for image in images})
    ends = dict.fromkeys(sizes[:: max(1, len(sizes) - 1)])
    size = " to ".join(f"{height} x {width}" for height, width in ends)
    shown = {"pictures": f"{size}, {channels} channels", "pixel values": "; ".join(ranges)}
    for name, value in (("white", 255), ("black", 0)):
        count = sum(bool((image == value).mean() >= _ONE_COLOUR) for image in images)
        if count:
            shown[f"all {name}"] = f"{count:,} of {len(images):,} pictures that were looked at"
    return shown


def _present(samples: Samples, name: str) -> list[Any]:
    """Return the values of a field, of the samples that have it."""
    return [row[name] for row in samples.rows if row.get(name) is not None]


def _images(samples: Samples) -> list[Array]:
    found: list[Array] = _present(samples, "images")
    is_picture = found and found[0].ndim == 3 and found[0].shape[0] in (1, 3)
    return found if is_picture and found[0].dtype == np.uint8 else []


def _names(samples: Samples) -> Sequence[str]:
    return [str(name) for name in samples.attributes.get("classes") or ()]


def _shares(samples: Samples, counts: Mapping[int, int]) -> list[tuple[int, str, int, str]]:
    """Return value, name, count and share of every class."""
    names, total = _names(samples), max(1, sum(counts.values()))
    return [
        (value, _class_name(value, names), count, f"{count / total:.1%}")
        for value, count in counts.items()
    ]


def _told_shares(samples: Samples, counts: Mapping[int, int]) -> str:
    shares = sorted(_shares(samples, counts), key=lambda each: -each[2])
    return first_names([f"{name} {count:,} ({share})" for _, name, count, share in shares], _LISTED)


def _class_name(value: int, names: Sequence[str]) -> str:
    if 0 <= value < len(names):
        return names[value]
    return "255 (counts nowhere)" if value == _IGNORE else str(value)


# -- page ----------------------------------------------------------------------------------------


def samples_section(samples: Samples) -> page.Section | None:
    """Return samples drawn for a page; None where there is nothing to draw."""
    drawn = [samples.rows[at] for at in _evenly(len(samples.rows), MAX_DRAWN)]
    figures: list[Html] = []
    if _images(samples):
        figures = [_picture_figure(row, _names(samples), n) for n, row in enumerate(drawn)]
    elif any(isinstance(value, Window) for value in (drawn[0] if drawn else {}).values()):
        figures = [
            window_figure(samples.fields, row, samples.attributes, n)
            for n, row in enumerate(drawn[: MAX_DRAWN // 2])
        ]
    elif any("mz" in row for row in drawn):
        figures = [_spectrum_figure(row, n) for n, row in enumerate(drawn)]
    elif drawn and (table := _rows_table(samples, drawn)):
        return page.Section("samples", "Samples", table)
    if not figures:
        return None
    facts = sample_facts(samples)
    parts = []
    if warning := facts.pop(WARNING, ""):
        parts.append(Html(f"<p>{page.badge('warning', 'warn')} {page.escape(warning)}</p>"))
    drawn_apart = ("classes", "mask classes")
    parts.append(page.facts({what: facts[what] for what in facts if what not in drawn_apart}))
    if samples.mask_counts:
        shares = sorted(_shares(samples, samples.mask_counts))[:64]
        colours = (
            (f"{name} {share}", f"rgb{colour_of(value)}") for value, name, _, share in shares
        )
        parts.append(page.legend(colours))
    if samples.label_counts:
        shares = sorted(_shares(samples, samples.label_counts))[:200]
        rows = [(page.name(name), f"{count:,}", share) for _, name, count, share in shares]
        parts.append(page.table(("class", "samples", "share"), rows, key="classes", numeric=(1, 2)))
    has_windows = any(info.kind == "series" for info in samples.fields.values())
    grid = chart_grid(figures) if has_windows else page.grid(figures)
    return page.Section("samples", "Samples", page.join([*parts, grid]))


def _picture_figure(row: Mapping[str, Any], names: Sequence[str], number: int) -> Html:
    pixels = np.broadcast_to(np.moveaxis(row["images"], 0, -1), (*row["images"].shape[1:], 3))
    title = str(row.get("name") or f"sample {number}")
    shown = [_img(pixels, f"{title}")]
    caption = ""
    mask = row.get("masks")
    if mask is not None and mask.shape == pixels.shape[:2]:
        colours = np.array([colour_of(value) for value in range(256)], dtype=np.float32)
        mixed = 0.45 * pixels + 0.55 * colours[mask]
        shown.append(_img(mixed.astype(np.uint8), f"mask of {title}"))
        present = np.flatnonzero(np.bincount(mask.ravel(), minlength=256)).tolist()
        caption = ", ".join(_class_name(value, names) for value in present[:8])
    if row.get("labels") is not None and np.ndim(row["labels"]) == 0:
        caption = _class_name(int(row["labels"]), names)
    return page.figure(page.name(title), page.join(shown), page.escape(page.shorten(caption, 120)))


def _img(pixels: Array, alt: str) -> Html:
    return Html(
        f'<img alt="{page.escape(page.shorten(alt, 80))}" src="{png_url(pixels, _SIDE)}" '
        'style="width:100%;image-rendering:pixelated;display:block;margin-bottom:4px">'
    )


def png_url(pixels: Array, side: int) -> str:
    """Return `(height, width, 3)` uint8 as a small PNG for a page, of at most `side` pixels a side."""
    step = max(1, -(-max(pixels.shape[:2]) // side))
    return f"data:image/png;base64,{base64.b64encode(encode_png(pixels[::step, ::step])).decode()}"


def encode_png(pixels: Array, colours: Array | None = None, **texts: str) -> bytes:
    """Return `(height, width, 3)` uint8 as a PNG; no image library is needed for this.

    With `colours`, `(256, 3)`, pixels are `(height, width)` values that are shown in these colours. `texts` are kept in
    the file by their names.
    """

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    high, wide = pixels.shape[:2]
    packer = zlib.compressobj(6)  # row by row, to avoid a copy of a large mask
    rows = b"".join(packer.compress(b"\0" + np.ascontiguousarray(row).tobytes()) for row in pixels)
    kind = 2 if colours is None else 3
    parts = [(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, kind, 0, 0, 0))]
    parts += [(b"tEXt", f"{name}\0{text}".encode()) for name, text in texts.items()]
    if colours is not None:
        parts.append((b"PLTE", colours.astype(np.uint8).tobytes()))
    parts += [(b"IDAT", rows + packer.flush()), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts)


def colour_of(value: int) -> tuple[int, int, int]:
    """Return the colour of a class: 0 is dark, 255 white, the others walk around the circle of colours."""
    if value == 0:
        return 40, 42, 48
    if value == _IGNORE:
        return 255, 255, 255
    red, green, blue = colorsys.hsv_to_rgb(value * 0.618033988749895 % 1.0, 0.65, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


def _spectrum_figure(row: Mapping[str, Any], number: int) -> Html:
    title = str(row.get("name") or row.get("identifier") or f"sample {number}")
    about = [f"{name} {row[name]}" for name in _TEXTS[1:] if row.get(name)]
    if row.get("mol_weight") is not None:
        about.append(f"mass {float(row['mol_weight']):.4f}")
    drawing = draw_molecule(row["atoms"], row["bonds"]) if row.get("atoms") is not None else ""
    picture = page.join([_sticks(row["mz"], row["intensity"], number), Html(drawing)])
    return page.figure(page.name(title), picture, page.escape(page.shorten("; ".join(about), 200)))


def _sticks(mz: Array, intensity: Array, number: int) -> Html:
    """Return the peaks as vertical lines, the base peak at full height."""
    mz, intensity = np.asarray(mz, np.float64), np.asarray(intensity, np.float64)
    if not len(mz):
        return page.paragraph("no peaks", quiet=True)
    order = np.argsort(-intensity, kind="stable")[:300]
    top, last = max(float(intensity.max()), 1e-30), max(float(mz.max()), 1.0) * 1.03
    lines = "".join(
        f"M{400 * mz[at] / last:.1f} 100v-{max(0.5, 95 * intensity[at] / top):.1f}" for at in order
    )
    ends = f"m/z {page.format_number(float(mz.min()))} to {page.format_number(float(mz.max()))}, {len(mz)} peaks"
    return Html(
        f'<svg id="spectrum-{number}" role="img" aria-label="{page.escape(ends)}" viewBox="0 0 400 100" '
        f'preserveAspectRatio="none" style="height:110px"><path d="{lines}" stroke="var(--bar)" stroke-width="1.5" '
        f'fill="none"/><path class="base" d="M0 99.5h400"/></svg><p class="quiet">{page.escape(ends)}</p>'
    )


def _rows_table(samples: Samples, rows: Sequence[Mapping[str, Any]]) -> Html:
    """Return a table of samples, with the store's names of columns; empty if no field has short rows.

    It shows `features`, or else the first field with one row of numbers per sample, and up to four fields of single
    numbers; of up to four ragged fields it shows how many values they have.
    """
    arrays = {
        n: value for n, value in rows[0].items() if isinstance(value, np.ndarray | np.generic)
    }
    flat = {name: np.ndim(value) for name, value in arrays.items()}
    table = next((name for name in ("features", *flat) if flat.get(name) == 1), None)
    if table is not None and samples.fields[table].kind != "dense":
        table = None
    others = [name for name, dims in flat.items() if not dims][:4]
    lengths = [name for name in flat if samples.fields[name].kind == "ragged"][:4]
    if not (table or others or lengths):
        return Html("")
    width = samples.fields[table].shape[0] if table else 0
    known = samples.fields[table].columns if table else None
    columns = (known or [f"{table}[{number}]" for number in range(min(width, _COLUMNS))])[:_COLUMNS]
    names = _names(samples)
    body = []
    for row in rows:
        values = row[table][:_COLUMNS] if table else ()
        cells = [page.format_number(float(value)) for value in values]
        for name in others:
            value = row[name]
            is_class = name in ("labels", "targets") and names and float(value) == int(value)
            cells.append(_class_name(int(value), names) if is_class else str(value))
        body.append([*cells, *(f"{len(row[name]):,} values" for name in lengths)])
    note = f"{width - len(columns)} more columns, not shown." if width > len(columns) else ""
    made = page.table([*columns, *others, *lengths], body, key="rows", numeric=range(len(columns)))
    return page.join([made, page.paragraph(note, quiet=True)] if note else [made])


def samples_page(
    title: str, inspection: Inspection, facts: Mapping[str, str], samples: Samples | None
) -> str:
    """Return the page of `inspect`, and of a finished pack: samples first, then what every column holds."""
    drawn = None if samples is None else samples_section(samples)
    return quality_page(title, inspection.stats, inspection.findings, facts, drawn)
