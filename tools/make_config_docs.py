"""Write docs/config.md from the schema: `python -m tools.make_config_docs`."""

import argparse
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from utils.config.rollout import ServerOverride
from utils.config.schema import Config
from utils.config.section import Section, brief, section_keys, section_of

TARGET = Path(__file__).parents[1] / "docs" / "config.md"
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_INTRO = """# Configuration

Every key of a config file, generated from the schema in `utils/config` by `python -m tools.make_config_docs`.

A file may `extends` others (a path, or a list of paths, relative to itself): mappings merge key by key, lists and
scalars are replaced, later entries win, the file itself wins over all. Paths inside a config are relative to the
working directory. Unknown keys are errors, and all problems of a file are reported together. See the resolved file and
the plan of a run with `python train_stage2.py --config FILE --dry-run --world-size N`.
"""


def render() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *_section(Config, "")])


def _section(section: type[Section], path: str) -> list[str]:
    """Heading, table of plain keys, then the sections inside."""
    plain, inner = [], []
    for key, field in section_keys(section).items():
        nested = section_of(field.annotation)
        if nested is None or field.description:
            plain.append(_row(key, field))
        if nested is not None:
            is_list = "list[" in str(field.annotation)
            inner += _section(nested, f"{path}.{key}".removeprefix(".") + ("[]" if is_list else ""))
    if section is ServerOverride:
        plain = []  # the keys of the common settings, listed just above
    table = ["| key | type | default | meaning |", "|---|---|---|---|", *plain, ""] if plain else []
    title = ["## Top level", ""] if section is Config else [f"## `{path}`", "", section.__doc__ or "", ""]
    return [*title, *table, *inner]


def _row(key: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{brief(field.get_default(call_default_factory=True))}`"
    bounds = _bounds(field.metadata)
    cells = [f"`{key}`", _type(field.annotation) + bounds, default, field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(annotation: Any) -> str:
    """`int >= 1 or null`, `full or lora`, `list of str`, ..."""
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        return _type(base) + _bounds(metadata)
    if annotation is NoneType:
        return "null"
    if isinstance(annotation, type) and not get_args(annotation):
        return "mapping" if issubclass(annotation, Section) else annotation.__name__
    args = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if get_origin(annotation) is list:
        return f"list of {_type(args[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    return " or ".join(map(_type, args))


def _bounds(metadata: list[Any]) -> str:
    found = [item for entry in metadata for item in getattr(entry, "metadata", [entry])]
    signs = [
        f" {sign} {getattr(item, name):g}" for item in found for name, sign in _SIGNS.items() if hasattr(item, name)
    ]
    return " and".join(signs)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
