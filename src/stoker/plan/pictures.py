"""Chooses the kind of store for pictures on this machine: raw pixels, or the encoded bytes of their files.

Enters: the bytes of both kinds, free memory, the measured decode rate. Leaves: a `PictureChoice`: the kind, and
the reasons with their numbers. Costs microseconds; pure.

Pixels need no decoding, so they are better if they fit into memory. If only the encoded bytes fit, decoding them costs
less than reading pixels from a disk again in every epoch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.plan.decision import GPU_SHARE
from stoker.store.manifest import Manifest
from stoker.units import format_bytes

PictureKind = Literal["raw", "encoded"]
_ASSUMED_SIZE = (224, 224)


@dataclass(frozen=True)
class PictureBytes:
    """The bytes of pictures and masks, as pixels of `raw_size` and as files; `kind` is what the store holds.

    `encoded_bytes` is None if the store does not record the files that it was made of.
    """

    num_pictures: int
    kind: PictureKind
    raw_bytes: int
    raw_size: tuple[int, int]
    encoded_bytes: int | None


@dataclass(frozen=True)
class PictureChoice:
    """The better kind on this machine, and why."""

    kind: PictureKind
    reasons: tuple[str, ...]
    bytes: PictureBytes
    decoded_per_second: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def picture_bytes(manifest: Manifest) -> PictureBytes | None:
    """Return the bytes of a store's pictures as both kinds; None if it has no field `images` of pictures."""
    images = manifest.fields.get("images")
    if images is None:
        return None
    count, masks = manifest.num_samples, manifest.fields.get("masks")
    if images.encoding == "picture":
        names = ("images/values", "masks/values")
        encoded = sum(shard.rows.get(name, 0) for shard in manifest.shards for name in names)
        facts = manifest.attributes["encoded"]
        # Both recipes take the size that all pictures have, and a loader needs no resizing for it.
        is_one_size = facts["smallest"] == facts["largest"] and count > 0
        height, width = facts["smallest"] if is_one_size else _ASSUMED_SIZE
        planes = int(manifest.attributes["channels"]) + (masks is not None)
        return PictureBytes(
            count, "encoded", count * planes * height * width, (height, width), encoded
        )
    if images.kind != "dense" or len(images.shape) != 3:
        return None
    raw = count * math.prod(images.shape)
    if masks is not None and masks.kind == "dense":
        raw += count * math.prod(masks.shape)
    size = (images.shape[1], images.shape[2])
    made_of = manifest.provenance
    is_files = made_of is not None and made_of.kind == "images" and made_of.files
    files = sum(file.size_bytes for file in made_of.files) if is_files and made_of else None
    return PictureBytes(count, "raw", raw, size, files)


def choose_kind(
    pictures: PictureBytes,
    gpu_memory_bytes: int | None,
    ram_bytes: int,
    decoded_per_second: float | None = None,
    share: float = GPU_SHARE,
) -> PictureChoice:
    """Return the better kind of store, by free memory and its `share` for data; the decode rate is only reported."""
    raw_where = _where(pictures.raw_bytes, gpu_memory_bytes, ram_bytes, share)
    size = f"{pictures.raw_size[0]} x {pictures.raw_size[1]}"
    raw = f"as pixels of {size}: {format_bytes(pictures.raw_bytes)}, {raw_where}"
    if pictures.encoded_bytes is None:
        reason = "how many bytes their files have is not known"
        return PictureChoice(pictures.kind, (raw, reason), pictures, decoded_per_second)
    # Decoders read from host memory, so encoded bytes are kept there.
    coded_where = _where(pictures.encoded_bytes, None, ram_bytes, share)
    rate = (
        "decode rate not measured"
        if decoded_per_second is None
        else f"{decoded_per_second:,.0f} pictures/s are decoded here"
    )
    coded = f"encoded: {format_bytes(pictures.encoded_bytes)}, {coded_where}; {rate}"
    if raw_where != "read from disk in every epoch":
        kind: PictureKind = "raw"
        why = "raw pixels are better here: they fit, and nothing is decoded"
    else:
        kind = "encoded"
        times = pictures.raw_bytes / max(1, pictures.encoded_bytes)
        why = (
            f"encoded pictures are better here: pixels do not fit, and are {times:.1f} x the bytes"
        )
        if pictures.raw_bytes < pictures.encoded_bytes:
            kind, why = "raw", "raw pixels are better here: they have fewer bytes"
    return PictureChoice(kind, (why, raw, coded), pictures, decoded_per_second)


def _where(num_bytes: int, gpu_memory_bytes: int | None, ram_bytes: int, share: float) -> str:
    if gpu_memory_bytes is not None and num_bytes <= share * gpu_memory_bytes:
        return "resident on the GPU"
    return "resident in RAM" if num_bytes <= share * ram_bytes else "read from disk in every epoch"
