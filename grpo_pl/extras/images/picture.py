"""``Picture``: an image as a policy sees it, and reading one from wherever a row has it."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_pl.data.image_limits import ImageLimits

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is read. Pillow knows more, some of which run other programs."""
THUMBNAIL = 192
"""Most pixels of a side of a thumbnail."""
_DEEP = "I;16"
"""Modes of one channel of 16 bits begin so."""
_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV"}
"""Modes of at most 8 bits a channel that have a way to RGB."""
_DATA_URL = re.compile(r"data:image/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/", re.IGNORECASE)
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image of three channels of 8 bits, turned as its EXIF data say, without any metadata.

    Two are equal if their pixels are, whatever files they came from.
    """

    png: bytes = field(repr=False, compare=False)
    """The image as a PNG."""
    sha256: str
    """Digest of width and height, four bytes each, most significant first, and then the pixels: row by row, red, green
    and blue."""
    width: int
    """Pixels of a row."""
    height: int
    """Rows."""

    @classmethod
    def of(cls, pixels: bytes, width: int, height: int) -> Picture:
        """The picture of these pixels: row by row, red, green and blue, a byte each.

        Raises:
            ValueError: there are no pixels, or not 3 · ``width`` · ``height`` bytes.
        """
        if min(width, height) < 1 or len(pixels) != 3 * width * height:
            raise ValueError(f"{len(pixels)} bytes are not the pixels of an image of {width}x{height}.")
        file = io.BytesIO()
        pillow().frombytes("RGB", (width, height), pixels).save(file, "PNG", compress_level=1)
        sizes = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        return cls(png=file.getvalue(), sha256=hashlib.sha256(sizes + pixels).hexdigest(), width=width, height=height)

    def pil(self) -> Image.Image:
        """The image as Pillow's, of mode RGB."""
        image = pillow().open(io.BytesIO(self.png), formats=("PNG",))
        image.load()
        return image

    def pixels(self) -> bytes:
        """Row by row, red, green and blue, a byte each."""
        return self.pil().tobytes()

    def thumbnail(self) -> bytes:
        """A PNG of the image, made smaller where one side has more than ``THUMBNAIL`` pixels."""
        if max(self.width, self.height) <= THUMBNAIL:
            return self.png
        small, file = self.pil(), io.BytesIO()
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(file, "PNG")
        return file.getvalue()

    def data_url(self) -> str:
        """The image as a ``data:`` URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


def read_picture(
    given: Any, *, folder: Path | str | None, limits: ImageLimits, where: str, keep: bool = True
) -> Picture:
    """Reads one image.

    A palette, CMYK and grey become RGB; of 16 bits a channel the upper 8 stay; what is transparent lies on white; the
    orientation in EXIF data is applied. Of a photograph with further pictures in its file (MPO) the first is taken.

    Args:
        given: path of a file relative to ``folder``; a ``data:`` URL; the bytes of a file; an image of Pillow; a
            mapping of ``bytes`` and ``path``, as ``datasets.Image`` stores one; or a `Picture`.
        folder: no file outside of it is opened; None opens none at all.
        limits: what is refused before anything is decoded.
        where: begins every message, such as ``row 3 of 'train.jsonl', image 1``.
        keep: keep it for the next time that it is read.

    Raises:
        ValueError: one line: no image that can be read, one beyond the limits, an animation, more than 8 bits a channel
            in a form that does not tell their range, a remote URL, or a file outside of ``folder``.
    """
    if isinstance(given, Picture):
        return given
    if isinstance(given, Mapping) and given.keys() <= {"bytes", "path"}:
        given = given.get("bytes") if given.get("bytes") is not None else given.get("path")
    if isinstance(given, Path):
        given = str(given)
    if isinstance(given, str):
        given, where = _content(given, folder, limits, where)
    if isinstance(given, bytes | bytearray | memoryview):
        return (_RECENT.read if keep else _decoded)(bytes(given), limits, where)
    image_class = pillow().Image
    if isinstance(given, image_class):
        return _normal(given, limits, where)
    shown = "null" if given is None else f"{str(given)[:_SHOWN]!r}, {type(given).__name__}"
    raise ValueError(f"{where} is {shown}: give a path, bytes, an image of Pillow or a data: URL.")


class Recent:
    """The pictures that were read last, by what their files hold: the checks before a run, and each epoch, read the
    same ones again, and to encode a PNG takes several times as long as to decode a photograph.

    Args:
        most: bytes of all their PNG files together.
    """

    def __init__(self, most: float) -> None:
        self.most, self.size = most, 0
        self._pictures: OrderedDict[tuple[bytes, float, float], Picture] = OrderedDict()

    def read(self, content: bytes, limits: ImageLimits, where: str) -> Picture:
        """The picture that a file holds; see `read_picture`."""
        key = (hashlib.sha256(content).digest(), limits.megabytes, limits.megapixels)
        known = self._pictures.pop(key, None)
        picture = known or _decoded(content, limits, where)
        self.size += 0 if known else len(picture.png)
        self._pictures[key] = picture  # as the last one
        while self.size > self.most and self._pictures:
            self.size -= len(self._pictures.popitem(last=False)[1].png)
        return picture


_RECENT = Recent(256e6)


def pillow() -> Any:
    """The module ``PIL.Image``.

    Raises:
        ValueError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need Pillow: pip install 'grpo_pl[images]'.") from error
    return Image


def _content(given: str, folder: Path | str | None, limits: ImageLimits, where: str) -> tuple[bytes, str]:
    """The bytes that a text names or holds, and what they are called in messages."""
    if given[:5].lower() == "data:":
        head = _DATA_URL.match(given)
        if head is None:
            raise ValueError(f"{where}: {given[:_SHOWN]!r} is no data: URL of an image: write data:image/png;base64,….")
        _check_size(3 * (len(given) - head.end()) // 4 - 2, limits, where)  # two at most are padding
        try:
            return base64.b64decode(given[head.end() :], validate=True), where
        except binascii.Error as error:
            raise ValueError(f"{where}: its data: URL is not in base64: {error}.") from error
    if _URL.match(given):
        raise ValueError(f"{where}: {given[:_SHOWN]!r} is a URL, and nothing is fetched: give the image itself.")
    if folder is None:
        raise ValueError(f"{where}: {given[:200]!r} is a path, and no file is opened here: give its bytes.")
    where = f"{where}, file {given[:200]!r}"
    try:
        home = Path(folder).expanduser().resolve()
        try:
            file = (home / given).resolve()
        except (ValueError, RuntimeError) as error:  # a character NUL, or links in a circle
            raise ValueError(f"{where} is no name of a file: {error}.") from error
        if not file.is_relative_to(home):
            raise ValueError(f"{where} lies outside of {str(home)!r}: {limits.elsewhere}.")
        if not file.is_file():
            raise ValueError(f"{where}: there is no such file in {str(home)!r}.")
        with file.open("rb") as opened:
            return opened.read(int(limits.megabytes * 1e6) + 1), where
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}.") from error


def _check_size(size: int, limits: ImageLimits, where: str) -> None:
    if size > limits.megabytes * 1e6:
        raise ValueError(f"{where} has more than {limits.megabytes:g} megabytes: {limits.setting('megabytes')}.")


def _decoded(content: bytes, limits: ImageLimits, where: str) -> Picture:
    _check_size(len(content), limits, where)
    if not content:
        raise ValueError(f"{where} is empty.")
    library = pillow()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # of many pixels, which `limits` decide on, and of metadata
        try:
            image = library.open(io.BytesIO(content), formats=FORMATS)
        except library.DecompressionBombError as error:
            raise ValueError(f"{where}: {_too_many(limits)}") from error
        except Exception as error:  # of whatever kind: the bytes may be anything
            known = ", ".join(FORMATS)
            raise ValueError(f"{where} is no image that can be read; these can be: {known}.") from error
        with image:
            return _normal(image, limits, where)


def _too_many(limits: ImageLimits) -> str:
    return f"it has more than {limits.megapixels:g} million pixels: {limits.setting('megapixels')}."


def _normal(image: Image.Image, limits: ImageLimits, where: str) -> Picture:
    from PIL import ImageOps

    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"{where} has {width}x{height} pixels.")
    if width * height > limits.megapixels * 1e6:
        raise ValueError(f"{where}: {width}x{height}, {_too_many(limits)}")
    deep = image.mode.startswith(_DEEP) and "transparency" not in image.info
    if image.mode not in _MODES and not deep:
        raise ValueError(f"{where} has pixels of Pillow's mode {image.mode}: save it as RGB with 8 bits a channel.")
    try:
        moves = image.format != "MPO" and getattr(image, "is_animated", False)  # counting them may take seconds
        image.load()
        upright = ImageOps.exif_transpose(image)
        if deep:
            upright = upright.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        if upright.has_transparency_data:
            seen = upright.convert("RGBA")
            upright = pillow().alpha_composite(pillow().new("RGBA", seen.size, "white"), seen)
        rgb = upright.convert("RGB")
        pixels = rgb.tobytes()
    except Exception as error:  # of whatever kind: the bytes may be anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{where} cannot be decoded: {reason}.") from error
    if moves:
        raise ValueError(f"{where} has several frames: give one of them as an image.")
    return Picture.of(pixels, *rgb.size)
