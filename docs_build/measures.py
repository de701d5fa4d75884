"""Where the figures of each benchmark stand in its result files: ours, the peers, the limit.

Enters: nothing. Leaves: `MEASURES`, a table by the benchmark's name, for `results.py`. A new benchmark gets its lines
here; until then its file is shown whole. `augment` has tables of its own and is read by `results.py` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Measure:
    """One row: where a figure of ours, its peers and its limit stand in a result.

    Attributes:
        what: In words.
        unit: Of all its figures.
        ours: Keys that lead to our figure, with slashes between them. A key with `*` at its end is a beginning.
        peers: Keys by the peer's name.
        limit: The limit's name and its keys.
    """

    what: str
    unit: str
    ours: str
    peers: Mapping[str, str] = field(default_factory=dict)
    limit: tuple[str, str] | None = None

    @property
    def less_is_better(self) -> bool:
        """Whether it is a time or a size; rates are the other way round."""
        return self.unit in ("s", "µs", "MB", "× its time")


def _windows(kind: str) -> Measure:
    at = f"{kind}/epoch_seconds"
    return Measure(
        f"an epoch over windows, {kind}",
        "s",
        f"{at}/stoker Loader",
        {
            "torch DataLoader": f"{at}/torch DataLoader*",
            "a plain h5py chunk loader": f"{at}/document's chunk loader",
        },
        ("every window on the device", f"{at}/limit*"),
    )


def _pictures(kind: str) -> Measure:
    at, rate = f"{kind}/loading", "images_per_second"
    return Measure(
        f"encoded photographs, {kind}, augmented",
        "images/s",
        f"{at}/encoded/{rate}",
        {"torch DataLoader, Pillow": f"{at}/dataloader, 16 workers/{rate}"},
        ("nvJPEG alone", f"{at}/decoder/{rate}"),
    )


def _pictures_on_a_cpu(kind: str) -> Measure:
    at, rate = f"{kind}/loading", "images_per_core_second"
    return Measure(
        f"encoded photographs, {kind}, augmented, by CPU time",
        "images per core-second",
        f"{at}/encoded/{rate}",
        {"torch DataLoader, Pillow": f"{at}/dataloader, 2 workers/{rate}"},
    )


def _step(batch: str) -> Measure:
    at = f"batch_{batch}"
    return Measure(
        f"training step of an MLP, batch {batch}",
        "rows/s",
        f"{at}/stoker/rows_per_second",
        {
            "torch DataLoader": f"{at}/peer_rows_per_second",
            "torch's own graph of the step": f"{at}/torch_graph_rows_per_second",
        },
        ("the graph alone", f"{at}/stoker/limit_rows_per_second"),
    )


def _gigabytes(reader: str, what: str) -> Measure:
    at = "gigabytes_per_second"
    peers = {"h5py slicing": f"{at}/h5py d[a:b]", "h5py read_direct": f"{at}/h5py read_direct"}
    limit = ("memory copy", f"{at}/limit: memory copy")
    return Measure(what, "GB/s", f"{at}/{reader}", peers, limit)


def _gzip(kind: str) -> Measure:
    at = f"megabytes_per_second/{kind}/core"
    limit = ("inflating alone", f"{at}/limit: inflating alone")
    what = f"gzip HDF5 per second of CPU time, {kind}"
    return Measure(what, "MB/s", f"{at}/stoker", {"h5py": f"{at}/h5py, 1 thread"}, limit)


def _spectra(what: str, reader: str) -> Measure:
    at = "records_per_second"
    peers = {"matchms": f"{at}/matchms", "a plain line loop": f"{at}/plain loop"}
    limit = ("gunzip and split", f"{at}/limit: gunzip + split")
    return Measure(what, "records/s", f"{at}/{reader}", peers, limit)


def _bars(what: str, reader: str) -> Measure:
    peers = {"pandas": "times/peer_pandas/median_seconds"}
    limit = ("pyarrow without types", "times/limit_arrow_text/median_seconds")
    return Measure(what, "s", f"times/{reader}/median_seconds", peers, limit)


_PINNED_COPY = ("pinned copy", "pinned_copy_gb_per_second")
_READ_ONCE = ("every byte read once", "read_once_seconds")
_EAGER = {"an eager loop over a plain chunk loader": "forex/document_samples_per_second"}
_RANDOM, _TRAINED, _RATE = "random_row_microseconds", "256 px/training", "images_per_second"

MEASURES: dict[str, tuple[Measure, ...]] = {
    "read": (
        _gigabytes("stoker store", "dense rows from the page cache"),
        _gigabytes("stoker first read (checksums verified)", "the first read, checksums verified"),
        _gigabytes("stoker plain file", "the same from anybody's HDF5 file"),
        Measure(
            "one random row",
            "µs",
            f"{_RANDOM}/stoker store",
            {
                "h5py, default chunks": f"{_RANDOM}/h5py, default chunks, gzip 4",
                "h5py, chunk of one row": f"{_RANDOM}/h5py, chunk of one row, gzip 4",
                "h5py, contiguous": f"{_RANDOM}/h5py, contiguous",
            },
        ),
    ),
    "gzip_hdf5": tuple(
        map(_gzip, ("counts", "counts, shuffle", "prices", "prices, shuffle", "bytes"))
    ),
    "msp": (
        _spectra("spectra from an MSP library, gzip", "stoker, gzip"),
        _spectra("the same, plain file", "stoker, plain"),
        _spectra("the careful engine, plain file", "stoker careful, plain"),
    ),
    "massspec": (
        Measure(
            "one random spectrum of 300,000",
            "µs",
            "read/spectrum_us",
            {
                "HDF5, default chunks": "peers/auto_chunks_us",
                "HDF5, chunk of one row": "peers/row_chunks_us",
            },
        ),
        Measure(
            "packing 300,000 molecules",
            "s",
            "pack/seconds",
            limit=("the target", "targets/pack_seconds"),
        ),
        Measure(
            "the store of them", "MB", "pack/store_mb", limit=("the target", "targets/store_mb")
        ),
        Measure("memory to open it", "MB", "open/open_mb"),
    ),
    "bars": (
        _bars("a million CSV bars", "stoker"),
        _bars("the same, gzip", "stoker_gzip"),
        _bars("the same, damaged lines in it", "stoker_damaged"),
    ),
    "windows": (_windows("one series"), _windows("five timeframes")),
    "feed": (
        Measure(
            "HDF5 in the page cache to the GPU",
            "GB/s",
            "stoker_gb_per_second",
            {"pinning each chunk": "document_gb_per_second"},
            _PINNED_COPY,
        ),
        Measure(
            "the first time, pinning counted",
            "GB/s",
            "stoker_first_time_gb_per_second",
            {"pinning each chunk": "document_first_time_gb_per_second"},
            _PINNED_COPY,
        ),
        Measure(
            "cold, from the disk",
            "GB/s",
            "cold_stoker_gb_per_second",
            limit=("dd iflag=direct", "cold_dd_direct_gb_per_second"),
        ),
        Measure(
            "reading behind computing, three times the compute",
            "s",
            "overlap_compute_bound/both",
            limit=("computing alone", "overlap_compute_bound/compute"),
        ),
    ),
    "ragged": (
        Measure(
            "graphs and spectra of 300,000 molecules",
            "samples/s",
            "stoker_samples_per_second",
            {
                "graphs from MOL per sample": "from_mol_samples_per_second",
                "graphs from words per sample": "from_words_samples_per_second",
            },
        ),
    ),
    "step": (
        _step("128"),
        _step("1024"),
        Measure("the Trainer around a bare eager loop", "× its time", "overhead/ratio"),
    ),
    "recipes": (
        Measure(
            "an epoch of the forex recipe",
            "samples/s",
            "forex/default/samples_per_second",
            _EAGER,
        ),
        Measure(
            "the same, timeframes one after the other",
            "samples/s",
            "forex/one stream/samples_per_second",
            _EAGER,
        ),
        Measure("the segmentation recipe", "images/s", "segmentation/images_per_second"),
    ),
    "pictures": (
        _pictures("256 px"),
        _pictures("full"),
        Measure(
            "training resnet18 on encoded photographs, 256 px",
            "images/s",
            f"{_TRAINED}/encoded/{_RATE}",
            {
                "torch DataLoader, Pillow": f"{_TRAINED}/dataloader, 16 workers/{_RATE}",
                "a store of pixels": f"{_TRAINED}/raw/{_RATE}",
            },
            ("one batch again and again", f"{_TRAINED}/held batch/{_RATE}"),
        ),
    ),
    "pictures_cpu": (_pictures_on_a_cpu("256 px"), _pictures_on_a_cpu("full")),
    "loader_cpu": (
        Measure(
            "an epoch without a GPU, four chunks",
            "s",
            "chunk_data_loader_seconds",
            {"a plain h5py chunk loader": "document_seconds"},
            _READ_ONCE,
        ),
        Measure(
            "the same, one chunk",
            "s",
            "chunk_data_loader_one_chunk_seconds",
            {"a plain h5py chunk loader": "document_one_chunk_seconds"},
            _READ_ONCE,
        ),
    ),
}
