"""Pictures and masks: `stoker pack images` and `stoker pack segmentation`.

`listing` finds the files and says what is ignored; `pairing` brings images and masks together; `labels` reads a CSV of
labels and lists of splits; `decoding` turns a file into 8-bit pixels by a stated rule; `encoded` keeps the bytes of the
file; `masks` turns mask values and colours into classes; `coco` draws outlines; `source` and `segmentation` have
the two sources.
"""

from stoker.sources.images.encoded import KeepEncoded
from stoker.sources.images.listing import find_pairs, find_scenes, holds_pictures
from stoker.sources.images.segmentation import SegmentationSource
from stoker.sources.images.source import ImagesSource, parse_range, parse_size

__all__ = [
    "ImagesSource",
    "KeepEncoded",
    "SegmentationSource",
    "find_pairs",
    "find_scenes",
    "holds_pictures",
    "parse_range",
    "parse_size",
]
