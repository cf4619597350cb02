"""The rollout server: vLLM behind a small HTTP front, on devices of its own. It generates and receives weights.

Launch: `python rollout_server.py --config FILE [--server-index I] [--dry-run]`, or `make server GPUS=0,1 CONFIG=FILE`.
Host and port are those of `servers[I].base_url` in the config; `custom.extra.rollout_server` has vLLM's settings.
Endpoints: utils/server/app.py. Ctrl-C or SIGTERM ends it with all its processes.
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from typing import NoReturn

from utils.config.load import ConfigError, exit_with, load_config_or_exit
from utils.config.plan import add_plan_arguments, fill_plan_arguments, print_dry_run
from utils.output import outlive_readers, tell
from utils.rollout.access import access_token
from utils.server.launch import Launch, describe, engine_args, problems_of, resolve
from utils.server.process import (
    allow_open_files,
    answer_loading,
    begin_as_child,
    end_now,
    escape_logs,
    kill_later,
    listen,
    set_environment,
)

if __name__ == "__mp_main__":  # in a process that vLLM spawned
    begin_as_child()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--server-index", type=int, default=0, help="which of the config's servers to start")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and plan, start nothing")
    add_plan_arguments(parser)
    args = parser.parse_args()
    fill_plan_arguments(parser, args)

    outlive_readers()
    escape_logs()  # before vLLM's own loggers are set up, which keep this
    cfg, token = load_config_or_exit(args.config), access_token()
    try:
        launch = resolve(cfg, args.server_index)
    except ConfigError as error:
        exit_with(error)
    if args.dry_run:
        print_dry_run(cfg, args.world_size, args.device_gib, has_learners=False)  # a teacher's config has none
    print(describe(launch), flush=True)

    set_environment(launch.device, launch.settings.cpu_kv_cache_gib, launch.world_size)  # before vLLM is imported
    problems = problems_of(launch, token)
    if args.dry_run:
        print("".join(f"would not start: {problem}\n" for problem in problems), end="")
        sys.exit(2 if problems else 0)
    try:
        server_socket = None if problems else listen(launch.address.host, launch.address.port)
    except OSError as error:
        problems.append(str(error))
    if problems:
        told = [f"{args.config}: {problem}" for problem in problems]
        index = f" --server-index {args.server_index}" if args.server_index else ""
        again = (
            f"after fixing this, start again with: python rollout_server.py --config {shlex.quote(args.config)}{index}"
        )
        exit_with("\n".join([*told, again]))

    for number in (signal.SIGTERM, signal.SIGINT):  # while it loads; asyncio would wait for the whole model
        signal.signal(number, stop_loading)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(launch, server_socket, token))
    end_now()


def stop_loading(number: int, frame: object) -> NoReturn:
    """End at once: nothing is to be saved, and the kernel ends the engines with this process."""
    tell("\nrollout server: stopped while loading\n")
    os._exit(128 + number)


async def serve(launch: Launch, server_socket: socket.socket, token: str | None) -> None:
    """Load the model and answer until a signal says stop."""
    allow_open_files()
    with answer_loading(server_socket):  # importing vLLM alone takes seconds
        import uvicorn
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from utils.data.encoding import load_processor
        from utils.server.app import make_app
        from utils.server.engine import RolloutEngine
        from utils.server.front import front_config, own_hosts, require_host
        from utils.server.images import ImageStore
        from utils.server.weight_updates import WeightUpdates

        model = launch.model
        try:
            processor = load_processor(model.path, model.image_min_pixels, model.image_max_pixels)
        except (OSError, ValueError) as error:
            exit_with(f"model.path={model.path}: {error}")
        # In the main thread: the engines' lives are tied to the thread that starts them.
        llm = AsyncLLM.from_engine_args(engine_args(launch), usage_context=UsageContext.OPENAI_API_SERVER)
        images = ImageStore(launch.image_roots, launch.settings.allow_image_urls, launch.settings.max_image_pixels)
        engine = RolloutEngine(llm, processor, images, model.path, launch.world_size, launch.stuck_s)
        await engine.warm_up()
    updates = WeightUpdates(engine, "nccl" if launch.device == "cuda" else "gloo")
    app = make_app(engine, updates, token, launch.path_prefix)
    app.add_middleware(require_host, hosts=own_hosts(launch.address.host))
    front = uvicorn.Server(front_config(app))
    front.capture_signals = contextlib.nullcontext  # ours below; uvicorn would end the process before the engines

    def stop() -> None:
        if not front.should_exit:
            kill_later()
            front.should_exit = True
            print("rollout server: stopping", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    print(f"rollout server: ready on {launch.url}", flush=True)
    try:
        await front.serve(sockets=[server_socket])
    finally:
        server_socket.close()
        llm.shutdown(timeout=3)


if __name__ == "__main__":
    main()
