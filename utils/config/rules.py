"""Rules between the keys of a config, and between a config and the machine that runs it.

A rule yields `(path, "the rule; what to do")` for every problem; `utils.config.load` runs them all and reports them.
"""

import math
import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any
from urllib.parse import urlsplit

from utils.config.rlhf import Sampling, setting_at
from utils.config.rollout import ServerAddress, ServerSettings, is_loopback
from utils.config.schema import RM, RS, SHARED_WITH_STAGE2, Config, Losses, RolloutMatching
from utils.config.section import brief, parse_path, value_at
from utils.families import part_of

Found = Iterator[tuple[str, str]]
Rule = Callable[[Config], Found]
RULES: list[tuple[tuple[str, ...], Rule]] = []
PATHS = ("model.path", "model.reference_path", "tuner.adapter_path", "training.output_dir")
MAX_SLOT_RANK = 512  # of LoRA in vLLM 0.32
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")  # vLLM's others report logits
NO_SERVER = f"{RM}.vllm.mode: colocate, or {RM}.rollout_backend: hf"


def reads(*paths: str) -> Callable[[Rule], Rule]:
    """Register a rule and the paths it reads; it is skipped if one of them is already reported."""

    def register(check: Rule) -> Rule:
        RULES.append((paths, check))
        return check

    return register


@reads(*PATHS)
def _paths_are_written_out(cfg: Config) -> Found:
    """A shell expands `~` and `$VAR`, a config does not: a folder of that name would be made."""
    data = cfg.model_dump()
    paths = [(path, value_at(data, parse_path(path), None)) for path in PATHS]
    for key in ("train_jsonl", "val_jsonl"):
        files = data["custom"][key] or []
        paths += [(f"custom.{key}[{i}]", file["path"]) for i, file in enumerate(files)]
    rewards = data["rlhf"]["reward_files"] if data["rlhf"] else []
    paths += [(f"rlhf.reward_files[{i}]", path) for i, path in enumerate(rewards)]
    paths += _image_roots(data["custom"]["extra"]["rollout_server"])
    for path, value in paths:
        if value is not None and not value.strip():
            yield path, "must not be empty; name a path"
        elif value is not None and re.match(r"~|.*\$\w|.*\$\{", value):
            yield path, "~ and $VAR are not expanded here; write the path out"


def _image_roots(server: dict[str, Any] | None) -> list[tuple[str, str]]:
    sections = [(RS, server or {})]
    sections += [(f"{RS}.servers[{i}]", own) for i, own in enumerate((server or {}).get("servers") or [])]
    key = "allowed_image_roots"
    return [(f"{at}.{key}[{i}]", root) for at, own in sections for i, root in enumerate(own.get(key) or [])]


@reads("training.packing", "training.packing_drop_last")
def _packing_drops_last(cfg: Config) -> Found:
    if cfg.training.packing and not cfg.training.packing_drop_last:
        yield "training.packing_drop_last", "training.packing has no flush steps, so it must be true; set it to true"


@reads("custom.trainer_variant", "training.packing", "training.packing_buffer", "training.per_device_train_batch_size")
def _buffer_holds_a_batch(cfg: Config) -> Found:
    """GRPO has no buffer: it packs all answers of a step."""
    batch = cfg.training.per_device_train_batch_size
    if not cfg.is_grpo and cfg.training.packing and cfg.training.packing_buffer < batch:
        way_out = "raise it or lower training.per_device_train_batch_size"
        yield "training.packing_buffer", f"must hold the {batch} samples of a micro-step; {way_out}"


@reads("custom.trainer_variant", "global_max_length", f"{RM}.max_new_tokens", RS, "rlhf", "training.packing")
def _lengths_fit(cfg: Config) -> Found:
    new_tokens, row, key = cfg.rm.max_new_tokens, cfg.global_max_length, cfg.rollout_path("max_new_tokens")
    if row is None and not cfg.is_grpo:
        yield "global_max_length", "is required for stage 2; set it to the number of tokens one row may hold"
    elif row is None and (cfg.training.packing or cfg.is_colocate or not cfg.uses_vllm):
        own = "rlhf.vllm_mode: colocate" if cfg.is_colocate else "rlhf.use_vllm: false"
        why = "training.packing" if cfg.training.packing else own
        yield "global_max_length", f"is required with {why}; set it to the number of tokens one row may hold"
    elif row is not None and new_tokens >= row and cfg.generates:
        yield key, f"prompt and response must fit in global_max_length={row}; lower it or raise global_max_length"
    for path, length in _engine_lengths(cfg).items():
        if new_tokens >= length:
            rule = f"must hold prompt and response, but {key}={new_tokens} alone fills it; raise this, or lower {key}"
            yield path, rule
        elif cfg.is_grpo and row is not None and length < row:
            yield path, f"must be at least global_max_length={row}; raise it or lower that"


def length_limit(cfg: Config) -> tuple[str, float]:
    """Return the fewest tokens that a row or an engine has for a prompt with its response, and the key that says so."""
    limits = {"global_max_length": cfg.global_max_length or math.inf} | _engine_lengths(cfg)
    return min(limits.items(), key=itemgetter(1))


def _engine_lengths(cfg: Config) -> dict[str, int]:
    """`vllm_max_model_len` of each server by the path that sets it, the common one where no servers are known; nothing
    where no server generates (GRP-2)."""
    name = "vllm_max_model_len"
    if cfg.rs is None or cfg.is_colocate or not cfg.uses_vllm:
        return {}
    num_servers = len(cfg.servers()) if _servers_are_known(cfg) else 0
    if not num_servers:
        return {f"{RS}.{name}": cfg.rs.vllm_max_model_len}
    own = [i for i, server in enumerate(cfg.rs.servers) if name in server.model_fields_set]
    paths = [f"{RS}.servers[{i}].{name}" if i in own else f"{RS}.{name}" for i in range(num_servers)]
    return {path: cfg.server_settings(i).vllm_max_model_len for i, path in enumerate(paths)}


def _server_settings(cfg: Config) -> Iterator[tuple[str, ServerSettings]]:
    """Yield (path, settings), common and for each override; nothing where GRPO uses no server (GRP-2)."""
    if cfg.rs is not None and (not cfg.is_grpo or cfg.connection):
        yield RS, cfg.rs
        yield from ((f"{RS}.servers[{i}]", cfg.server_settings(i)) for i in range(len(cfg.rs.servers)))


@reads(f"{RM}.rollout_backend", f"{RM}.vllm.mode", f"{RM}.vllm.server", "custom.trainer_variant")
def _server_mode_has_servers(cfg: Config) -> Found:
    uses_server = not cfg.is_grpo and cfg.uses_vllm and cfg.rm.vllm.mode == "server"
    if uses_server and cfg.rm.vllm.server is None:
        yield f"{RM}.vllm.server", "is required by mode: server; list the servers with base_url and group_port"


@reads(f"{RM}.vllm.server")
def _server_form(cfg: Config) -> Found:
    path, server = f"{RM}.vllm.server", cfg.rm.vllm.server
    if server is None or cfg.is_grpo:  # GRPO's comes from rlhf, see _grpo_connection
        return
    paired = server.base_url is not None or server.group_port is not None
    if paired == (server.servers is not None):
        both = "servers and base_url/group_port are both given" if paired else "neither servers nor base_url is given"
        unset = "; unset what `extends` brings: servers: null, or base_url: null and group_port: null" if paired else ""
        yield path, f"{both}; give exactly one: servers, or base_url with group_port{unset}"
    elif paired and (server.base_url is None or server.group_port is None):
        yield path, "base_url and group_port belong together; give both"
    else:
        try:
            addresses = server.addresses()
        except ValueError as error:
            yield f"{path}.group_port", str(error)
            return
        if not addresses:
            yield f"{path}.{'base_url' if paired else 'servers'}", "must not be empty; name at least one server"
        yield from _address_problems(addresses, path, paired)


def _servers_are_known(cfg: Config) -> bool:
    """False where `_server_form` finds fault with the list of servers, which nothing may read then."""
    return next(_server_form(cfg), None) is None


def _address_problems(addresses: list[ServerAddress], path: str, paired: bool) -> Found:
    """Find malformed urls, and servers that share a url, a host and port, or a group port."""
    taken: dict[tuple[str, int], int] = {}
    group_ports: dict[int, int] = {}
    entries = [path if paired else f"{path}.servers[{index}]" for index in range(len(addresses))]
    for index, (entry, address) in enumerate(zip(entries, addresses, strict=True)):
        place, port = _host_and_port(address.base_url), address.group_port
        if place is None:
            yield f"{entry}.base_url", f"{address.base_url!r} must be http(s)://HOST[:PORT][/PREFIX]; correct it"
        elif (other := taken.setdefault(place, index)) != index:
            rule = f"servers {other} and {index} are both at {place[0]}:{place[1]}; give each its own port"
            yield f"{entry}.base_url", rule
        if port > 65535:
            yield f"{entry}.group_port", f"server {index} would get port {port}, above 65535; start lower"
        if (other := group_ports.setdefault(port, index)) != index:
            yield f"{entry}.group_port", f"servers {other} and {index} share group port {port}; give each its own"
    for port, index in group_ports.items():
        if (other := taken.get(("loopback", port))) is not None:
            rule = f"group port {port} is also where server {other} listens on this machine; choose another"
            yield f"{entries[index]}.group_port", rule


@reads("custom.trainer_variant", f"{RM}.teacher", f"{RM}.vllm.server")
def _teacher_is_another_server(cfg: Config) -> Found:
    teacher, path = cfg.custom.extra.rollout_matching.teacher, f"{RM}.teacher"
    if teacher is None:
        return
    if cfg.is_grpo:
        yield path, "GRPO has no teacher; delete it"
        return
    if (place := _host_and_port(teacher.base_url)) is None:
        yield f"{path}.base_url", f"{teacher.base_url!r} must be http(s)://HOST[:PORT][/PREFIX]; correct it"
    elif _servers_are_known(cfg) and place in [_host_and_port(s.base_url) for s in cfg.servers()]:
        rule = "is a rollout server of this run, which generates with the weights in training"
        yield f"{path}.base_url", f"{rule}; start the teacher's server at another port"


def _host_and_port(url: str) -> tuple[str, int] | None:
    """Return the host and port of a url, with one name for this machine; None if the url is not usable."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    is_http = parts.scheme in ("http", "https") and parts.hostname and port != 0
    if not is_http or parts.query or parts.fragment or parts.username:
        return None
    default_port = 443 if parts.scheme == "https" else 80
    return "loopback" if is_loopback(parts.hostname) else parts.hostname, default_port if port is None else port


@reads(f"{RM}.vllm.sync", f"{RM}.vllm.enable_lora", "tuner", RS)
def _adapter_sync_needs_lora(cfg: Config) -> Found:
    enabled, sync = cfg.rm.vllm.enable_lora, cfg.rm.vllm.sync
    if cfg.is_grpo:
        return
    if cfg.connection and not sync.fallback_to_full and (obstacle := cfg.adapter_obstacle()):
        way_out = f"set it to true, or mode: full, or use no server ({NO_SERVER})"
        yield f"{RM}.vllm.sync.fallback_to_full", f"adapter sync fails, {obstacle}; {way_out}"
    if sync.mode == "adapter" and not enabled:
        yield f"{RM}.vllm.sync.mode", f"adapter needs {RM}.vllm.enable_lora: true; set it, or use full"
    for path, settings in _server_settings(cfg):
        if settings.vllm_enable_lora != enabled:
            yield f"{path}.vllm_enable_lora", f"must agree with {RM}.vllm.enable_lora={brief(enabled)}; change one"
    if enabled and cfg.tuner.type == "lora" and cfg.tuner.rank > MAX_SLOT_RANK:
        yield "tuner.rank", f"vLLM's slots hold at most {MAX_SLOT_RANK}; lower it, or set {RM}.vllm.enable_lora: false"


@reads("custom.trainer_variant", f"{RM}.rollout_backend", f"{RM}.vllm.mode", f"{RM}.vllm.enable_lora")
def _colocate_needs_no_lora(cfg: Config) -> Found:
    if cfg.is_colocate and cfg.rm.vllm.enable_lora:
        way_out = f"set it to false with {RM}.vllm.sync.mode: full, or use {RM}.rollout_backend: hf"
        yield f"{RM}.vllm.enable_lora", f"a colocated engine takes merged weights only; {way_out}"


@reads(RS, f"{RM}.vllm.server", "rlhf")
def _overrides_have_servers(cfg: Config) -> Found:
    if cfg.rs is None or not cfg.rs.servers or not _servers_are_known(cfg) or not cfg.connection:
        return
    given, known = len(cfg.rs.servers), len(cfg.servers())
    if given > known:
        yield f"{RS}.servers", f"overrides {given} servers, but {known} are connected; remove entries or add servers"


# Engine arguments of vLLM that have a key of their own here, so that nothing is set in two places.
_ENGINE_KEYS = {"model": "model.path", "dtype": "model.dtype", "seed": "training.seed"} | {
    name.removeprefix("vllm_"): f"{RS}.{name}" for name in ServerSettings.model_fields if name.startswith("vllm_")
}


@reads(RS)
def _engine_kwargs(cfg: Config) -> Found:
    sections = [cfg.rs, *cfg.rs.servers] if cfg.rs else []
    for (path, _), section in zip(_server_settings(cfg), sections, strict=False):
        for key, value in section.vllm_engine_kwargs.items():  # of an override its own, not those it inherits
            here = f"{path}.vllm_engine_kwargs.{key}"
            if key in _ENGINE_KEYS:
                yield here, f"has a key of its own; use {_ENGINE_KEYS[key]}"
            elif value is not None and (
                key in ("quantization", "quantization_config", "mm_encoder_attn_dtype")
                or (key == "kv_cache_dtype" and value not in ("auto", "bfloat16", "float16"))
                or (key == "load_format" and value == "bitsandbytes")
            ):
                yield here, "FP8 and other quantized rollouts are not supported; delete the key"
            elif key == "enable_eplb" and value:
                yield (
                    here,
                    "a sync would load experts where they lay at the start, not where EPLB moved them; delete it",
                )


@reads("model.image_min_pixels", "model.image_max_pixels")
def _image_sizes(cfg: Config) -> Found:
    smallest, largest = cfg.model.image_min_pixels, cfg.model.image_max_pixels
    if smallest and largest and smallest > largest:
        yield "model.image_min_pixels", f"must not exceed model.image_max_pixels={largest}; lower it or raise that"


@reads("model.dtype", "model.attn_implementation")
def _flash_attention_has_its_dtype(cfg: Config) -> Found:
    if cfg.model.attn_implementation == "flash_attention_2" and cfg.model.dtype == "float32":
        yield "model.attn_implementation", "needs model.dtype: bfloat16 or float16; set one of them, or use sdpa"


@reads("tuner", "training.vit_lr", "training.aligner_lr", "training.embed_lr")
def _tuner_is_consistent(cfg: Config) -> Found:
    tuner = cfg.tuner
    if tuner.use_dora and tuner.type != "lora":
        yield "tuner.use_dora", "needs tuner.type: lora; set it, or use_dora: false"
    if tuner.adapter_path is not None and tuner.type != "lora":
        yield "tuner.adapter_path", "needs tuner.type: lora; set it, or adapter_path: null"
    saved = tuner.modules_to_save if tuner.type == "lora" else []
    if tuner.modules_to_save and tuner.type != "lora":
        yield "tuner.modules_to_save", "needs tuner.type: lora; set it, or modules_to_save: []"
    if "type" not in tuner.model_fields_set:  # a preset's, kept beside `type: full`, wait for the other type
        for key in sorted(tuner.model_fields_set & {"rank", "alpha", "dropout", "target_modules"}):
            yield f"tuner.{key}", "needs tuner.type: lora, and without it all weights train; set it, or type: full"
    try:
        re.compile(tuner.target_modules if isinstance(tuner.target_modules, str) else "")
    except (re.error, OverflowError, RecursionError) as error:
        way_out = 'correct it, or give a list of name endings, or "all-linear"'
        yield "tuner.target_modules", f"is not a valid regular expression: {error}; {way_out}"
    if tuner.freeze_llm and tuner.freeze_vit and tuner.freeze_aligner and not saved:
        yield "tuner.freeze_llm", "leaves nothing to train; unfreeze the llm, the vit or the aligner"
    # Saved modules train in frozen parts, too. Not every name tells its part (`patch_embed`), and a tower may
    # hold the aligner, so a rate is refused only where surely nothing has it.
    parts = {part_of(name) for name in saved}
    if tuner.freeze_vit and cfg.training.vit_lr is not None and parts <= {"embeddings", "aligner"}:
        yield "training.vit_lr", "the vision tower is frozen; set tuner.freeze_vit: false, or vit_lr: null"
    if tuner.freeze_aligner and cfg.training.aligner_lr is not None and parts <= {"embeddings"}:
        yield "training.aligner_lr", "the aligner is frozen; set tuner.freeze_aligner: false, or aligner_lr: null"
    if cfg.training.embed_lr is not None and "embeddings" not in parts and (tuner.type == "lora" or tuner.freeze_llm):
        way_out = "freeze_llm: false" if tuner.type == "full" else "modules_to_save: [embed_tokens]"
        yield "training.embed_lr", f"the embeddings are frozen; set tuner.{way_out}, or embed_lr: null"


@reads(f"{RM}.async", f"{RM}.rollout_backend", f"{RM}.vllm.mode", f"{RM}.vllm.sync")
def _prefetch_has_an_engine_of_its_own(cfg: Config) -> Found:
    prefetch = cfg.rm.async_
    if not prefetch.enabled:
        if prefetch.version_window:
            yield f"{RM}.async.version_window", f"needs {RM}.async.enabled: true; set it, or version_window: 0"
        return
    if not cfg.connection and cfg.generates:
        way_out = f"use {cfg.rollout_path('vllm.mode')}: server, or set it to false"
        yield f"{RM}.async.enabled", f"prefetch needs rollout servers; {way_out}"
    if prefetch.on_sync == "keep" and cfg.sync_mode() == "adapter":
        yield f"{RM}.async.on_sync", "an adapter sync cannot keep requests; use wait, abort or full sync"


@reads(f"{RM}.answer_format", f"{RM}.losses")
def _numbers_have_no_coordinate_loss(cfg: Config) -> Found:
    if cfg.rm.format.has_coord_tokens:
        return
    for key in ("w1", "gate", "sigma"):
        default = getattr(Losses(), key)
        if getattr(cfg.rm.losses, key) not in (0, default):
            rule = f"applies to coordinate tokens, and {RM}.answer_format: {cfg.rm.answer_format} has none"
            yield f"{RM}.losses.{key}", f"{rule}; delete it, or set the default {default:g}"


@reads("training.eval_steps", "training.eval_at_start", "custom.val_jsonl")
def _evaluation_has_data(cfg: Config) -> Found:
    for key in ("eval_steps", "eval_at_start"):
        if getattr(cfg.training, key) and cfg.custom.val_jsonl is None:
            off = {"eval_steps": "0", "eval_at_start": "false"}[key]
            yield f"training.{key}", f"evaluation needs custom.val_jsonl; name a file, or set {key}: {off}"


@reads("custom.trainer_variant", "rlhf")
def _rlhf_belongs_to_grpo(cfg: Config) -> Found:
    if not cfg.is_grpo and cfg.rlhf is not None:
        yield "rlhf", "belongs to trainer_variant: grpo; delete it"
    if cfg.is_grpo and cfg.rlhf is None:
        yield "rlhf", "is required for trainer_variant: grpo; add it"


@reads("custom.trainer_variant", "rlhf", RS)
def _grpo_connection(cfg: Config) -> Found:
    if not cfg.is_grpo or cfg.rlhf is None:
        return
    if cfg.rlhf.sync.mode == "adapter":
        yield "rlhf.sync.mode", "GRPO syncs merged weights; set it to full"
    if not cfg.rlhf.uses_server:
        return  # host, port and launch settings of the server are ignored
    hosts, ports = cfg.rlhf.vllm_server_host, cfg.rlhf.vllm_server_port
    if len(hosts) != 1:
        yield "rlhf.vllm_server_host", "must be a list of exactly one host; use [127.0.0.1]"
    elif hosts[0] not in ("127.0.0.1", "localhost"):
        yield "rlhf.vllm_server_host", "must be loopback, 127.0.0.1 or localhost; use [127.0.0.1]"
    if len(ports) != 1:
        yield "rlhf.vllm_server_port", "must be a list of exactly one port; give one"
    elif ports[0] == cfg.rlhf.vllm_server_group_port:
        yield "rlhf.vllm_server_group_port", f"is also the server's port, {ports[0]}; choose another"
    if cfg.rs is None:
        yield RS, "is required by rlhf.vllm_mode: server; add it with vllm_max_model_len"
    for path, settings in _server_settings(cfg):
        if settings.vllm_enable_lora:
            yield f"{path}.vllm_enable_lora", "GRPO syncs merged weights; set it to false"


@reads("custom.trainer_variant", "rlhf", RS)
def _engine_reports_what_it_samples_from(cfg: Config) -> Found:
    """By default vLLM reports the model's probabilities before temperature and filters are applied; transformers'
    generate reports none, and the learner knows the temperature alone."""
    if not cfg.is_grpo or cfg.rlhf is None or cfg.rlhf.importance_correction_cap is None:
        return
    decoding, plain = cfg.rlhf.decoding, Sampling()
    if not cfg.rlhf.use_vllm and decoding.model_copy(update={"temperature": plain.temperature}) != plain:
        rule = "top_p, top_k and repetition_penalty need an engine that reports probabilities (rlhf.use_vllm: true)"
        yield "rlhf.decoding", f"{rule}; use it, leave them out, or set rlhf.importance_correction_cap: null"
    if not cfg.rlhf.uses_server or decoding == plain:
        return
    for path, settings in _server_settings(cfg):
        if settings.vllm_engine_kwargs.get("logprobs_mode") != "processed_logprobs":
            rule = "importance correction with rlhf.decoding other than plain sampling at temperature 1 needs "
            way_out = "{logprobs_mode: processed_logprobs}; add it, or set rlhf.importance_correction_cap: null"
            yield f"{path}.vllm_engine_kwargs", rule + way_out


@reads(RS)
def _engine_reports_probabilities(cfg: Config) -> Found:
    for path, settings in _server_settings(cfg):
        if (mode := settings.vllm_engine_kwargs.get("logprobs_mode", "raw_logprobs")) not in LOGPROBS_MODES:
            rule = f"logprobs_mode: {mode} reports no log-probabilities; use {' or '.join(LOGPROBS_MODES)}"
            yield f"{path}.vllm_engine_kwargs", rule


@reads("custom.trainer_variant", RM)
def _stage2_settings_in_a_grpo_file(cfg: Config) -> Found:
    given, default = cfg.custom.extra.rollout_matching, RolloutMatching()
    for key, found in RolloutMatching.model_fields.items():
        if cfg.is_grpo and key not in SHARED_WITH_STAGE2 and getattr(given, key) != getattr(default, key):
            yield f"{RM}.{found.alias or key}", "is for stage 2, GRPO takes its settings from rlhf; delete it here"


@reads("custom.trainer_variant", "tuner.dropout")
def _ratios_have_no_dropout(cfg: Config) -> Found:
    if cfg.is_grpo and cfg.tuner.dropout:
        rule = "GRPO compares probabilities in training with those in sampling, and dropout would change them"
        yield "tuner.dropout", f"{rule}; set it to 0"


@reads("custom.trainer_variant", "rlhf", "tuner", "model.reference_path", f"{RM}.losses")
def _penalty_has_a_reference(cfg: Config) -> Found:
    path, key = ("rlhf.beta", "beta") if cfg.is_grpo else (f"{RM}.losses.reference_kl", "reference_kl")
    way_out = f"name the checkpoint that training starts from as model.reference_path, or set {key}: 0"
    if not cfg.has_reference:
        if cfg.model.reference_path is not None:
            yield "model.reference_path", f"nothing is compared with it; set {path}, or delete it"
    elif cfg.model.reference_path is not None:
        return
    elif cfg.tuner.type != "lora":
        rule = "full fine-tuning keeps no copy of the start policy, as adapters do"
        yield path, f"{rule}; {way_out}"
    elif cfg.tuner.adapter_path is not None:
        why = "with adapters disabled the model is the policy before tuner.adapter_path, not the starting policy"
        yield path, f"{why}; merge that adapter and {way_out}"


@reads("custom.trainer_variant", f"{RM}.targets.supervise_closing", f"{RM}.losses.reference_kl", f"{RM}.teacher")
def _something_says_when_to_stop(cfg: Config) -> Found:
    held = cfg.rm.losses.reference_kl or cfg.rm.teacher is not None
    if not cfg.is_grpo and cfg.rm.targets.supervise_closing == "complete" and not held:
        rule = "complete leaves nothing that says when to stop where annotation is partial"
        yield f"{RM}.targets.supervise_closing", f"{rule}; set {RM}.losses.reference_kl or a teacher, or use always"


@reads("rlhf", f"{RM}.async")
def _old_responses_are_corrected(cfg: Config) -> Found:
    if cfg.is_grpo and cfg.rlhf is not None and cfg.rm.async_.version_window:
        if cfg.rlhf.importance_correction_cap is None:
            why = f"responses of older weights ({RM}.async.version_window) need the correction"
            yield "rlhf.importance_correction_cap", f"{why}; set a number, or version_window: 0"


@reads("rlhf")
def _rewards_have_weights(cfg: Config) -> Found:
    if cfg.rlhf is None:
        return
    names, weights = cfg.rlhf.reward_funcs, cfg.rlhf.reward_weights
    if weights is not None and len(weights) != len(names):
        yield "rlhf.reward_weights", f"must have one weight for each of the {len(names)} reward_funcs; correct it"
    elif weights is not None:
        ends = {"at the start": 0, "at the end": math.inf}
        zero = [name for name, step in ends.items() if not any(setting_at(weight, step) for weight in weights)]
        if zero:
            rule = f"are all 0 {' and '.join(zero)}, so that no response is better than another"
            yield "rlhf.reward_weights", f"{rule}; keep one positive"
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        yield "rlhf.reward_funcs", f"names {', '.join(repeated)} more than once; raise its weight instead"
    if not all(0 < setting_at(cfg.rlhf.reward_iou, step) <= 1 for step in (0, math.inf)):
        yield "rlhf.reward_iou", "must be above 0 and at most 1, at the start and at the end of a schedule; correct it"


@reads("custom.train_jsonl", "custom.val_jsonl", "custom.trainer_variant")
def _only_stage2_forces_files(cfg: Config) -> Found:
    for name, files in (("train_jsonl", cfg.custom.train_jsonl), ("val_jsonl", cfg.custom.val_jsonl or [])):
        for i, file in enumerate(files):
            if file.teacher_forced_ratio is not None and (cfg.is_grpo or name == "val_jsonl"):
                rule = "counts for stage 2's training data only; delete it"
                yield f"custom.{name}[{i}].teacher_forced_ratio", rule
            if name == "val_jsonl" and file.weight != 1:
                yield f"custom.{name}[{i}].weight", "counts for training data only; delete it"


@reads(f"{RM}.targets", f"{RM}.matching.label")
def _true_labels_are_learnt(cfg: Config) -> Found:
    if cfg.rm.targets.label_context == "truth" and cfg.rm.matching.label == "ignore":
        yield (
            f"{RM}.targets.label_context",
            "truth writes the true labels so that they are trained, but matching.label: ignore trains none; set "
            "matching.label: correct, or own here",
        )


# ---- the launch -----------------------------------------------------------------------------------------------------


def launch_problems(cfg: Config, world_size: int, missing: set[str] | frozenset[str] = frozenset()) -> Found:
    """Find why `world_size` learners cannot run the config with packages, or "cuda", `missing` (CFG-10, 17, ROL-5)."""
    if world_size > 1 and cfg.servers() and cfg.sync_mode() != "full":
        rule = f"{world_size} learners in server mode need full; set it, or launch one learner, or use no server"
        yield cfg.rollout_path("vllm.sync.mode"), f"{rule} ({NO_SERVER})"
    backend = cfg.rollout_path("rollout_backend")
    hf = f"{backend}: {'false (transformers, the hf backend)' if cfg.is_grpo else 'hf'}"
    if cfg.uses_vllm and "vllm" in missing:
        yield backend, f"vLLM is not installed here; run make setup, or set {hf}"
    if cfg.is_colocate and world_size % cfg.rm.vllm.tensor_parallel_size:
        mode = cfg.rollout_path("vllm.mode")
        way_out = f"set it to 1 (with {mode}: colocate) or to another divisor of {world_size}, or set {hf}"
        yield cfg.rollout_path("vllm.tensor_parallel_size"), f"must divide the {world_size} learner(s); {way_out}"
    if cfg.training.fused_kernels and missing & {"liger_kernel", "cuda"}:
        what = "the package liger-kernel (requirements-gpu.txt)" if "liger_kernel" in missing else "CUDA devices"
        yield "training.fused_kernels", f"needs {what}, which this machine does not have; set it to false"
    for name in cfg.training.report_to:
        if name in missing:
            how = f"pip install -c requirements-trackers.txt {name}"
            yield "training.report_to", f"{name} is not installed here; {how}, or leave it out"
    if cfg.model.attn_implementation == "flash_attention_2" and missing & {"flash_attn", "cuda"}:
        what = "the package flash-attn (pip install --no-build-isolation flash-attn==2.8.3.post2) and CUDA devices"
        yield "model.attn_implementation", f"needs {what}, which this machine does not have; set it to sdpa"
