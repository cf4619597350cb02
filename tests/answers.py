"""Small byte-level tokenizers whose tokens fuse brackets, quotes and text, for the tests of parsing and targets."""

import functools
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from utils.answer_format import FORMATS, QWEN3VL
from utils.geometry import Object
from utils.targets import format_objects
from utils.token_table import TokenTable

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DESCS = ["red circle", "red", "blue circle", "green square", "red circle with a dot", "猫", "crème brûlée", "(big) car"]


@functools.cache
def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """`qwen`: split into words as Qwen does, so `]}]}` is one token; `whole`: no splitting, so `"}, {"desc": "` is.

    `native` and `fused` are the same two for Qwen3-VL's own answer form, without coordinate tokens: `native` has each
    digit as a token and `"},\\n` as one, `fused` has tokens of several digits or of digits and what is beside them.
    """
    rng = random.Random(0)
    is_native = kind in ("native", "fused")
    make_texts = _native_answers if is_native else _training_answers
    texts = [answer for _ in range(300) for answer in make_texts(rng)]
    tokenizer = make_tokenizer_for(texts, splits_words=kind in ("qwen", "native"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    if not is_native:
        tokenizer.add_tokens([AddedToken(f"<|coord_{k}|>", normalized=False) for k in range(1000)])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def make_tokenizer_for(texts: list[str], splits_words: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer trained on these texts."""
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if splits_words else byte_level
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


@functools.cache
def make_table(kind: str, form: str = "coord_tokens") -> TokenTable:
    return TokenTable.from_tokenizer(make_tokenizer(kind), FORMATS[form])


def _training_answers(rng: random.Random) -> list[str]:
    """Answers in several layouts with coordinates taken out, as a tokenizer sees them around its added tokens."""
    text = format_objects([random_object(rng) for _ in range(rng.randint(1, 4))])
    pieces = [text, text.replace(" ", ""), text.replace("]}]}", "}]}]}")]
    return [part for piece in pieces for part in _without_coords(piece)] + ["]}]}", '"}]}', '"}, {"bbox_2d": [']


def _native_answers(rng: random.Random) -> list[str]:
    """Answers of Qwen3-VL in the layouts it has."""
    objects = [random_box(rng) for _ in range(rng.randint(1, 4))]
    return [QWEN3VL.write(objects, opening) for opening in ("[", "[\n\t", "```json\n[\n\t")]


def _without_coords(text: str) -> list[str]:
    import re

    return re.split(r"<\|coord_\d+\|>", text)


def random_box(rng: random.Random, descs: list[str] = DESCS, max_bin: int = 1000) -> Object:
    """A box on the grid of Qwen3-VL's numbers."""
    x1, x2 = sorted(rng.randint(0, max_bin) for _ in range(2))
    y1, y2 = sorted(rng.randint(0, max_bin) for _ in range(2))
    return Object(rng.choice(descs), "bbox_2d", (x1, y1, x2, y2))


def random_object(rng: random.Random, descs: list[str] = DESCS) -> Object:
    """A valid object with a `desc` out of a list."""
    if rng.random() < 0.3:
        num_points = rng.randint(3, 6)
        return Object(rng.choice(descs), "poly", tuple(rng.randrange(1000) for _ in range(2 * num_points)))
    x1, x2 = sorted(rng.randrange(1000) for _ in range(2))
    y1, y2 = sorted(rng.randrange(1000) for _ in range(2))
    return Object(rng.choice(descs), "bbox_2d", (x1, y1, x2, y2))
