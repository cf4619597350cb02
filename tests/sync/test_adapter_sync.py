"""Adapter sync (SYN-10): what is sent, when it is impossible, and how a run continues without it. A real engine's
slots are tested in tests/e2e/test_adapter_sync.py."""

import logging
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from tests.sync.test_sync_order import OneRank, StandIn
from utils.sync.adapter_sync import AdapterSync, AdapterWeights, FallbackSync, make_sync
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import WeightSync


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)


def tuned(**settings) -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=2, lora_alpha=5, **{"target_modules": ["first", "second"]} | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"alpha_pattern": {"second": 7}}])
def test_tensors_have_pefts_names_and_b_is_scaled_SYN_10(settings):
    """SYN-10: B @ A of what is sent is the whole change that PEFT's merge makes."""
    model = tuned(**settings)
    sent = dict(AdapterWeights(model).tensors())
    assert set(sent) == set(get_peft_model_state_dict(model))
    before = {name: getattr(model.base_model.model, name).base_layer.weight.clone() for name in ("first", "second")}
    merged = model.merge_and_unload()
    for name in before:
        change = sent[f"base_model.model.{name}.lora_B.weight"] @ sent[f"base_model.model.{name}.lora_A.weight"]
        torch.testing.assert_close(before[name] + change, getattr(merged, name).weight)


def test_an_adapter_in_a_frozen_part_goes_with_every_sync_SYN_10():
    """SYN-10: the engine fills its slot with what one update brings, and with nothing else."""
    model = tuned()
    for name, parameter in model.named_parameters():
        if "first" in name:
            parameter.requires_grad_(False)
    server = StandIn(AdapterWeights(model))
    limits = {"run_id": "run", "bucket_bytes": 1 << 20, "timeout_s": 5, "open_timeout_s": 5}
    addresses = [("127.0.0.1", 1), ("127.0.0.1", 2)]
    sync = AdapterSync(server.weights, OneRank(server.events), server, addresses, **limits)
    sync.transport = server
    for step in range(2):
        assert sync.sync(f"run:{step}").num_tensors == 4
        assert server.names == [entry.name for entry in server.weights.entries]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tuned(use_dora=True), "first.weight has a DoRA adapter"),
        (lambda: tuned(target_modules=["first"], modules_to_save=["second"]), "second.weight is trained itself"),
        (Net, "first.weight is trained itself"),
        (lambda: Net().requires_grad_(False), "no adapters"),
    ],
)
def test_what_slots_cannot_hold_is_known_at_start_SYN_10(model, words, caplog):
    """SYN-10: with fallback one warning and a full sync, without it guidance."""
    arguments = (OneRank([]), None, [])
    limits = {"run_id": "run", "bucket_bytes": 1, "timeout_s": 1, "open_timeout_s": 1}
    with pytest.raises(ValueError, match=rf"{words}.*set .*sync.mode: full, or .*fallback_to_full: true"):
        make_sync(model(), "adapter", False, *arguments, **limits)
    with caplog.at_level(logging.WARNING):
        assert type(make_sync(model(), "adapter", True, *arguments, **limits)) is WeightSync
    assert len(caplog.records) == 1 and words in caplog.text
    assert type(make_sync(model(), "full", False, *arguments, **limits)) is WeightSync


def test_a_failure_at_run_time_makes_the_rest_of_the_run_full_SYN_10_LRN_12(caplog):
    """SYN-10, LRN-12: one warning; the communicator is opened anew, and the version that failed is synced in full. A
    lost server, or a post that a stop request cut off, is no failure of the adapter."""
    model = tuned()
    server = StandIn(AdapterWeights(model))
    server.lost, server.stop = lambda: [0], threading.Event()
    limits = {"run_id": "run", "bucket_bytes": 1 << 20, "timeout_s": 5, "open_timeout_s": 5}
    ranks, addresses = OneRank(server.events), [("127.0.0.1", 1), ("127.0.0.1", 2)]

    def full() -> WeightSync:
        sync = WeightSync(MergedWeights(model), ranks, server, addresses, **limits)
        server.fail_at, server.weights, sync.transport = "", sync.weights, server
        return sync

    adapter = AdapterSync(AdapterWeights(model), ranks, server, addresses, **limits)
    adapter.transport = server
    sync = FallbackSync(adapter, full)
    assert sync.sync("run:0").num_tensors == 4 and all("lora_" in name for name in server.names)
    assert sync.sync("run:1").num_tensors == 4
    server.fail_at = "/update_weights/"
    with pytest.raises(RuntimeError, match="run:2"):  # a lost server is for CON-4 to bring back
        sync.sync("run:2")
    server.lost = list
    server.stop.set()
    with pytest.raises(RuntimeError, match="run:2"):  # a stop request cuts posts to healthy servers, too
        sync.sync("run:2")
    assert sync.current is adapter and sync.fallback is None
    server.stop.clear()
    with caplog.at_level(logging.WARNING):
        assert sync.sync("run:2").num_tensors == 4  # weights and biases
    assert server.names == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert server.events.index("1 /close_communicator/") < server.events.index("1 /init_communicator/")
    assert sync.sync("run:3").num_tensors == 4
    full_sync, server.fail_at = sync.current, "/update_weights/"
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="run:4"):
        sync.sync("run:4")  # not an adapter's failure any more: nothing else is left to try
    assert sync.current is full_sync and server.events.count("1 /init_communicator/") == 1
    assert (sync.mode, "run:2" in sync.fallback, "run:4" in sync.fallback) == ("full", True, False)
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "adapter sync failed; full sync from now on: weight sync run:2"[:47]
    ]
