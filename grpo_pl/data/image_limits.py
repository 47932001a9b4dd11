"""``ImageLimits``: how large the images of a problem may be, and where their files may lie."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_pl.functional.argument_checks import check_at_least, check_positive

IMAGE_COLUMNS = ("image", "images")
"""Columns of the images of a row that are not in its messages."""


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What is refused before an image is decoded, and how many a problem may have."""

    megabytes: float = 10.0
    """Most megabytes (10⁶ bytes) of one file or text of an image."""
    megapixels: float = 16.0
    """Most million pixels of one image, by what its header says."""
    per_prompt: int = 8
    """Most images of one problem."""
    folder: str | None = None
    """Folder that the paths of images are relative to and that no file may lie outside of; null is the folder of the
    data file."""

    def __post_init__(self) -> None:
        at = "data.source.images"
        check_positive(**{f"{at}.megabytes": self.megabytes, f"{at}.megapixels": self.megapixels})
        check_at_least(1, at, per_prompt=self.per_prompt)

    @property
    def numbers(self) -> dict[str, float]:
        """The limits by the names of their fields."""
        return {"megabytes": self.megabytes, "megapixels": self.megapixels, "per_prompt": self.per_prompt}

    @property
    def elsewhere(self) -> str:
        """What messages say of a file that lies outside of its folder."""
        return "move it there, or set data.source.images.folder"

    def setting(self, name: str) -> str:
        """What messages call a limit, by the name of its field."""
        return f"data.source.images.{name}"


@dataclass(frozen=True, kw_only=True)
class OptionLimits(ImageLimits):
    """The default limits of the images of a file that an option of a command names; nothing sets others."""

    option: str
    """Such as ``--images``."""

    @property
    def elsewhere(self) -> str:
        return "move it there, beside the file of the rows"

    def setting(self, name: str) -> str:
        return f"the limit of {self.option}"
