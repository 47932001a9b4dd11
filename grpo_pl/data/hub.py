"""Data sets of the hub, of which text files are read as they are written, with and without network."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from grpo_pl.files.cache import cache_root
from grpo_pl.files.hub import offline_without_network
from grpo_pl.files.writing import best_effort, staged

if TYPE_CHECKING:
    from datasets import DatasetBuilder

TEXT_BUILDERS = ("csv", "json")
"""Builders of ``datasets`` that guess types."""
_TEXT_FILES = ["README.md", "*.csv*", "*.tsv*", "*.json*", "*.ndjson*"]


def hub_builder(path: str, subset: str | None) -> DatasetBuilder:
    """The builder of a data set of the hub. Where the hub cannot be asked, it is one for the text files in the hub's
    cache, at the commit that was asked for last, or for the table that ``datasets`` made of files with types.

    Raises:
        OSError: there is none, in the cache neither.
        ValueError: there is only a table that ``datasets`` made of text files, or not each of these files.
    """
    import datasets
    from huggingface_hub import snapshot_download

    offline_without_network()
    remedy = f"run once where the hub can be reached, or 'hf download --repo-type dataset {path}'"
    fault: Exception = ValueError(f"of its text files only a table is here, with types that were guessed: {remedy}")
    table = None
    try:
        builder = datasets.load_dataset_builder(path, subset)
        if builder.name in TEXT_BUILDERS:
            names = [url.removeprefix(f"{builder.base_path}/") for url in chain(*builder.config.data_files.values())]
            with best_effort(lists := _list_of_files(str(builder.hash), subset)), staged(lists, shared=True) as staging:
                staging.write_text(json.dumps(names))
        if builder.name != "cache" or builder.info.builder_name not in TEXT_BUILDERS:
            return builder
        table = builder
    except OSError as error:
        fault = error
    try:
        folder = Path(snapshot_download(path, repo_type="dataset", local_files_only=True, allow_patterns=_TEXT_FILES))
        builder = datasets.load_dataset_builder(str(folder), subset)
    except (OSError, ValueError):
        raise fault from None
    if builder.name not in TEXT_BUILDERS:
        raise fault
    names = json.loads(lists.read_text()) if (lists := _list_of_files(folder.name, subset)).is_file() else []
    if lacking := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"its file {lacking[0]} is not in the hub's cache: {remedy}")
    size = sum(Path(file).stat().st_size for file in {*chain(*builder.config.data_files.values())})
    if table is not None and table.hash == folder.name and table.info.download_size not in (None, size):
        raise ValueError(f"of its {table.info.download_size} bytes {size} are in the hub's cache: {remedy}")
    return builder


def _list_of_files(commit: str, subset: str | None) -> Path:
    """Where it is written which files a data set of the hub has, so that one whose download was cut is known."""
    return cache_root() / "hub" / f"{commit}-{quote(subset or '', safe='')}.json"
