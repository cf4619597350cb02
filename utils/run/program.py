"""Start and end of both training programs: the command line, the exit status and the closing report."""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from utils.config.checkpoint_files import adapter_problems, checkpoint_problems
from utils.config.load import Config, exit_with, load_config_or_exit, problem, require_variant
from utils.config.memory import expert_adapters_problem, heads_problem
from utils.config.plan import add_plan_arguments, fill_plan_arguments, print_dry_run
from utils.dist import COMMAND_NAME, capture_error
from utils.families import family_in, longest_sequence, read_config
from utils.output import outlive_readers
from utils.run.inputs import KINDS, data_problems
from utils.run.resume import EARLIER_RUN, holds_a_run
from utils.run.session import Program
from utils.run.shutdown import StopRequest, end_with, launch_command

AnyProgram = TypeVar("AnyProgram", bound=Program)


def run_program(
    script: str,
    variant: str,
    description: str,
    set_up: Callable[[Config, str | None, Sequence[str]], AnyProgram],
    train: Callable[[AnyProgram], None],
    check: Callable[[Config, bool], object] = lambda cfg, is_dry_run: None,
) -> NoReturn:
    """Read the command line, then run `train(set_up(config, checkpoint to resume, accepted changes))` to its end.

    Args:
        script: the program's file, which trains configs of `variant` (CFG-4).
        check: exits with status 2 for what the program finds wrong with the config, before anything else starts. In a
            dry run (its second argument) it touches no device.
    """
    args = parse_args(description)
    outlive_readers()
    cfg = load_config_or_exit(args.config)
    require_variant(cfg, variant, script)
    check(cfg, args.dry_run)
    if args.dry_run:
        print_dry_run(cfg, args.world_size, args.device_gib)
        if os.environ.get("RANK", "0") == "0":  # under a launcher, one printout is enough
            resume = args.resume or cfg.training.resume_from_checkpoint
            for line in model_problems(cfg) + data_problems(cfg) + run_dir_problems(cfg, resume):  # a plan needs none
                print(f"would not start: {line}", file=sys.stderr)
        sys.exit(0)
    stop, run, status = StopRequest(), None, 0
    stop.install()

    def end(error: Exception) -> int:
        facts = (run.session.steps_done, run.session.policy.version) if run else (None, None)
        return end_with(error, Path(cfg.training.output_dir), args.config, *facts)

    try:
        if found := model_problems(cfg):
            exit_with("\n".join(found))
        run = set_up(cfg, args.resume or cfg.training.resume_from_checkpoint, args.accept_changes)
        run.session.stop = stop
        train(run)
    except SystemExit:  # a user's mistake, which is told already
        if os.environ.get("RANK", "0") == "0":
            print(f"after fixing this, start again with: {again_command(args)}", file=sys.stderr)
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is, it has ended the run)
        status = end(error)
    finally:
        if run is not None and (error := capture_error(run.session.close)) is not None:
            if status:  # the first error is the one that counts
                print(f"and at its end: {type(error).__name__}: {error}", file=sys.stderr)
            else:
                status = end(error)
    if run is not None and (run.session.monitor.gave_up_a_tracker or run.session.prefetcher.is_stuck):
        leave_at_once(status)
    sys.exit(status)


def leave_at_once(status: int) -> NoReturn:
    """Exit without what would wait for ever at the end: W&B for its service, Python for a thread in a user's reward."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def again_command(args: argparse.Namespace) -> str:
    """What started this process, with `--resume` and `--accept-changes`, which only `tools.launch` has on record."""
    more = {"--resume": [args.resume] if args.resume else [], "--accept-changes": args.accept_changes}
    given = [word for option, values in more.items() if values for word in (option, *values)]
    return " ".join([launch_command(args.config), *([] if COMMAND_NAME in os.environ else map(shlex.quote, given))])


def model_problems(cfg: Config) -> list[str]:
    """List what is wrong with the checkpoints that a run starts from, before anything is loaded or waited for."""
    start, reference = cfg.model.path, cfg.model.reference_path
    folders = {"model.path": start} | ({"model.reference_path": reference} if reference not in (None, start) else {})
    found = [
        problem(cfg, key, rule)
        for key, folder in folders.items()
        for rule in checkpoint_problems(Path(folder), with_processor=key == "model.path")
    ]
    if not found and os.path.isdir(start) and (rule := _form_problem(cfg, start)):
        found.append(problem(cfg, cfg.rollout_path("answer_format"), rule))
    adapter = cfg.tuner.adapter_path
    if adapter is not None:
        found += [problem(cfg, "tuner.adapter_path", rule) for rule in adapter_problems(Path(adapter))]
    if not found and os.path.isdir(start) and (rule := expert_adapters_problem(cfg)):
        found.append(problem(cfg, "tuner.target_modules", rule))
    if cfg.is_colocate and not found and os.path.isdir(start):
        longest = longest_sequence(read_config(start))
        if longest and (cfg.global_max_length or 0) > longest:
            rule = f"is the colocated engine's length too, but the model ends at {longest} positions; lower it"
            found.append(problem(cfg, "global_max_length", rule))
        if rule := heads_problem(cfg, cfg.rm.vllm.tensor_parallel_size):
            rule += ", and of the number of learners; 1 always is one"
            found.append(problem(cfg, cfg.rollout_path("vllm.tensor_parallel_size"), rule))
    return found


def _form_problem(cfg: Config, start: str) -> str | None:
    try:
        return family_in(start).form_problem(cfg.rm.answer_format)
    except (OSError, ValueError):
        return None  # told elsewhere


def run_dir_problems(cfg: Config, resume: str | None) -> list[str]:
    """Say if the run directory is another run's, which a fresh start leaves alone."""
    is_taken = not resume and holds_a_run(Path(cfg.training.output_dir))
    return [problem(cfg, "training.output_dir", EARLIER_RUN)] if is_taken else []


def parse_args(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file; everything is set there")
    parser.add_argument("--dry-run", action="store_true", help="check the config, print the plan, touch no device")
    num_learners = int(os.environ.get("WORLD_SIZE", 1))
    add_plan_arguments(parser, num_learners)
    parser.add_argument(
        "--resume", nargs="?", const="auto", metavar="CHECKPOINT", help="instead of training.resume_from_checkpoint"
    )
    parser.add_argument(
        "--accept-changes",
        nargs="+",
        choices=KINDS,
        default=[],
        help="resume although data files (with as many samples as before) or the base model are not what they were",
    )
    parser.add_argument("--local_rank", type=int, default=0, help="added by the launcher")
    args = parser.parse_args()
    fill_plan_arguments(parser, args, num_learners)
    return args
