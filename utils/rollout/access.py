"""The access token of the rollout servers, as both ends read it (SRV-3)."""

import os
import re

from utils.config.load import exit_with

TOKEN_NAME = "ROLLOUT_SERVER_TOKEN"  # noqa: S105


def access_token() -> str | None:
    """Return the environment's token, None without one; exit status 2 for one that no header carries as it is.

    HTTP libraries quote such a header in their errors, which reach logs.
    """
    token = os.environ.get(TOKEN_NAME) or None
    if token and not re.fullmatch(r"[!-~]+", token):
        rule = "must be printable ASCII without spaces or line ends (Windows files end lines in \\r); fix or unset it"
        exit_with(f"{TOKEN_NAME}: {rule}")
    return token
