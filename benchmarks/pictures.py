"""Encoded photographs decoded ahead on the device, against a DataLoader with Pillow, raw pixels, the decoder alone.

    python benchmarks/pictures.py [--cpu] [--seconds 4] [--turns 3] [--count 4096] [--batch 256] [--no-training]
                                  [--peer-turns 1] [--no-dataloader]
    python benchmarks/pictures.py --pack 50000 [--photographs TAR]

Made-up photographs of two sizes: 500 x 375 (about 114 kB as JPEG of quality 90) and 341 x 256 (about 32 kB). Every way
gives float batches of `RandomResizedCrop(224)`, flip, brightness, contrast and saturation of 0.4, normalised.

    decoder      nvJPEG alone (torchvision), batches of encoded bytes that lie in memory: the limit on a GPU
    engines      nvJPEG alone, called directly as the loader calls it, by one thread
    encoded      `stoker.Loader` over a store of `--keep-encoded`
    raw          `stoker.Loader` over a store of uint8 pixels at 256 x 256
    dataloader   torch's DataLoader, 16 workers (2 with --cpu), Pillow, torchvision's transforms (else Pillow's)
    dali         NVIDIA DALI's pipeline, where it is installed

Training: resnet18 at 224, bf16, channels-last, on each of them and on one held batch; from encoded pictures also on a
stream of high priority, and by stoker's Trainer, which captures the step (its held batch: replays of the graph alone).
Printed beside: busy cores, the
share of time with a kernel on the GPU (NVML), bytes, growth of resident memory, packing, and how far the pixels of
nvJPEG are from those of Pillow; and the loader's busy cores where batches are taken no faster than nvJPEG alone decodes
them. The peers whose workers take seconds to fill their queues have fewer turns.

With --pack: `pack images --keep-encoded` of that many photographs at 256 px beside a plain read of their files, by as
many threads as there are cores, from the disk (the page cache is emptied, which needs root) and from memory.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import os
import resource
import shutil
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

from harness import publish, side_by_side
from stoker import Loader
from stoker.augment import (
    ColorJitter,
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)
from stoker.loader.pictures import Engines
from stoker.machine import rss_bytes
from stoker.packing import PackOptions, pack
from stoker.sources.images import ImagesSource, KeepEncoded
from stoker.store.reader import open_store
from stoker.train.trainer import Trainer

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
KINDS = {"full": (375, 500), "256 px": (256, 341)}
DISTINCT = 96


def photograph(height: int, width: int, seed: int) -> bytes:
    """Return a JPEG of quality 90: smooth shapes with some noise, as large as photographs are."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.asarray(smooth, np.int16) + rng.normal(0, 11, (height, width, 1)).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_folder(folder: Path, size: tuple[int, int], count: int) -> int:
    """Write `count` JPEG files in ten class folders; return their bytes."""
    made = [photograph(*size, seed) for seed in range(min(count, DISTINCT))]
    for number in range(count):
        home = folder / f"class-{number % 10}"
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{number:06}.jpg").write_bytes(made[number % len(made)])
    return sum(len(made[number % len(made)]) for number in range(count))


def make_compose(half: bool) -> Compose:
    dtype = [ToDtype(torch.bfloat16, channels_last=True)] if half else []
    return Compose(
        [
            RandomResizedCrop(224),
            RandomHorizontalFlip(),
            ColorJitter(0.4, 0.4, 0.4),
            Normalize(MEAN, STD),
            *dtype,
        ]
    )


class Folder(torch.utils.data.Dataset):
    """The usual dataset: open, decode, transform one file."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.rglob("*.jpg"))
        self.labels = [int(file.parent.name.rpartition("-")[2]) for file in self.files]
        self.transform = usual_transform()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[number]) as image:
            return self.transform(image.convert("RGB")), self.labels[number]


def usual_transform() -> Callable[[Any], torch.Tensor]:
    try:
        from torchvision import transforms
    except ImportError:
        return pillow_transform
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.4, 0.4, 0.4),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


_MEAN, _STD = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)


def pillow_transform(image: Any) -> torch.Tensor:
    """Do what the transforms of torchvision do on Pillow's images, which is these calls."""
    draw = torch.rand(8).tolist()
    area = image.width * image.height * (0.08 + 0.92 * draw[0])
    shape = float(np.exp(np.log(3 / 4) + draw[1] * (np.log(4 / 3) - np.log(3 / 4))))
    width = min(image.width, max(1, round((area * shape) ** 0.5)))
    height = min(image.height, max(1, round((area / shape) ** 0.5)))
    left, top = int(draw[2] * (image.width - width)), int(draw[3] * (image.height - height))
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((224, 224), Image.Resampling.BILINEAR)
    if draw[4] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for way, u in zip(
        (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), draw[5:], strict=True
    ):
        image = way(image).enhance(0.6 + 0.8 * u)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    return pixels.to(torch.float32).div(255).sub_(_MEAN).div_(_STD)


# -- ways ------------------------------------------------------------------------------------------


def repeated(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


class Way:
    """Batches without end, for a while; measures images a second and busy cores."""

    def __init__(self, name: str, batches: Iterator[Any], size: Callable[[Any], int]) -> None:
        self.name, self.batches, self.size = name, batches, size
        self.rates: list[float] = []
        self.cores: list[float] = []
        self.busy: list[float] = []

    def run(
        self,
        seconds: float,
        cuda: bool,
        step: Callable[[Any], None] | None = None,
        most_per_second: float = math.inf,
    ) -> float:
        """Take batches for `seconds`, images not faster than asked for; return the seconds for one image."""
        if not cuda:
            wait_for_others()
        for batch in itertools.islice(self.batches, 3):
            if step is not None:
                step(batch)
        if cuda:
            torch.cuda.synchronize()
        began, spent, count = time.perf_counter(), cpu_seconds(), 0
        with gpu_busy(self.busy) if cuda else contextlib.nullcontext():
            while time.perf_counter() - began < seconds:
                batch = next(self.batches)
                count += self.size(batch)
                if step is not None:
                    step(batch)
                early = began + count / most_per_second - time.perf_counter()
                if early > 0:
                    time.sleep(early)
            if cuda:
                torch.cuda.synchronize()
        took = time.perf_counter() - began
        self.rates.append(count / took)
        self.cores.append((cpu_seconds() - spent) / took)
        return took / count

    def result(self) -> dict[str, Any]:
        rates = sorted(self.rates)
        middle = statistics.median(rates)
        return {
            "images_per_second": round(middle, 1),
            "spread": round((rates[-1] - rates[0]) / middle, 3),
            "busy_cores": round(statistics.median(self.cores), 2),
            "gpu_busy_percent": round(statistics.median(self.busy), 1) if self.busy else None,
            # What a busy machine leaves of the cores changes the rate, and this not.
            "images_per_core_second": round(
                statistics.median(
                    rate / max(cores, 1e-9)
                    for rate, cores in zip(self.rates, self.cores, strict=True)
                ),
                1,
            ),
        }


@contextlib.contextmanager
def gpu_busy(into: list[float]) -> Iterator[None]:
    """Append the share of time with a kernel on the GPU, in percent, as NVML samples it; nothing without it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:  # noqa: BLE001  a figure beside the others: its absence must not end the run
        yield
        return
    readings: list[int] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(0.1):
            readings.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        into.extend(readings[len(readings) // 3 :])  # NVML looks back for up to a second


def cpu_seconds() -> float:
    """CPU time of this process; children count when they have ended, so a DataLoader's workers are read apart."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


def wait_for_others() -> None:
    """Wait until the ways that are not measured now, such as a DataLoader's workers, have filled their queues."""
    busy = 1.0
    while busy > 0.1:
        spent = cpu_seconds()
        time.sleep(0.3)
        busy = (cpu_seconds() - spent) / 0.3


def decoder_way(folder: Path, batch: int, device: torch.device) -> Way | None:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    data = [
        torch.from_numpy(np.frombuffer(file.read_bytes(), np.uint8).copy())
        for file in sorted(folder.rglob("*.jpg"))[: 4 * batch]
    ]

    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, len(data) - batch + 1, batch):
                part = data[start : start + batch]
                yield decode_jpeg(part, mode=ImageReadMode.RGB, device=device)

    return Way("decoder", batches(), len)


def engines_way(
    folder: Path, batch: int, size: tuple[int, int], device: torch.device
) -> Way | None:
    engines = Engines(device, 3)
    if not engines.are_used:
        return None
    files = sorted(folder.rglob("*.jpg"))[: 4 * batch]
    data = [torch.from_numpy(np.frombuffer(f.read_bytes(), np.uint8).copy()) for f in files]
    sizes = np.tile(size, (batch, 1))

    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, len(data) - batch + 1, batch):
                made = engines.decode(data[start : start + batch], sizes, np.empty(0, np.int64))
                assert made is not None
                yield made

    return Way("engines", batches(), lambda made: len(made.starts))


def loader_way(name: str, store: Path, batch: int, device: torch.device, half: bool) -> Way:
    loader = Loader(store, batch, device, shuffle=True, augment=make_compose(half), drop_last=True)
    print(f"  {name}: {loader.reason}", flush=True)
    return Way(name, repeated(loader), lambda made: len(made["labels"]))


def dataloader_way(folder: Path, batch: int, workers: int, device: torch.device, half: bool) -> Way:
    cuda = device.type == "cuda"
    loader = torch.utils.data.DataLoader(
        Folder(folder), batch, shuffle=True, num_workers=workers, drop_last=True,
        persistent_workers=True, pin_memory=cuda,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for images, labels in repeated(loader):
            images = images.to(device, non_blocking=True)
            if half:
                images = images.to(torch.bfloat16, memory_format=torch.channels_last)
            yield {"images": images, "labels": labels.to(device, non_blocking=True)}

    return Way(f"dataloader, {workers} workers", batches(), lambda made: len(made["labels"]))


def dali_way(folder: Path, batch: int, device: torch.device) -> Way | None:
    try:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator
    except ImportError:
        return None

    @pipeline_def(batch_size=batch, num_threads=16, device_id=device.index or 0)
    def pipeline() -> Any:
        data, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(data, device="mixed")
        images = fn.resize(images, resize_x=224, resize_y=224)
        images = fn.color_twist(
            images,
            brightness=fn.random.uniform(range=(0.6, 1.4)),
            contrast=fn.random.uniform(range=(0.6, 1.4)),
            saturation=fn.random.uniform(range=(0.6, 1.4)),
        )
        images = fn.crop_mirror_normalize(
            images, dtype=types.FLOAT, mean=[255 * m for m in MEAN], std=[255 * s for s in STD],
            mirror=fn.random.coin_flip(),
        )  # fmt: skip
        return images, labels

    iterator = DALIGenericIterator(
        pipeline(), ["images", "labels"], reader_name="reader", auto_reset=True
    )

    def batches() -> Iterator[Any]:
        for made in repeated(iterator):
            yield made[0]

    return Way("dali", batches(), lambda made: len(made["labels"]))


# -- training --------------------------------------------------------------------------------------


def make_step(device: torch.device) -> Callable[[Any], None] | None:
    try:
        from torchvision.models import resnet18
    except ImportError:
        return None
    model = resnet18(num_classes=10).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(
                model(batch["images"]), batch["labels"].long().view(-1)
            )
        loss.backward()
        optimizer.step()

    return step


def train_on_high_priority(
    ways: list[Way], turns: int, seconds: float, step: Any
) -> dict[str, Any]:
    """Return rates of a hand-written loop on a stream of high priority, as shares of its held batch."""
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    for way in ways:
        way.rates, way.cores, way.busy = [], [], []
    with torch.cuda.stream(stream):
        side_by_side([lambda way=way: way.run(seconds, True, step) for way in ways], turns)
    torch.cuda.current_stream().wait_stream(stream)
    rows: dict[str, Any] = {way.name: way.result() for way in ways}
    most = rows["held batch"]["images_per_second"]
    rows["share_of_held_batch"] = round(rows["encoded"]["images_per_second"] / most, 3)
    return rows


def train_by_trainer(
    store: Path, batch: int, device: torch.device, seconds: float
) -> dict[str, Any] | None:
    """Return the rate of stoker's Trainer on encoded pictures, and of replays of its graph alone."""
    try:
        from torchvision.models import resnet18
    except ImportError:
        return None
    model = resnet18(num_classes=10).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    steps = max(24, round(seconds / 0.02))
    with open_store(store) as opened:
        drawn = np.ones(opened.num_samples)
    loader = Loader(
        store, batch, device, augment=make_compose(True), drop_last=True,
        weights=drawn, epoch_samples=steps * batch,
    )  # fmt: skip

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, labels.long().view(-1))

    settings = {"epochs": 3, "precision": "bf16", "read_every": 50}
    with loader:
        trainer = Trainer(model, loader, None, criterion, optimizer, None, settings, device)
        busy: list[float] = []
        with gpu_busy(busy):
            history = trainer.fit(quiet=True)
        captured = trainer._captured
        graph = None if captured is None else captured._graph
        rate = max(report.samples_per_second for report in history.epochs[1:])
        made: dict[str, Any] = {
            "images_per_second": round(rate, 1),
            "wait_share": round(history.epochs[-1].wait_share, 3),
            "gpu_busy_percent": round(statistics.median(busy), 1) if busy else None,
            "step": "eager" if captured is None else captured.reason,
        }
        if graph is not None:
            graph.replay()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                graph.replay()
            torch.cuda.synchronize()
            limit = steps * batch / (time.perf_counter() - began)
            made["replays_images_per_second"] = round(limit, 1)
            made["share_of_replays"] = round(rate / limit, 3)
    return made


# -- facts -----------------------------------------------------------------------------------------


def pixel_distance(folder: Path, device: torch.device) -> dict[str, float] | None:
    """Return how far nvJPEG's pixels are from Pillow's, in levels of 255."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:
        return None
    files = sorted(folder.rglob("*.jpg"))[:64]
    data = [torch.from_numpy(np.frombuffer(f.read_bytes(), np.uint8).copy()) for f in files]
    made = decode_jpeg(data, mode=ImageReadMode.RGB, device=device)
    away = []
    for file, image in zip(files, made, strict=True):
        with Image.open(file) as opened:
            wanted = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)
        away.append((image.cpu().int() - wanted.int()).abs().float())
    joined = torch.cat([each.flatten() for each in away])
    return {"mean": float(joined.mean()), "largest": float(joined.max())}


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    device = torch.device("cpu" if options.cpu else "cuda:0")
    cuda = not options.cpu
    workers = 2 if options.cpu else 16
    published = "pictures_cpu" if options.cpu else "pictures"
    result: dict[str, Any] = {}

    def in_turns(ways: list[Way], step: Callable[[Any], None] | None = None) -> None:
        slow = [way for way in ways if way.name.startswith("dataloader")]
        for some, turns in (
            ([way for way in ways if way not in slow], options.turns),
            (slow, options.peer_turns or options.turns),
        ):
            side_by_side(
                [lambda way=way: way.run(options.seconds, cuda, step) for way in some], turns
            )

    for kind, size in KINDS.items():
        name = kind.replace(" ", "-")
        folder, encoded, raw = work / name, work / f"{name}-encoded", work / f"{name}-raw"
        num_bytes = write_folder(folder, size, options.count)
        print(
            f"{kind}: {options.count} photographs of {num_bytes / options.count:,.0f} bytes",
            flush=True,
        )
        began = time.perf_counter()
        pack(ImagesSource((8, 8), 3, folder, keep_encoded=KeepEncoded()), encoded, PackOptions())
        packing = time.perf_counter() - began
        with open_store(encoded) as store:
            share = store.num_bytes / num_bytes
        distance = pixel_distance(folder, device) if cuda else None  # loads nvJPEG, too
        before = rss_bytes()
        ways: list[Way | None] = [loader_way("encoded", encoded, options.batch, device, cuda)]
        ways[0].run(1.0, cuda)  # type: ignore[union-attr]
        growth = rss_bytes() - before
        if kind == "256 px":
            pack(ImagesSource((256, 256), 3, folder), raw, PackOptions())
            ways.append(loader_way("raw", raw, options.batch, device, cuda))
        if not options.no_dataloader:
            ways.append(dataloader_way(folder, options.batch, workers, device, cuda))
        if cuda:
            ways += [
                decoder_way(folder, options.batch, device),
                engines_way(folder, options.batch, size, device),
                dali_way(folder, options.batch, device),
            ]
        found = [way for way in ways if way is not None]
        in_turns(found)
        rows = {way.name: way.result() for way in found}
        for way, row in rows.items():
            print(
                f"  {way:24s} {row['images_per_second']:>10,.0f} images/s, {row['busy_cores']:.1f} cores",
                flush=True,
            )
        result[kind] = {
            "loading": rows,
            "jpeg_bytes": num_bytes,
            "store_share_of_jpeg_bytes": round(share, 4),
            "packed_per_second": round(options.count / packing, 1),
            "rss_growth_bytes": growth,
            "nvjpeg_from_pillow": distance,
        }
        ours = rows["encoded"]["images_per_second"]
        result[kind]["ratios"] = {
            name: round(ours / row["images_per_second"], 3)
            for name, row in rows.items()
            if name != "encoded"
        }
        each = rows["encoded"]["images_per_core_second"]
        result[kind]["ratios_per_core_second"] = {
            name: round(each / row["images_per_core_second"], 3)
            for name, row in rows.items()
            if name != "encoded"
        }
        print(f"  ratios: {result[kind]['ratios']}, by core-second: ", end="")
        print(result[kind]["ratios_per_core_second"], flush=True)
        if cuda and "decoder" in rows:
            paced = Way("encoded", found[0].batches, found[0].size)
            paced.run(options.seconds, cuda, None, rows["decoder"]["images_per_second"])
            result[kind]["at_the_decoders_rate"] = paced.result()
            print(f"  at the decoder's rate: {paced.result()}", flush=True)
        step = make_step(device) if cuda and not options.no_training else None
        if step is not None:
            held = next(found[0].batches)
            training = [Way("held batch", itertools.repeat(held), lambda made: len(made["labels"]))]
            training += [way for way in found if way.name not in ("decoder", "engines")]
            for way in training:
                way.rates, way.cores, way.busy = [], [], []
            in_turns(training, step)
            rows = result[kind]["training"] = {way.name: way.result() for way in training}
            most = rows["held batch"]["images_per_second"]
            result[kind]["training_share_of_held_batch"] = {
                name: round(row["images_per_second"] / most, 3) for name, row in rows.items()
            }
            print(f"  training: {rows}", flush=True)
            pair = [way for way in training if way.name in ("held batch", "encoded")]
            found_high = train_on_high_priority(pair, options.turns, options.seconds, step)
            result[kind]["training_on_high_priority"] = found_high
            print(f"  on a stream of high priority: {found_high}", flush=True)
            publish(published, result)
            trained = train_by_trainer(encoded, options.batch, device, options.seconds)
            result[kind]["training_by_trainer"] = trained
            print(f"  by the Trainer: {trained}", flush=True)
        publish(published, result)  # after each size: a run that is cut off leaves one
        del ways, found
    return result


# -- packing ---------------------------------------------------------------------------------------


def write_photographs(folder: Path, count: int, photographs: Path | None) -> int:
    """Write `count` JPEG files of which no two are equal; return their bytes.

    Of up to 2,000 pictures: parts of the photographs in a tar file at 341 x 256 and quality 90, or drawn ones. Each is
    used again with a comment in its header.
    """
    rng = np.random.default_rng(0)
    distinct = min(count, 2000 if photographs else DISTINCT)
    if photographs is None:
        made = [photograph(256, 341, seed) for seed in range(distinct)]
    else:
        with tarfile.open(photographs) as tar:
            files = [tar.extractfile(each) for each in tar if each.name.lower().endswith(".jpg")]
            images = [Image.open(file).convert("RGB") for file in files if file is not None]
        made = []
        for number in range(distinct):
            image = images[number % len(images)]
            width = int(image.width * rng.uniform(0.7, 1.0))
            height = min(image.height, width * 3 // 4)
            left = int(rng.integers(0, image.width - width + 1))
            top = int(rng.integers(0, image.height - height + 1))
            file = io.BytesIO()
            image.crop((left, top, left + width, top + height)).resize((341, 256)).save(
                file, "JPEG", quality=90
            )
            made.append(file.getvalue())
    num_bytes = 0
    for number in range(count):
        data = made[number % distinct]
        note = f"{number:08}".encode()
        data = data[:2] + b"\xff\xfe" + (len(note) + 2).to_bytes(2, "big") + note + data[2:]
        home = folder / f"class-{number % 10}"
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{number:06}.jpg").write_bytes(data)
        num_bytes += len(data)
    return num_bytes


def forget_files() -> bool:
    """Empty the page cache; False where this process may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def measure_packing(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    folder = work / "photographs"
    num_bytes = write_photographs(folder, options.pack, options.photographs)
    files = sorted(folder.rglob("*.jpg"))
    cores = len(os.sched_getaffinity(0))

    def read_all() -> None:
        with ThreadPoolExecutor(cores) as pool:
            assert sum(pool.map(lambda file: len(file.read_bytes()), files)) == num_bytes

    def pack_all() -> None:
        shutil.rmtree(work / "store", ignore_errors=True)
        source = ImagesSource((8, 8), 3, folder, keep_encoded=KeepEncoded())
        pack(source, work / "store", PackOptions())

    def decode_some() -> None:
        for file in files[:: max(1, len(files) // 500)]:
            image = Image.open(io.BytesIO(file.read_bytes()))
            image.draft(None, (image.width // 8, image.height // 8))
            image.load()

    result: dict[str, Any] = {"photographs": len(files), "jpeg_bytes": num_bytes, "cores": cores}
    for name, run in (("read", read_all), ("pack", pack_all)):
        for state in ("disk", "memory"):
            if state == "disk" and not forget_files():
                result[f"{name}_from_disk"] = None
                continue
            if state == "memory":
                read_all()
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            before = cpu_seconds() + children.ru_utime + children.ru_stime
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent = cpu_seconds() + children.ru_utime + children.ru_stime - before
            result[f"{name}_from_{state}"] = {
                "seconds": round(took, 2),
                "bytes_per_second": round(num_bytes / took),
                "busy_cores": round(spent / took, 2),
                "bytes_per_core_second": round(num_bytes / spent),
            }
            print(f"  {name} from {state}: {result[f'{name}_from_{state}']}", flush=True)
    began = time.process_time()
    decode_some()
    some = files[:: max(1, len(files) // 500)]
    spent = time.process_time() - began
    result["decode_bytes_per_core_second"] = round(sum(f.stat().st_size for f in some) / spent)
    with open_store(work / "store") as store:
        result["store_share_of_jpeg_bytes"] = round(store.num_bytes / num_bytes, 4)
    publish("pictures_pack", result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="two workers, no GPU")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peer-turns", type=int, help="of the DataLoader [default: as --turns]")
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--no-dataloader", action="store_true")
    parser.add_argument(
        "--work", type=Path, help="folder for pictures and stores [default: a temporary one]"
    )
    parser.add_argument("--pack", type=int, metavar="COUNT", help="measure packing, nothing else")
    parser.add_argument("--photographs", type=Path, metavar="TAR", help="of JPEG files for --pack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        (measure_packing if options.pack else measure)(options, Path(folder))


if __name__ == "__main__":
    main()
