"""Load a YAML file into a validated `Config`: `extends`, strict validation, every problem in one report.

`utils.config.schema` holds the keys, `utils.config.rules` and `utils.config.deepspeed` the rules between them. All
programs and Make targets resolve files through `resolve_yaml`. Nothing here touches a model, a device or the network,
and the import is fast.
"""

import contextlib
import difflib
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from utils.config.deepspeed import deepspeed_problems
from utils.config.report import ConfigError, Origin, problem
from utils.config.rollout import ServerAddress
from utils.config.rules import RULES, launch_problems
from utils.config.schema import RM, RS, SCRIPTS, Config
from utils.config.section import Keys, brief, dotted, iter_fields, parse_path, section_keys, section_of, value_at

SILENT_RANKS_WAIT_S = 10.0
_ABSENT = object()


# ---- YAML and extends -----------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Read YAML 1.2 scalars (`1e-5` is a number, `off` and `no` are strings); a key given twice is an error."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # any kind, as for `!!timestamp abc`
            reason = f"cannot be read as {node.tag.rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        mapping = super().construct_mapping(node, deep)
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag != "tag:yaml.org,2002:str" or key_node.value in seen:
                reason = "is given twice" if key_node.value in seen else "must be text to be a key"
                raise yaml.constructor.ConstructorError(None, None, f"{key_node.value!r} {reason}", key_node.start_mark)
            seen.add(key_node.value)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Write what `_Loader` reads back."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
):
    for _char in _first:
        _resolvers = _Loader.yaml_implicit_resolvers.setdefault(_char.replace("\0", ""), [])
        _resolvers.append((f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z")))


def _text(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
    if re.search("[\0\ud800-\udfff]", node.value):
        raise ValueError(f"{node.value!r} contains a NUL or a lone surrogate, which no path may contain")
    return loader.construct_scalar(node)


_Loader.add_constructor("tag:yaml.org,2002:str", _text)
# YAML 1.1 would read 010 as 8.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def resolve_yaml(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Read a YAML file and all files it extends. Returns the merged mapping and, per key, the file that set it last.

    Mappings merge key by key; lists and scalars are replaced. Later entries of `extends` win over earlier ones, the
    file itself over all of them.

    Raises:
        ConfigError: a missing file, a cycle, broken YAML; the message holds the chain of files that led there.
    """
    problems: list[str] = []
    with contextlib.suppress(RuntimeError):  # no such user
        path = Path(path).expanduser()  # no shell expands the ~ of CONFIG="~/x.yaml"
    data, origin = _resolve(Path(path), (), problems)
    if problems:
        raise ConfigError(problems)
    return data, origin


def _resolve(path: Path, chain: tuple[Path, ...], problems: list[str]) -> tuple[dict[str, Any], dict[Keys, str]]:
    path = Path(os.path.abspath(path))
    trail = " -> ".join(_shown(link) for link in (*chain, path))
    if path in chain:
        problems.append(f"{_shown(chain[-1])}: extends={_shown(path)}: a cycle of files, {trail}; remove one link")
        return {}, {}
    own = _read_mapping(path, trail, problems)
    parents = own.pop("extends", [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        problems.append(f"{_shown(path)}: extends={brief(parents)}: must be a file or a list of files; correct it")
        parents = []
    data, origin = {}, {}
    for parent in parents:
        _merge(data, origin, *_resolve(path.parent / parent, (*chain, path), problems))
    _merge(data, origin, own, defaultdict(lambda: _shown(path)))
    return data, origin


def _read_mapping(path: Path, trail: str, problems: list[str]) -> dict[str, Any]:
    try:
        loaded = _own_copy(yaml.load(path.read_text(encoding="utf-8"), _Loader))  # noqa: S506  (a SafeLoader)
        if loaded is None or isinstance(loaded, dict):
            return loaded or {}
        reason = f"must hold a mapping of keys, not {brief(loaded)}"
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
    except yaml.YAMLError as error:
        told = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        reason = f"not valid YAML: {told}" + "; indent with spaces, not tabs" * (r"'\t'" in told)
    except RecursionError:
        reason = "an anchor contains itself"
    problems.append(f"{_shown(path)}: {reason}" + f"; reached by {trail}" * (" -> " in trail))
    return {}


def _own_copy(value: Any) -> Any:
    """Return a deep copy that shares nothing; `copy.deepcopy` keeps one object for an anchor and all its aliases."""
    if isinstance(value, dict):
        return {key: _own_copy(inner) for key, inner in value.items()}
    return [_own_copy(inner) for inner in value] if isinstance(value, list) else value


def _merge(base: dict, base_origin: dict[Keys, str], over: dict, over_origin: dict[Keys, str], at: Keys = ()) -> None:
    for key, value in over.items():
        here = (*at, key)
        if not (isinstance(value, dict) and isinstance(base.get(key), dict)):
            for stale in [keys for keys in base_origin if keys[: len(here)] == here]:
                del base_origin[stale]
            base[key] = {} if isinstance(value, dict) else value
        base_origin[here] = over_origin[here]
        if isinstance(value, dict):
            _merge(base[key], base_origin, value, over_origin, here)


def _shown(path: Path) -> str:
    """Path for messages, relative if the file lies below the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


# ---- loading --------------------------------------------------------------------------------------------------------


def load_config(path: str | os.PathLike[str]) -> Config:
    """Resolve and validate a file. Raises `ConfigError` with all problems of the file."""
    data, files = resolve_yaml(path)
    return build_config(data, Origin(_shown(Path(os.path.abspath(path))), data, files))


def load_config_or_exit(path: str | os.PathLike[str]) -> Config:
    """`load_config` for programs: problems go to stderr, exit status 2, no traceback."""
    try:
        return load_config(path)
    except ConfigError as error:
        called = Path(sys.argv[0]).name
        program = called if called in (*SCRIPTS.values(), "rollout_server.py") else "train_stage2.py"
        command = f"python {program} --config {shlex.quote(str(path))} --dry-run"
        exit_with(f"{error}\nto check the file again without starting anything: {command}")


def build_config(data: dict[str, Any], origin: Origin | None = None) -> Config:
    """Validate a resolved mapping. Raises `ConfigError` with all problems: fields first, then rules between them."""
    origin = origin or Origin("config", data)
    cfg, bad, problems = _check_fields(data, origin)
    cfg._origin = origin
    for reads, rule in RULES:
        read_keys = [parse_path(path) for path in reads]
        if not any(a[: len(b)] == b[: len(a)] for a in bad for b in read_keys):
            problems += [problem(cfg, path, text) for path, text in rule(cfg)]
    if problems:
        raise ConfigError(problems)
    return cfg


def exit_with(error: Exception | str, is_main: bool | None = None) -> NoReturn:
    """Exit with status 2, after printing the problems on the main rank; None: on the first rank of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0" if is_main is None else is_main:
        file = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        print(file + reason_of(error) if isinstance(error, Exception) else error, file=sys.stderr)
    else:  # the launcher ends all ranks as soon as one has exited, and the main one may be slower
        time.sleep(SILENT_RANKS_WAIT_S)
    raise SystemExit(2)


def reason_of(error: Exception) -> str:
    """What an error says; of the system's, `No such file or directory` alone, without its number and the file."""
    return getattr(error, "strerror", None) or str(error)


def dump_yaml(cfg: Config) -> str:
    """Return the resolved config with every default written out; loading it gives an equal config."""
    return yaml.dump(cfg.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def require_variant(cfg: Config, variant: str, script: str) -> None:
    """Exit with status 2 if `cfg` is meant for another program than `script` (CFG-4)."""
    actual = cfg.custom.trainer_variant
    if actual != variant:
        rule = f"{script} trains {variant}; start this file with {SCRIPTS[actual]}"
        exit_with(problem(cfg, "custom.trainer_variant", rule))


def check_launch(cfg: Config, world_size: int, missing: set[str] | frozenset[str] = frozenset()) -> None:
    """Check that `world_size` learners can run `cfg` on a machine without `missing` (see `launch_problems`). Raises
    `ConfigError` with all problems, those of the DeepSpeed JSON included."""
    found = [*launch_problems(cfg, world_size, missing), *deepspeed_problems(cfg, world_size)]
    if found:
        raise ConfigError([problem(cfg, path, rule) for path, rule in found])


def require_server(cfg: Config, index: int) -> ServerAddress:
    """Return the address of server `index`. Raises `ConfigError` if the file does not describe that server."""
    servers = cfg.servers()
    if cfg.rs is None:
        raise ConfigError([problem(cfg, RS, "is required to launch a server; add it with vllm_max_model_len")])
    if not servers and not cfg.generates:
        rule = "this run needs no server, as nothing is generated, not even for an evaluation; start the learner alone"
        raise ConfigError([problem(cfg, "training.eval_steps", rule)])
    if not servers:
        backend, mode = cfg.rollout_path("rollout_backend"), cfg.rollout_path("vllm.mode")
        way_out = f"{backend}: {'true' if cfg.is_grpo else 'vllm'} and {mode}: server"
        rule = f"this run needs no server, as its learners generate; start them alone, or set {way_out}"
        raise ConfigError([problem(cfg, mode if cfg.uses_vllm else backend, rule)])
    if not 0 <= index < len(servers):
        rule = f"there are {len(servers)} servers, so no --server-index {index}; add the server or use a smaller index"
        raise ConfigError([problem(cfg, cfg.rollout_path("vllm.server"), rule)])
    return servers[index]


# ---- single fields --------------------------------------------------------------------------------------------------

_RETIRED = {
    f"{RM}.targets.trim_trailing_unmatched": (
        f"was replaced; use {RM}.targets.unmatched: trim for true (only where annotation is complete), keep for false"
    ),
    f"{RM}.temperature": f"was renamed; use {RM}.decoding.temperature",
    f"{RM}.top_p": f"was renamed; use {RM}.decoding.top_p",
    f"{RM}.top_k": f"was renamed; use {RM}.decoding.top_k",
    f"{RM}.rollout_generate_batch_size": f"was replaced; use {RM}.decode_batch_size",
    f"{RM}.rollout_infer_batch_size": f"was replaced; use {RM}.decode_batch_size",
    f"{RM}.rollout_buffer": f"was removed; asynchronous prefetch, {RM}.async, replaces it",
    f"{RM}.post_rollout_pack_scope": "was removed; packing is always per micro-step; delete the key",
}

# Keys of other frameworks for techniques that are not supported here, anywhere in the file.
_UNSUPPORTED = {
    "QLoRA": r"(qlora|load_in_[48]bit|bnb_.*|quant_(bits|method)|quantization(_config|_bit)?)",
    "FP8 rollouts": r"(.*fp8.*|vllm_quantization|kv_cache_dtype)",
    "sequence parallelism": r"(.*sequence_parallel.*|context_parallel.*|ulysses.*|ring_attention.*)",
}


def _check_fields(data: dict[str, Any], origin: Origin) -> tuple[Config, list[Keys], list[str]]:
    """Validate every field by itself. Returns a usable config, the paths of wrong fields, and the problems.

    Wrong fields are set aside and take their defaults, so that rules about other fields can still run on the result.
    """
    data, bad, problems = _own_copy(data), [], []
    for path, migration in _RETIRED.items():
        keys = parse_path(path)
        if value_at(data, keys, _ABSENT) is not _ABSENT:
            problems.append(origin.problem(keys, migration))
            value_at(data, keys[:-1], {}).pop(keys[-1])
    for key, found in section_keys(Config).items():
        if found.is_required() and section_of(found.annotation):
            data.setdefault(key, {})  # so that the missing keys inside are named
    while True:
        try:
            return Config.model_validate(data), bad, problems
        except ValidationError as error:
            rules = _field_problems(error, data)
        for keys, rule in rules.items():
            if not any(keys[: len(above)] == above for above in bad):
                problems.append(origin.problem(keys, rule))
        bad += rules
        for keys in rules:
            _set_aside(data, keys)


def _field_problems(error: ValidationError, data: dict[str, Any]) -> dict[Keys, str]:
    """Path -> rule. The branches of a union (`str | list[str]`) report separately; they are joined by "or"."""
    rules: dict[Keys, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False):
        keys = _real_path(item["loc"], data, missing=item["type"] == "missing")
        if item["type"] == "extra_forbidden":
            rule = _unknown_key(keys)
        elif item["type"] in ("model_type", "model_attributes_type"):
            rule = "must be a mapping of keys"
        else:
            rule = item["msg"].replace("Input should be", "must be").replace("Field required", "is required")
            rule = re.sub(r"List should have at least (\d+) item.*", r"must have at least \1 item", rule)
            rule += _spelling(item)
        rules.setdefault(keys, []).append(rule)
    return {keys: f"{' or '.join(dict.fromkeys(rule))}{_advice(keys)}" for keys, rule in rules.items()}


def _spelling(item: Any) -> str:
    """The way out for a value that is only spelt wrongly: `yes`, or a number in quotes."""
    given, kind = item["input"], item["type"]
    if not isinstance(given, str):
        return ""
    if kind == "bool_type" and given.lower() in ("yes", "no", "on", "off", "true", "false"):
        return "; write true or false, without quotes"
    is_number = re.fullmatch(r"\s*[-+]?[0-9.]+([eE][-+]?[0-9]+)?\s*", given)
    return "; remove the quotes" if kind in ("int_type", "float_type") and is_number else ""


def _real_path(loc: Keys, data: Any, missing: bool) -> Keys:
    """Reduce pydantic's location to keys in the file, without union branches and entries of a normalised list."""
    keys: Keys = ()
    for step in loc:
        if value_at(data, (*keys, step), _ABSENT) is not _ABSENT:
            keys = (*keys, step)
    return (*keys, loc[-1]) if missing else keys


def _field_at(keys: Keys) -> Any:
    """Return the schema's field at a path, or None."""
    section, found = Config, None
    for key in keys:
        if not isinstance(key, int):
            found = section_keys(section).get(key) if section else None
            section = section_of(found.annotation) if found else None
    return found


def _advice(keys: Keys) -> str:
    """Return the meaning of the key and its default, as the way out."""
    found = _field_at(keys)
    if found is None or not found.description:
        return ""
    default = "" if found.is_required() or found.default_factory else f", default {brief(found.default)}"
    return f"; meaning: {found.description}{default}"


def _unknown_key(keys: Keys) -> str:
    """Name the technique that is not supported, or the nearest known key: a sibling, else one of another section."""
    name = str(keys[-1])
    for technique, pattern in _UNSUPPORTED.items():
        if re.fullmatch(pattern, name):
            return f"{technique} is not supported; delete the key"
    parent = _field_at(keys[:-1])
    section = section_of(parent.annotation) if parent else Config
    siblings = list(section_keys(section)) if section else []
    if name == "<<":
        return "YAML's merge key is not supported; put what is shared into a file of its own, and name it with extends"
    # Of a name in several sections the one that shares most of the path, or else the first.
    paths = sorted(reversed([path for path, _ in iter_fields(Config)]), key=lambda path: _num_shared(path, keys))
    elsewhere = {path.rsplit(".", 1)[-1]: path for path in paths}
    if name in elsewhere:
        return f"unknown key here; did you mean {elsewhere[name]}?"
    if near := difflib.get_close_matches(name, siblings, 1):
        return f"unknown key; did you mean {dotted((*keys[:-1], near[0]))}?"
    if near := difflib.get_close_matches(name, elsewhere, 1, cutoff=0.75):
        return f"unknown key; did you mean {elsewhere[near[0]]}?"
    nearest = difflib.get_close_matches(name, siblings, 1, cutoff=0)
    return f"unknown key; delete it (nearest known key: {', '.join(nearest)}; all of them: docs/config.md)"


def _num_shared(path: str, keys: Keys) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(parse_path(path), keys, strict=False)))


def _set_aside(data: dict[str, Any], keys: Keys) -> None:
    """Remove a wrong value so that its default applies; a required field gets the schema's example."""
    # An entry cannot leave its list without renaming the others: the whole list goes.
    keys = tuple(takewhile(lambda key: isinstance(key, str), keys))
    parent, found = value_at(data, keys[:-1], {}), _field_at(keys)
    parent.pop(keys[-1], None)
    if found is not None and found.is_required():
        parent[keys[-1]] = {} if not found.examples else found.examples[0]
