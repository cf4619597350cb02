"""Bad requests for a rollout server, reproducible by seed: `bad_request(random.Random(seed), ...)`."""

import base64
import copy
import io
import json
import os
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

JUNK = [None, True, -1, 0, 1.5, 2**31, 2**63, 2**64, -(2**70), 1e308, "", "x", "<image>", "\0", "ሴ\U0001f600", [], {}]
JUNK += [[[[]]], {"a": {"b": []}}, ["x", 3, None], "A" * 5000, [0] * 500, {"type": "image"}, {"role": "user"}]
WORDS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<image>", "{{ x }}", "\0"]
WORDS += [
    "<think>",
    "{% for %}",
    "é",
    "\u202e",
    "�",
    "\U000e0001",
    "word ",
    "[{",
    "\r\n",
    "'; --",
    "%n%s",
    "<|coord_7|>",
]
WEIGHT_CALLS = ["init_communicator", "close_communicator", "start_weight_update", "update_weights"]
WEIGHT_CALLS += ["finish_weight_update", "abort_weight_update", "reset_prefix_cache"]
PATHS = [
    "/health/",
    "/infer/",
    "/probe/",
    "/teacher/",
    "/weight_version/",
    "/get_world_size/",
    "/",
    "/nowhere/",
    "/infer/../health/",
]
PATHS += ["/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/infer/%00", "/static/../../secret", "/infer/?x=" + "y" * 3000]
SPECIAL = {"Content-Type": "text/plain"}, {"Content-Type": ""}, {"Content-Type": "application/json; charset=utf-16"}
SPECIAL += {"Run-Token": "ü" * 9}, {"Authorization": "Bearer x"}, {"Expect": "200-maybe"}, {"Content-Encoding": "gzip"}
SPECIAL += ({"Transfer-Encoding": "identity"}, {"X": "y" * 5000}, {"Content-Type": "multipart/form-data"})


@dataclass
class BadRequest:
    """A request. `outside`: indices of its requests that name only images that must never be opened."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    outside: list[int] = field(default_factory=list)


@dataclass
class Traps:
    """Files around an image root: those that may be named (`inside`) and those that must not be opened (`outside`)."""

    inside: list[str]
    outside: list[str]


def set_traps(root: Path, secrets: Path) -> Traps:
    """Put broken and odd files below `root`, a picture and a text into `secrets`, and all kinds of paths to them."""
    picture = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 10, 10)).save(picture, "PNG")
    secrets.mkdir()
    (secrets / "secret.png").write_bytes(picture.getvalue())
    (secrets / "secret.txt").write_text("CANARY")
    os.mkfifo(secrets / "pipe")
    (root / "cut.png").write_bytes(picture.getvalue()[:40])
    (root / "noise.png").write_bytes(Random(0).randbytes(2000))
    (root / "text.png").write_text("hello")
    (root / "folder.png").mkdir()
    os.mkfifo(root / "pipe.png")
    (root / "loop.png").symlink_to(root / "loop.png")
    (root / "dangling.png").symlink_to(root / "nothing")
    (root / "link.png").symlink_to(secrets / "secret.png")
    (root / "chain.png").symlink_to(root / "link.png")
    (root / "door").symlink_to(secrets)
    up = os.path.relpath(secrets, root)
    outside = [f"{root}/link.png", f"{root}/chain.png", f"{root}/door/secret.png", f"{root}/door/pipe"]
    for name in ("secret.png", "secret.txt", "pipe"):
        outside += [f"{secrets}/{name}", f"file://{secrets}/{name}", f"{root}/{up}/{name}", f"{root}/./{up}/./{name}"]
        outside += [f"{root}/folder.png/../{up}/{name}", f"{root}/door/../{secrets.name}/{name}", f"//{secrets}/{name}"]
        outside += [f"/proc/self/root{secrets}/{name}", f"/proc/self/cwd/{os.path.relpath(secrets)}/{name}"]
        outside += [os.path.relpath(secrets / name), f"~{secrets}/{name}"]
    names = [
        "cut",
        "noise",
        "text",
        "folder",
        "pipe",
        "loop",
        "dangling",
        "missing",
        "a" * 300,
        "a/" * 3000,
        "\n",
        "%2e",
    ]
    inside = [f"{root}/{name}.png" for name in names] + [f"{root}/0.png\0", f"{root}/\0{secrets}/secret.png", str(root)]
    inside += [
        "/etc/passwd",
        "/proc/self/environ",
        "/proc/self/mem",
        "/dev/zero",
        "/dev/stdin",
        "/dev/fd/0",
        "",
        ".",
        "/",
    ]
    inside += [f"FILE://{secrets}/secret.png", f"file://localhost{secrets}/secret.png", f"file:{secrets}/secret.png"]
    inside += [
        "http://127.0.0.1:9/a.png",
        "ftp://127.0.0.1/a",
        "gopher://x",
        "data:image/png,x",
        "data:;base64,",
        "data:",
    ]
    inside += [data_uri(bomb(60_000, 60_000)), data_uri(bomb(2**31 - 1, 2**31 - 1)), data_uri(bomb(9000, 9000))]
    inside += [
        data_uri(bomb(1, 20_000)),
        data_uri(b"%!PS-Adobe-3.0 EPSF-3.0\n"),
        data_uri(b""),
        "A" * 30,
        "/9j/" + "!" * 30,
    ]
    return Traps(inside, outside)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG that claims a large size but has hardly any data."""
    chunks = [b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(bytes(9999))]
    framed = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in [*chunks, b"IEND"]]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def bad_request(random: Random, traps: Traps, good: str) -> BadRequest:
    """Return a request that is wrong somewhere. `good`: an image that may be opened."""
    kinds = [_images, _images, _mutated_infer, _mutated_infer, _prompts, _probe, _weights, _not_json, _http]
    return random.choice(kinds)(random, traps, good)


def _call(requests: list[Any], **config: Any) -> dict[str, Any]:
    return {"infer_requests": requests, "request_config": {"max_tokens": 2, "temperature": 0.0} | config}


def _ask(text: Any, *images: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "images": list(images)}


def _post(path: str, body: Any, **kwargs: Any) -> BadRequest:
    return BadRequest("POST", path, json.dumps(body).encode(), **kwargs)


def _images(random: Random, traps: Traps, good: str) -> BadRequest:
    """Several requests with one image each, in every form that can name an image."""
    asked, outside = [], []
    for number in range(random.randint(1, 4)):
        is_outside = random.random() < 0.5
        source = random.choice(traps.outside if is_outside else traps.inside)
        if not is_outside and random.random() < 0.3:
            source = data_uri(_damaged(random))
        part = {"type": "image", "image": source}
        if random.random() < 0.5:
            part = {"type": "image_url", "image_url": random.choice([source, {"url": source}])}
        asked.append(random.choice([_ask("<image>x", source), _ask([part, {"type": "text", "text": "x"}])]))
        outside += [number] if is_outside else []
    return _post("/infer/", _call(asked), outside=outside)


def _damaged(random: Random) -> bytes:
    """A real picture in some format, with a few bytes changed, or truncated."""
    buffer = io.BytesIO()
    kind = random.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "EPS", "TGA", "ICO"])
    Image.effect_noise((24, 24), 50).convert("RGB").save(buffer, kind)
    data = bytearray(buffer.getvalue())
    for _ in range(random.randint(1, 8)):
        data[random.randrange(min(len(data), 120))] = random.randrange(256)
    return bytes(data[: random.choice([len(data), random.randrange(len(data))])])


def _mutated(random: Random, value: Any, times: int) -> Any:
    """Return `value` with a few of its parts, at any depth, replaced, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(times):
        spots = [(value, key) for key in _keys(value)]
        for parent, key in spots:
            spots += [(parent[key], inner) for inner in _keys(parent[key])]
        if not spots:
            return random.choice(JUNK)
        parent, key = random.choice(spots)
        action = random.random()
        if action < 0.7:
            parent[key] = copy.deepcopy(random.choice(JUNK))
        elif action < 0.85:
            del parent[key]
        elif isinstance(parent, dict):
            parent[random.choice(["tools", "videos", "extra", "adapter_request", "chat_template_kwargs", "n"])] = "x"
        else:
            parent.append(copy.deepcopy(random.choice(JUNK)))
    return value


def _keys(value: Any) -> list[Any]:
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def _mutated_infer(random: Random, traps: Traps, good: str) -> BadRequest:
    parts = [{"type": "image_url", "image_url": {"url": good}}, {"type": "text", "text": "x"}]
    config = {"seed": 3, "stop": ["}"], "top_p": 0.9, "top_k": 5, "logprobs": True, "top_logprobs": 2, "min_p": 0.1}
    body = _call([_ask("<image>x", good), _ask(parts)], **config, repetition_penalty=1.1, presence_penalty=0.1)
    return _post("/infer/", _mutated(random, body, random.randint(1, 3)))


def _prompts(random: Random, traps: Traps, good: str) -> BadRequest:
    """Control characters, the model's own special tokens, too many images or markers, much too long."""
    text = "".join(random.choice(WORDS) for _ in range(random.choice([1, 5, 50])))
    text *= random.choice([1, 1, 1, 500, 20_000 // len(text) + 1])
    role = random.choice(["user", "system", "assistant", "tool"])
    images = [good] * random.randint(0, 2)
    messages = [{"role": role, "content": random.choice([text, [{"type": "text", "text": text}]])}]
    return _post("/infer/", _call([{"messages": messages * random.choice([1, 1, 40]), "images": images}]))


def _probe(random: Random, traps: Traps, good: str) -> BadRequest:
    ids = [random.choice([0, 1, 5, 300, 1000, 5000, 10**6, 2**31 - 1]) for _ in range(random.randint(0, 5))]
    body = {"infer_request": _ask("<image>x", good), "token_ids": ids * random.choice([1, 1, 300])}
    return _post(random.choice(["/probe/", "/teacher/"]), _mutated(random, body, random.randint(0, 2)))


def _weights(random: Random, traps: Traps, good: str) -> BadRequest:
    """Weight calls from someone other than the run that owns the server, under any run id."""
    body = {
        "run_id": random.choice(["holder", "x"]),
        "version": "x:1",
        "pause": "abort",
        "names": ["a"],
        "digest": True,
    }
    body |= {"dtype_names": ["float32"], "shapes": [[4]], "master_address": "127.0.0.1", "master_port": 9}
    body |= {"world_size": 3, "rank_offset": 1, "bucket_bytes": 1, "timeout_s": 5.0, "open_timeout_s": 5.0}
    fields = {
        "init_communicator": list(body)[7:],
        "start_weight_update": ["version", "pause"],
        "update_weights": ["names", "dtype_names", "shapes", "digest"],
        "finish_weight_update": ["version"],
    }
    call = random.choice(WEIGHT_CALLS)
    body = {key: body[key] for key in ["run_id", *fields.get(call, [])]}
    token = random.choice(["", "x", "None", "null", "A" * 43])
    headers = {"Content-Type": "application/json", "Run-Token": token}
    return _post(f"/{call}/", _mutated(random, body, random.randint(0, 2)), headers=headers)


def _not_json(random: Random, traps: Traps, good: str) -> BadRequest:
    whole = json.dumps(_call([_ask("<image>x", good)])).encode()
    cut = whole[: random.randrange(len(whole))]
    swapped = bytearray(whole)
    swapped[random.randrange(len(whole))] = random.randrange(256)
    odd = whole.replace(b'"x"', random.choice([b"NaN", b"Infinity", b'"\\ud800"', b'"\xff"', b"1e999", b"9" * 5000]))
    deep = random.choice([b"[", b'{"a":', b'{"infer_requests":[']) * random.choice([100, 100_000])
    body = random.choice([cut, bytes(swapped), odd, deep, random.randbytes(300), b"", b"null", b"3", b'"x"', b"[]"])
    return BadRequest("POST", random.choice(["/infer/", "/probe/", "/init_communicator/"]), body)


def _http(random: Random, traps: Traps, good: str) -> BadRequest:
    method = random.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "POST", "BREW"])
    body = json.dumps(_call([_ask("x")])).encode()
    return BadRequest(method, random.choice(PATHS), body, headers=dict(random.choice(SPECIAL)))
