"""Partial syncs into a real server with two engines: its weights and outputs equal PEFT's own merge (SYN-6, SYN-7)."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText

from tests.e2e.processes import Server
from tests.e2e.test_server import asked, assert_serves, folder, save_variant  # noqa: F401
from utils.config.rollout import ServerAddress
from utils.data.encoding import load_processor
from utils.data.images import open_image
from utils.data.prompts import to_chat_messages
from utils.dist import Ranks
from utils.rollout.client import RolloutClient
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import Probe, WeightSync
from utils.sync.wire import tensor_digest

pytestmark = pytest.mark.e2e


class ListeningClient(RolloutClient):
    """A client that keeps the responses of /update_weights/."""

    def post(self, index, path, body, timeout_s=None):
        answer = super().post(index, path, body, timeout_s)
        if path == "/update_weights/":
            self.held = answer["digests"]
        return answer


@pytest.fixture(scope="module")
def server(folder, start_model):  # noqa: F811
    server = Server(folder, start_model, vllm_data_parallel_size=2)
    try:
        yield server.wait_ready()
    finally:
        server.end()


def tuned(start_model: Path, train_embeddings: bool):
    """DoRA on q and v of the language model only; the vision tower is frozen, and the output layer tied."""
    base = AutoModelForImageTextToText.from_pretrained(start_model, dtype=torch.float32)
    saved = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True} if train_embeddings else {}
    targets = r".*language_model.*\.(q_proj|v_proj)"
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, use_dora=True, target_modules=targets, **saved))


def train_a_little(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def merged_by_peft(model) -> dict[str, torch.Tensor]:
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    return {name: tensor for name, tensor in merged.items() if name != "lm_head.weight"}


def own_logprobs(model_dir: Path, request: dict, token_ids: list[int]) -> np.ndarray:
    """Return transformers' log-probabilities of `token_ids` after the request's prompt."""
    processor = load_processor(model_dir)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    images = [open_image(image) for image in request["images"]]
    chat = to_chat_messages(request["messages"], len(images))
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=images, return_tensors="pt")
    ids = torch.cat([inputs["input_ids"], torch.tensor([token_ids])], dim=1)
    with torch.no_grad():
        output = model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
        )
    logprobs = output.logits[0, -len(token_ids) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].numpy()


def open_sync(server: Server, model, run_id: str, probe: Probe | None = None) -> WeightSync:
    address = ServerAddress(base_url=server.url, group_port=server.group_port)
    client = ListeningClient([address], rank=0, world_size=1, decode_batch_size=4)
    client.wait_ready()
    sync = WeightSync(
        MergedWeights(model),
        Ranks(),
        client,
        [("127.0.0.1", server.group_port)],
        run_id=run_id,
        bucket_bytes=300_000,
        timeout_s=60,
        open_timeout_s=60,
        verify="always",
        probe=probe,
    )
    sync.open()
    return sync


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_partial_syncs_leave_the_engine_with_the_merged_model_SYN_6_SYN_7(
    server, start_model, folder, asked, tmp_path, train_embeddings  # noqa: F811
):  # fmt: skip
    """SYN-6, SYN-7: digests of all that every worker holds, log-probabilities and greedy answers, after three partial
    syncs on one communicator. Then it is closed, reopened on the same port, and the sync is full again. With trained
    embeddings the output layer, which is tied to them and never sent, must follow."""
    torch.manual_seed(int(train_embeddings))
    model = tuned(start_model, train_embeddings)
    token_ids = list(range(40, 52))
    own = []

    def logprobs():
        own.append(own_logprobs(save_variant(start_model, merged_by_peft(model), tmp_path), asked[0], token_ids))
        return own[-1]

    sync = open_sync(server, model, f"run-{train_embeddings}", Probe(asked[0], token_ids, logprobs))
    reports = []
    for step in range(4):
        train_a_little(model)
        server.infer(asked[:2], max_tokens=4)  # fills the caches that the sync must drop (SYN-9)
        reports.append(sync.sync(f"run-{train_embeddings}:{step}"))
        expected = {name: tensor_digest(tensor) for name, tensor in merged_by_peft(model).items()}
        assert sync.client.held == [expected] * 2  # of every tensor, whether sent again or not
        assert sync.ledger == expected
    assert all(np.abs(after - before).max() > 1e-2 for before, after in zip(own, own[1:], strict=False))
    full, *partial = reports
    assert full.num_tensors == len(sync.weights.entries) and all(report.verified for report in reports)
    num_layers = model.config.text_config.num_hidden_layers
    for report in partial:
        assert report.num_tensors == 3 * num_layers + train_embeddings  # q and v, and k because they are one tensor
        assert report.num_bytes < full.num_bytes
    assert_serves(server, save_variant(start_model, merged_by_peft(model), tmp_path), asked[:2])

    sync.close()
    again = open_sync(server, model, f"again-{train_embeddings}")
    assert [again.sync(f"again-{train_embeddings}:{i}").num_tensors for i in range(2)] == [
        full.num_tensors,
        partial[0].num_tensors,
    ]
    again.close()
