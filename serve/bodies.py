"""``Body``: the base class of all objects in requests, and the types of texts in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from serve import fields

Text = Annotated[str, Field(min_length=0)]  # a string with a constraint is checked for lone surrogates
MAX_SHORT = 256
Short = Annotated[str, Field(min_length=1, max_length=MAX_SHORT)]


class Body(BaseModel):
    """An object with the declared fields, and further ones that ``passing`` accepts. Null counts as left out."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    passing: ClassVar[fields.Passing | None] = fields.Passing()
    """Rules for fields that are not declared; None accepts them all."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: each for name, each in value.items() if each is not None or name not in cls.model_fields}

    @model_validator(mode="after")
    def _only_known_fields(self) -> Self:
        if self.passing is not None and self.model_extra:
            self.passing.check(self.model_extra, type(self).model_fields)
        return self


def by_type(must_be: str, kinds: dict[type, str]) -> Discriminator:
    """Reads a value of several types as the member of the union that its own type names, so that errors are those of
    what the client meant. Tags are no identifiers, which errors would take for fields."""
    return chosen(must_be, lambda value: next((tag for kind, tag in kinds.items() if isinstance(value, kind)), None))


def chosen(must_be: str, tag: Callable[[Any], str | None]) -> Discriminator:
    """Reads a value as the member of the union that ``tag`` names; None refuses it."""
    return Discriminator(tag, custom_error_type="wrong_type", custom_error_message=f"must be {must_be}")


def at(field: str, message: str) -> PydanticCustomError:
    """An error about ``field``, for checks that need the whole object."""
    return PydanticCustomError("value_error", "{message}", {"message": message, "field": field})  # type: ignore[arg-type]
