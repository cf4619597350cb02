"""Set-up: what one of several nodes lacks is told once, by name, before anything heavy starts; settings of the config
reach what uses them."""

import errno
import json
import logging
import os
import re
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.answers import make_table
from tests.e2e.processes import config_of
from tests.run.test_resume import ranks  # noqa: F401
from utils.config.load import build_config, load_config
from utils.dist import Ranks
from utils.rollout.client import RolloutClient
from utils.run import setup
from utils.run.monitor import write_evaluation
from utils.run.resume import Checkpoint
from utils.run.rollout_log import read_rollout_log
from utils.run.setup import (
    begin_logging,
    check_ranks,
    claim_run_dir,
    load_tokenizer,
    make_layout,
    open_engine,
    open_records,
    open_session,
    owes_an_evaluation,
    reach_servers,
)
from utils.targets import plain_segment

HOST = socket.gethostname()


def config(folder: Path, url: str = "http://10.0.0.3:8000"):
    return build_config(config_of(folder, folder / "model", url, 8001, {}))


@pytest.fixture
def two_nodes(monkeypatch) -> Ranks:
    """Rank 0 of two, alone on its node; the other one arrives at every gather with the same."""
    for name, value in {"WORLD_SIZE": "2", "LOCAL_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(Ranks, "gather", lambda own, value: [value, value])
    return Ranks()


def test_nodes_are_told_apart_by_both_launchers(monkeypatch):
    """torchrun and DeepSpeed name the ranks of a node differently; one rank without a launcher is one node."""
    for name in ("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not Ranks().spans_nodes
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        for size in (4, 2):
            monkeypatch.setenv(name, str(size))
            assert Ranks().spans_nodes is (size == 2)
        monkeypatch.delenv(name)


def test_a_token_that_a_rank_lacks_is_told_before_servers_are_asked_SRV_3(tmp_path, two_nodes, monkeypatch, capsys):
    """SRV-3: beyond loopback only; an empty one is none."""
    monkeypatch.setattr(RolloutClient, "wait_ready", lambda client: pytest.fail("asked"))
    monkeypatch.setattr(RolloutClient, "check_model", lambda client, path, digest: None)
    monkeypatch.setattr("utils.run.setup.model_digest", lambda path: "")
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "")
    with pytest.raises(SystemExit) as end:
        reach_servers(config(tmp_path), two_nodes)
    message = f"ROLLOUT_SERVER_TOKEN: not set for rank 0 on {HOST}, rank 1 on {HOST}, but http://10.0.0.3:8000 is not "
    assert end.value.code == 2 and capsys.readouterr().err.startswith(message)
    monkeypatch.setattr(RolloutClient, "wait_ready", lambda client: None)
    monkeypatch.setattr(Ranks, "gather", lambda own, value: [value])
    reach_servers(config(tmp_path, "http://127.0.0.1:8000"), two_nodes)
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "secret")
    reach_servers(config(tmp_path), two_nodes)


def test_messages_about_servers_name_the_keys_of_the_config_that_is_used_CON_1_DIS_2(tmp_path, two_nodes, monkeypatch):
    """CON-1, DIS-2: GRPO has its own section."""
    monkeypatch.setattr(RolloutClient, "wait_ready", lambda client: None)
    monkeypatch.setattr(RolloutClient, "check_model", lambda client, path, digest: None)
    monkeypatch.setattr("utils.run.setup.model_digest", lambda path: "")
    client = reach_servers(config(tmp_path, "http://127.0.0.1:8000"), two_nodes)
    assert client.capacity_key == "custom.extra.rollout_matching.decode_batch_size"
    assert "custom.extra.rollout_matching.vllm.mode: colocate" in client.ways_out
    client = reach_servers(load_config("configs/demo/grpo.yaml"), two_nodes)
    assert client.capacity_key == "rlhf.decode_batch_size" and "rlhf.vllm_server_group_port" in client.ways_out
    assert "rollout_matching" not in client.ways_out
    assert "make server GPUS=<ids> CONFIG=configs/demo/grpo.yaml " in client.ways_out
    assert client.answers_per_sample == load_config("configs/demo/grpo.yaml").rlhf.num_generations > 1  # CON-3


def test_the_client_of_the_servers_has_the_limits_of_the_config_CFG_8_CFG_11_CON_3(tmp_path, two_nodes, monkeypatch):
    """CFG-8, CFG-11, CON-3."""
    monkeypatch.setattr(RolloutClient, "wait_ready", lambda client: None)
    monkeypatch.setattr(RolloutClient, "check_model", lambda client, path, digest: None)
    data = config_of(tmp_path, tmp_path / "model", "http://127.0.0.1:8000", 8001, {})
    matching = data["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 3, "max_failed_fraction": 0.25}
    matching["vllm"]["server"] |= {"timeout_s": 7.0, "infer_timeout_s": 9.0}
    client = reach_servers(build_config(data), two_nodes)
    assert (client.decode_batch_size, client.max_failed_fraction) == (3, 0.25)
    assert (client.timeout_s, client.infer_timeout_s) == (7.0, 9.0)
    assert (client.rank, client.world_size) == (0, 2)


def test_servers_are_checked_before_a_run_goes_on_CON_4(tmp_path, two_nodes, monkeypatch):
    """CON-4: that they have the model, and were started with this config's settings."""
    seen: list[Any] = []
    monkeypatch.setattr(RolloutClient, "wait_ready", lambda client: seen.append("ready"))
    monkeypatch.setattr(RolloutClient, "check_model", lambda client, *args: seen.append(args))
    monkeypatch.setattr(RolloutClient, "check_settings", lambda client, settings: seen.append(settings))
    monkeypatch.setattr("utils.run.setup.model_digest", lambda path: "digest")
    cfg = config(tmp_path, "http://127.0.0.1:8000")
    reach_servers(cfg, two_nodes)
    assert seen == ["ready", (cfg.model.path, "digest"), [cfg.server_settings(0)]]


def test_the_servers_answers_are_accepted_while_this_run_owns_them_alone_CON_4(monkeypatch):
    """CON-4: from the moment on at which its communicators are open; until then a former run's name is no matter."""
    client = SimpleNamespace(owner=None)
    sync = SimpleNamespace(open=lambda: opened.append(client.owner))
    opened: list[str | None] = []
    monkeypatch.setattr("utils.run.setup.make_weight_sync", lambda *_: sync)
    open_engine(None, None, "run", client, None, None, None, None)
    assert (opened, client.owner) == ([None], "run")


CHOSEN = {"hf": {"rollout_backend": "hf"}, "colocate": {"vllm": {"mode": "colocate", "tensor_parallel_size": 1}}}


@pytest.mark.parametrize("backend", CHOSEN)
def test_engines_in_the_learners_process_get_the_settings_of_the_config_ROL_6_ROL_7(tmp_path, monkeypatch, backend):
    """ROL-6, ROL-7, SYN-7."""
    made, learner, processor, probe = [], SimpleNamespace(model=None), object(), object()
    name = {"hf": "HfEngine", "colocate": "ColocateEngine"}[backend]
    module = SimpleNamespace(**{name: lambda *args, **options: made.append((args, options))})
    monkeypatch.setitem(sys.modules, f"utils.rollout.{backend}", module)
    monkeypatch.setattr("utils.run.setup.MergedWeights", lambda model: "weights")
    data = config_of(tmp_path, tmp_path / "model", "http://127.0.0.1:8000", 8001, {})
    data["custom"]["extra"]["rollout_matching"] = {"decode_batch_size": 3, "max_new_tokens": 64} | CHOSEN[backend]
    data["training"] |= {"seed": 7}
    cfg = build_config(data)
    open_engine(cfg, "ranks", "run", None, learner, processor, probe, None)
    if backend == "hf":
        assert made == [((learner, "ranks", processor, 3), {})]
    else:
        options = {"max_model_len": cfg.global_max_length, "decode_batch_size": 3, "seed": 7}
        assert made == [((cfg.model, cfg.rm.vllm, "weights", "ranks", processor, probe), options)]


def test_images_have_the_limits_of_the_config_CFG_17(tmp_path, start_model):
    """CFG-17: as the server's have, or prompts would differ (ROL-3)."""
    cfg = config(tmp_path)
    limits = {"path": str(start_model), "image_min_pixels": 32 * 32, "image_max_pixels": 96 * 96}
    processor, _ = load_tokenizer(cfg.model_copy(update={"model": cfg.model.model_copy(update=limits)}))
    size = processor.image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (32 * 32, 96 * 96)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_collated_and_checked_as_the_config_and_the_answer_format_want_PCK_6_TGT_8(
    tmp_path, monkeypatch, packing
):
    """PCK-6, TGT-8: tokens that hold a digit are known, where coordinates are numbers."""
    monkeypatch.setattr("utils.run.setup.position_ids_for", lambda model: lambda ids, vision: ids[None])
    cfg = config(tmp_path)
    cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"packing": packing})})
    table, dummy = make_table("native", "qwen3vl"), plain_segment("", [1, 2], [], {})
    _, collate = make_layout(cfg, SimpleNamespace(model=None), table, dummy)
    parts = [plain_segment(name, [1, 2], [int(table.digit_ids[0])], {}) for name in "ab"]
    for segment in parts:
        segment.digit_index = np.array([2])
    assert (collate(parts).attention_mask is None) == packing
    parts[1].input_ids[2] = 1
    assert 1 not in table.digit_ids
    with pytest.raises(ValueError, match="sample b: no supervised digit"):
        collate(parts)


def test_ranks_wait_for_each_other_as_long_as_the_config_says_LRN_2(tmp_path):
    """LRN-2: `training.rank_timeout_s`."""
    cfg = config(tmp_path)
    cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"rank_timeout_s": 77.0})})
    assert check_ranks(cfg)._timeout.total_seconds() == 77.0


def test_kernels_that_are_not_proven_are_refused_before_the_model_is_loaded_FAM_2(tmp_path, monkeypatch, capsys):
    """FAM-2: with file and key."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    monkeypatch.setattr("utils.run.setup.load_processor", lambda *_: None)
    cfg = config(tmp_path)
    cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"fused_kernels": True})})
    with pytest.raises(SystemExit) as end:
        load_tokenizer(cfg)
    message = "config: training.fused_kernels=true: not tested with Qwen2.5-VL; set it to false\n"
    assert end.value.code == 2 and capsys.readouterr().err == message


def test_a_model_that_always_thinks_is_refused_where_answers_are_objects_FAM_2(tmp_path, start_model, capsys):
    """FAM-2: its answers would not begin with an object, and none could be read. Other rewards of GRPO may take it."""
    shutil.copytree(start_model, tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{{ '<think>\\n' }}")
    with pytest.raises(SystemExit) as end:
        load_tokenizer(config(tmp_path))
    message = f"model.path={tmp_path / 'model'}: its prompts open a thinking block, "
    assert end.value.code == 2 and capsys.readouterr().err.startswith(message)
    assert load_tokenizer(config(tmp_path), needs_coordinates=False)[1] is not None


def test_a_run_directory_must_be_the_same_on_every_node_LRN_5(tmp_path, two_nodes, monkeypatch, capsys):
    """LRN-5: a node that does not see what rank 0 has just written there is named."""
    lock, _ = claim_run_dir(config(tmp_path), None, two_nodes)
    lock.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    monkeypatch.setattr("utils.run.setup.os.path.exists", lambda path: ".seen" not in str(path))
    with pytest.raises(SystemExit) as end:
        claim_run_dir(config(tmp_path), None, two_nodes)
    message = (
        f"training.output_dir={tmp_path / 'run'}: rank 0 on {HOST}, rank 1 on {HOST} does not see what rank 0 writes"
    )
    assert end.value.code == 2 and capsys.readouterr().err.startswith(message)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_run_directory_that_cannot_be_written_is_named_LRN_5(tmp_path, ranks, monkeypatch, capsys):  # noqa: F811
    """LRN-5: with key, reason and way out."""
    (tmp_path / "run").write_text("a file")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.lock")

    for reason in (r"File exists\); mend it", r"No space left on device\); make room there"):
        with pytest.raises(SystemExit) as end:
            claim_run_dir(config(tmp_path), None, ranks)
        message = capsys.readouterr().err
        begins = f"training.output_dir={tmp_path / 'run'}: cannot be written ("
        assert end.value.code == 2 and message.startswith(begins)
        assert re.search(f"{reason}, or choose another directory$", message.strip())
        monkeypatch.setattr("utils.run.setup.RunLock", full)


def test_ranks_of_one_node_share_their_run_directory_anyway_LRN_5(tmp_path, ranks, monkeypatch):  # noqa: F811
    """LRN-5: no file is looked for."""
    monkeypatch.setattr("utils.run.setup.os.path.exists", lambda path: pytest.fail("looked for a file"))
    claim_run_dir(config(tmp_path), None, ranks)[0].close()


@pytest.mark.parametrize(
    ("address", "interface", "reason"),
    [
        ("127.0.1.1", None, "its host name resolves to loopback or not at all"),
        (None, "", "its host name resolves to loopback or not at all"),
        ("10.0.0.1", "ib7", "GLOO_SOCKET_IFNAME=ib7 is not here"),
        ("10.0.0.1", "net0,lo", "GLOO_SOCKET_IFNAME=net0,lo is not here"),
        ("10.0.0.1", None, None),
        ("127.0.1.1", "net1", None),
        ("127.0.1.1", "net1,net0", None),
    ],
)
def test_a_node_that_others_cannot_reach_is_told_before_the_ranks_meet(
    tmp_path, two_nodes, monkeypatch, capsys, address, interface, reason
):
    """Gloo listens at the host name's address, or on the given interfaces; loopback is of no use between nodes."""

    def look_up(name: str) -> str:
        if address is None:
            raise socket.gaierror("Name or service not known")
        return address

    monkeypatch.setattr("socket.gethostbyname", look_up)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "net0"), (3, "net1")])
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    if reason is None:
        return two_nodes.check_interface()
    with pytest.raises(SystemExit) as end:
        open_session(config(tmp_path), metric="f1")
    message = f"node {HOST} cannot be reached by the other nodes: {reason}; set GLOO_SOCKET_IFNAME to one of net0, net1"
    assert end.value.code == 2 and capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("eval_steps", "eval_at_start", "is_made", "owes"),
    [(2, False, False, True), (0, True, False, True), (2, False, True, False), (0, False, False, False)],
)
def test_an_owed_evaluation_is_made_once_unless_evaluation_is_off_now_LRN_5_LRN_7(
    tmp_path, eval_steps, eval_at_start, is_made, owes
):
    """LRN-5, LRN-7: without evaluation there may be neither an engine nor samples to make it."""
    if is_made:
        write_evaluation(tmp_path, 4, {"f1": 0.5}, [], is_best=True)
    else:
        (tmp_path / "eval").mkdir()
        (tmp_path / "eval" / "step_000004.json").write_text("")  # what a power cut may leave is none
    training = SimpleNamespace(output_dir=str(tmp_path), eval_steps=eval_steps, eval_at_start=eval_at_start)
    for resumed, expected in ((None, False), ({"owes_evaluation": False}, False), ({"owes_evaluation": True}, owes)):
        assert owes_an_evaluation(SimpleNamespace(training=training), 4, resumed) == expected


def session_of(cfg, own, owes_evaluation=False) -> SimpleNamespace:
    """What `open_records` reads of a session, without servers."""
    engine = SimpleNamespace(mode="full", fallback=None)
    return SimpleNamespace(
        cfg=cfg,
        ranks=own,
        run_dir=Path(cfg.training.output_dir),
        run_id="def",
        num_steps=9,
        policy=SimpleNamespace(engine=engine, client=None),
        inputs={"accepted_changes": []},
        owes_evaluation=owes_evaluation,
    )


@pytest.mark.parametrize("report_to", ["none", ["tensorboard"]])
def test_trackers_learn_what_the_run_is_LOG_3_LRN_5(tmp_path, report_to):
    """LOG-3, LRN-5: those of the config, on rank 0 alone; a resumed run's from the step after its checkpoint."""
    data = config_of(tmp_path, tmp_path / "model", "http://10.0.0.3:8000", 8001, {})
    data["training"] |= {"report_to": report_to, "logging_steps": 3}
    cfg = build_config(data)
    for checkpoint, purge_step in ((None, None), (Checkpoint(tmp_path / "checkpoint-3", 3, "abc", 1, {}, {}), 4)):
        for rank in (Ranks(), SimpleNamespace(is_main=False, world_size=2)):
            monitor = open_records(checkpoint, session_of(cfg, rank))
            monitor.close()
            assert monitor.facts.run_id == "def" and monitor.facts.run_dir == Path(cfg.training.output_dir)
            assert monitor.facts.config["training"]["report_to"] == cfg.training.report_to
            assert [own.name for own in monitor._trackers] == (cfg.training.report_to if rank.is_main else [])
            assert (monitor.num_steps, monitor.logging_steps) == (9, 3)
            assert not rank.is_main or monitor.facts.purge_step == purge_step


@pytest.mark.parametrize("owes", [True, False])
def test_the_records_of_an_evaluation_that_is_owed_are_dropped_LRN_5(tmp_path, owes):
    """LRN-5: it is made again, and would stand in `rollouts.jsonl` twice."""
    log = tmp_path / "run" / "rollouts.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"step": 3, "phase": phase}) + "\n" for phase in ("train", "eval")))
    checkpoint = Checkpoint(tmp_path / "checkpoint-3", 3, "abc", 1, {}, {})
    open_records(checkpoint, session_of(config(tmp_path), Ranks(), owes)).close()
    assert [line["phase"] for line in read_rollout_log(log)] == ["train"] + ["eval"] * (not owes)


def test_the_records_of_a_run_that_ended_before_its_first_checkpoint_are_dropped_LRN_5(tmp_path):
    """LRN-5: it begins anew, in the same folder."""
    log = tmp_path / "run" / "rollouts.jsonl"
    log.parent.mkdir()
    log.write_text(json.dumps({"step": 1, "phase": "train"}) + "\n")
    log.with_name("run.json").write_text("{}")
    monitor = open_records(None, session_of(config(tmp_path), Ranks()))
    monitor.close()
    assert read_rollout_log(log) == [] and monitor.facts.purge_step == 0


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_a_tracker_that_is_not_installed_is_told_before_anything_starts_LOG_3(tmp_path, capsys):
    """LOG-3: exit status 2 with the command that installs it; the model's folder does not even exist."""
    data = config_of(tmp_path, tmp_path / "model", "http://127.0.0.1:8000", 8001, {})
    data["training"]["report_to"] = ["tensorboard", "wandb"]
    with pytest.raises(SystemExit) as end:
        open_session(build_config(data), metric="f1")
    assert end.value.code == 2
    assert "training.report_to" in (told := capsys.readouterr().err) and "requirements-trackers.txt wandb" in told


def test_a_model_that_one_rank_finds_wrong_ends_all_with_its_reason_FAM_3(tmp_path, monkeypatch, capsys):
    """FAM-3: and what is no fault of the model is raised as it is."""
    monkeypatch.setattr(setup, "Learner", lambda *_: None)
    monkeypatch.setattr(setup, "check_model", lambda *_: None)
    two = SimpleNamespace(is_main=True, first=lambda value: value or "packing changes the model's output")
    cfg = config(tmp_path)
    with pytest.raises(SystemExit):
        setup.open_learner(cfg, two, 1, None, None)
    assert "packing changes the model's output" in capsys.readouterr().err

    def broken(*_):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(setup, "check_model", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        setup.open_learner(cfg, two, 1, None, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_its_failed_requests_CON_3(monkeypatch, capsys, rank):
    """CON-3: with its number; of all else the others tell errors only."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    names = ("utils.rollout.round", "utils.rollout.teacher", "utils.rollout.client")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        begin_logging(SimpleNamespace(rank=rank, is_main=rank == 0))
        for name in names:
            logging.getLogger(name).warning("no image")
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    told = [f"{name}: no image" for name in names]
    assert capsys.readouterr().err.splitlines() == ([f"rank 1: {line}" for line in told[:2]] if rank else told)
