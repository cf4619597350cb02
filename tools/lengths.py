"""Lengths of prompts, for tools that read all of a file before they do anything long."""

from collections.abc import Sequence
from typing import Any

from utils.data.encoding import num_prompt_tokens
from utils.data.samples import DataError, Sample


def prompt_lengths(samples: Sequence[Sample], processor: Any) -> list[int]:
    """Tokens of each prompt; no image is opened. Raises DataError with all samples whose prompt cannot be encoded, such
    as one with a very long, thin image."""
    lengths, problems = [], []
    for sample in samples:
        try:
            lengths.append(num_prompt_tokens(sample, processor))
        except ValueError as error:
            problems.append(f"{sample.source}: the prompt cannot be encoded ({error}); correct or remove the line")
    if problems:
        raise DataError(problems)
    return lengths
