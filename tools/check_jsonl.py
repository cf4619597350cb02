"""Check data files and report each class of mistake: counts, first lines, an example.

    python -m tools.check_jsonl data/train.jsonl data/val.jsonl

The checks are those of `utils.data.samples`: training accepts a file without mistakes, and the lines reported are the
ones that `data.on_bad_sample: skip` would leave out. Memory use does not depend on the size of the file. A large file
is read by one process per core, 16 at most. Exit status: 0 no mistakes, 1 mistakes.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from utils.config.schema import Data
from utils.data.index import Checks, scan
from utils.data.mistakes import ProblemCounts
from utils.data.samples import LineReader, empty_file, unreadable_file


def check(paths: Sequence[str], prompt: str | None, max_lines: int = 5) -> tuple[ProblemCounts, str]:
    """Check all files; return their mistakes and the text to print."""
    counts, text = ProblemCounts(max_lines), []
    for path in paths:
        num_good = num_bad = num_objects = 0
        try:
            for part in scan(path, Checks(LineReader(prompt))):
                num_good += len(part.lines)
                num_bad += len(part.bad)
                num_objects += part.num_objects
                for bad in part.bad:
                    counts.add(bad)
            if not num_good + num_bad:
                counts.add(empty_file(path))
        except OSError as error:
            counts.add(unreadable_file(path, error))
        text.append(f"{path}: {num_good} good samples with {num_objects} objects, {num_bad} bad lines")
    return counts, "\n".join([*text, counts.report()]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL data files")
    parser.add_argument(
        "--prompt",
        default=Data().prompt,
        metavar="TEXT",
        help="data.prompt, for lines without their own prompt (default: the config's); '' requires one in every line",
    )
    parser.add_argument("--lines", type=int, default=5, metavar="N", help="line numbers to list per class (default 5)")
    args = parser.parse_args()
    counts, text = check(args.files, args.prompt, max(args.lines, 1))
    print(text)
    if not counts.num_bad:
        print(f"write a config: python -m tools.init --data {shlex.quote(args.files[0])} --model DIR --gpus N")
    sys.exit(1 if counts.num_bad else 0)


if __name__ == "__main__":
    main()
