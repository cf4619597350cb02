"""How the sections of a config are written and walked: the strict base class, common types, paths of keys."""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Ratio = Annotated[float, Field(ge=0, le=1)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=2_000_000)]  # 23 days: a socket's wait must fit in 2**31 ms
NonNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Keys = tuple[str | int, ...]  # ("custom", "train_jsonl", 0, "path") is custom.train_jsonl[0].path


class Section(BaseModel):
    """A mapping in which an unknown key or a value of another type than declared is an error."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=(), serialize_by_alias=True
    )


def key(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declare a key with its default (`...`: required) and its meaning, which docs and messages show."""
    return Field(default, description=meaning, **bounds)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class inside an annotation such as `list[DataFile] | None`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for arg in get_args(annotation) if (found := section_of(arg))), None)


def section_keys(section: type[Section]) -> dict[str, FieldInfo]:
    """Map each key, as written in YAML, to its field."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def iter_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield `(dotted path, field)` of every key, sections before their content; entries of a list are `path[]`."""
    for name, field in section_keys(section).items():
        yield prefix + name, field
        if inner := section_of(field.annotation):
            is_list = "list[" in str(field.annotation)
            yield from iter_fields(inner, f"{prefix}{name}{'[].' if is_list else '.'}")


def brief(value: Any) -> str:
    """Format a value for messages and docs: JSON, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def dotted(keys: Keys) -> str:
    """`("a", 0, "b")` -> `a[0].b`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def parse_path(path: str) -> Keys:
    """`a[0].b` -> `("a", 0, "b")`."""
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path))


def value_at(data: Any, keys: Keys, default: Any = None) -> Any:
    """Return the value at a path of nested mappings and lists, or the default."""
    for key in keys:
        known = key in data if isinstance(data, dict) else isinstance(data, list) and key in range(len(data))
        if not known:
            return default
        data = data[key]
    return data
