"""A baseline JPEG decoder that stops at the planes: what the GPU's engines give before colours become RGB.

For tests, on pictures of some thousand pixels. It follows the standard (ITU-T T.81) and rounds once, at the end.
"""

from __future__ import annotations

import numpy as np

_ZIGZAG = sorted(
    range(64), key=lambda n: (n // 8 + n % 8, n % 8 if (n // 8 + n % 8) % 2 == 0 else n // 8)
)
_COSINES = np.array(
    [
        [
            np.cos((2 * x + 1) * u * np.pi / 16) * (np.sqrt(0.125) if u == 0 else 0.5)
            for u in range(8)
        ]
        for x in range(8)
    ]
)


def read_planes(data: bytes) -> tuple[tuple[int, int], list[tuple[int, int]], list[np.ndarray]]:
    """Return (height, width), the sampling (across, down) of each component, and its plane."""
    tables, codes, parts, at, restart = {}, {}, [], 2, 0
    size = (0, 0)
    while True:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        body = data[at + 4 : at + 2 + length]
        at += 2 + length
        if marker == 0xDB:
            while body:
                assert body[0] < 16, "8-bit tables"
                tables[body[0]] = np.frombuffer(body[1:65], np.uint8).astype(np.float64)
                body = body[65:]
        elif marker == 0xC4:
            while body:
                counts, total = body[1:17], sum(body[1:17])
                codes[body[0]] = _codes(counts, body[17 : 17 + total])
                body = body[17 + total :]
        elif marker == 0xC0:
            size = (int.from_bytes(body[1:3], "big"), int.from_bytes(body[3:5], "big"))
            parts = [tuple(body[6 + 3 * n : 9 + 3 * n]) for n in range(body[5])]
        elif marker == 0xDD:
            restart = int.from_bytes(body[:2], "big")
        elif marker == 0xDA:
            assert not restart
            chosen = {body[1 + 2 * n]: body[2 + 2 * n] for n in range(body[0])}
            return size, *_scan(data[at:], size, parts, chosen, tables, codes)


def _codes(counts: bytes, values: bytes) -> dict[tuple[int, int], int]:
    found, code, used = {}, 0, 0
    for length, count in enumerate(counts, 1):
        for _ in range(count):
            found[length, code] = values[used]
            code, used = code + 1, used + 1
        code <<= 1
    return found


class _Bits:
    def __init__(self, data: bytes) -> None:
        text = data[: data.index(b"\xff\xd9")].replace(b"\xff\x00", b"\xff")
        self.bits = np.unpackbits(np.frombuffer(text, np.uint8)).tolist()
        self.at = 0

    def take(self, count: int) -> int:
        value = 0
        for bit in self.bits[self.at : self.at + count]:
            value = value * 2 + bit
        self.at += count
        return value

    def symbol(self, codes: dict[tuple[int, int], int]) -> int:
        code = 0
        for length in range(1, 17):
            code = code * 2 + self.bits[self.at]
            self.at += 1
            if (length, code) in codes:
                return codes[length, code]
        raise ValueError("no such code")

    def number(self, size: int) -> int:
        value = self.take(size)
        return value if not size or value >> (size - 1) else value - (1 << size) + 1


def _scan(data, size, parts, chosen, tables, codes):
    bits = _Bits(data)
    samplings = [(part[1] >> 4, part[1] & 15) for part in parts]
    if len(parts) == 1:
        samplings = [(1, 1)]
    most_x, most_y = (max(each[axis] for each in samplings) for axis in (0, 1))
    across, down = -(-size[1] // (8 * most_x)), -(-size[0] // (8 * most_y))
    planes = [np.zeros((down * 8 * y, across * 8 * x)) for x, y in samplings]
    before = [0] * len(parts)
    for unit in range(across * down):
        for number, (name, _, quantised) in enumerate(parts):
            x_times, y_times = samplings[number]
            dc, ac = codes[chosen[name] >> 4], codes[16 | chosen[name] & 15]
            for block in range(x_times * y_times):
                levels = np.zeros(64)
                before[number] += bits.number(bits.symbol(dc))
                levels[0], place = before[number], 1
                while place < 64:
                    symbol = bits.symbol(ac)
                    if symbol == 0:
                        break
                    place += symbol >> 4
                    if symbol & 15:
                        levels[_ZIGZAG[place]] = bits.number(symbol & 15) * tables[quantised][place]
                    place += 1
                levels[0] *= tables[quantised][0]
                y = (unit // across * y_times + block // x_times) * 8
                x = (unit % across * x_times + block % x_times) * 8
                planes[number][y : y + 8, x : x + 8] = _COSINES @ levels.reshape(8, 8) @ _COSINES.T
    made = []
    for plane, (x, y) in zip(planes, samplings, strict=True):
        height, width = -(-size[0] * y // most_y), -(-size[1] * x // most_x)
        made.append(np.rint(plane + 128).clip(0, 255).astype(np.uint8)[:height, :width])
    return samplings, made
