"""Bodies as the routes read them, without a server."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serve.errors import from_fault
from serve.json_body import read_object

T = TypeVar("T", bound=BaseModel)


def parse(kind: type[T], body: bytes) -> T:
    """The request in ``body``, or the refusal as ``ApiError``."""
    try:
        return kind.model_validate(read_object(body))
    except ValidationError as error:
        raise from_fault(error.errors(include_url=False, include_input=False)[0]) from None
