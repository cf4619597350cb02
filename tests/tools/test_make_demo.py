"""The demo's data and start model, and the supervised warm-up: DAT-1, DAT-2, CFG-3, TGT-1."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.config.test_checkpoint_files import NOT_WHOLE
from tests.families import build_family
from tools import warmup_sft
from tools.make_demo import (
    COLOURS,
    SHAPES,
    WARMUP_CONFIG,
    Scenes,
    build_start_model,
    fourier_features,
    make_dataset,
    make_demo,
    sinusoid_2d,
)
from utils.answer_format import FORMATS
from utils.config.load import ConfigError
from utils.data.encoding import encode_prompt, load_processor
from utils.data.samples import DataError, load_samples
from utils.learner.model import load_model
from utils.targets import TargetOptions


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder, num_train=40, num_val=10, seed=0)
    return folder


# ---- scenes --------------------------------------------------------------------------------------------------------


def test_dat_1_dataset_loads_and_holds_what_the_recipe_says(dataset):
    """DAT-1."""
    train, val = load_samples([dataset / "train.jsonl", dataset / "val.jsonl"], "x")
    assert (len(train), len(val)) == (40, 10)
    for sample in train + val:
        assert 1 <= len(sample.objects) <= 4
        assert all(o.desc.split()[0] in COLOURS and o.desc.split()[1] in SHAPES for o in sample.objects)
        corners = [(o.coords[1], o.coords[0]) for o in sample.objects]
        assert corners == sorted(corners)  # top to bottom, then left to right


def test_boxes_fit_the_shapes_that_are_drawn(dataset):
    for line in (dataset / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        pixels = np.asarray(Image.open(dataset / row["images"][0])).astype(int)
        coloured = (pixels.max(axis=2) - pixels.min(axis=2)) > 40  # the ground is grey
        for box in (o["bbox_2d"] for o in row["objects"]):
            x1, y1, x2, y2 = box
            ys, xs = coloured[y1:y2, x1:x2].nonzero()
            assert (xs.min(), xs.max()) == (0, x2 - x1 - 1) and (ys.min(), ys.max()) == (0, y2 - y1 - 1)
            coloured[y1:y2, x1:x2] = False
        assert not coloured.any()  # nothing is drawn outside the boxes


def test_dataset_is_the_same_for_the_same_seed_and_train_and_val_are_disjoint(dataset, tmp_path):
    make_dataset(tmp_path / "same", num_train=40, num_val=10, seed=0)
    make_dataset(tmp_path / "other", num_train=40, num_val=10, seed=1)
    assert digest(tmp_path / "same") == digest(dataset)
    assert digest(tmp_path / "other") != digest(dataset)
    images = [value for name, value in digest(dataset).items() if name.endswith(".png")]
    assert len(set(images)) == 50


def test_warm_up_scenes_are_others_and_mostly_list_their_first_object_only(tmp_path):
    make_dataset(tmp_path, num_train=2, num_val=2, num_warmup=120, seed=0)
    (tmp_path / "plain").mkdir()
    make_dataset(tmp_path / "plain", num_train=122, num_val=2, seed=0)  # the same scenes, fully annotated
    warm = load_samples([tmp_path / "warmup.jsonl"], "x")[0]
    full = load_samples([tmp_path / "plain" / "train.jsonl"], "x")[0][2:]
    assert all(some.objects == every.objects[: len(some.objects)] for some, every in zip(warm, full, strict=True))
    crowded = [(len(s.objects), len(f.objects)) for s, f in zip(warm, full, strict=True) if len(f.objects) > 1]
    complete = sum(some == every for some, every in crowded) / len(crowded)
    assert all(some in (1, every) for some, every in crowded) and 0.25 < complete < 0.55


def test_a_new_colour_is_missing_in_the_warm_up_and_alone_annotated_in_training(tmp_path):
    make_dataset(tmp_path, num_train=20, num_val=30, num_warmup=30, new_colour="yellow")
    (tmp_path / "plain").mkdir()
    make_dataset(tmp_path / "plain", num_train=200, num_val=30)
    labels, images = {}, {}
    for name in ("train", "val", "warmup"):
        samples = load_samples([tmp_path / f"{name}.jsonl"], "x")[0]
        labels[name] = [[item.desc.split()[0] for item in sample.objects] for sample in samples]
        images[name] = len({Path(sample.images[0]).read_bytes() for sample in samples})
    assert images == {"train": 20, "val": 30, "warmup": 30}
    assert all(labels["train"]) and {colour for each in labels["train"] for colour in each} == {"yellow"}
    assert {colour for each in labels["warmup"] for colour in each} == {"red", "green", "blue"}
    assert {colour for each in labels["val"] for colour in each} == {"red", "green", "blue", "yellow"}
    shown = {s.id: s.objects for s in load_samples([tmp_path / "plain" / "train.jsonl"], "x")[0]}
    partial = [s for s in load_samples([tmp_path / "train.jsonl"], "x")[0] if len(s.objects) < len(shown[s.id])]
    assert len(partial) > 10  # most show other objects, too


def test_other_scenes_have_more_and_smaller_objects_that_repeat_labels(tmp_path):
    scenes = Scenes(max_objects=12, sizes=(0.12, 0.22), max_labels=3)
    make_dataset(tmp_path, num_train=60, num_val=1, scenes=scenes)
    rows = [json.loads(line)["objects"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert max(map(len, rows)) > 9 and min(map(len, rows)) >= 1
    assert max(len({o["desc"] for o in objects}) for objects in rows) == 3
    widths = [o["bbox_2d"][2] - o["bbox_2d"][0] for objects in rows for o in objects]
    assert 15 <= min(widths) < max(widths) <= 28  # 0.12 and 0.22 of 128 pixels


def test_the_demos_scenes_are_what_they_have_always_been(tmp_path):
    """They are part of its outcome: other scenes, other numbers in the README."""
    make_dataset(tmp_path, num_train=1, num_val=1)
    val, train = (json.loads((tmp_path / f"{name}.jsonl").read_text())["objects"] for name in ("val", "train"))
    assert [(o["desc"], o["bbox_2d"]) for o in val + train] == [
        ("blue ring", [41, 41, 70, 73]),
        ("yellow ring", [22, 78, 56, 112]),
        ("yellow triangle", [42, 20, 71, 45]),
        ("green ring", [81, 56, 124, 98]),
    ]


# ---- the start model -----------------------------------------------------------------------------------------------


def test_start_model_loads_and_takes_an_encoded_prompt(start_model, dataset):
    processor, model = load_processor(start_model), load_model(start_model, "float32")
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen3VLProcessor"
    assert 1.4e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.7e6
    assert model.lm_head.weight is model.get_input_embeddings().weight
    prompt = encode_prompt(load_samples([dataset / "val.jsonl"], "List.")[0][0], processor)
    ids = torch.tensor([prompt.prompt_token_ids])
    assert (ids == model.config.image_token_id).sum() == 64  # 8 x 8 visual tokens
    answer = model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        **prompt.vision,
        max_new_tokens=3,
    )
    assert answer.shape[1] <= ids.shape[1] + 3


def test_tgt_1_tokenizer_spells_answers_with_one_token_per_coordinate(start_model):
    """TGT-1."""
    tokenizer = load_processor(start_model).tokenizer
    answer = (
        '{"objects": [{"desc": "red circle", "bbox_2d": [<|coord_0|>, <|coord_88|>, <|coord_340|>, <|coord_999|>]}]}'
    )
    ids = tokenizer(answer)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer.decode(ids) == answer and tokens.count("<|coord_0|>") == 1
    assert tokens[-1] == "]}]}"  # brackets are fused: the end of the last object lies inside one token
    first = tokenizer.convert_tokens_to_ids("<|coord_0|>")
    assert tokenizer.convert_ids_to_tokens(list(range(first, first + 1000))) == [f"<|coord_{k}|>" for k in range(1000)]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.eos_token_id != tokenizer.pad_token_id
    wild = 'Zürich 日本 "\\" \n\t{[]} 🙂'
    assert tokenizer.decode(tokenizer(wild)["input_ids"]) == wild


def test_start_model_depends_on_the_seed_alone(start_model, tmp_path):
    torch.manual_seed(123)
    same = build_start_model(tmp_path / "same", seed=0)
    other = build_start_model(tmp_path / "other", seed=1)
    assert digest(same)["model.safetensors"] == digest(start_model)["model.safetensors"]
    assert digest(other)["model.safetensors"] != digest(start_model)["model.safetensors"]
    assert torch.get_rng_state().equal(torch.manual_seed(123).get_state())  # the caller's generator is left alone


def test_start_model_refuses_sizes_that_do_not_fit_patches(tmp_path):
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        build_start_model(tmp_path, image_size=100)


def test_initial_embeddings_are_smooth_and_of_the_stated_size():
    bins = fourier_features(1000, 128)
    assert bins.std() == pytest.approx(0.06, rel=0.1)
    near, far = (bins[1:] - bins[:-1]).norm(dim=1).mean(), (bins[500:] - bins[:-500]).norm(dim=1).mean()
    assert near < far / 5
    assert sinusoid_2d(16, 96).std() == pytest.approx(0.3, rel=0.1)


# ---- warm-up -------------------------------------------------------------------------------------------------------


def tiny_warmup(**changes) -> warmup_sft.WarmupConfig:
    values = {
        "model": "-",
        "train_jsonl": "-",
        "output_dir": "-",
        "steps": 12,
        "samples_per_step": 4,
        "row_tokens": 600,
    }
    return warmup_sft.WarmupConfig.model_validate(values | changes)


def test_make_demo_trains_saves_and_keeps_what_is_made(tmp_path, capsys):
    make_demo(tmp_path, tiny_warmup(), num_train=4, num_val=4, num_warmup=24)
    out = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if line.startswith("step ")]
    assert losses[-1] < 0.9 * losses[0]
    model = load_model(tmp_path / "model", "float32")
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in model.parameters())
    assert load_processor(tmp_path / "model").chat_template
    before = digest(tmp_path)
    make_demo(tmp_path, tiny_warmup(), num_train=4, num_val=4, num_warmup=24)
    assert capsys.readouterr().out.count("kept") == 3 and digest(tmp_path) == before
    make_demo(tmp_path, tiny_warmup(steps=2), num_train=4, num_val=4, num_warmup=24)
    assert capsys.readouterr().out.count("kept") == 2
    assert digest(tmp_path)["model/model.safetensors"] != before["model/model.safetensors"]


def test_cfg_3_warmup_config_reports_all_mistakes_with_the_file(tmp_path):
    """CFG-3."""
    path = tmp_path / "w.yaml"
    path.write_text("model: m\ntrain_jsonl: t.jsonl\noutput_dir: o\nsteps: 0\nmomentum: 1\nlosses: {text: high}\n")
    with pytest.raises(ConfigError) as caught:
        warmup_sft.load_warmup_config(path)
    assert len(caught.value.problems) == 3
    assert all(str(path) in problem for problem in caught.value.problems)
    assert [name for name in ("steps=0", "momentum=1", 'losses.text="high"') if name in str(caught.value)] == [
        "steps=0",
        "momentum=1",
        'losses.text="high"',
    ]


def test_TGT_16_the_warmup_has_no_start_policy(tmp_path):
    """TGT-16."""
    path = tmp_path / "w.yaml"
    path.write_text("model: m\ntrain_jsonl: t.jsonl\noutput_dir: o\nsteps: 1\nlosses: {reference_kl: 1}\n")
    with pytest.raises(ConfigError, match="losses.reference_kl=1: the warm-up learns every token"):
        warmup_sft.load_warmup_config(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("train_jsonl: [{path: t.jsonl, annotated: [cat]}]", "annotated.*has no effect here: every sample trains"),
        ("train_jsonl: t.jsonl\nanswer_format: qwen3vl\nlosses: {gate: 2.0}", "losses.gate=2.0: .*qwen3vl has none"),
    ],
)
def test_the_warmup_refuses_what_has_no_effect_in_it(tmp_path, lines, message):
    path = tmp_path / "w.yaml"
    path.write_text(f"model: m\noutput_dir: o\nsteps: 1\n{lines}\n")
    with pytest.raises(ConfigError, match=message):
        warmup_sft.load_warmup_config(path)


def test_the_warmup_asks_as_the_answer_format_does_DAT_1(start_model, dataset):
    """DAT-1: unless the config has a prompt."""
    values = {"model": str(start_model), "train_jsonl": str(dataset / "train.jsonl"), "answer_format": "qwen3vl"}
    for data, prompt in (({}, FORMATS["qwen3vl"].prompt), ({"prompt": "List."}, "List.")):
        (sample,) = warmup_sft.load_parts(tiny_warmup(**values, data=data)).stream.next(1)
        assert sample.messages[-1]["content"] == prompt


def test_the_warmup_refuses_labels_that_stage_2_refuses_DAT_3(tmp_path, dataset):
    """DAT-3: InternVL's form writes labels as they are."""
    build_family("internvl", tmp_path / "model")
    line = json.loads((dataset / "train.jsonl").read_text().splitlines()[0])
    line["images"] = [str(dataset / image) for image in line["images"]]
    line["objects"][0]["desc"] = "the <img> tag"
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    values = {"model": str(tmp_path / "model"), "train_jsonl": str(tmp_path / "train.jsonl")}
    with pytest.raises(DataError, match="spells a special token of the model"):
        warmup_sft.load_parts(tiny_warmup(**values, answer_format="internvl"))


def test_shipped_warmup_config_reads_and_writes_where_the_demo_does():
    cfg = warmup_sft.load_warmup_config(WARMUP_CONFIG)
    assert (cfg.model, cfg.output_dir) == ("runs/demo/start", "runs/demo/model")
    assert [file.path for file in cfg.train_jsonl] == ["runs/demo/data/warmup.jsonl"]


def test_learning_rate_rises_then_falls_to_its_end():
    factor = warmup_sft.lr_factor(tiny_warmup(steps=100, warmup_share=0.05, min_lr_ratio=0.02))
    assert [round(factor(step), 3) for step in (0, 4, 5)] == [0.2, 1.0, 1.0]
    assert factor(99) == pytest.approx(0.02, abs=0.001)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty", "", "the file is empty"),
        ("broken", "{\n", "train.jsonl:1: not valid JSON"),
    ],
)
def test_dat_3_bad_data_ends_the_command_with_2_and_one_message(
    tmp_path, start_model, monkeypatch, capsys, name, text, message
):
    """DAT-3."""
    (tmp_path / "train.jsonl").write_text(text)
    config = tmp_path / "w.yaml"
    config.write_text(
        f"model: {start_model}\ntrain_jsonl: {tmp_path}/train.jsonl\noutput_dir: {tmp_path}/out\nsteps: 1\n"
    )
    monkeypatch.setattr("sys.argv", ["warmup_sft", "--config", str(config)])
    with pytest.raises(SystemExit) as caught:
        warmup_sft.main()
    assert caught.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def warm_up_until_training(folder: Path, monkeypatch, dataset: Path, **changes) -> int | str:
    """Start the command on samples of `dataset`, with a YAML in `folder`; return how it ended, at the latest where it
    would train."""
    values = {"model": "-", "train_jsonl": str(dataset / "train.jsonl"), "output_dir": str(folder / "out"), "steps": 1}
    (folder / "w.yaml").write_text(yaml.safe_dump(values | changes))
    monkeypatch.setattr("sys.argv", ["warmup_sft", "--config", str(folder / "w.yaml")])
    monkeypatch.setattr(warmup_sft, "train", lambda *_: sys.exit("trains"))
    with pytest.raises(SystemExit) as caught:
        warmup_sft.main()
    assert not (folder / "out").exists()
    return caught.value.code


@pytest.mark.parametrize("fault", NOT_WHOLE)
def test_srv_2_a_start_model_that_is_not_whole_ends_the_command_with_2(
    tmp_path, start_model, dataset, monkeypatch, capsys, fault
):
    """SRV-2."""
    spoil, message = NOT_WHOLE[fault]
    spoil(shutil.copytree(start_model, tmp_path / "model"))
    assert warm_up_until_training(tmp_path, monkeypatch, dataset, model=str(tmp_path / "model")) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'{tmp_path}/w.yaml: model="{tmp_path}/model": ')
    assert message in error and error.count("\n") == 1


def test_pck_3_samples_that_fit_no_row_are_named_before_training(tmp_path, start_model, dataset, monkeypatch, capsys):
    """PCK-3: those whose segment is longer, and no other; a row as long as the longest is enough."""
    cfg = tiny_warmup(model=str(start_model), train_jsonl=str(dataset / "train.jsonl"))
    parts, options = warmup_sft.load_parts(cfg), TargetOptions()
    samples = parts.stream.datasets[0]
    lengths = [len(warmup_sft.supervised_segment(own, parts.processor, parts.table, options)) for own in samples]
    longest = max(lengths)
    values = {"model": str(start_model), "row_tokens": longest}
    assert warm_up_until_training(tmp_path, monkeypatch, dataset, **values) == "trains"
    capsys.readouterr()
    assert warm_up_until_training(tmp_path, monkeypatch, dataset, **values | {"row_tokens": longest - 1}) == 2
    first, *named = capsys.readouterr().err.splitlines()
    num = lengths.count(longest)
    assert (
        first
        == f"{tmp_path}/w.yaml: row_tokens={longest - 1}: {num} of 40 samples do not fit; raise it, or remove them"
    )
    reason = f"prompt and ground truth make {longest} tokens"
    too_long = [own for own, length in zip(samples, lengths, strict=True) if length == longest]
    assert named == [f"{own.source}: {reason}" for own in too_long]


@pytest.mark.parametrize(("place", "reason"), [("file", "File exists"), ("file/in", "Not a directory")])
def test_an_output_dir_that_cannot_be_written_ends_the_command_before_training(
    tmp_path, start_model, dataset, monkeypatch, capsys, place, reason
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(warmup_sft, "load_parts", lambda *_: pytest.fail("loads"))
    place = str(tmp_path / place)
    assert warm_up_until_training(tmp_path, monkeypatch, dataset, model=str(start_model), output_dir=place) == 2
    error = capsys.readouterr().err  # a long path is shown by its beginning
    assert error.startswith(f'{tmp_path}/w.yaml: output_dir="{place[:40]}')
    assert error.endswith(f": cannot be written ({reason}); choose another directory\n") and error.count("\n") == 1


@pytest.mark.parametrize("place", ["model", "held"])
def test_a_checkpoint_is_not_overwritten(tmp_path, start_model, dataset, monkeypatch, capsys, place):
    """The start model least of all."""
    monkeypatch.setattr(warmup_sft, "load_parts", lambda *_: pytest.fail("loads"))
    for name in ("model", "held"):
        shutil.copytree(start_model, tmp_path / name)
    values = {"model": str(tmp_path / "model"), "output_dir": str(tmp_path / place)}
    assert warm_up_until_training(tmp_path, monkeypatch, dataset, **values) == 2
    assert "holds a checkpoint, which would be overwritten; choose another directory" in capsys.readouterr().err


def test_the_command_that_scores_a_warm_up_names_what_it_has_to_be_told():
    """Answers would be asked for, and read, in another way."""
    plain = warmup_sft.evaluation_command(tiny_warmup())
    assert plain == "python -m tools.evaluate --checkpoint - --data FILE"
    told = warmup_sft.evaluation_command(tiny_warmup(answer_format="qwen3vl", data={"prompt": "Find: all"}))
    settings = 'custom.extra.rollout_matching.answer_format: "qwen3vl", data.prompt: "Find: all"'
    assert told == f"{plain} --config CONFIG (a training config with {settings})"


def test_dat_3_lines_that_a_warm_up_skips_are_counted(tmp_path, start_model, dataset, capsys):
    """DAT-3."""
    data = dataset / "with_a_bad_line.jsonl"
    data.write_text((dataset / "train.jsonl").read_text().splitlines()[0] + "\n{\n")
    values = {"model": str(start_model), "train_jsonl": str(data), "output_dir": str(tmp_path / "out")}
    warmup_sft.load_parts(tiny_warmup(**values, data={"on_bad_sample": "skip"}))
    assert json.loads((tmp_path / "out/skipped.jsonl").read_text())["line"] == 2
    assert "1 bad sample(s) skipped" in capsys.readouterr().out
