"""Small pictures in all formats, and damaged ones."""

from __future__ import annotations

import random
from io import BytesIO

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def pixels(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Smooth colours with noise, [height, width, channels] uint8."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, channels)).astype(np.uint8)
    mode = {3: "RGB", 4: "RGBA"}[channels]
    smooth = Image.fromarray(corners, mode).resize((width, height), Image.Resampling.BILINEAR)
    noise = rng.integers(-20, 21, (height, width, channels))
    return np.clip(np.asarray(smooth).astype(int) + noise, 0, 255).astype(np.uint8)


def picture(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Returns such a picture in one of Pillow's modes."""
    channels = 4 if mode in ("RGBA", "LA", "PA") else 3
    return Image.fromarray(pixels(height, width, seed, channels)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Returns the picture as a file."""
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def damaged(data: bytes, seed: int) -> bytes:
    """Returns the file with a few bytes changed, added, dropped or moved, or cut short."""
    rng = random.Random(seed)
    own = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place, count = rng.randrange(len(own)), rng.randrange(1, 9)
        match rng.randrange(6):
            case 0:
                own[place] ^= 1 << rng.randrange(8)
            case 1:
                own[place : place + count] = rng.randbytes(count)
            case 2:
                del own[place : place + count]
            case 3:
                own[place:place] = rng.randbytes(count)
            case 4:
                own[place : place + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
            case _:
                del own[max(place, 1) :]
    return bytes(own)
