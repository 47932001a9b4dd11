"""``Body``: what every object in a request is checked as; and the texts that requests hold."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from serve import fields

Text = Annotated[str, Field(min_length=0)]  # a string with a constraint is checked for lone surrogates
Short = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """An object that holds what it declares, and what ``passing`` lets through. Null is the same as nothing."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)
    passing: ClassVar[fields.Passing | None] = fields.Passing()
    """None takes further fields as they are."""

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


def at(field: str, message: str) -> PydanticCustomError:
    """A fault of one of an object's fields, found when all of them are known."""
    return PydanticCustomError("value_error", "{message}", {"message": message, "field": field})  # type: ignore[arg-type]
