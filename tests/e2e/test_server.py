"""The rollout server as a real process: two CPU engines, real HTTP, real weight updates over Gloo, real signals."""

import base64
import contextlib
import ctypes
import itertools
import os
import select
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from random import Random

import psutil
import pytest
import requests
import torch
from PIL import Image, ImageDraw
from safetensors.torch import load_file

from tests import ms_swift
from tests.e2e import traffic
from tests.e2e.processes import START_S, Server, alive, launch
from tools.launch import process_tree
from utils.sync.wire import bucket_layouts, tensor_digest

pytestmark = pytest.mark.e2e

GREEDY = {"max_tokens": 12, "temperature": 0.0}
SAMPLED = {"max_tokens": 12, "temperature": 1.0}


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return bool(condition())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "data").mkdir()
    for i in range(4):
        image = Image.new("RGB", (128, 96), (60 * i, 90, 200 - 40 * i))
        ImageDraw.Draw(image).rectangle((10 * i, 20, 10 * i + 40, 70), fill=(250, 250, 60 * i))
        image.save(folder / "data" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def other_model(tmp_path_factory) -> Path:
    """A checkpoint of the same architecture with other random weights."""
    from tools.make_demo import build_start_model

    return build_start_model(tmp_path_factory.mktemp("other_model"), seed=1)


@pytest.fixture(scope="module")
def server(folder, start_model):
    server = Server(folder, start_model, vllm_data_parallel_size=2)
    try:
        yield server.wait_ready()
    finally:
        server.end()


@pytest.fixture(scope="module")
def asked(folder) -> list[dict]:
    prompt = [{"role": "user", "content": "<image>List every object."}]
    return [{"messages": prompt, "images": [str(folder / "data" / f"{i}.png")]} for i in range(4)]


class Learner:
    """Rank 0 of a weight update, as in utils/sync/weight_sync.py, but small enough to stop anywhere."""

    group: torch.distributed.ProcessGroup | None = None
    last: "Learner | None" = None

    def __init__(self, server: Server, run_id: str, world_size: int = 2, bucket_bytes: int = 1 << 20):
        self.server, self.run_id, self.bucket_bytes = server, run_id, bucket_bytes
        if Learner.last is not None:  # a store on the same port that is still alive would hand out its old keys
            Learner.last.group = None
        Learner.last = self
        body = {"run_id": run_id, "master_address": "127.0.0.1", "master_port": server.group_port}
        body |= {
            "world_size": world_size + 1,
            "rank_offset": 1,
            "bucket_bytes": bucket_bytes,
            "timeout_s": 60,
            "open_timeout_s": 60,
        }
        answers = []
        opening = threading.Thread(target=lambda: answers.append(server.post("/init_communicator/", body)))
        opening.start()
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group as open_group

        self.group = open_group(
            "127.0.0.1", server.group_port, 0, world_size + 1, backend="gloo", timeout=timedelta(seconds=60)
        )
        opening.join()
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["transport"] == "gloo"
        self.token = answers[0].json()["run_token"]

    def call(self, path: str, **body) -> requests.Response:
        return self.server.post(path, {"run_id": self.run_id, **body}, run_token=self.token)

    def update(
        self, weights: dict, version: str, pause: str = "wait", stop_before: int | None = None
    ) -> requests.Response:
        """Do a whole update; return the response to finish, or to the first call that failed."""
        started = self.call("/start_weight_update/", version=version, pause=pause)
        if started.status_code != 200:
            return started
        answers = []
        info = {
            "names": list(weights),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
            "shapes": [list(t.shape) for t in weights.values()],
        }
        receiving = threading.Thread(
            target=lambda: answers.append(self.call("/update_weights/", digest=True, **info)), daemon=True
        )
        receiving.start()
        self._send(list(weights.values()), stop_before)
        receiving.join(60)
        if answers[0].status_code != 200:
            return answers[0]
        self.digests = answers[0].json()["digests"]
        return self.call("/finish_weight_update/", version=version)

    def _send(self, tensors: list[torch.Tensor], stop_before: int | None) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        layouts = bucket_layouts([t.numel() * t.element_size() for t in tensors], self.bucket_bytes)
        for index, layout in enumerate(layouts):
            if index == stop_before:
                self.group.shutdown()
                self.group = None  # closes the connections, as if the process had ended
                return
            bucket = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            for tensor, offset in zip(tensors[layout.first : layout.last], layout.offsets, strict=True):
                raw = tensor.contiguous().view(-1).view(torch.uint8)
                bucket[offset : offset + raw.numel()] = raw
            self.group.broadcast([bucket], options).wait()


def own_answers(model_dir: Path, asked: list[dict], max_tokens: int) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Return transformers' greedy answers: (prompt ids, answer ids up to the end token, log-probs [n - 1, V])."""
    from transformers import AutoModelForImageTextToText

    from utils.data.encoding import load_processor
    from utils.data.images import open_image
    from utils.data.prompts import to_chat_messages

    processor = load_processor(model_dir)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for request in asked:
        images = [open_image(image) for image in request["images"]]
        text = processor.apply_chat_template(
            to_chat_messages(request["messages"], len(images)), tokenize=False, add_generation_prompt=True
        )
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)[0]
            rest = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
            types = {"mm_token_type_ids": inputs["mm_token_type_ids"]} if "mm_token_type_ids" in inputs else {}
            if types:  # answer tokens are text
                padding = ids.numel() - inputs["input_ids"].shape[1]
                types = {"mm_token_type_ids": torch.nn.functional.pad(types["mm_token_type_ids"], (0, padding))}
            logits = model(input_ids=ids[None], **rest, **types).logits[0, :-1]
        logprobs = logits.log_softmax(-1)
        prompt = inputs["input_ids"][0].tolist()
        answer = ids[len(prompt) :].tolist()
        if answer and answer[-1] == processor.tokenizer.eos_token_id:
            answer = answer[:-1]
        answers.append((prompt, answer, logprobs))
    return answers


def assert_serves(server: Server, model_dir: Path, asked: list[dict]) -> None:
    """The server's greedy answers and probe must equal the checkpoint's in `model_dir` (SYN-7, ROL-1, ROL-3)."""
    own = own_answers(model_dir, asked, GREEDY["max_tokens"])
    for output, (prompt_ids, answer_ids, _) in zip(server.infer(asked, **GREEDY), own, strict=True):
        assert output["response"]["prompt_token_ids"] == prompt_ids
        assert output["response_token_ids"] == [answer_ids]
    prompt_ids, answer_ids, logprobs = own[0]
    probe = server.post("/probe/", {"infer_request": asked[0], "token_ids": answer_ids}).json()
    assert probe["prompt_token_ids"] == prompt_ids + answer_ids
    scored = torch.tensor(probe["prompt_token_ids"])[1:]
    logprobs = logprobs[: len(scored)]
    for replica in probe["logprobs"]:
        assert replica[0] is None
        assert torch.tensor(replica[1:]).sub(logprobs.gather(1, scored[:, None])[:, 0]).abs().max() < 1e-3


def test_a_teacher_reports_what_transformers_finds_most_likely(server, start_model, asked):
    """TGT-16: the 20 most likely tokens at each token of an answer of someone else, with an image in the prompt."""
    for request, (prompt_ids, answer_ids, logprobs) in zip(asked, own_answers(start_model, asked, 16), strict=True):
        answer = server.post("/teacher/", {"infer_request": request, "token_ids": answer_ids}).json()
        assert answer["prompt_token_ids"] == prompt_ids + answer_ids
        own = logprobs[len(prompt_ids) - 1 :][: len(answer_ids)]
        token_ids, found = torch.tensor(answer["top_token_ids"]), torch.tensor(answer["top_logprobs"])
        assert token_ids.shape == (len(answer_ids), 20) and all(len(set(row)) == 20 for row in token_ids.tolist())
        assert (own.gather(1, token_ids) - found).abs().max() < 1e-3
        assert (own.topk(20).values - found).abs().max() < 1e-3


def test_health_and_sizes(server):
    """SRV-1, SRV-6, SRV-8"""
    health = server.get("/health/").json()
    assert health["status"] == "ok" and health["weight_version"] is None and health["world_size"] == 2
    assert server.get("/get_world_size/").json() == {"world_size": 2}
    assert server.get("/weight_version/").json() == {"weight_version": None, "boot_id": health["boot_id"]}


def test_start_up_print(server):
    """SRV-2"""
    text = server.log.read_text()
    for words in (f"port              {server.port}", "data parallel     2", "max model length  512", "host "):
        assert words in text


def test_greedy_answers_and_prompts_equal_transformers(server, start_model, asked):
    """ROL-1, ROL-3, SRV-4, SRV-8"""
    assert_serves(server, start_model, asked)


def test_every_image_form_gives_the_same_answer(server, folder, asked):
    """SRV-4: local path, data URI, base64; string messages and content lists; the order is kept."""
    raw = base64.b64encode((folder / "data" / "0.png").read_bytes()).decode()
    uri = f"data:image/png;base64,{raw}"
    text = {"type": "text", "text": "List every object."}
    forms = [
        asked[0],
        {"messages": asked[0]["messages"], "images": [uri]},
        {"messages": asked[0]["messages"], "images": [raw]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": uri}, text]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}, text]}]},
        {"messages": [{"role": "user", "content": "List every object."}], "images": uri},
        asked[1],
    ]
    outputs = server.infer(forms, **GREEDY, logprobs=True)
    first = outputs[0]["response"]
    for output in outputs[:-1]:
        assert output["response"]["prompt_token_ids"] == first["prompt_token_ids"]
        assert output["response_token_ids"] == outputs[0]["response_token_ids"]
    assert outputs[-1]["rollout_logprobs"] != outputs[0]["rollout_logprobs"]
    assert first["images_size"] == [[128, 96]]
    assert len(first["choices"][0]["logprobs"]["content"]) == len(outputs[0]["response_token_ids"][0])
    assert first["choices"][0]["message"]["content"]


def test_request_i_samples_with_seed_plus_i(server, asked):
    """SRV-4, DIS-6: so splitting a call in two changes nothing."""
    whole = server.infer([asked[0]] * 4, **SAMPLED, seed=2**31 - 2)
    again = server.infer([asked[0]] * 4, **SAMPLED, seed=2**31 - 2)
    tokens = [output["response_token_ids"] for output in whole]
    assert tokens == [output["response_token_ids"] for output in again]
    halves = server.infer([asked[0]] * 2, **SAMPLED, seed=2**31 - 2) + server.infer([asked[0]] * 2, **SAMPLED, seed=0)
    assert tokens == [output["response_token_ids"] for output in halves]
    assert len({str(t) for t in tokens}) == 4


def num_finished(server: Server) -> dict[str, float]:
    """Requests that each engine has answered up to their length."""
    lines = server.get("/metrics/").text.splitlines()
    done = [line for line in lines if line.startswith("vllm:request_success_total") and '"length"' in line]
    return {line.split('engine="')[1][0]: float(line.split()[-1]) for line in done}


def test_both_replicas_take_part(server, asked):
    """SRV-9"""
    before = num_finished(server)
    server.infer(asked * 2, **GREEDY)
    counts = {engine: count - before[engine] for engine, count in num_finished(server).items()}
    assert set(counts) == {"0", "1"} and abs(counts["0"] - counts["1"]) <= 4 and min(counts.values()) > 0, counts
    lines = server.get("/metrics/").text.splitlines()
    assert any(line.startswith("rollout_server_device_memory_bytes") for line in lines)


def test_bad_requests_fail_alone(server, folder, asked):
    """SRV-5: unreadable image, too long a prompt, refused path and URL; the other requests are answered."""
    (folder / "data" / "broken.png").write_bytes(b"\x89PNG broken")
    (folder / "outside.png").write_bytes((folder / "data" / "0.png").read_bytes())
    (folder / "data" / "link.png").symlink_to(folder / "outside.png")
    prompt = asked[0]["messages"]
    images = ["broken.png", "missing.png", "link.png", "../outside.png"]
    bad = [{"messages": prompt, "images": [str(folder / "data" / name)]} for name in images]
    bad.append({"messages": prompt, "images": ["http://127.0.0.1:9/a.png"]})
    bad.append({"messages": [{"role": "user", "content": "word " * 600}]})
    bad.append({"messages": prompt, "images": []})
    bad.append({"messages": [{"role": "nobody", "content": "x"}]})
    outputs = server.infer([asked[0], *bad, asked[1]], **GREEDY)
    infos = [output["rollout_infos"] for output in outputs]
    assert [("error" in info, info.get("refused", False)) for info in infos] == (
        [(False, False)] + [(True, False)] * 2 + [(True, True)] * 3 + [(True, False)] * 3 + [(False, False)]
    )
    assert "512" in infos[6]["error"] and "nobody" in infos[8]["error"]
    plain = server.infer(asked[:2], **GREEDY)
    assert [outputs[0]["response_token_ids"], outputs[-1]["response_token_ids"]] == [
        output["response_token_ids"] for output in plain
    ]


def test_malformed_calls_get_a_4xx_and_the_server_stays_up(server):
    """SRV-5"""
    broken = server.session.post(f"{server.url}/infer/", data="{", headers={"content-type": "application/json"})
    assert broken.status_code == 422
    answer = server.post("/infer/", {"infer_requests": [{"messages": 3}]})
    assert answer.status_code == 422 and answer.json()["detail"][0]["loc"][-1] == "messages"
    assert server.post("/probe/", {"infer_request": {"messages": [{"role": "user", "content": "<image>"}]}}).ok is False
    assert server.get("/health/").status_code == 200


def test_a_client_that_hangs_up_frees_the_engine(server, asked):
    """CON-3: its retry must not queue behind answers that nobody will read."""
    with pytest.raises(requests.Timeout):
        server.post(
            "/infer/",
            {"infer_requests": asked * 8, "request_config": {"max_tokens": 400, "temperature": 1.0, "stop": ["\0"]}},
            timeout=1.0,
        )
    assert wait_until(lambda: server.get("/health/").json()["running"] == 0, 10)


def test_weights_arrive_bit_for_bit_and_are_served(server, other_model, start_model, asked):
    """SYN-1, SYN-7, SYN-8: over Gloo, in buckets, twice; digests per worker, versions, answers of the new weights."""
    learner = Learner(server, "run-a", bucket_bytes=300_000)
    for model, version in ((other_model, "run-a:1"), (start_model, "run-a:2"), (other_model, "run-a:3")):
        weights = load_file(model / "model.safetensors")
        answer = learner.update(weights, version)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"weight_version": version, "missing": []}
        assert learner.digests == [{name: tensor_digest(tensor) for name, tensor in weights.items()}] * 2
        assert server.get("/health/").json()["weight_version"] == version
        assert_serves(server, model, asked[:2])
        assert server.infer(asked[:1], **GREEDY)[0]["rollout_infos"]["weight_version"] == version


def test_engines_leave_the_cores_alone_while_their_workers_work(server, other_model):
    """SRV-8: vLLM's own engines spin for a second after each call and take cores away from the learner next to them."""

    class Late(Learner):
        share = 0.0  # of a core: CPU time of all the server's processes while workers wait for the first bucket

        def _send(self, tensors: list[torch.Tensor], stop_before: int | None) -> None:
            processes = process_tree(self.server.process.pid)
            before = sum(sum(process.cpu_times()[:2]) for process in processes)
            time.sleep(1.0)
            self.share = sum(sum(process.cpu_times()[:2]) for process in processes) - before
            super()._send(tensors, stop_before)

    learner = Late(server, "run-late")
    assert learner.update(load_file(other_model / "model.safetensors"), "run-late:1").status_code == 200
    assert learner.share < 0.4  # one that spins takes 1.0


def test_frozen_tensors_need_not_be_sent_again(server, other_model, start_model, asked, tmp_path):
    """SYN-6: an update of one whole layer leaves everything else as it was, and reports what it did not touch."""
    learner = Learner(server, "run-b")
    mixed = load_file(other_model / "model.safetensors")
    assert learner.update(mixed, "run-b:1").status_code == 200
    layer = "model.language_model.layers.1."
    changed = {n: t for n, t in load_file(start_model / "model.safetensors").items() if n.startswith(layer)}
    assert len(changed) > 5
    answer = learner.update(changed, "run-b:2").json()
    assert answer["weight_version"] == "run-b:2" and len(answer["missing"]) > 20
    assert not any(".layers.1." in name and "language_model" in name for name in answer["missing"])
    assert_serves(server, save_variant(other_model, mixed | changed, tmp_path), asked[:2])


def save_variant(model_dir: Path, weights: dict, path: Path) -> Path:
    from safetensors.torch import save_file

    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_updates_that_must_not_be_used_are_refused(server, other_model):
    """SYN-3, SYN-6: unknown tensor, wrong shape, half a fused group; then a full update repairs the server."""
    whole = load_file(other_model / "model.safetensors")
    query = next(name for name in whole if name.endswith("layers.0.self_attn.q_proj.weight"))
    for weights, words in (
        (whole | {"model.language_model.nonsense.weight": torch.zeros(3)}, "nonsense"),
        (whole | {query: torch.zeros(8, 8)}, "q_proj"),
        ({query: whole[query]}, "part of a fused tensor"),
    ):
        learner = Learner(server, "run-c")
        answer = learner.update(weights, "run-c:1")
        assert answer.status_code == 502 and words in answer.json()["detail"], answer.text
        assert server.get("/health/").json()["status"] == "dirty"
    assert Learner(server, "run-c").update(whole, "run-c:2").status_code == 200


@pytest.mark.parametrize("pause", ["wait", "abort", "keep"])
def test_requests_that_are_running_when_weights_change(server, start_model, other_model, asked, pause):
    """SYN-8, SYN-9: one set of weights per answer, except with `keep`, whose answers say so."""
    learner = Learner(server, "run-d")
    before, after = (load_file(model / "model.safetensors") for model in (start_model, other_model))
    assert learner.update(before, "run-d:1").status_code == 200
    outputs = []
    config = {"max_tokens": 400, "temperature": 1.0, "seed": 1}
    tokens_before = _generated_tokens(server)
    running = threading.Thread(target=lambda: outputs.extend(server.infer(asked * 8, **config)))
    running.start()
    assert wait_until(
        lambda: min(now - b for now, b in zip(_generated_tokens(server), tokens_before, strict=True)) > 32, 30
    )
    answer = learner.update(after, "run-d:2", pause=pause)
    assert answer.status_code == 200, answer.text
    running.join()
    expected = {
        "wait": {"weight_version": "run-d:1"},
        "abort": {"weight_version": "run-d:2"},
        "keep": {"weight_version": "run-d:1", "last_weight_version": "run-d:2"},
    }
    long = [output for output in outputs if len(output["response_token_ids"][0]) > 300]
    told = [{name: value for name, value in output["rollout_infos"].items() if "version" in name} for output in long]
    assert long and told == [expected[pause]] * len(long)
    assert_serves(server, other_model, asked[:2])


def _generated_tokens(server: Server) -> list[float]:
    """Return the number of tokens generated so far, per replica."""
    lines = server.get("/metrics/").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")]


def test_a_learner_that_dies_in_the_middle_leaves_a_server_that_recovers(server, other_model, asked):
    """SYN-3, CON-4: a dirty server does not answer; the next learner reopens the communicator and sends everything."""
    weights = load_file(other_model / "model.safetensors")
    learner = Learner(server, "run-e", bucket_bytes=300_000)
    answer = learner.update(weights, "run-e:1", stop_before=4)
    assert answer.status_code == 502 and "broke off" in answer.json()["detail"]
    health = server.get("/health/")
    assert health.status_code == 503 and health.json()["status"] == "dirty"
    assert health.json()["weight_version"] is None
    assert server.post("/infer/", {"infer_requests": asked[:1], "request_config": GREEDY}).status_code == 503
    assert learner.call("/abort_weight_update/").status_code == 200

    following = Learner(server, "run-f", bucket_bytes=300_000)
    assert learner.call("/start_weight_update/", version="run-e:2").status_code == 403
    assert following.update(weights, "run-f:1").status_code == 200
    assert server.get("/health/").status_code == 200
    assert_serves(server, other_model, asked[:2])
    assert following.call("/close_communicator/").status_code == 200


def test_a_learner_that_dies_before_sending_leaves_a_server_that_recovers(server, other_model):
    """SYN-3: between start and the first bucket."""
    learner = Learner(server, "run-g")
    assert learner.call("/start_weight_update/", version="run-g:1").status_code == 200
    learner.group = None
    following = Learner(server, "run-h")
    assert server.get("/health/").json()["status"] == "dirty"
    assert following.update(load_file(other_model / "model.safetensors"), "run-h:1").status_code == 200


def test_prefix_cache_can_be_reset(server):
    """SRV-1"""
    assert Learner(server, "run-i").call("/reset_prefix_cache/").json() == {"reset": True}


def test_another_run_cannot_take_or_write_into_a_server_whose_learner_is_alive(server, other_model, asked):
    """SRV-3, CON-4, GRP-4: neither by the run id that /health/ shows nor by opening the communicator. Once the learner
    has ended, the next one has the server at once."""
    holder = Learner(server, "run-j")
    assert server.get("/health/").json()["owner"] == "run-j"
    body = {
        "master_address": "127.0.0.1",
        "master_port": 9,
        "world_size": 3,
        "bucket_bytes": 1,
        "timeout_s": 60,
        "open_timeout_s": 60,
    }
    start = time.monotonic()
    for run_id, token in itertools.product(("run-j", "thief"), (None, "guess")):
        answer = server.post("/init_communicator/", body | {"run_id": run_id}, run_token=token)
        assert answer.status_code == 409 and "run run-j holds this server" in answer.json()["detail"]
        label = {"run_id": run_id, "version": "x:1"}
        assert server.post("/start_weight_update/", label, run_token=token).status_code == 403
        assert server.post("/close_communicator/", {"run_id": run_id}, run_token=token).status_code == 403
        assert server.post("/reset_prefix_cache/", {}, run_token=token).status_code == 403
    assert time.monotonic() - start < 10
    weights = load_file(other_model / "model.safetensors")
    assert holder.update(weights, "run-j:1").status_code == 200  # it noticed nothing
    assert_serves(server, other_model, asked[:1])
    holder.group = None  # as if its process had ended
    assert Learner(server, "run-k").update(weights, "run-k:1").status_code == 200


def test_ms_swifts_forms_are_met_field_by_field(server, asked):
    """SRV-4: requests as its dataclasses serialize, responses read by its models; nothing unknown or converted."""
    swift = ms_swift.load().protocol
    requests_of_theirs = [
        swift.RolloutInferRequest(asked[0]["messages"], images=asked[0]["images"], uuid="a", data_dict={"k": [1]}),
        swift.RolloutInferRequest([{"role": "user", "content": "no image"}]),
        swift.RolloutInferRequest(asked[1]["messages"], images=["/nowhere.png"]),
    ]
    settings = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0, "stop": None, "seed": 5}
    details = {"logprobs": True, "top_logprobs": 3, "return_details": True}
    config = swift.RequestConfig(max_tokens=6, min_p=0.0, **settings, **details)
    body = {"infer_requests": [asdict(request) for request in requests_of_theirs], "request_config": asdict(config)}
    answer = server.post("/infer/", body | {"metrics": None, "use_tqdm": False, "adapter_request": None})
    assert answer.status_code == 200, answer.text
    first, second, failed = map(ms_swift.read_answer, answer.json())
    for output, num_images in ((first, 1), (second, 0)):
        response, [choice] = output.response, output.response.choices
        ids = output.response_token_ids[0]
        assert (choice.index, choice.message.role, choice.token_ids) == (0, "assistant", ids)
        assert choice.finish_reason in ("stop", "length") and isinstance(choice.message.content, str)
        positions = choice.logprobs["content"]
        assert [position["logprob"] for position in positions] == output.rollout_logprobs[0] and len(positions) == len(
            ids
        )
        assert all(len(position["top_logprobs"]) >= 3 for position in positions)
        usage = response.usage
        assert usage.prompt_tokens == len(response.prompt_token_ids) and 0 <= usage.completion_tokens - len(ids) <= 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert response.model and response.id.startswith("chatcmpl-") and abs(response.created - time.time()) < 600
        assert len(response.images_size or []) == num_images
        stopped = {"stop_token_id", "stop_logprob"} if choice.finish_reason == "stop" else set()
        assert set(output.rollout_infos) == {"weight_version"} | stopped
        assert output.messages is None and output.response_loss_mask == [] and output.prompt_logprobs is None
    assert failed.rollout_infos["refused"] and failed.response_token_ids == [] and failed.rollout_logprobs == []
    assert failed.response.choices[0].finish_reason is None
    defaults = {"infer_requests": [asdict(requests_of_theirs[1])], "request_config": asdict(swift.RequestConfig())}
    assert server.post("/infer/", defaults).status_code == 200
    assert server.post("/infer/", defaults | {"request_config": None}).status_code == 200


def test_ms_swifts_client_gets_answers_weight_version_and_errors(server, asked):
    """SRV-4: its own class, unchanged, against this server."""
    theirs = ms_swift.load()
    client = theirs.client.VLLMInferClient(base_urls=[server.url])
    good = theirs.protocol.RolloutInferRequest(asked[0]["messages"], images=asked[0]["images"])
    refused = theirs.protocol.RolloutInferRequest(asked[1]["messages"], images=["/nowhere.png"])
    config = theirs.protocol.RequestConfig(max_tokens=6, temperature=0.0)
    first, second = client.infer([good, refused], config)
    [ours] = server.infer([asked[0]], max_tokens=6, temperature=0.0)
    assert first.response_token_ids == ours["response_token_ids"] and first.response_token_ids[0]
    assert first.rollout_infos["weight_version"] == server.get("/weight_version/").json()["weight_version"]
    assert second.rollout_infos["refused"] and not second.response_token_ids
    with pytest.raises(RuntimeError, match="422.*temperature"):
        client.infer([good], theirs.protocol.RequestConfig(temperature=-1.0))


class Opened:
    """Names of the files in some folders that any process opens while this is active (Linux's inotify)."""

    IN_OPEN = 0x20

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.file = open(libc.inotify_init1(os.O_NONBLOCK), "rb", buffering=0)  # noqa: SIM115
        for folder in folders:
            assert libc.inotify_add_watch(self.file.fileno(), bytes(folder), self.IN_OPEN) >= 0

    def names(self) -> set[str]:
        names, data = set(), self.file.read(1 << 20) or b""
        while data:
            length = struct.unpack_from("iIII", data)[3]
            names.add(data[16 : 16 + length].rstrip(b"\0").decode())
            data = data[16 + length :]
        return names


def test_two_thousand_bad_requests_do_no_harm(server, folder, asked):
    """SRV-5, SRV-3: no status above 499; no request for a file outside the roots succeeds and none of these files is
    ever opened; no weight call without the run's token gets through; nothing hangs; nothing is logged as a crash.
    Afterwards the server answers as before."""
    holder = Learner(server, "holder")
    before = server.get("/health/").json()
    good = server.infer(asked, **GREEDY)
    secrets, inside = folder / "secrets", folder / "data" / "traps"
    inside.mkdir()
    traps = traffic.set_traps(inside, secrets)
    (inside / "good.png").write_bytes((folder / "data" / "0.png").read_bytes())
    opened = {"inside": Opened(inside), "outside": Opened(secrets)}
    logged = len(server.log.read_text())

    def send(seed: int) -> str | None:
        bad = traffic.bad_request(Random(seed), traps, str(inside / "good.png"))
        for attempt in range(3):  # closed with a part of the body unread, a connection may lose its answer on the way
            try:
                with requests.Session() as session:  # its own, as the server closes it after some mistakes
                    session.trust_env = False
                    url, more = server.url + bad.path, {"data": bad.body, "headers": bad.headers, "timeout": 60}
                    answer = session.request(bad.method, url, **more)
                break
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError):
                if attempt == 2:
                    raise
        story = (
            f"seed {seed}: {bad.method} {bad.path[:40]} {bad.body[:200]!r} -> {answer.status_code} {answer.text[:300]}"
        )
        allowed = answer.status_code < 500 and "CANARY" not in answer.text and len(answer.content) < 1 << 20
        if bad.path.strip("/") in traffic.WEIGHT_CALLS:
            allowed &= answer.status_code in (403, 409, 422)
        for number in bad.outside:
            infos = answer.json()[number]["rollout_infos"] if answer.status_code == 200 else {}
            allowed &= infos.get("refused", False)
        return None if allowed else story

    with ThreadPoolExecutor(4) as pool:
        wrong = [story for story in pool.map(send, range(2000)) if story]
    assert not wrong, f"{len(wrong)} wrong, first:\n" + "\n".join(wrong[:5])
    assert {"good.png", "cut.png"} <= opened["inside"].names() and not opened["outside"].names()
    assert "Traceback" not in server.log.read_text()[logged:]
    after = server.get("/health/").json()
    assert after == before and alive(server.children) == server.children
    strip = [{**output, "response": {**output["response"], "id": 0, "created": 0}} for output in good]
    again = server.infer(asked, **GREEDY)
    assert [{**output, "response": {**output["response"], "id": 0, "created": 0}} for output in again] == strip
    assert holder.call("/close_communicator/").status_code == 200


def test_bodies_beyond_the_limit_get_a_413_and_are_not_kept(server):
    """SRV-5: with a content length, or chunked."""
    piece = b" " * (1 << 20)
    memory = psutil.Process(server.process.pid).memory_info().rss
    for headers in ({"Content-Length": str(1 << 40)}, {"Transfer-Encoding": "chunked"}):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as wire:
            head = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
            head = f"Host: 127.0.0.1\r\nContent-Type: application/json\r\n{head}"
            wire.sendall(f"POST /infer/ HTTP/1.1\r\n{head}\r\n".encode())
            pieces = 300 if "chunked" in head else 0
            with contextlib.suppress(ConnectionError):  # it hangs up in the middle of a piece
                while pieces and not select.select([wire], [], [], 0)[0]:
                    wire.sendall(b"100000\r\n" + piece + b"\r\n")
                    pieces -= 1
            assert b" 413 " in wire.recv(1 << 16).splitlines()[0]
    assert wait_until(lambda: server.get("/health/").status_code == 200, 10)
    assert psutil.Process(server.process.pid).memory_info().rss - memory < 700 << 20


def test_a_busy_port_is_an_error_that_names_its_holder(server, folder):
    """SRV-2: status 2, no traceback, never another port."""
    log = folder / "busy.log"
    assert launch(server.config, log).wait(120) == 2
    text = log.read_text()
    assert f"{server.port}: Address already in use; held by process {server.process.pid}" in text
    assert "Traceback" not in text


def test_an_engine_of_one_device_computes_in_its_own_process_SRV_8(server):
    """SRV-8: on CPU vLLM would give it a worker process; both spin while they wait, and imports take twice as long."""
    names = [" ".join(child.cmdline()) for child in alive(server.children)]
    assert sum("EngineCore" in name for name in names) == 2 and not any("Worker" in name for name in names), names


def test_tensor_parallel_behind_a_prefix_and_a_token(folder, start_model, other_model, asked):
    """SRV-1, SRV-3, SRV-7: TP 2 receives weights; no answer without the token; SIGKILL of the front ends everything."""
    server = Server(folder, start_model, prefix="/rollout", token="s3cret", vllm_tensor_parallel_size=2)
    try:
        server.wait_ready()
        refused = requests.get(f"{server.url}/health/", timeout=10)
        assert refused.status_code == 401 and refused.headers["WWW-Authenticate"] == "Bearer"
        assert server.get("/get_world_size/").json() == {"world_size": 2}
        weights = load_file(other_model / "model.safetensors")
        learner = Learner(server, "run-t")
        assert learner.update(weights, "run-t:1").json() == {"weight_version": "run-t:1", "missing": []}
        assert learner.digests == [{name: tensor_digest(tensor) for name, tensor in weights.items()}] * 2
        assert_serves(server, other_model, asked[:2])
        assert learner.update(weights, "run-t:2", stop_before=2).status_code == 502
        assert Learner(server, "run-u").update(weights, "run-u:1").status_code == 200
        assert_serves(server, other_model, asked[:1])

        for token in ("s3cret", learner.token):
            assert token not in server.log.read_text()
            assert not any(token in str(child.environ()) for child in alive(server.children))
        assert len(alive(server.children)) >= 3
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        assert wait_until(lambda: not alive(server.children), 15), alive(server.children)
        assert socket.socket().connect_ex(("127.0.0.1", server.port)) != 0
    finally:
        server.end()


def test_sigterm_ends_the_tree_while_it_is_generating(server, asked):
    """SRV-7: within 15 s, with the port free again; an aborted client does not delay it."""
    body = {"infer_requests": asked * 16, "request_config": {"max_tokens": 400, "temperature": 1.0}}
    threading.Thread(target=lambda: _ignore(server.post, "/infer/", body), daemon=True).start()
    assert wait_until(lambda: server.get("/health/").json()["running"] > 8, 30)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(20)
    assert wait_until(lambda: not alive(server.children), 15 - (time.monotonic() - start)), alive(server.children)
    assert time.monotonic() - start < 15
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))


def _ignore(function, *args) -> None:
    try:
        function(*args)
    except requests.RequestException:
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_loading_server_says_so_and_dies_with_its_engines(folder, start_model, number):
    """SRV-6, SRV-7: 503 while loading; SIGKILL at that moment leaves no process either, and Ctrl-C does not wait for
    the model."""
    server = Server(folder, start_model)
    try:
        assert wait_until(lambda: _status(server) == 503, 60)
        assert server.get("/health/").json()["status"] == "loading"
        front = psutil.Process(server.process.pid)
        assert wait_until(lambda: len(front.children(recursive=True)) >= 2, START_S)
        server.children = front.children(recursive=True)
        server.process.send_signal(number)
        assert server.process.wait(15) == (130 if number == signal.SIGINT else -number)
        assert wait_until(lambda: not alive(server.children), 30), alive(server.children)
    finally:
        server.end()


def _status(server: Server) -> int | None:
    try:
        return server.get("/health/").status_code
    except requests.ConnectionError:
        return None
