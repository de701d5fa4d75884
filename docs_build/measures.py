"""Where the figures of each benchmark stand in its result files: ours, the peers, the limit.

Enters: nothing. Leaves: `MEASURES`, a table by the benchmark's name, for `results.py`. A new benchmark gets its lines
here; until then its file is shown whole. `augment` has tables of its own and is read by `results.py` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Measure:
    """One row: where a figure of ours, its peers and its limit stand in a result.

    Attributes:
        what: In words.
        unit: Of all its figures.
        ours: Keys that lead to our figure. A last key with `*` at its end is a beginning.
        peers: Keys by the peer's name.
        limit: Keys of the limit and its name.
        less_is_better: Times and latencies; rates are the other way round.
    """

    what: str
    unit: str
    ours: Keys
    peers: Mapping[str, Keys] = field(default_factory=dict)
    limit: tuple[str, Keys] | None = None
    less_is_better: bool = False


def _seconds(
    what: str, ours: Keys, peers: Mapping[str, Keys], limit: tuple[str, Keys] | None = None
) -> Measure:
    return Measure(what, "s", ours, peers, limit, less_is_better=True)


def _windows(kind: str) -> Measure:
    at = (kind, "epoch_seconds")
    return _seconds(
        f"an epoch over windows, {kind}",
        (*at, "stoker Loader"),
        {
            "torch DataLoader": (*at, "torch DataLoader*"),
            "a plain h5py chunk loader": (*at, "document's chunk loader"),
        },
        ("every window on the device", (*at, "limit*")),
    )


def _pictures(kind: str) -> Measure:
    def rate(way: str) -> Keys:
        return (kind, "loading", way, "images_per_second")

    return Measure(
        f"encoded photographs, {kind}, augmented",
        "images/s",
        rate("encoded"),
        {"torch DataLoader, Pillow": rate("dataloader, 16 workers")},
        ("nvJPEG alone", rate("decoder")),
    )


def _pictures_on_a_cpu(kind: str) -> Measure:
    def rate(way: str) -> Keys:
        return (kind, "loading", way, "images_per_core_second")

    return Measure(
        f"encoded photographs, {kind}, augmented, by CPU time",
        "images per core-second",
        rate("encoded"),
        {"torch DataLoader, Pillow": rate("dataloader, 2 workers")},
    )


def _trained_pictures(kind: str) -> Measure:
    def rate(way: str) -> Keys:
        return (kind, "training", way, "images_per_second")

    return Measure(
        f"training resnet18 on encoded photographs, {kind}",
        "images/s",
        rate("encoded"),
        {
            "torch DataLoader, Pillow": rate("dataloader, 16 workers"),
            "a store of pixels": rate("raw"),
        },
        ("one batch again and again", rate("held batch")),
    )


def _step(batch: str) -> Measure:
    return Measure(
        f"training step of an MLP, batch {batch}",
        "rows/s",
        (f"batch_{batch}", "stoker", "rows_per_second"),
        {
            "torch DataLoader": (f"batch_{batch}", "peer_rows_per_second"),
            "torch's own graph of the step": (f"batch_{batch}", "torch_graph_rows_per_second"),
        },
        ("the graph alone", (f"batch_{batch}", "stoker", "limit_rows_per_second")),
    )


def _gigabytes(reader: str, what: str) -> Measure:
    at = ("gigabytes_per_second",)
    return Measure(
        what,
        "GB/s",
        (*at, reader),
        {"h5py slicing": (*at, "h5py d[a:b]"), "h5py read_direct": (*at, "h5py read_direct")},
        ("memory copy", (*at, "limit: memory copy")),
    )


def _overlap(case: str, what: str) -> Measure:
    return _seconds(
        f"reading behind computing, {what}",
        (case, "both"),
        {},
        ("computing alone", (case, "compute")),
    )


def _gzip(kind: str) -> Measure:
    at = ("megabytes_per_second", kind, "core")
    return Measure(
        f"gzip HDF5 per second of CPU time, {kind}",
        "MB/s",
        (*at, "stoker"),
        {"h5py": (*at, "h5py, 1 thread")},
        ("inflating alone", (*at, "limit: inflating alone")),
    )


_MATCHMS = {
    "matchms": ("records_per_second", "matchms"),
    "a plain line loop": ("records_per_second", "plain loop"),
}
_UNZIP = ("gunzip and split", ("records_per_second", "limit: gunzip + split"))
_PANDAS = {"pandas": ("times", "peer_pandas", "median_seconds")}
_ARROW = ("pyarrow without types", ("times", "limit_arrow_text", "median_seconds"))

MEASURES: dict[str, tuple[Measure, ...]] = {
    "read": (
        _gigabytes("stoker store", "dense rows from the page cache"),
        _gigabytes("stoker first read (checksums verified)", "the first read, checksums verified"),
        _gigabytes("stoker plain file", "the same from anybody's HDF5 file"),
        Measure(
            "one random row",
            "µs",
            ("random_row_microseconds", "stoker store"),
            {
                "h5py, default chunks": (
                    "random_row_microseconds",
                    "h5py, default chunks, gzip 4",
                ),
                "h5py, chunk of one row": (
                    "random_row_microseconds",
                    "h5py, chunk of one row, gzip 4",
                ),
                "h5py, contiguous": ("random_row_microseconds", "h5py, contiguous"),
            },
            less_is_better=True,
        ),
    ),
    "gzip_hdf5": tuple(
        map(_gzip, ("counts", "counts, shuffle", "prices", "prices, shuffle", "bytes"))
    ),
    "msp": (
        Measure(
            "spectra from an MSP library, gzip",
            "records/s",
            ("records_per_second", "stoker, gzip"),
            _MATCHMS,
            _UNZIP,
        ),
        Measure(
            "the same, plain file",
            "records/s",
            ("records_per_second", "stoker, plain"),
            _MATCHMS,
            _UNZIP,
        ),
        Measure(
            "the careful engine, plain file",
            "records/s",
            ("records_per_second", "stoker careful, plain"),
            _MATCHMS,
            _UNZIP,
        ),
    ),
    "massspec": (
        Measure(
            "one random spectrum of 300,000",
            "µs",
            ("read", "spectrum_us"),
            {
                "HDF5, default chunks": ("peers", "auto_chunks_us"),
                "HDF5, chunk of one row": ("peers", "row_chunks_us"),
            },
            less_is_better=True,
        ),
        _seconds(
            "packing 300,000 molecules",
            ("pack", "seconds"),
            {},
            ("the target", ("targets", "pack_seconds")),
        ),
        Measure(
            "the store of them",
            "MB",
            ("pack", "store_mb"),
            {},
            ("the target", ("targets", "store_mb")),
            less_is_better=True,
        ),
        Measure("memory to open it", "MB", ("open", "open_mb"), {}, None, less_is_better=True),
    ),
    "bars": (
        _seconds("a million CSV bars", ("times", "stoker", "median_seconds"), _PANDAS, _ARROW),
        _seconds("the same, gzip", ("times", "stoker_gzip", "median_seconds"), _PANDAS, _ARROW),
        _seconds(
            "the same, damaged lines in it",
            ("times", "stoker_damaged", "median_seconds"),
            _PANDAS,
            _ARROW,
        ),
    ),
    "windows": (_windows("one series"), _windows("five timeframes")),
    "feed": (
        Measure(
            "HDF5 in the page cache to the GPU",
            "GB/s",
            ("stoker_gb_per_second",),
            {"pinning each chunk": ("document_gb_per_second",)},
            ("pinned copy", ("pinned_copy_gb_per_second",)),
        ),
        Measure(
            "the first time, pinning counted",
            "GB/s",
            ("stoker_first_time_gb_per_second",),
            {"pinning each chunk": ("document_first_time_gb_per_second",)},
            ("pinned copy", ("pinned_copy_gb_per_second",)),
        ),
        Measure(
            "cold, from the disk",
            "GB/s",
            ("cold_stoker_gb_per_second",),
            {},
            ("dd iflag=direct", ("cold_dd_direct_gb_per_second",)),
        ),
        _overlap("overlap_compute_bound", "three times the compute"),
    ),
    "ragged": (
        Measure(
            "graphs and spectra of 300,000 molecules",
            "samples/s",
            ("stoker_samples_per_second",),
            {
                "graphs from MOL per sample": ("from_mol_samples_per_second",),
                "graphs from words per sample": ("from_words_samples_per_second",),
            },
        ),
    ),
    "step": (
        _step("128"),
        _step("1024"),
        Measure(
            "the Trainer around a bare eager loop",
            "× its time",
            ("overhead", "ratio"),
            less_is_better=True,
        ),
    ),
    "recipes": (
        Measure(
            "an epoch of the forex recipe",
            "samples/s",
            ("forex", "default", "samples_per_second"),
            {"an eager loop over a plain chunk loader": ("forex", "document_samples_per_second")},
        ),
        Measure(
            "the same, timeframes one after the other",
            "samples/s",
            ("forex", "one stream", "samples_per_second"),
            {"an eager loop over a plain chunk loader": ("forex", "document_samples_per_second")},
        ),
        Measure("the segmentation recipe", "images/s", ("segmentation", "images_per_second")),
    ),
    "pictures": (_pictures("256 px"), _pictures("full"), _trained_pictures("256 px")),
    "pictures_cpu": (_pictures_on_a_cpu("256 px"), _pictures_on_a_cpu("full")),
    "loader_cpu": (
        _seconds(
            "an epoch without a GPU, four chunks",
            ("chunk_data_loader_seconds",),
            {"a plain h5py chunk loader": ("document_seconds",)},
            ("every byte read once", ("read_once_seconds",)),
        ),
        _seconds(
            "the same, one chunk",
            ("chunk_data_loader_one_chunk_seconds",),
            {"a plain h5py chunk loader": ("document_one_chunk_seconds",)},
            ("every byte read once", ("read_once_seconds",)),
        ),
    ),
}
