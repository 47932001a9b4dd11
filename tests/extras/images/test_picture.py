"""Images from wherever a row has them, and every one that is refused."""

import base64
import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import GifImagePlugin, Image

from grpo_pl.data.image_limits import ImageLimits
from grpo_pl.extras.images.picture import Picture, Recent, read_picture

LIMITS = ImageLimits(megabytes=0.1, megapixels=0.01)
RED, GREEN, BLUE, BLACK, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (0, 0, 0), (255, 255, 255)


def _image(rows: list[list[tuple[int, int, int]]]) -> Image.Image:
    return Image.frombytes("RGB", (len(rows[0]), len(rows)), bytes(c for row in rows for color in row for c in color))


TWO = _image([[RED, GREEN, BLUE], [BLACK, WHITE, RED]])
PIXELS = bytes([*RED, *GREEN, *BLUE, *BLACK, *WHITE, *RED])
DIGEST = hashlib.sha256(bytes([0, 0, 0, 3, 0, 0, 0, 2]) + PIXELS).hexdigest()


def _file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _read(given: Any, folder: Path | None = None, limits: ImageLimits = LIMITS) -> Picture:
    return read_picture(given, folder=folder, limits=limits, where="row 3, image 1")


def _colors(picture: Picture) -> list[tuple[int, ...]]:
    data = picture.pixels()
    return [tuple(data[i : i + 3]) for i in range(0, len(data), 3)]


def test_one_image_is_equal_from_everywhere(tmp_path: Path) -> None:
    png = _file(TWO)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(png)
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    stored = [{"bytes": png, "path": "elsewhere.png"}, {"bytes": None, "path": str(tmp_path / "in" / "a.png")}]
    given = ["in/a.png", Path("in/a.png"), "in/../in/a.png", png, bytearray(png), _file(TWO, "BMP"), TWO, url, *stored]
    for one in [*given, _file(TWO, "TIFF"), _file(TWO, "WEBP", lossless=True), _file(TWO, "GIF")]:
        picture = _read(one, tmp_path)
        assert (picture.sha256, picture.width, picture.height, picture.pixels()) == (DIGEST, 3, 2, PIXELS)
        assert _read(picture) is picture
        assert _read(picture.data_url()) == picture
    assert picture.pil().mode == "RGB" and picture.pil().size == (3, 2)


def test_images_of_equal_pixels_and_other_sizes_are_different() -> None:
    assert _read(Image.new("RGB", (2, 3))) != _read(Image.new("RGB", (3, 2)))
    with pytest.raises(ValueError, match="2x2"):
        Picture.of(bytes(9), 2, 2)


def test_what_was_read_last_is_kept_within_a_size() -> None:
    files = [_file(Image.new("RGB", (4, 4), (shade, 0, 0))) for shade in range(3)]
    one = len(_read(files[0]).png)
    recent = Recent(2.5 * one)
    first, second = (recent.read(file, LIMITS, "") for file in files[:2])
    assert recent.read(files[0], LIMITS, "") is first
    recent.read(files[2], LIMITS, "")  # in the place of the second, which was asked for before the first
    assert recent.read(files[0], LIMITS, "") is first and recent.size <= recent.most
    again = recent.read(files[1], LIMITS, "")
    assert again == second and again is not second
    with pytest.raises(ValueError, match="pixels"):
        recent.read(files[0], ImageLimits(megapixels=1e-6), "")
    assert recent.size <= recent.most


def test_metadata_are_gone_from_what_is_kept() -> None:
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    for kind in ("JPEG", "PNG", "WEBP"):
        assert b"secret" in _file(TWO, kind, exif=exif)
        assert b"secret" not in _read(_file(TWO, kind, exif=exif)).png


# EXIF's eight orientations of one image: (its pixels row by row, width) as a viewer shows the 3x2 image
SHOWN = {
    1: ("RGB0WR", 3),
    2: ("BGRRW0", 3),
    3: ("RW0BGR", 3),
    4: ("0WRRGB", 3),
    5: ("R0GWBR", 2),
    6: ("0RWGRB", 2),
    7: ("RBWG0R", 2),
    8: ("BRGWR0", 2),
}


@pytest.mark.parametrize("orientation", SHOWN)
def test_the_orientation_is_applied(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    names = {RED: "R", GREEN: "G", BLUE: "B", BLACK: "0", WHITE: "W"}
    picture = _read(_file(TWO, exif=exif))
    assert ("".join(names[c] for c in _colors(picture)), picture.width) == SHOWN[orientation]  # type: ignore[index]


def _palette(transparent: bool) -> bytes:
    image = TWO.quantize(5)
    return _file(image, transparency=image.getpixel((0, 1))) if transparent else _file(image)


def _grey_of_16_bits() -> bytes:
    rows = b"".join(
        b"\0" + b"".join(value.to_bytes(2, "big") for value in row) for row in [[0, 255, 256], [0x8000] * 3]
    )
    return _png(3, 2, rows, bits=16, kind=0)


def _png(width: int, height: int, rows: bytes, *, bits: int = 8, kind: int = 2, data: bytes | None = None) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    content = zlib.compress(rows) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (_palette(False), [RED, GREEN, BLUE, BLACK, WHITE, RED]),
        (_palette(True), [RED, GREEN, BLUE, WHITE, WHITE, RED]),
        (_grey_of_16_bits(), [BLACK, BLACK, (1, 1, 1), (128,) * 3, (128,) * 3, (128,) * 3]),
        (Image.new("L", (1, 1), 7), [(7, 7, 7)]),
        (Image.new("1", (1, 1), 1), [WHITE]),
        (Image.new("LA", (1, 1), (0, 0)), [WHITE]),
        (Image.new("RGBA", (2, 1), (255, 0, 0, 0)), [WHITE, WHITE]),
        (Image.new("RGBA", (1, 1), (255, 0, 0, 255)), [RED]),
        (_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), [RED] * 64),
        (Image.new("CMYK", (1, 1), (0, 0, 0, 255)), [BLACK]),
        (Image.new("HSV", (1, 1), (0, 255, 255)), [RED]),
    ],
)
def test_other_forms_of_pixels_become_rgb(given: Any, shown: list[tuple[int, int, int]]) -> None:
    assert _colors(_read(given)) == shown


def test_cmyk_in_a_jpeg_becomes_rgb() -> None:
    (color,) = set(_colors(_read(_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))))
    assert all(abs(a - b) < 8 for a, b in zip(color, RED, strict=True))


def test_16_bits_of_three_channels_keep_the_upper_8() -> None:
    picture = _read(_png(1, 1, b"\0" + bytes([255, 255, 128, 255, 0, 255]), bits=16))
    assert _colors(picture) == [(255, 128, 0)]


def test_the_first_picture_of_a_photograph_is_taken() -> None:
    picture = _read(
        _file(Image.new("RGB", (8, 8), WHITE), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    )
    assert set(_colors(picture)) == {WHITE}


def _moving(kind: str) -> bytes:
    return _file(Image.new("RGB", (4, 4), RED), kind, save_all=True, append_images=[Image.new("RGB", (4, 4), BLUE)])


GOOD = _file(Image.effect_noise((60, 60), 90).convert("RGB"))
REFUSED: dict[str, tuple[Any, str]] = {
    "remote": ("https://example.org/a.png", "https://example.org/a.png"),
    "remote, another scheme": ("S3://bucket/a.png", "bucket"),
    "file URL": ("file:///etc/passwd", "file:///etc/passwd"),
    "remote in a stored image": ({"bytes": None, "path": "http://127.0.0.1/a.png"}, "http://127.0.0.1/a.png"),
    "not there": ("none.png", "none.png"),
    "a folder": (".", "'.'"),
    "outside": ("../out.png", "data.source.images.folder"),
    "outside, absolute": ("/etc/passwd", "/etc/passwd"),
    "outside by a link": ("link.png", "link.png"),
    "outside, stored": ({"bytes": None, "path": "/etc/passwd"}, "/etc/passwd"),
    "a pipe": ("pipe.png", "pipe.png"),
    "NUL": ("a\0.png", "a\\x00.png"),
    "a circle of links": ("circle.png", "circle.png"),
    "an empty file": ("empty.png", "empty.png"),
    "empty": (b"", "empty"),
    "a text": (b"hello world", "PNG"),
    "truncated": (GOOD[:-2000], "truncated"),
    "truncated JPEG": (_file(Image.effect_noise((60, 60), 90).convert("RGB"), "JPEG")[:900], "truncated"),
    "truncated header": (GOOD[:20], "PNG"),
    "damaged": (_png(2, 2, b"", data=b"no zlib"), "row 3"),
    "no rows": (_png(0, 5, b""), "row 3"),
    "0x0": (Image.new("RGB", (0, 0)), "0x0"),
    "0x5": (Image.new("RGB", (0, 5)), "0x5"),
    "bomb by its header": (_png(60000, 60000, b""), "0.01"),
    "many pixels": (_png(200, 51, b""), "200x51"),
    "many pixels, in memory": (Image.new("RGB", (200, 51)), "200x51"),
    "many bytes": (_file(Image.effect_noise((99, 99), 90), "BMP") + bytes(100_000), "0.1"),
    "many bytes of a file": ("large.png", "0.1"),
    "many bytes of a text": ("data:image/png;base64," + "A" * 140_000, "0.1"),
    "GIF that moves": (_moving("GIF"), "frames"),
    "PNG that moves": (_moving("PNG"), "frames"),
    "WEBP that moves": (_moving("WEBP"), "frames"),
    "pages": (_moving("TIFF"), "frames"),
    "32 bits": (Image.new("I", (1, 1)), "mode I"),
    "floats": (_file(Image.new("F", (1, 1)), "TIFF"), "mode F"),
    "PostScript": (_file(Image.new("RGB", (1, 1)), "EPS"), "PNG"),
    "a data URL of a text": ("data:text/html;base64,AAAA", "text/html"),
    "a data URL without base64": ("data:image/svg+xml,<svg/>", "svg"),
    "a data URL that is damaged": ("data:image/png;base64,@@@", "base64"),
    "null": (None, "null"),
    "both null": ({"bytes": None, "path": None}, "null"),
    "a number": (7, "'7', int"),
    "another mapping": ({"url": "a"}, "dict"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named_in_one_line(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "out.png").write_bytes(_file(TWO))
    (folder / "link.png").symlink_to(tmp_path / "out.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "empty.png").touch()
    (folder / "large.png").write_bytes(_file(TWO) + bytes(100_000))
    os.mkfifo(folder / "pipe.png")
    given, named = REFUSED[case]
    with pytest.raises(ValueError) as error:
        _read(given, folder)
    told = str(error.value)
    assert told.startswith("row 3, image 1") and named in told and "\n" not in told and len(told) < 400


def test_without_a_folder_no_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(_file(TWO))
    for given in ("a.png", str(tmp_path / "a.png"), {"bytes": None, "path": "a.png"}):
        with pytest.raises(ValueError, match=r"a\.png"):
            _read(given)


def test_a_file_of_many_frames_is_refused_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: Image.Image) -> int:
        raise AssertionError("each was looked at")

    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", property(counted))
    frame = b"\x2c" + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    head = b"GIF89a" + struct.pack("<2H3B", 1, 1, 0x80, 0, 0) + bytes(6)
    with pytest.raises(ValueError, match="several frames"):
        _read(head + frame * 1000 + b";", limits=ImageLimits())


def test_damage_anywhere_is_a_refusal_and_never_another_error() -> None:
    """Every format, cut and changed at many places: read, or refused in one line."""
    limits = ImageLimits(megapixels=0.1)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = _file(Image.effect_noise((24, 24), 90).convert("RGB"), kind)
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            changed = bytearray(whole)
            changed[place] ^= 0xFF
            for content in (whole[:place], bytes(changed)):
                try:
                    picture = _read(content, limits=limits)
                except ValueError as error:
                    assert str(error).startswith("row 3, image 1") and "\n" not in str(error)
                else:
                    assert len(picture.pixels()) == 3 * picture.width * picture.height


@pytest.mark.parametrize(
    "wrong", [{"megabytes": 0}, {"megapixels": -1.0}, {"megapixels": float("inf")}, {"per_prompt": 0}]
)
def test_limits_that_allow_nothing_or_anything_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ImageLimits(**wrong)
