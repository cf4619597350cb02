"""`rollout_server.py` as users start it, config, token and signals included, with an engine that answers at once and a
log of everything: `python -m tests.security.served --config FILE`."""

import logging
import subprocess
import sys
import time
from typing import Any

import uvicorn
from vllm.v1.engine.async_llm import AsyncLLM

import rollout_server
from tests.security.bounded_server import QuickLLM
from utils.server import front

LOADING_S = 2.0
SLOW_PORT = 9  # of a learner whose communicator never opens
ALL = 1  # the level below uvicorn's own TRACE


class ServedLLM(QuickLLM):
    """Its model takes `LOADING_S` to load; a child process tells its environment. Its prefix cache is broken."""

    opening = False

    @classmethod
    def from_engine_args(cls, *_: Any, **__: Any) -> "ServedLLM":
        print_environment = "import os; print('environment of a child:', dict(os.environ), flush=True)"
        subprocess.run([sys.executable, "-c", print_environment], check=True)
        time.sleep(LOADING_S)
        return cls(replicas=1)

    async def _utility(self, method: str, *args: Any, engine: int) -> Any:
        if method == "collective_rpc":
            step, payload = args[2]
            self.opening = {"init": payload.get("master_port") == SLOW_PORT, "close": False}.get(step, self.opening)
            if step in ("init", "opening"):
                return [{"result": self.opening, "error": None}]
        return await super()._utility(method, *args, engine=engine)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        raise RuntimeError("a fault of the engine")

    def shutdown(self, timeout: float) -> None:
        pass


def front_that_tells_all(app: Any) -> uvicorn.Config:
    config = quiet_front(app)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(ALL)
    return config


if __name__ == "__main__":
    logging.basicConfig(level=ALL, stream=sys.stdout)
    AsyncLLM.from_engine_args = ServedLLM.from_engine_args
    quiet_front, front.front_config = front.front_config, front_that_tells_all
    rollout_server.main()
