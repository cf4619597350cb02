"""The real `rollout_server.py` with one route more: `/bench/STEP/` runs a step below on every worker and times it.

Launched by bench_sync.py. So both unavoidable parts of a sync, the broadcast and the engine's own loading, are measured
in the very process that takes part in the sync. `BenchExtension` reaches vLLM by `vllm_engine_kwargs`.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import rollout_server

if __name__ == "__mp_main__":
    rollout_server.begin_as_child()

serve = rollout_server.serve


async def serve_with_bench(*args: Any) -> None:
    from utils.server import app as server_app

    make_app = server_app.make_app

    def make_app_with_bench(engine: Any, *rest: Any) -> Any:
        app = make_app(engine, *rest)

        @app.post("/bench/{step}/")
        async def bench(step: str, body: dict[str, Any]) -> list[Any]:
            return await engine.on_all_workers(f"bench_{step}", body)

        return app

    server_app.make_app = make_app_with_bench
    await serve(*args)


if __name__ == "__main__":
    rollout_server.serve = serve_with_bench
    rollout_server.main()
