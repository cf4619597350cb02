"""The HTTP responses of a rollout server, checked for form."""

import json
from contextlib import suppress
from typing import Any

from utils.rollout.link import CallFailed


def read_text(url: str, status: int, text: str) -> str:
    """Return the text of a 200 response. Raises: CallFailed for any other."""
    if status != 200:
        raise CallFailed(url, f"HTTP {status}: {excerpt(text)}", status)
    return text


def read_json(url: str, status: int, text: str) -> Any:
    """Return the decoded JSON of a 200 response. Raises: CallFailed, also for a body that is not JSON."""
    try:
        return json.loads(read_text(url, status, text))
    except ValueError as error:
        raise CallFailed(url, f"not JSON: {excerpt(text)}") from error


def read_health(url: str, status: int, text: str, allow_dirty: bool = False) -> dict[str, Any]:
    """Return the response of `/health/`.

    Raises:
        CallFailed: not healthy; unless `allow_dirty` and it is only without usable weights (503 `dirty`).
    """
    if allow_dirty and status == 503:
        with suppress(CallFailed):
            health = read_health(url, 200, text)
            if is_dirty(health):
                return health
    health = read_json(url, status, text)
    if not isinstance(health, dict) or not isinstance(health.get("boot_id"), str):
        raise CallFailed(url, f"something other than a rollout server responded: {excerpt(health)}")
    return health


def is_dirty(health: dict[str, Any]) -> bool:
    """Was the server left without usable weights by a failed weight update?"""
    return "dirty" in str(health.get("status"))


def read_outputs(url: str, status: int, text: str, num_requests: int) -> list[dict[str, Any]]:
    """Return one `RolloutOutput` form per request, each with token ids or an error. Raises: CallFailed."""
    outputs = read_json(url, status, text)
    if not isinstance(outputs, list) or len(outputs) != num_requests:
        got = f"{len(outputs)} answers" if isinstance(outputs, list) else excerpt(outputs)
        raise CallFailed(url, f"{num_requests} requests got {got}")
    for output in outputs:
        if not isinstance(output, dict) or not isinstance(output.get("rollout_infos"), dict):
            raise CallFailed(url, f"not a rollout output: {excerpt(output)}")
        if output["rollout_infos"].get("error") is not None:
            continue
        response = output.get("response")
        is_whole = isinstance(response, dict) and response.get("choices") and response.get("prompt_token_ids")
        if not is_whole or not isinstance(output.get("response_token_ids"), list):
            raise CallFailed(url, f"a rollout output without token ids: {excerpt(output)}")
    return outputs


def excerpt(value: Any, limit: int = 300) -> str:
    """Return the beginning of a text, or of a value's JSON, for an error message."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= limit else text[:limit] + "..."
