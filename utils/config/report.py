"""What is wrong with a config, as lines for the user: the file, the path with its value, the rule and what to do."""

from dataclasses import dataclass, field
from typing import Any

from utils.config.schema import Config
from utils.config.section import Keys, brief, dotted, parse_path, value_at

_ABSENT = object()


class ConfigError(ValueError):
    """A config that cannot be used; `problems` holds one line per problem."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass
class Origin:
    """The files a config came from; turns a path and a rule into a line for the user."""

    file: str
    data: dict[str, Any]
    files: dict[Keys, str] = field(default_factory=dict)

    def problem(self, path: str | Keys, rule: str, value: Any = _ABSENT) -> str:
        """Return `FILE: field.path=value: the rule; what to do`, with the value in the file if it has one."""
        keys = parse_path(path) if isinstance(path, str) else path
        value = value_at(self.data, keys, value)
        shown = dotted(keys) if value is _ABSENT else f"{dotted(keys)}={brief(value)}"
        # The file that set the key, or the nearest section around it.
        file = next((self.files[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.files), self.file)
        return f"{file}: {shown}: {rule}"


def problem(cfg: Config, path: str, rule: str) -> str:
    """Return the line that reports `path` of a loaded config, for checks after loading."""
    return cfg._origin.problem(path, rule, value_at(cfg.model_dump(), parse_path(path), _ABSENT))
