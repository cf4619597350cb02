"""`deepspeed` as `make train` starts it: an operator's signals reach the ranks, and the ranks alone.

    python -m tools.launch --num_gpus 2 train_stage2.py --config FILE

On SIGTERM the `deepspeed` command itself ends and leaves its ranks running; on Ctrl-C its inner launcher gives them 30
seconds and then kills them, checkpoint or not (DeepSpeed 0.19). So it runs in a session of its own here; SIGTERM,
SIGINT and SIGHUP go to the ranks as SIGTERM; and their exit status comes back. Where a rank was killed, and others with
it before they could speak, the last words are said here. A rendezvous port that is taken is refused before all that.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import psutil

from utils.dist import check_master_port

MASTER_PORT = 29500  # DeepSpeed's, where none is given


def main() -> None:
    try:
        check_port_of(sys.argv[1:])
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    launcher = Path(sys.executable).parent / "deepspeed"
    process = subprocess.Popen([launcher, *sys.argv[1:]], start_new_session=True)

    def pass_on(number: int, frame: FrameType | None) -> None:
        for target in ranks_below(process.pid) or family_of(process.pid):
            target.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    status = process.wait()
    if 256 - status in set(signal.Signals):  # of a rank that a signal ended
        print("\n".join(words_for_the_killed(256 - status, sys.argv[1:])), file=sys.stderr, flush=True)
    sys.exit(status if status >= 0 else 128 - status)


def check_port_of(arguments: list[str]) -> None:
    """Raises OSError where the ranks could not meet at `--master_port`. A dry run needs no port.

    Args:
        arguments: as for this program.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--master_port", type=int, default=MASTER_PORT)
    if "--dry-run" not in arguments:
        check_master_port(parser.parse_known_args(arguments)[0].master_port)


def words_for_the_killed(number: int, arguments: list[str]) -> list[str]:
    """How far the run has come and how to go on, as far as the run directory tells.

    Args:
        number: of the signal.
        arguments: as for this program.
    """
    from utils.config.load import load_config
    from utils.run.rollout_log import read_rollout_log
    from utils.run.shutdown import newest_checkpoint

    run_dir = Path(load_config(arguments[arguments.index("--config") + 1]).training.output_dir)
    log, newest = run_dir / "rollouts.jsonl", newest_checkpoint(run_dir)
    lines = read_rollout_log(log) if log.exists() else []
    command = f"python -m tools.launch {' '.join(arguments)}" + " --resume auto" * ("--resume" not in arguments)
    return [
        f"run {run_dir}: a rank was ended by {signal.Signals(number).name}"
        + "; where memory runs out, the kernel does so (dmesg)" * (number == signal.SIGKILL),
        *(f"  last step on record: {line['step']}, with weights {line['weight_version']}" for line in lines[-1:]),
        f"  newest complete checkpoint: {newest}" if newest else "  no checkpoint is complete",
        f"  {'go on from it' if newest else 'start again'} with: {command}",
    ]


def ranks_below(pid: int) -> list[psutil.Process]:
    """The ranks, which the launcher marks by `--local_rank`; none before they have started."""
    return [process for process in family_of(pid) if _is_rank(process)]


def family_of(pid: int) -> list[psutil.Process]:
    """The process and all below it that still run."""
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
