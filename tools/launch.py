"""Run `deepspeed` so that signals reach the ranks and only the ranks; `make train` and `make grpo` use it.

    python -m tools.launch --num_gpus 2 train_stage2.py --config FILE

On SIGTERM the `deepspeed` command itself ends and leaves its ranks running; on Ctrl-C its inner launcher gives them 30
seconds and then kills them, whether or not they have saved a checkpoint (DeepSpeed 0.19). Therefore it runs in a
session of its own, SIGTERM, SIGINT and SIGHUP are forwarded to the ranks as SIGTERM, and their exit status is returned.
If a rank is killed and takes the others with it before they can report, this program reports the state of the run. A
rendezvous port that is already in use is refused before anything starts.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil

from utils.dist import check_master_port

MASTER_PORT = 29500  # DeepSpeed's default


def main() -> None:
    try:
        check_port_of(sys.argv[1:])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    launcher = Path(sys.executable).parent / "deepspeed"
    process = subprocess.Popen([launcher, *sys.argv[1:]], start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        for target in ranks_of(process.pid) or process_tree(process.pid):
            target.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    status = process.wait()
    if 256 - status in set(signal.Signals):  # a signal ended one of the ranks
        print("\n".join(killed_rank_message(256 - status, sys.argv[1:])), file=sys.stderr, flush=True)
    sys.exit(status if status >= 0 else 128 - status)


def check_port_of(arguments: list[str]) -> None:
    """Raise OSError if the ranks could not meet at `--master_port`. A dry run needs no port.

    Args:
        arguments: of this program.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master_port", type=int, default=MASTER_PORT)
    if "--dry-run" not in arguments:
        check_master_port(parser.parse_known_args(arguments)[0].master_port)


def killed_rank_message(number: int, arguments: list[str]) -> list[str]:
    """Lines that say how far the run got and how to resume it, from the run directory.

    Args:
        number: of the signal.
        arguments: of this program.
    """
    # Imported late, so that the launcher stays small while the ranks run.
    from utils.config.load import load_config
    from utils.run.rollout_log import read_rollout_log
    from utils.run.shutdown import newest_checkpoint

    run_dir = Path(load_config(arguments[arguments.index("--config") + 1]).training.output_dir)
    log, newest = run_dir / "rollouts.jsonl", newest_checkpoint(run_dir)
    lines = read_rollout_log(log) if log.exists() else []
    command = f"python -m tools.launch {' '.join(arguments)}" + " --resume auto" * ("--resume" not in arguments)
    return [
        f"run {run_dir}: a rank was ended by {signal.Signals(number).name}"
        + "; the kernel does this when memory runs out (see dmesg)" * (number == signal.SIGKILL),
        *(f"  last logged step: {line['step']}, with weights {line['weight_version']}" for line in lines[-1:]),
        f"  newest complete checkpoint: {newest}" if newest else "  no checkpoint is complete",
        f"  {'resume from it' if newest else 'start again'} with: {command}",
    ]


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the rank processes, recognised by the launcher's `--local_rank`; none before they have started."""
    return [process for process in process_tree(pid) if _is_rank(process)]


def process_tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants that are still running."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_rank(process: psutil.Process) -> bool:
    try:
        return any(word.startswith("--local_rank=") for word in process.cmdline())
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
