"""Add the 1000 coordinate tokens of `answer_format: coord_tokens` to a released checkpoint.

    python -m tools.add_coord_tokens --model DIR --output DIR

The tokens `<|coord_0|>` to `<|coord_999|>` get the next free ids, which may lie among the spare rows of a released
checkpoint; embeddings and head grow only as far as needed. Only the files that contain these two are rewritten, one at
a time, which takes about as much memory as the larger file. The other weights are hard-linked if the file system allows
it, otherwise copied. All rows of existing tokens stay the same, bit for bit.

New rows are only a start: without supervised training (stage 1, `configs/stage1/`) the model does not know when to
write them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor
from transformers import AutoProcessor

from utils.config.checkpoint_files import checkpoint_problems
from utils.config.load import exit_with
from utils.families import read_config, text_config
from utils.geometry import NUM_BINS

TOKENS = [f"<|coord_{k}|>" for k in range(NUM_BINS)]
ROW_MULTIPLE = 128  # matrix multiplication is faster with round sizes, and tensor parallelism needs equal shards
LENGTHS = (8.0, 400.0)  # in bins: the range of correlation lengths between coordinate tokens
MAX_ROWS_SEEN = 16384  # at most this many old rows are used to estimate their spread
INDEX = "model.safetensors.index.json"


def add_coord_tokens(source: Path, target: Path, seed: int = 0) -> Path:
    """Write the checkpoint `source` with coordinate tokens to `target`, which appears complete or not at all.

    Raises:
        ValueError: no safetensors checkpoint of a supported family, it has coordinate tokens, or `target` exists.
        OSError: files cannot be read or written.
    """
    check_source(source)
    config = read_config(source)
    if target.exists():
        raise ValueError(f"--output {target}: exists; name another directory or delete it")
    processor = AutoProcessor.from_pretrained(source)
    num_old, first = len(processor.tokenizer), add_to_tokenizer(processor.tokenizer, source)
    digit_ids = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    num_rows = max(text_config(config)["vocab_size"], -(-(first + NUM_BINS) // ROW_MULTIPLE) * ROW_MULTIPLE)

    def extend(weight: Tensor) -> Tensor:
        return extended(weight, num_rows, first, coord_rows(weight[:num_old], digit_ids, seed))

    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(source, partial, extend)
    processor.save_pretrained(partial)
    for section in (config, config.get("text_config", {})):
        if "vocab_size" in section:
            section["vocab_size"] = num_rows
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (source / "generation_config.json").is_file():
        shutil.copy2(source / "generation_config.json", partial)
    os.replace(partial, target)
    return target


def check_source(source: Path) -> None:
    """Raise ValueError for a checkpoint that is not whole (its copy would not be, either), or that this tool cannot
    extend."""
    if found := checkpoint_problems(source):
        raise ValueError("\n".join(f"--model {source}: {rule}" for rule in found))
    if not list(source.glob("*.safetensors")):
        raise ValueError(f"--model {source}: no *.safetensors files; save the checkpoint in that form")


def add_to_tokenizer(tokenizer: Any, source: Path) -> int:
    """Add the tokens in place and return the id of the first. They are not "special", so decoding keeps them."""
    known = tokenizer.get_vocab()
    if there := sum(token in known for token in TOKENS):
        advice = "use it as it is" if there == NUM_BINS else "start from the release, which has none"
        raise ValueError(f"--model {source}: has {there} of {NUM_BINS} coordinate tokens already; {advice}")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOKENS])
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    assert ids == list(range(ids[0], ids[0] + NUM_BINS)), "the tokenizer numbered the new tokens with gaps"
    return ids[0]


# ---------------------------------------------------------------------------------------------------------------------
# new rows


def coord_rows(old: Tensor, digit_ids: list[int], seed: int) -> Tensor:
    """Return rows for the coordinate tokens, float32 `[1000, dim]`, given those of the old tokens `[num_old, dim]`.

    Each row by itself is what Hewitt proposes for a new word, a draw from a normal distribution with the old rows'
    spread in each dimension, except that its mean is that of the ten digits, since coordinates are numbers. Together
    the rows form a smooth curve: learning one bin helps its neighbours, as the Gaussian target requires. All rows have
    the old rows' median norm.

    Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models".
    """
    seen = old[:: -(-len(old) // MAX_ROWS_SEEN)].float()
    rows = old[digit_ids].float().mean(dim=0) + seen.std(dim=0) * smooth_curve(old.shape[1], seed)
    return rows * (seen.norm(dim=1).median() / rows.norm(dim=1, keepdim=True))


def smooth_curve(dim: int, seed: int) -> Tensor:
    """Return random smooth functions of the bin, float32 `[1000, dim]`, with mean 0 and variance 1 over the seeds.

    Each dimension is a draw from a Gaussian process with its own length scale. The correlation of two bins is
    exp(-distance^2 / (2 length^2)), averaged over the lengths (log-uniform in `LENGTHS`), so it decreases with
    distance.

    Source: Rahimi and Recht 2007, random Fourier features (one per dimension).
    """
    generator = torch.Generator().manual_seed(seed)
    shortest, longest = LENGTHS
    length = shortest * (longest / shortest) ** torch.rand(dim, generator=generator)
    frequency = torch.randn(dim, generator=generator) / length
    phase = 2 * math.pi * torch.rand(dim, generator=generator)
    return math.sqrt(2) * torch.cos(torch.arange(NUM_BINS)[:, None] * frequency + phase)


def extended(weight: Tensor, num_rows: int, first: int, rows: Tensor) -> Tensor:
    """Return `weight` `[n, dim]` grown to `num_rows`, with `rows` from row `first` on, in its dtype.

    Rows that belong to no token are the mean of the old rows. In the head, their logit is then the mean of all old
    logits, which can never be the largest.
    """
    grown = weight.new_empty(num_rows, weight.shape[1])
    grown[: len(weight)] = weight
    grown[len(weight) :] = weight[:: -(-len(weight) // MAX_ROWS_SEEN)].float().mean(dim=0).to(weight.dtype)
    grown[first : first + len(rows)] = rows.to(weight.dtype)
    return grown


# ---------------------------------------------------------------------------------------------------------------------
# files


def write_weights(source: Path, target: Path, extend: Callable[[Tensor], Tensor]) -> None:
    """Write all weight files of `source` to `target`, with `extend` applied to embeddings and head if stored.

    Tied embeddings and head that are both stored stay equal, as `extend` depends on the tensor alone.
    """
    grown = total = 0
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            if not any(map(is_vocabulary, names)):
                link_or_copy(file, target / file.name)
                continue
            content = {}
            for name in names:
                content[name] = tensors.get_tensor(name)
                if is_vocabulary(name):
                    before = content[name]
                    content[name] = extend(before)
                    grown += content[name].nbytes - before.nbytes
                    total += content[name].numel() - before.numel()
            save_file(content, target / file.name, metadata=tensors.metadata())
    if (source / INDEX).is_file():
        index = json.loads((source / INDEX).read_text())
        for key, more in (("total_size", grown), ("total_parameters", total)):
            if key in index.get("metadata", {}):
                index["metadata"][key] += more
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def is_vocabulary(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, metavar="DIR", help="a released checkpoint")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="directory to create")
    parser.add_argument("--seed", type=int, default=0, help="seed of the new rows (default 0)")
    args = parser.parse_args()
    try:
        add_coord_tokens(args.model, args.output, args.seed)
    except (ValueError, OSError) as error:
        exit_with(error)
    print(f"{args.output}: added {NUM_BINS} coordinate tokens")
    preset = "configs/stage1/qwen3vl_8b_4gpu.yaml"
    print(f"train it on the answer format: make train GPUS=0,1,2,3 CONFIG={preset}, with model.path: {args.output}")


if __name__ == "__main__":
    main()
