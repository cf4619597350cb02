"""Work that survives the loss and return of a rollout server (CON-4): noticing is local, recovery is collective."""

import logging
from collections.abc import Callable
from typing import TypeVar

from utils.dist import DistributedError, Ranks, capture_error
from utils.rollout.client import RolloutClient
from utils.rollout.round import ServerGone

logger = logging.getLogger(__name__)

MAX_RECOVERIES = 5  # of one piece of work: a server that dies that often will not live
Result = TypeVar("Result")


def retry_on_server_loss(
    work: Callable[[], Result],
    where: str,
    ranks: Ranks,
    client: RolloutClient | None,
    quiesce: Callable[[], None],
    reopen: Callable[[], None],
) -> Result:
    """What `work` returns, done again from its beginning after every loss of a rollout server (collective).

    Any loss on any rank sends all ranks into the recovery together: they `quiesce`, so that nobody asks a server that
    is back before it has weights, wait for all servers (`timeout_s`), then `reopen` the communicators; `work` must
    bring the full weights to servers that lost them before it asks anything.

    Args:
        client: None where no server generates: then nothing can be lost.

    Raises:
        DistributedError: on all ranks; any other failure of `work`, or servers that do not come back as they were.
    """
    recoveries = 0
    while True:
        try:
            if recoveries:
                reopen()
            result, error = _outcome(work)
            ranks.raise_on_all_ranks(error, where)
            if recoveries:
                logger.warning("%s is done; nothing was lost, the run goes on", where)
            return result
        except DistributedError as failure:
            if recoveries == MAX_RECOVERIES or not any(ranks.gather(_is_loss(client, failure))):
                raise
            logger.warning("%s\nwaiting for the rollout servers, then going on", failure)
        quiesce()
        ranks.raise_on_all_ranks(capture_error(client.wait_ready), f"{where}: waiting for the rollout servers")
        logger.warning("all rollout servers answer; opening the communicators anew, then sending all weights")
        recoveries += 1


def _outcome(work: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  (raised again, on all ranks, at the next fence)
        return None, error


def _is_loss(client: RolloutClient | None, failure: DistributedError) -> bool:
    return client is not None and (isinstance(failure.__cause__, ServerGone) or bool(client.lost()))
