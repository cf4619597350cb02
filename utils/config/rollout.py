"""The sections about engines: where servers are, how weights reach them, how they sample, how a server is launched."""

import ipaddress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_serializer

from utils.config.section import NonNegative, Port, PositiveFloat, PositiveInt, Seconds, Section, key

MAX_IMAGE_PIXELS = 16 << 20  # 18 bytes a pixel on the way into the engine, measured: 300 MiB


@dataclass(frozen=True)
class ServerAddress:
    """Where a rollout server listens (`base_url`) and where the learner opens its weight communicator."""

    base_url: str
    group_port: int

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        url = urlsplit(self.base_url)
        return url.port or (443 if url.scheme == "https" else 80)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class ServerEntry(Section):
    """One rollout server."""

    base_url: str = key(..., "http(s) url of the server; a path prefix is allowed")
    group_port: Port = key(..., "port on the learner's side for the weight communicator of this server")


class Server(Section):
    """Where the rollout servers are: either `servers`, or `base_url` with `group_port`."""

    servers: list[ServerEntry] | None = key(None, "one entry per server")
    base_url: str | list[str] | None = key(None, "paired form: the url or urls of the servers")
    group_port: Port | list[Port] | None = key(None, "paired form: a list, or one port that counts up over the urls")
    timeout_s: Seconds = key(
        240.0, "seconds to reach a server or open its communicator; an engine silent for half of it is reported dead"
    )
    infer_timeout_s: float | None = key(
        None, "seconds for one /infer/ request; null, zero or negative: no limit", le=2_000_000
    )

    @field_validator("infer_timeout_s")
    @classmethod
    def _positive_or_none(cls, value: float | None) -> float | None:
        return value if value is not None and value > 0 else None

    def addresses(self) -> list[ServerAddress]:
        """Return the servers in order, urls without a trailing slash. Raises `ValueError` if the lists do not pair."""
        if self.servers is not None:
            return [ServerAddress(entry.base_url.rstrip("/"), entry.group_port) for entry in self.servers]
        urls, ports = self.base_url or [], self.group_port or []
        if isinstance(urls, str):
            if not isinstance(ports, int):
                raise ValueError("a single base_url takes a single group_port; give one number")
            urls = [urls]
        if isinstance(ports, int):
            ports = [ports + index for index in range(len(urls))]
        if len(ports) != len(urls):
            way_out = "give as many ports as urls, or a single port to count up from"
            raise ValueError(f"{len(urls)} base_urls cannot pair with {len(ports)} group_ports; {way_out}")
        return [ServerAddress(url.rstrip("/"), port) for url, port in zip(urls, ports, strict=True)]


class Sync(Section):
    """How updated weights reach the engines."""

    mode: Literal["full", "adapter", "auto"] = key("full", "merged weights; adapters; auto: adapters with enable_lora")
    fallback_to_full: bool = key(True, "if adapter sync fails, warn once and use full sync from then on")
    bucket_mib: PositiveInt = key(256, "size of one bucket in MiB; rank 0 needs memory for two")
    timeout_s: float = key(300.0, "limit for one sync in seconds; beyond it every rank stops", gt=0, le=86_400)
    verify: Literal["off", "first", "always"] = key("first", "compare the weights after a sync, by digests and a probe")


class Vllm(Section):
    """The vLLM engine that generates."""

    mode: Literal["colocate", "server"] = key("colocate", "inside the learner, or separate servers")
    gpu_memory_utilization: float = key(0.45, "colocate: fraction of a device's memory for vLLM", gt=0, le=1)
    tensor_parallel_size: PositiveInt = key(4, "colocate: learner devices that one engine spans")
    enable_lora: bool = key(False, "the engine has LoRA slots; adapter sync needs them")
    server: Server | None = key(None, "connection settings of server mode")
    sync: Sync = Field(default_factory=Sync)


class Decoding(Section):
    """How tokens are sampled."""

    temperature: NonNegative = key(0.0, "0 is greedy")
    top_p: float = key(1.0, "nucleus sampling; 1 is off", gt=0, le=1)
    top_k: int = key(-1, "sample from the k most likely tokens; -1 or 0 is off", ge=-1)
    repetition_penalty: PositiveFloat = key(1.0, "1 is off")

    @field_validator("top_k")
    @classmethod
    def _zero_is_off(cls, value: int) -> int:
        return value or -1


class ServerSettings(Section):
    """How one rollout server is launched; host and port come from the connection settings."""

    device: Literal["auto", "cuda", "cpu"] = key("auto", "auto: cuda if there is a GPU, else cpu")
    vllm_tensor_parallel_size: PositiveInt = key(1, "devices that one engine spans")
    vllm_data_parallel_size: PositiveInt | Literal["auto"] = key(
        "auto", "number of engines; auto: visible devices / tensor_parallel_size, 1 on CPU"
    )
    vllm_gpu_memory_utilization: float = key(
        0.85, "fraction of a device's memory for vLLM; CUDA, NCCL and two sync buckets lie outside", gt=0, le=1
    )
    vllm_max_model_len: PositiveInt = key(..., "longest prompt + response in tokens", examples=[32768])
    vllm_max_num_seqs: PositiveInt | None = key(None, "sequences an engine runs at once; null: vLLM's")
    vllm_enable_lora: bool = key(False, "LoRA slots; must equal rollout_matching.vllm.enable_lora")
    vllm_enable_prefix_caching: bool = key(True, "reuse cached prefixes; cleared at every weight update")
    vllm_engine_kwargs: dict[str, Any] = key({}, "further engine arguments of vLLM, passed through")
    allow_remote: bool = key(False, "listen beyond loopback; needs the token ROLLOUT_SERVER_TOKEN in every request")
    allowed_image_roots: list[str] | None = key(None, "directories to read images from; null: those of the data files")
    allow_image_urls: bool = key(False, "fetch images from http(s) urls")
    max_image_pixels: PositiveInt = key(
        MAX_IMAGE_PIXELS, "pixels of a request's images together; of a call's, 16 times that"
    )
    cpu_kv_cache_gib: PositiveInt = key(4, "device cpu: memory for cached keys and values, in GiB")

    @property
    def world_size(self) -> int | None:
        """Devices of this server, TP x DP; None if that depends on the machine it is launched on."""
        replicas = self.vllm_data_parallel_size
        if replicas == "auto":
            replicas = 1 if self.device == "cpu" else None
        return replicas and self.vllm_tensor_parallel_size * replicas


class ServerOverride(ServerSettings):
    """Settings of one server that differ from the common ones; keys that are not given stay common."""

    vllm_max_model_len: PositiveInt = key(1, "longest prompt + response in tokens")

    @model_serializer(mode="wrap")
    def _given_keys(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}


class RolloutServer(ServerSettings):
    """How the rollout servers are launched; host and port come from the connection settings."""

    servers: list[ServerOverride] = key([], "entry i overrides any of the keys above for server i")
