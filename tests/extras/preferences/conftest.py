"""Files of rows, as tests of data write them."""

from tests.data.conftest import jsonl

__all__ = ["jsonl"]
