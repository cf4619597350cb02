"""`tools.add_coord_tokens` on small Qwen3-VL checkpoints without coordinate tokens: tied, untied, with spare rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, Qwen3VLForConditionalGeneration

from tests.config.test_checkpoint_files import NOT_WHOLE
from tools import make_demo
from tools.add_coord_tokens import TOKENS, add_coord_tokens, add_to_tokenizer, coord_rows, extended, main, smooth_curve
from utils.config.memory import model_size
from utils.config.schema import Tuner
from utils.data.encoding import encode_prompt, load_processor
from utils.data.samples import load_samples
from utils.parsing import TokenTable

RESERVE = 300  # rows beyond the tokenizer, as in released checkpoints


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, reserve: int, dtype=torch.float32) -> Path:
    """Make a checkpoint as it would be released: several files, no coordinate tokens."""
    monkeypatch.setattr(make_demo, "NUM_COORD_TOKENS", 0)
    processor = make_demo.build_processor(64)
    config = make_demo.model_config(processor, 64)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = tied
    config.text_config.vocab_size = len(processor.tokenizer) + reserve
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config).to(dtype)
    with torch.no_grad():  # so that generation ends at some point and not all weights are alike
        model.get_input_embeddings().weight.mul_(3)
    eos = processor.tokenizer.eos_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=eos, repetition_penalty=1.25)
    model.save_pretrained(folder, max_shard_size="500KB")
    processor.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("reserve", [0, RESERVE, 5000])
@pytest.mark.parametrize("tied", [True, False])
def test_old_tokens_are_what_they_were_and_new_ones_usable_TGT_1(tmp_path, monkeypatch, tied, reserve) -> None:
    """TGT-1: transformers loads the result; logits of old tokens for text and image are unchanged."""
    source = build(tmp_path / "released", monkeypatch, tied, reserve)
    target = add_coord_tokens(source, tmp_path / "with_coords")
    old_processor, processor = load_processor(source), load_processor(target)
    num_old = len(old_processor.tokenizer)
    assert processor.tokenizer.convert_tokens_to_ids(TOKENS) == list(range(num_old, num_old + 1000))
    table = TokenTable.from_tokenizer(processor.tokenizer)
    answer = '{"objects": [{"desc": "red ring", "bbox_2d": [<|coord_1|>, <|coord_20|>, <|coord_300|>, <|coord_999|>]}]}'
    ids = processor.tokenizer(answer)["input_ids"]
    assert (table.coord_bin[ids][table.coord_bin[ids] >= 0]).tolist() == [1, 20, 300, 999]
    assert processor.tokenizer.decode(ids, skip_special_tokens=True) == answer
    assert processor.chat_template == old_processor.chat_template

    before, after = (AutoModelForImageTextToText.from_pretrained(path) for path in (source, target))
    num_rows = after.config.text_config.vocab_size
    assert num_rows >= num_old + 1000 and (num_rows % 128 == 0 or num_rows == num_old + reserve)
    assert after.get_input_embeddings().weight.shape[0] == after.lm_head.weight.shape[0] == num_rows
    assert (after.lm_head.weight is after.get_input_embeddings().weight) == tied
    assert after.generation_config.repetition_penalty == 1.25
    data = make_demo.make_dataset(tmp_path / "data", num_train=1, num_val=1, image_size=64)[0]
    sample = load_samples([data], "List.")[0][0]
    prompt, again = (encode_prompt(sample, p) for p in (old_processor, processor))
    assert prompt.prompt_token_ids == again.prompt_token_ids
    ids = torch.tensor([prompt.prompt_token_ids])
    inputs = {"mm_token_type_ids": (ids == before.config.image_token_id).int()} | prompt.vision
    with torch.no_grad():
        logits = [m(input_ids=ids, **inputs).logits for m in (before, after)]
    torch.testing.assert_close(logits[1][..., :num_old], logits[0][..., :num_old], atol=1e-6, rtol=0)
    assert (
        logits[1][..., num_old + 1000 :] <= logits[0].max(dim=-1, keepdim=True).values
    ).all()  # rows without a token


def test_only_files_with_the_vocabulary_are_written_anew(tmp_path, monkeypatch) -> None:
    """The other files are the same file on disk; the index, the dtype and all other tensors are unchanged."""
    source = build(tmp_path / "released", monkeypatch, False, RESERVE, torch.bfloat16)
    target = add_coord_tokens(source, tmp_path / "out")
    files = [path.name for path in source.glob("*.safetensors")]
    assert len(files) > 3 and sorted(files) == sorted(path.name for path in target.glob("*.safetensors"))
    anew = [name for name in files if not (source / name).samefile(target / name)]
    assert 1 <= len(anew) <= 2
    for name in anew:
        with safe_open(target / name, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}  # some readers refuse a file that does not say it
    before = {name: tensor for file in files for name, tensor in load_file(source / file).items()}
    after = {name: tensor for file in files for name, tensor in load_file(target / file).items()}
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], tensor) or name.endswith(("embed_tokens.weight", "lm_head.weight"))
    indexes = [json.loads((path / "model.safetensors.index.json").read_text()) for path in (source, target)]
    assert indexes[0]["weight_map"] == indexes[1]["weight_map"]
    assert indexes[1]["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert indexes[1]["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in after.values())
    assert model_size(target, Tuner()).total == sum(tensor.numel() for tensor in after.values())
    assert AutoConfig.from_pretrained(target).text_config.vocab_size == len(after["lm_head.weight"])


@pytest.mark.parametrize("has_links", [True, False])
def test_files_of_a_cache_are_linked_or_copied_not_pointed_at(tmp_path, monkeypatch, has_links) -> None:
    """A hub's cache holds symbolic links to files elsewhere, which may go."""
    source = build(tmp_path / "released", monkeypatch, True, 0)
    (tmp_path / "blobs").mkdir()
    for file in source.glob("*.safetensors"):
        blob = file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(blob)
    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    target = add_coord_tokens(source, tmp_path / "out")
    files = list(target.glob("*.safetensors"))
    assert any(file.samefile(source / file.name) for file in files) == has_links
    assert files and not any(file.is_symlink() for file in files)


def no_link(*_: object) -> None:
    raise OSError("no links here")


def test_the_same_seed_gives_the_same_rows(tmp_path, monkeypatch) -> None:
    source = build(tmp_path / "released", monkeypatch, True, 0)
    rows = [load_vocabulary(add_coord_tokens(source, tmp_path / str(i), seed)) for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])


def test_spare_rows_of_a_release_do_not_count(tmp_path, monkeypatch) -> None:
    """They were never trained, so that their spread says nothing."""
    source = build(tmp_path / "released", monkeypatch, True, RESERVE)
    num_old = len(load_processor(source).tokenizer)
    before = load_vocabulary(add_coord_tokens(source, tmp_path / "before"))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("embed_tokens.weight")]:
            tensors[name][num_old:] *= 1000
            save_file(tensors, file, metadata={"format": "pt"})
    after = load_vocabulary(add_coord_tokens(source, tmp_path / "after"))
    assert torch.equal(before[: num_old + 1000], after[: num_old + 1000])


def test_what_an_interrupted_try_left_is_not_in_the_result(tmp_path, monkeypatch) -> None:
    source = build(tmp_path / "released", monkeypatch, True, 0)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/left.safetensors").write_bytes(b"half a file")
    assert not (add_coord_tokens(source, tmp_path / "out") / "left.safetensors").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_part_of_the_tokens_is_too_many(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(make_demo, "NUM_COORD_TOKENS", 0)
    tokenizer = make_demo.build_processor(64).tokenizer
    tokenizer.add_tokens(TOKENS[:3])
    with pytest.raises(ValueError, match="has 3 of 1000 coordinate tokens already; start from the release, which has"):
        add_to_tokenizer(tokenizer, tmp_path)


def load_vocabulary(folder: Path) -> torch.Tensor:
    return next(
        tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.endswith("embed_tokens.weight")
    )


@pytest.mark.parametrize("dim", [128, 2048])
def test_neighbours_are_alike_and_the_further_the_less(dim) -> None:
    """Mean cosine at growing distances; norms and spread are those of the old rows."""
    generator = torch.Generator().manual_seed(3)
    scale = 0.5 + torch.rand(dim, generator=generator)
    old = scale * torch.randn(600, dim, generator=generator) * 0.02 + 0.003
    rows = coord_rows(old, list(range(10)), seed=0)
    unit = rows / rows.norm(dim=1, keepdim=True)
    cosine = [float((unit[d:] * unit[: 1000 - d]).sum(dim=1).mean()) for d in (1, 3, 10, 30, 100, 300, 900)]
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[0] > 0.99 and cosine[2] > 0.85 and cosine[-1] < 0.35
    norms = old.norm(dim=1)
    assert rows.norm(dim=1).numpy() == pytest.approx(np.full(1000, norms.median().item()), rel=1e-5)
    spread = (smooth_curve(dim, 0).var(dim=0) if dim == 128 else rows.var(dim=0) / old.var(dim=0)).mean()
    assert 0.6 < spread < 1.4


def test_dimensions_spread_as_those_of_the_old_rows_do() -> None:
    scale = torch.tensor([0.1, 1.0]).repeat_interleave(1024)
    rows = coord_rows(scale * torch.randn(600, 2048, generator=torch.Generator().manual_seed(3)), [0], seed=0)
    small, large = rows.std(dim=0).split(1024)
    assert large.mean() / small.mean() == pytest.approx(10, rel=0.1)


def test_rows_of_no_token_are_the_mean_of_the_old_ones() -> None:
    """Their logit is the mean of the old logits, which is not the largest."""
    old = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    grown = extended(old, num_rows=10, first=7, rows=torch.ones(2, 4))
    assert torch.equal(grown[:6], old) and torch.equal(grown[7:9], torch.ones(2, 4))
    torch.testing.assert_close(grown[[6, 9]], old.mean(dim=0).expand(2, 4))


def test_rows_start_from_the_digits() -> None:
    """Rows are closer to the digits' mean than to that of other tokens."""
    old = torch.randn(500, 256, generator=torch.Generator().manual_seed(0))
    old[100:110] += 2.0
    rows = coord_rows(old, list(range(100, 110)), seed=0)
    near, far = (
        torch.cosine_similarity(rows, old[span].mean(dim=0)[None]) for span in (slice(100, 110), slice(0, 100))
    )
    assert near.min() > 0.5 > far.max()


def old_form(source: Path) -> None:
    """Leave weights as torch saved them before safetensors."""
    for file in source.glob("*.safetensors*"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda source: add_coord_tokens(source, source.parent / "x") and (source.parent / "x"),
            "has 1000 of 1000 coordinate tokens already; use it as it is",
        ),
        (lambda source: (source.parent / "out").mkdir(), "out: exists; name another directory"),
        (
            lambda source: (source / "config.json").write_text('{"model_type": "qwen2"}'),
            "a qwen2 model, which is not",
        ),
        (lambda source: (source / "config.json").unlink(), "config.json cannot be read"),
        (old_form, "no *.safetensors files"),
        *NOT_WHOLE.values(),
    ],
)
def test_what_cannot_be_extended_is_refused_with_one_line_SRV_2(tmp_path, monkeypatch, capsys, change, message) -> None:
    """SRV-2: nor is a checkpoint copied that is not whole."""
    source = build(tmp_path / "released", monkeypatch, True, 0)
    changed = change(source)
    model = changed if isinstance(changed, Path) else source
    monkeypatch.setattr("sys.argv", ["add_coord_tokens", "--model", str(model), "--output", str(tmp_path / "out")])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_vllm_serves_the_result(tmp_path, monkeypatch) -> None:
    """Both backends of `tools.evaluate` load it and give the same answers, in float32."""
    target = add_coord_tokens(build(tmp_path / "released", monkeypatch, False, RESERVE), tmp_path / "out")
    data = make_demo.make_dataset(tmp_path / "data", num_train=2, num_val=1, image_size=64)[0]
    (tmp_path / "run.yaml").write_text(
        "global_max_length: 512\nmodel: {path: x, dtype: float32}\ntraining: {output_dir: x}\n"
        "custom: {trainer_variant: rollout_matching_sft, train_jsonl: x.jsonl, "
        "extra: {rollout_matching: {rollout_backend: hf, max_new_tokens: 20}}}\n"
    )
    for backend in ("vllm", "hf"):
        command = [sys.executable, "-m", "tools.evaluate", "--checkpoint", str(target), "--data", str(data)]
        command += [
            "--config",
            str(tmp_path / "run.yaml"),
            "--backend",
            backend,
            "--output",
            f"{tmp_path}/{backend}.json",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        run = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-5000:]
    results = [json.loads((tmp_path / f"{backend}.json").read_text()) for backend in ("vllm", "hf")]
    assert results[0].pop("coco"), "transformers gives no confidences (TGT-14)"
    assert results[0] | {"backend": 0} == results[1] | {"backend": 0}
