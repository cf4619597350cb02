"""A byte-level tokenizer as a table: the bytes of each token, which tokens are coordinates, which end an answer."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.answer_format import COORD_BYTE, COORD_TOKENS, AnswerFormat
from utils.geometry import NUM_BINS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_COORD_TEXT = re.compile(r"<\|coord_(0|[1-9]\d{0,2})\|>")
_DIGIT = re.compile(rb"[0-9]")
# GPT-2's map from vocabulary characters to bytes: printable bytes stand for themselves, the rest follow at 256.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_MOVED = sorted(set(range(256)) - set(_PRINTABLE))
_BYTE_OF_CHAR = {byte: byte for byte in _PRINTABLE} | {256 + i: byte for i, byte in enumerate(_MOVED)}


class TokenTable:
    """The facts about a byte-level tokenizer that parsing and targets use, computed once.

    Attributes:
        format: the form of answers. One without coordinate tokens reads any that the tokenizer has as plain text.
        bytes_of: the text of each id as bytes, `b""` for ids without text. Special and added tokens are literal text.
        coord_ids: int64 `[1000]`, the id of each coordinate token; `[0]` where the form has none.
        digit_ids: int64, ids whose text holds a digit; `[0]` where coordinates are tokens.
        has_digit: bool `[vocab]`, whether an id is one of them.
        coord_bin: int32 `[vocab]`, the bin of each id, -1 where it is not a coordinate token.
        stop_ids: ids that end an answer: every special token besides the coordinate tokens and the form's own tags.
        is_stop: bool `[vocab]`, `stop_ids` and ids without text.
        eos_id: the end token that closes targets.
    """

    def __init__(
        self,
        bytes_of: list[bytes],
        coord_ids: list[int],
        special_ids: set[int],
        added_ids: set[int],
        eos_id: int,
        backend: "Tokenizer",
        format: AnswerFormat = COORD_TOKENS,
    ) -> None:
        self.format = format
        self.bytes_of = bytes_of
        with_digit = [] if coord_ids else [i for i, text in enumerate(bytes_of) if _DIGIT.search(text)]
        self.digit_ids = np.array(with_digit, dtype=np.int64)
        self.has_digit = np.zeros(len(bytes_of), dtype=bool)
        self.has_digit[self.digit_ids] = True
        self.coord_ids = np.array(coord_ids, dtype=np.int64)
        self.coord_bin = np.full(len(bytes_of), -1, dtype=np.int32)
        self.coord_bin[self.coord_ids] = np.arange(len(coord_ids))
        self.eos_id = int(eos_id)
        self.stop_ids = frozenset(special_ids | {self.eos_id}) - frozenset(coord_ids)
        self.is_stop = np.array([not text for text in bytes_of])
        self.is_stop[list(self.stop_ids)] = True
        scan_bytes = [text.replace(COORD_BYTE, b"\xfe") if COORD_BYTE in text else text for text in bytes_of]
        for token in coord_ids:
            scan_bytes[token] = COORD_BYTE
        self._flat = np.frombuffer(b"".join(scan_bytes), dtype=np.uint8)  # all tokens' bytes as scanned, end to end
        self._length = np.fromiter(map(len, scan_bytes), dtype=np.int64, count=len(bytes_of))
        self._offset = np.cumsum(self._length) - self._length
        ordinary = (i for i in range(len(bytes_of) - 1, -1, -1) if bytes_of[i] and i not in added_ids)
        self._id_of = {bytes_of[i]: i for i in ordinary if self.coord_bin[i] < 0}
        self._backend = backend
        self._encode_piece = lru_cache(maxsize=65536)(self._encode_plain)  # the format's own pieces recur endlessly
        num_bytes = sum(len(text) == 1 for text in self._id_of)
        if num_bytes < 256:
            raise ValueError(f"the tokenizer has a token for only {num_bytes} of 256 bytes: it is not byte-level BPE")

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase", format: AnswerFormat = COORD_TOKENS) -> "TokenTable":
        """Read the table from a fast byte-level BPE tokenizer (151,936 ids: about 0.3 s).

        Raises:
            ValueError: coordinate tokens that the format needs are missing (names them), there is no end token, or the
                vocabulary is not byte-level.
        """
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        num_coords = NUM_BINS if format.has_coord_tokens else 0
        coord_ids = [backend.token_to_id(f"<|coord_{k}|>") for k in range(num_coords)]
        missing = [f"<|coord_{k}|>" for k, token in enumerate(coord_ids) if token is None]
        if missing:
            names = ", ".join(missing[:3]) + (f", ... {missing[-1]}" if len(missing) > 3 else "")
            raise ValueError(
                f"the tokenizer lacks {len(missing)} of {NUM_BINS} coordinate tokens ({names}); each must be a single "
                "token. Add them (python -m tools.add_coord_tokens) and train the model on answers that use them, or "
                "set answer_format to the family's own form (qwen3vl, qwen2_5vl, internvl), which needs none"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token), so an answer cannot be closed")
        bytes_of = _vocabulary_bytes(backend.get_vocab(with_added_tokens=False), added)
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        special -= {token for token, entry in added.items() if entry.content in format.tags}
        return cls(bytes_of, coord_ids, special, set(added), tokenizer.eos_token_id, backend, format)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as the tokenizer splits it, with one id per coordinate token and nothing added."""
        if not self.format.has_coord_tokens:
            return list(self._encode_plain(text))  # numbers differ each time: not cached
        parts = _COORD_TEXT.split(text)  # plain, bin, plain, bin, ..., plain
        ids = list(self._encode_piece(parts[0]))
        for index, plain in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(int(self.coord_ids[int(index)]))
            ids += self._encode_piece(plain)
        return ids

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of text in which coordinate tokens are plain text."""
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

    def spell(self, data: bytes) -> list[int]:
        """The fewest ordinary tokens whose bytes are `data`; among equals, earlier tokens are as long as possible."""
        size = len(data)
        count = [0] * (size + 1)  # count[i]: tokens needed for data[i:]
        step = [0] * (size + 1)  # step[i]: end of the first of them
        for i in range(size - 1, -1, -1):
            count[i] = size + 1
            for j in range(size, i, -1):
                if count[j] + 1 < count[i] and data[i:j] in self._id_of:
                    count[i], step[i] = count[j] + 1, j
        ids, i = [], 0
        while i < size:
            ids.append(self._id_of[data[i : step[i]]])
            i = step[i]
        return ids

    def scan_text(self, ids: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The answer as scanned (one 0xFF per coordinate token) and each token's end in it, int64 `[len(ids)]`."""
        length = self._length[ids]
        ends = np.cumsum(length)
        if not len(ids):
            return b"", ends
        source = np.repeat(self._offset[ids] - ends + length, length)  # a byte's place in `_flat` less its place here
        source += np.arange(len(source))
        return self._flat[source].tobytes(), ends

    def until_stop(self, token_ids: Sequence[int]) -> np.ndarray:
        """Ids before the first one that ends the answer: a special token, or an id without text. int64."""
        ids = np.array(token_ids, dtype=np.int64).reshape(-1)
        known = (ids >= 0) & (ids < len(self.bytes_of))
        stops = np.flatnonzero(~known | self.is_stop[np.where(known, ids, 0)])
        return ids[: stops[0]] if len(stops) else ids


def touched(ends: np.ndarray, spans: Sequence[Sequence[int]]) -> np.ndarray:
    """Mask of the tokens that hold a byte of the spans, whose ends are included here; bool `[len(ends)]`. Spans may
    extend past the last token."""
    first, last = np.array(spans, dtype=np.int64).reshape(-1, 2).T
    marks = np.zeros(len(ends) + 1, dtype=np.int64)
    np.add.at(marks, np.searchsorted(ends, first, side="right"), 1)
    np.add.at(marks, np.minimum(np.searchsorted(ends, last, side="right") + 1, len(ends)), -1)
    return np.cumsum(marks)[:-1] > 0


def _vocabulary_bytes(vocab: dict[str, int], added: dict[int, Any]) -> list[bytes]:
    """Bytes of every id, `b""` for ids that the tokenizer does not know. The vocabulary is translated in one go: each
    of its characters stands for one byte."""
    bytes_of = [b""] * (max([*vocab.values(), *added]) + 1)
    try:
        text = "".join(vocab).translate(_BYTE_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError("the tokenizer's vocabulary is not byte-level BPE (GPT-2's byte alphabet)") from error
    ends = np.cumsum(np.fromiter(map(len, vocab), dtype=np.int64, count=len(vocab))).tolist()
    for token, (start, end) in zip(vocab.values(), pairwise([0, *ends]), strict=True):
        bytes_of[token] = text[start:end]
    for token, entry in added.items():
        bytes_of[token] = entry.content.encode()
    return bytes_of
