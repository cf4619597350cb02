"""`tools.init`: the config that a new user gets loads, passes every check, and fits data and memory (CFG-16)."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.config.test_checkpoint_files import POINTER
from tests.data.test_images import shard
from tests.families import build_family
from tests.tools.test_report import sample_of
from tools.init import (
    DataFacts,
    _images_of,
    _pick,
    answer_form,
    find_data,
    fit,
    geometry,
    image_roots,
    main,
    pixel_limit,
)
from tools.make_demo import make_dataset
from utils.config.load import load_config
from utils.config.memory import DEVICE_GIB, GIB
from utils.config.plan import make_plan
from utils.config.released import MODELS
from utils.config.rollout import MAX_IMAGE_PIXELS
from utils.data.encoding import load_processor, num_prompt_tokens
from utils.data.samples import load_samples
from utils.families import FAMILIES
from utils.parsing import TokenTable
from utils.run.setup import load_tokenizer
from utils.server.images import ImageStore
from utils.server.launch import problems_of, resolve

ROOT = Path(__file__).parents[2]
DATA = DataFacts(
    num_lines=20000,
    num_read=20500,
    num_classes=80,
    objects_mean=7.0,
    objects_max=60,
    width_max=1920,
    height_max=1080,
    pixels_max=1920 * 1080,
    prompt_max=1100,
    answer_max=1300,
    segment_mean=1000,
    is_partial=False,
)
SETTINGS = {
    "answer_format": "qwen3vl", "format_reason": "a reason", "prompt": 'all "objects": # here', "model_name": "m",
    "data_name": "d", "train": "data/a: b.jsonl", "val": "data/val.jsonl", "roots": ["/a", "/b #c"],
    "max_pixels": 1048576, "unmatched": "trim", "reference_kl": 0.0, "rank": 64, "is_recurrent": False,
}  # fmt: skip


def write_coco(folder: Path) -> Path:
    """A COCO file with 40 images of the demo's scenes, images in `images/`."""
    folder.mkdir()
    train, *_ = make_dataset(folder / "scenes", num_train=40, num_val=1, seed=5)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    names = sorted({item["desc"] for row in rows for item in row["objects"]})
    (folder / "images").mkdir()
    coco = {"images": [], "annotations": [], "categories": [{"id": i, "name": name} for i, name in enumerate(names)]}
    for i, row in enumerate(rows):
        shutil.copy(train.parent / row["images"][0], folder / "images" / f"{i}.png")
        coco["images"].append({"id": i, "file_name": f"{i}.png", "width": row["width"], "height": row["height"]})
        for item in row["objects"]:
            x1, y1, x2, y2 = item["bbox_2d"]
            entry = {"id": len(coco["annotations"]), "image_id": i, "category_id": names.index(item["desc"])}
            coco["annotations"].append(entry | {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": 1, "iscrowd": 0})
    (folder / "mine.json").write_text(json.dumps(coco))
    shutil.rmtree(folder / "scenes")
    return folder / "mine.json"


CAT = {"desc": "cat", "bbox_2d": [1, 2, 30, 40]}


def write_line(folder: Path, size: tuple[int, int], objects: list[dict]) -> None:
    """An image and train.jsonl, whose one line names it."""
    Image.new("RGB", size).save(folder / "a.png")
    line = {"images": ["a.png"], "width": size[0], "height": size[1], "objects": objects}
    (folder / "train.jsonl").write_text(json.dumps(line) + "\n")


def without_coordinates(family: str, model: Path) -> Path:
    """A model that lacks a coordinate token, so that it has to write its family's own form."""
    build_family(family, model)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|coord_5|>", "<|other_5|>"))
    return model


def run_init(cwd: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.init", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def refused(monkeypatch, capsys, cwd: Path, model: Path, data: str = "train.jsonl") -> str:
    """What the program says where it ends with status 2."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "argv", ["init", "--data", data, "--model", str(model), "--gpus", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "data", "told"),
    [
        ("Annotations/a.xml", "set", "--data set: convert it first: python -m tools.convert --from voc --help"),
        ("data.yaml", "set", "--data set: convert it first: python -m tools.convert --from yolo --help"),
        ("data.yaml", "set/data.yaml", "set/data.yaml: convert it first: python -m tools.convert --from yolo --help"),
        ("labels/classes.txt", "set", "convert it first: python -m tools.convert --from yolo --help"),
        (
            "train/_annotations.coco.json",
            "set",
            "set: no JSON file in it; name one below it, such as set/train/_annotations.coco.json, or its folder",
        ),
    ],
)
def test_data_in_another_form_are_told_how_to_convert(tmp_path, start_model, monkeypatch, capsys, file, data, told):
    path = tmp_path / "set" / file
    path.parent.mkdir(parents=True)
    path.write_text("x")
    assert told in refused(monkeypatch, capsys, tmp_path, start_model, data)


def test_a_new_user_with_a_coco_file_and_a_model_CFG_16(tmp_path, start_model, monkeypatch, capsys):
    """CFG-16, CFG-15, PCK-7, SRV-5: the config loads and its plan works; every sample fits; rows are not too full; the
    server may read every image; and the learner's own dry run, with the file as written, agrees."""
    annotations = write_coco(tmp_path / "photos")
    (tmp_path / "disk").mkdir()
    linked = tmp_path / "photos" / "images" / "0.png"
    shutil.move(linked, tmp_path / "disk" / "0.png")
    linked.symlink_to(tmp_path / "disk" / "0.png")
    ended = run_init(tmp_path, "--data", str(annotations), "--model", str(start_model), "--gpus", "4")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == [
        "make server GPUS=0,1,2 CONFIG=mine.yaml",
        "make train GPUS=3 CONFIG=mine.yaml",
    ]
    monkeypatch.chdir(tmp_path)
    cfg = load_config("mine.yaml")
    plan = make_plan(cfg, 1)
    assert all(command in Path("mine.yaml").read_text() for command in plan.layout.commands)
    train, val = load_samples([cfg.custom.train_jsonl[0].path, cfg.custom.val_jsonl[0].path], cfg.data.prompt)
    assert len(train) + len(val) == 40 and train and val
    processor = load_processor(cfg.model.path, cfg.model.image_min_pixels, cfg.model.image_max_pixels)
    table = TokenTable.from_tokenizer(processor.tokenizer, cfg.rm.format)
    prompts = [num_prompt_tokens(sample, processor) for sample in (*train, *val)]
    answers = [len(table.encode(cfg.rm.format.write(sample.objects))) + 1 for sample in (*train, *val)]
    assert max(prompts) + cfg.rm.max_new_tokens <= min(cfg.rs.vllm_max_model_len, cfg.global_max_length)
    assert max(answers) <= cfg.rm.max_new_tokens
    mean = (sum(prompts) + sum(answers)) / len(prompts)
    assert cfg.training.per_device_train_batch_size * mean <= cfg.global_max_length
    for sample in (*train, *val):
        assert ImageStore(cfg.image_roots()).open_all(sample.images)[0].size == (sample.width, sample.height)
    command = [sys.executable, str(ROOT / "train_stage2.py"), "--config", "mine.yaml", "--dry-run", "--world-size", "1"]
    dry = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert dry.returncode == 0 and f"# {'optimizer steps:':<34}{plan.num_steps}\n" in dry.stdout
    assert "mine.yaml: exists" in refused(monkeypatch, capsys, tmp_path, start_model, str(annotations))


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("segment", [150, 1000, 5000])
def test_any_number_of_gpus_gets_a_plan_that_fits_CFG_16(tmp_path, gpus, segment):
    """CFG-16, PCK-7: for the released 8B."""
    data = replace(DATA, segment_mean=segment, prompt_max=max(1100, segment))
    settings = SETTINGS | {"model": "models/Qwen3-VL-8B-Instruct"}
    plan = fit(tmp_path / "a.yaml", gpus, data, settings)
    cfg = load_config(tmp_path / "a.yaml")
    assert cfg.data.prompt == SETTINGS["prompt"] and cfg.custom.train_jsonl[0].path == "data/a: b.jsonl"
    assert cfg.training.per_device_train_batch_size * segment <= cfg.global_max_length
    assert 16 <= plan.samples_per_step <= 48 and plan.num_steps is None, "the data do not exist"
    assert cfg.is_colocate == (gpus == 1)
    if gpus:
        places = [place for place, _ in plan.layout.places]
        assert places == [f"GPU {i}" for i in range(gpus)]
        assert sum(plan.learner_memory.values()) <= DEVICE_GIB * GIB


def test_a_config_of_any_name_loads_and_its_commands_quote_it_CFG_16(tmp_path):
    """CFG-16: blanks and YAML's own marks."""
    path = tmp_path / "my data: part #1.yaml"
    plan = fit(path, 4, DATA, SETTINGS | {"model": "models/Qwen3-VL-8B-Instruct"})
    assert load_config(path).training.output_dir == "runs/my data: part #1"
    assert all(shlex.split(command)[-1] == f"CONFIG={path}" for command in plan.layout.commands)
    assert f"--config '{path}' --dry-run" in path.read_text()


@pytest.mark.parametrize(("gib", "share"), [(24, 0.7), (48, 0.85), (141, 0.85)])
def test_gpus_of_other_sizes_get_a_plan_that_fits_them_CFG_16(tmp_path, gib, share):
    """CFG-16: for the released 2B."""
    settings = SETTINGS | {"model": "models/Qwen3-VL-2B-Instruct"}
    plan = fit(tmp_path / "a.yaml", 4, DATA, settings, gib)
    cfg = load_config(tmp_path / "a.yaml")
    assert sum(plan.learner_memory.values()) <= gib * GIB and cfg.server_settings().vllm_gpu_memory_utilization == share
    assert f"4 GPUs of {gib} GB" in (tmp_path / "a.yaml").read_text()


def test_gpus_too_small_for_a_rollout_server_are_told_CFG_16(tmp_path):
    """CFG-16: with a share below zero, a key of a file that was removed again was blamed."""
    with pytest.raises(
        ValueError, match="^--device-gib 6: a rollout GPU keeps 7 GiB free .*; take GPUs with more memory"
    ):
        fit(tmp_path / "a.yaml", 4, DATA, SETTINGS, 6)


def test_a_model_too_large_for_zero2_is_sharded_or_offloaded_CFG_16(tmp_path):
    """CFG-16: 33 billion parameters in bfloat16 leave too little of 80 GiB beside them; two learners share them, of
    four GPUs, too. With two GPUs in all, the optimizer goes to the CPU."""
    settings = SETTINGS | {"model": "models/Qwen3-VL-32B-Instruct"}
    for gpus, engine, learners in ((2, "zero3_offload", 1), (4, "zero3", 2), (8, "zero3", 2)):
        plan = fit(tmp_path / "a.yaml", gpus, DATA, settings)
        assert load_config(tmp_path / "a.yaml").deepspeed == engine and plan.world_size == learners
        assert sum(plan.learner_memory.values()) <= DEVICE_GIB * GIB
    with pytest.raises(ValueError, match="no batch geometry fits"):
        fit(tmp_path / "b.yaml", 4, replace(DATA, prompt_max=4000000), settings)
    assert not (tmp_path / "b.yaml").exists()


@pytest.mark.parametrize(("gpus", "tensor", "replicas"), [(4, 1, 3), (8, 2, 3)])
def test_experts_are_spread_over_the_rollout_gpus_CFG_16(tmp_path, gpus, tensor, replicas):
    """CFG-16: one engine over as many GPUs as heads allow: 16 of them go to 2 of 6, and not to 3."""
    settings = SETTINGS | {"model": "models/Qwen3-VL-30B-A3B-Instruct"}
    settings["text"] = MODELS["Qwen3-VL-30B-A3B"]["text_config"] | {"num_attention_heads": 16}
    plan = fit(tmp_path / "a.yaml", gpus, DATA, settings, 141)
    server = load_config(tmp_path / "a.yaml").server_settings()
    assert server.vllm_engine_kwargs == {"enable_expert_parallel": True} and plan.world_size < gpus
    assert (server.vllm_tensor_parallel_size, server.vllm_data_parallel_size) == (tensor, replicas)


def test_small_data_are_repeated_and_their_steps_are_small():
    few = geometry(2048, 4, 1, replace(DATA, num_lines=60, segment_mean=200))
    assert few["samples_per_step"] == 6 and few["epochs"] * 60 // 6 >= 200
    many = geometry(12000, 8, 2, DATA)
    assert many["samples_per_step"] == 2 * 2 * 10, "two rows of ten on each of two learners: the closest to 32"
    assert many["epochs"] == 1


@pytest.mark.parametrize(("gpus", "learners"), [(4, 1), (8, 2)])
def test_a_step_is_answered_in_one_wave(gpus, learners):
    """DIS-3: its micro-steps go to the servers side by side, and wait for nobody else's longest answer."""
    own = geometry(12000, gpus, learners, DATA)
    assert own["decode"] * own["rollout_devices"] >= own["samples_per_step"]


def test_without_coordinate_tokens_the_models_own_form_is_used(tmp_path, start_model):
    qwen3_vl, qwen2_5_vl = FAMILIES["qwen3_vl"], FAMILIES["qwen2_5_vl"]
    assert answer_form(load_processor(start_model).tokenizer, qwen3_vl)[0].name == "coord_tokens"
    shutil.copytree(start_model, tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|coord_5|>", "<|other_5|>"))
    own = load_processor(tmp_path / "model").tokenizer
    assert answer_form(own, qwen3_vl)[0].name == "qwen3vl"
    assert answer_form(own, qwen2_5_vl)[0].name == "qwen2_5vl"
    assert answer_form(own, FAMILIES["internvl"])[0].name == "internvl"
    with pytest.raises(ValueError, match="lacks 1 of 1000 coordinate tokens"):
        answer_form(own, replace(FAMILIES["internvl"], answer_format=None))


def test_the_presets_limit_of_pixels_is_set_only_where_model_and_data_pass_it(tmp_path, start_model):
    large, small = (replace(sample_of("a", ["a.png"], []), image_sizes=[(side, side)]) for side in (2000, 500))
    assert pixel_limit(load_processor(start_model), [large]) is None, "the model takes 128 x 128"
    shutil.copytree(start_model, tmp_path / "model")
    for file in (tmp_path / "model").glob("*processor*.json"):
        file.write_text(file.read_text().replace('"longest_edge": 16384', '"longest_edge": 16777216'))
    assert pixel_limit(load_processor(tmp_path / "model"), [small, large]) == 1 << 20
    assert pixel_limit(load_processor(tmp_path / "model"), [small]) is None


def test_data_are_found_in_folders_and_beside_each_other(tmp_path, capsys):
    for name in ("train.jsonl", "val.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}")
    both = (tmp_path / "train.jsonl", tmp_path / "val.jsonl")
    assert find_data(tmp_path, None, None) == find_data(both[0], None, None) == both
    assert capsys.readouterr().out == ""
    (tmp_path / "val.jsonl").rename(tmp_path / "other.jsonl")
    assert find_data(tmp_path, None, None) == find_data(both[0], None, None) == (both[0], None)
    assert find_data(both[0], tmp_path / "other.jsonl", None) == (both[0], tmp_path / "other.jsonl")
    assert find_data(tmp_path / "other.jsonl", None, None) == (tmp_path / "other.jsonl", None)
    says, rest = "# no validation data:", "Name a file with --val FILE; without one the run does not evaluate."
    assert capsys.readouterr().out.splitlines() == [
        f'{says} {tmp_path} has no other file, or several, with "val" in the name. {rest}',
        f"{says} there is no {tmp_path / 'val.jsonl'}. {rest}",
        f'{says} other.jsonl has no "train" that "val" could replace. {rest}',
    ]
    (tmp_path / "coco" / "annotations").mkdir(parents=True)
    for name in ("captions", "instances", "person_keypoints"):
        for split in ("train", "val"):
            (tmp_path / "coco" / "annotations" / f"{name}_{split}2017.json").write_text("{}")
    assert [_pick(tmp_path / "coco", split).stem for split in ("train", "val")] == [
        "instances_train2017",
        "instances_val2017",
    ]
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "trainval.jsonl").write_text("{}")
    assert find_data(tmp_path / "alone", None, None) == (tmp_path / "alone" / "trainval.jsonl", None)
    both[0].rename(tmp_path / "one.jsonl")
    with pytest.raises(ValueError, match="found one.jsonl, other.jsonl; name one"):
        find_data(tmp_path, None, None)
    with pytest.raises(ValueError, match="no such file"):
        find_data(tmp_path / "none", None, None)


@pytest.mark.parametrize("ending", ["json", "ndjson", "JSONL", "txt"])
def test_lines_of_samples_need_no_ending_DAT_1(tmp_path, start_model, monkeypatch, ending):
    """DAT-1: `tools.check_jsonl` takes such a file and names this program; training takes it, too."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("a.png")
    line = {"images": ["a.png"], "width": 64, "height": 64, "objects": [], "annotations": "a key of the user's"}
    Path(f"train.{ending}").write_text("\n\ufeff" * (ending == "txt") + json.dumps(line) + "\n")
    monkeypatch.setattr(sys, "argv", ["init", "--data", f"train.{ending}", "--model", str(start_model), "--gpus", "4"])
    main()
    assert load_config("train.yaml").custom.train_jsonl[0].path == f"train.{ending}"
    if ending != "txt":
        assert find_data(tmp_path, None, None)[0] == tmp_path / f"train.{ending}"


@pytest.mark.parametrize("text", ['[{"data": {"image": "a.png"}}]', '{"id": 1, "annotations": []}\n', "5", "{}"])
def test_a_json_file_of_another_program_is_no_coco_file(tmp_path, start_model, monkeypatch, capsys, text):
    """A task list of Label Studio, for example. Its images are not looked for."""
    (tmp_path / "tasks.json").write_text(text)
    assert "tasks.json: not a COCO file: {" in refused(monkeypatch, capsys, tmp_path, start_model, "tasks.json")


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("instances_train_train.jsonl", "instances_train_val.jsonl"),  # this program's own, of instances_train.json
        ("train_train.jsonl", "train_val.jsonl"),
        ("instances_train2017.jsonl", "instances_val2017.jsonl"),
        ("train2017_train.jsonl", "train2017_val.jsonl"),
        ("retrain.v1.train.jsonl", "retrain.v1.val.jsonl"),
    ],
)
def test_the_last_train_of_a_name_is_that_of_the_split(tmp_path, capsys, train, val):
    for name in (train, val):
        (tmp_path / name).write_text("{}")
    for data in (tmp_path / train, tmp_path):
        assert find_data(data, None, None) == (tmp_path / train, tmp_path / val)
    assert capsys.readouterr().out == ""


def test_an_empty_file_that_is_found_is_no_validation_data(tmp_path, capsys):
    """A split of few images may get none. A file that is named is read, and told to be empty."""
    train, val = tmp_path / "cl_train.jsonl", tmp_path / "cl_val.jsonl"
    train.write_text("{}")
    val.touch()
    for data in (train, tmp_path):
        assert find_data(data, None, None) == (train, None)
        assert f"# no validation data: {val} is empty. Name a file with --val" in capsys.readouterr().out
    assert find_data(train, val, None) == (train, val)


def test_coco_files_are_split_unless_they_are_too_few_or_come_in_two(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    annotations = write_coco(tmp_path / "photos")
    train, val = find_data(tmp_path / "photos", None, None)
    assert (str(train), str(val)) == ("data/photos_train.jsonl", "data/photos_val.jsonl")
    coco = json.loads(annotations.read_text())
    for name, ids in (("few_train", range(3)), ("few_val", range(3, 5))):
        chosen = {"images": [image for image in coco["images"] if image["id"] in ids]}
        (tmp_path / "photos" / f"{name}.json").write_text(json.dumps(coco | chosen))
    train, val = find_data(tmp_path / "photos" / "few_train.json", None, tmp_path / "photos" / "images")
    assert [len(path.read_text().splitlines()) for path in (train, val)] == [3, 2]
    (tmp_path / "photos" / "few_val.json").unlink()
    with pytest.raises(ValueError, match="few_train_train.jsonl: exists; train on it .* or remove it"):
        find_data(tmp_path / "photos" / "few_train.json", None, None)
    train.unlink(), val.unlink()
    (tmp_path / "photos" / "few_val.json").write_text(json.dumps(coco | {"images": []}))
    with pytest.raises(ValueError, match="few_val.json"):
        find_data(tmp_path / "photos" / "few_train.json", None, tmp_path / "photos" / "images")
    assert not train.exists()  # a second try begins anew
    (tmp_path / "photos" / "few_val.json").unlink()
    (tmp_path / "photos" / "images" / "1.png").unlink()
    capsys.readouterr()
    train, val = find_data(tmp_path / "photos" / "few_train.json", None, None)
    assert len(train.read_text().splitlines()) == 2 and val is None
    told = capsys.readouterr().out
    assert "# images left out: no such image file: 1 (first: image 1)\n" in told
    assert "# no validation data: none of the few images is in data/few_train_val.jsonl. Name a file with --val" in told


def test_images_of_the_same_names_are_those_of_the_split(tmp_path):
    for name in ("test", "train", "val", "annotations"):
        (tmp_path / name).mkdir()
        if name != "annotations":
            (tmp_path / name / "1.png").touch()
    files = {name: tmp_path / "annotations" / f"{name}.json" for name in ("instances_train", "val", "all")}
    for file in files.values():
        file.write_text('{"images": [{"file_name": "1.png"}]}')
    assert _images_of(files["instances_train"], None) == tmp_path / "train"
    assert _images_of(files["val"], None) == tmp_path / "val"
    with pytest.raises(ValueError, match="its images are in several folders .*; name their folder with --images"):
        _images_of(files["all"], None)
    assert _images_of(files["all"], tmp_path / "test") == tmp_path / "test"
    # --images names the folder of one split; that of the other is beside it, and its file elsewhere.
    (tmp_path / "val" / "1.png").rename(tmp_path / "val" / "2.png")
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    far = tmp_path / "elsewhere" / "deep" / "val.json"
    far.write_text('{"images": [{"file_name": "2.png"}]}')
    assert _images_of(far, tmp_path / "train") == tmp_path / "val"
    far.write_text('{"images": [{"file_name": "3.png"}]}')
    assert _images_of(far, tmp_path / "train") == tmp_path / "train"  # the conversion says what is missing there


def test_images_are_found_as_the_conversion_finds_them(tmp_path):
    """By LVIS's `coco_url`, by names that JSON escapes, and behind annotations of any length; a name that the system
    refuses, as it does a look into another's folder, is not found."""
    for folder in ("annotations", "train2017", "straße"):
        (tmp_path / folder).mkdir()
    for name in ("train2017/7.png", "straße/ß.png"):
        (tmp_path / name).touch()
    file = tmp_path / "annotations" / "all.json"
    cases = [
        ({"coco_url": "http://images.cocodataset.org/train2017/7.png"}, tmp_path),
        ({"file_name": "ß.png"}, tmp_path / "straße"),
        ({"file_name": "straße/ß.png"}, tmp_path),
    ]
    for image, folder in cases:
        content = {"annotations": ["x" * (1 << 20)], "images": [{"file_name": "x" * 999}, image]}
        file.write_text(json.dumps(content).replace("/", "\\/"))
        assert _images_of(file, None) == folder


def test_data_that_list_some_objects_get_long_answers_and_hold_the_others_TGT_12_TGT_16(
    tmp_path, start_model, monkeypatch
):
    """TGT-12, TGT-16: one object is listed of the many that an image may show."""
    monkeypatch.chdir(tmp_path)
    for name, num_partial in (("some", 5), ("all", 0), ("crowds", 1)):
        Image.new("RGB", (64, 64)).save("a.png")
        line = {"images": ["a.png"], "width": 64, "height": 64, "objects": [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}]}
        lines = [json.dumps(line | ({"annotated": ["cat"]} if at < num_partial else {})) + "\n" for at in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        arguments = ["init", "--data", f"{name}.jsonl", "--model", str(start_model), "--gpus", "0"]
        monkeypatch.setattr(sys, "argv", arguments)
        main()
    some, everything, crowds = (load_config(f"{name}.yaml").rm for name in ("some", "all", "crowds"))
    assert crowds == everything  # a line here and there that says so does not make the data partly annotated
    assert (some.max_new_tokens, some.losses.reference_kl, some.targets.unmatched) == (1024, 30.0, "drop_duplicates")
    assert not some.targets.supervise_structure
    assert everything.max_new_tokens < 100 and everything.targets.unmatched == "trim"
    assert everything.losses.reference_kl == 0.0


def test_data_are_read_under_the_limit_that_the_config_will_have_FAM_2(tmp_path, monkeypatch):
    """FAM-2: at the model's own limit Qwen2.5-VL would need coordinates for a panorama that it does not write."""
    monkeypatch.chdir(tmp_path)
    for file in without_coordinates("qwen2_5_vl", tmp_path / "model").glob("*processor*.json"):
        file.write_text(re.sub(r'"longest_edge": \d+', '"longest_edge": 12845056', file.read_text()))
    write_line(tmp_path, (12000, 600), [CAT])
    monkeypatch.setattr(sys, "argv", ["init", "--data", "train.jsonl", "--model", "model", "--gpus", "4"])
    main()
    cfg = load_config("train.yaml")
    assert (cfg.model.image_max_pixels, cfg.rm.answer_format) == (1 << 20, "qwen2_5vl")


def test_held_out_data_count_as_the_others_do_CFG_16(tmp_path, monkeypatch):
    """CFG-16: images that are larger, with more objects, in another folder, which only the evaluation sees."""
    monkeypatch.chdir(tmp_path)
    for file in without_coordinates("qwen2_5_vl", tmp_path / "model").glob("*processor*.json"):
        file.write_text(re.sub(r'"longest_edge": \d+', '"longest_edge": 12845056', file.read_text()))
    found = {}
    for name, size, objects in (("small", (64, 64), [CAT]), ("large", (2000, 1000), [CAT] * 20)):
        (tmp_path / name).mkdir()
        write_line(tmp_path / name, size, objects)
        arguments = ["--data", "small/train.jsonl", "--val", f"{name}/train.jsonl", "--output", f"made/{name}.yaml"]
        monkeypatch.setattr(sys, "argv", ["init", *arguments, "--model", "model", "--gpus", "4"])
        main()
        cfg = load_config(f"made/{name}.yaml")
        roots = [Path(root).name for root in cfg.server_settings().allowed_image_roots]
        found[name] = cfg.model.image_max_pixels, roots, cfg.rm.max_new_tokens
    assert found["small"][:2] == (None, ["small"]) and found["large"][:2] == (1 << 20, ["large", "small"])
    assert found["large"][2] > 10 * found["small"][2]


def test_labels_that_the_learner_refuses_are_refused_DAT_3_FAM_4(tmp_path, monkeypatch, capsys):
    """DAT-3, FAM-4: InternVL's form writes labels as they are."""
    model = without_coordinates("internvl", tmp_path / "model")
    write_line(tmp_path, (64, 64), [CAT | {"desc": "the <img> tag"}])
    assert "spells a special token of the model" in refused(monkeypatch, capsys, tmp_path, model)


def test_lines_without_objects_are_refused_DAT_3(tmp_path, start_model, monkeypatch, capsys):
    """DAT-3: as stage 2 refuses them; a summary is for GRPO."""
    write_line(tmp_path, (64, 64), [CAT])
    line = json.loads((tmp_path / "train.jsonl").read_text())
    del line["objects"]
    line |= {"summary": "a cat", "prompt": "<image>What is there?"}
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    assert "objects: missing; write []" in refused(monkeypatch, capsys, tmp_path, start_model)


def test_data_that_need_more_positions_than_the_model_has_are_told_CFG_15(tmp_path, start_model, monkeypatch, capsys):
    """CFG-15: the server of the config would refuse to start."""
    write_line(tmp_path, (64, 64), [CAT] * 3000)
    assert "ends at 8192 positions, the data need" in refused(monkeypatch, capsys, tmp_path, start_model)
    assert not (tmp_path / "train.yaml").exists()


def test_lvis_files_are_converted_as_lvis_TGT_12(tmp_path, monkeypatch, capsys):
    """TGT-12: an image that does not say what is absent would count as complete."""
    monkeypatch.chdir(tmp_path)
    coco = json.loads(write_coco(tmp_path / "photos").read_text())
    for image in coco["images"][1:]:
        image["neg_category_ids"] = []
    (tmp_path / "photos" / "mine.json").write_text(json.dumps(coco))
    train, _ = find_data(tmp_path / "photos" / "mine.json", None, None)
    assert "no neg_category_ids, which LVIS has for every image" in capsys.readouterr().out
    assert all("annotated" in json.loads(row) for row in train.read_text().splitlines())


@pytest.mark.parametrize(
    ("name", "told"), [("val.jsonl", "is JSONL, but --data is COCO's"), ("no.json", "no such file")]
)
def test_validation_data_in_another_form_are_told_before_anything_is_written(tmp_path, monkeypatch, name, told):
    monkeypatch.chdir(tmp_path)
    annotations = write_coco(tmp_path / "photos")
    Path("val.jsonl").write_text('{"images": ["a.png"], "width": 5, "height": 5, "objects": []}\n')
    with pytest.raises(ValueError, match=f"--val {name}: {told}"):
        find_data(annotations, Path(name), None)
    assert not list(tmp_path.glob("data/*"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_on_cpu_is_one_that_server_and_learner_accept_FAM_2(tmp_path, family, monkeypatch):
    """FAM-2, CFG-16: whatever vLLM's CPU kernels lack for a family, the config that is written does not ask for it."""
    monkeypatch.chdir(tmp_path)
    build_family(family, tmp_path / "model")
    write_line(tmp_path, (64, 64), [CAT])
    monkeypatch.setattr(
        sys, "argv", ["init", "--data", "train.jsonl", "--model", "model", "--gpus", "0", "--device-gib", "4"]
    )
    main()
    cfg = load_config("train.yaml")
    assert problems_of(resolve(cfg, 0), token=None) == []
    assert load_tokenizer(cfg)[1] is not None and cfg.tuner.rank == 16


def test_a_server_takes_the_largest_images_SRV_10(tmp_path, start_model, monkeypatch):
    """SRV-10: it counts the pixels of a sample's images together; the learner refuses a config with a lower limit."""
    monkeypatch.chdir(tmp_path)
    for side, expected in ((2000, MAX_IMAGE_PIXELS), (3000, 2 * 3000 * 3000)):
        Image.new("L", (side, side)).save(f"{side}.png")
        line = {"images": [f"{side}.png"] * 2, "prompt": "<image><image>find", "objects": []}
        Path(f"{side}.jsonl").write_text(json.dumps(line | {"width": side, "height": side}) + "\n")
        arguments = ["--data", f"{side}.jsonl", "--model", str(start_model), "--gpus", "2"]
        monkeypatch.setattr(sys, "argv", ["init", *arguments])
        main()
        assert load_config(f"{side}.yaml").server_settings().max_image_pixels == expected


def test_many_folders_of_images_become_those_above_SRV_5(tmp_path):
    """SRV-5: the server reads below these only."""
    few = [sample_of("a", [f"/data/{i}/a.png"], []) for i in range(3)]
    assert image_roots(few) == ["/data/0", "/data/1", "/data/2"]
    assert image_roots([sample_of("a", ["/data/../other/a.png"], [])]) == ["/other"]
    many = [sample_of("a", [f"/data/{i}/a.png"], []) for i in range(300)]
    assert image_roots(many) == ["/data"]
    far = [sample_of("a", [f"/disk/b/{path}/a.png"], []) for path in ("c/d/e", "c/d/f", "g")]
    assert image_roots([*many, *far]) == ["/data", "/disk/b"]  # never /
    tops = [f"/data{i}/x" for i in range(300)]
    assert image_roots([sample_of("a", [f"{top}/a.png"], []) for top in tops]) == sorted(tops)
    packed = shard(tmp_path / "s.tar", a=Image.new("RGB", (8, 8)))
    assert image_roots([sample_of("a", [f"{packed}/a.png"], [])]) == []  # its images are sent as bytes


@pytest.mark.parametrize(
    ("kind", "message"),
    [("llama", "a llama model, which is not supported"), (None, "config.json cannot be read")],
)
def test_a_model_that_cannot_be_trained_is_one_message(tmp_path, kind, message, monkeypatch, capsys):
    """Before any data are read; status 2, no traceback."""
    (tmp_path / "train.jsonl").write_text("not even JSON")
    if kind:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert message in refused(monkeypatch, capsys, tmp_path, tmp_path)
    assert not (tmp_path / "train.yaml").exists()


def test_a_checkpoint_that_is_not_whole_is_one_message(tmp_path, start_model, monkeypatch, capsys):
    """Status 2, no traceback, no network."""
    model = shutil.copytree(start_model, tmp_path / "model")
    (model / "model.safetensors").write_bytes(POINTER)
    told = f"--model {model}: model.safetensors is a Git LFS pointer"
    assert refused(monkeypatch, capsys, tmp_path, model).startswith(told)
    shutil.copy(start_model / "model.safetensors", model)
    (model / "chat_template.jinja").write_text("<think>")
    told = f"--model {model}: its prompts open a thinking block"
    assert refused(monkeypatch, capsys, tmp_path, model).startswith(told)
    assert "hf download Qwen/Qwen3.5-9B --local-dir" in refused(monkeypatch, capsys, tmp_path, Path("Qwen/Qwen3.5-9B"))


def test_mistakes_in_the_data_are_named_DAT_3(tmp_path, start_model, monkeypatch, capsys):
    """DAT-3: file, line and reason; nothing is written."""
    (tmp_path / "train.jsonl").write_text('{"images": ["none.png"], "width": 5, "height": 5, "objects": []}\n')
    assert "train.jsonl:1" in refused(monkeypatch, capsys, tmp_path, start_model)
    assert not (tmp_path / "train.yaml").exists()
    Image.new("RGB", (2000, 8)).save(tmp_path / "thin.png")
    line = {"images": ["thin.png"], "width": 2000, "height": 8, "objects": []}
    (tmp_path / "train.jsonl").write_text(json.dumps(line) + "\n")
    told = "train.jsonl:1: the prompt cannot be encoded (absolute aspect ratio"
    assert told in refused(monkeypatch, capsys, tmp_path, start_model)
