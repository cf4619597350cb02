"""Reads data files as training would and reports every class of mistake: counts, first lines, an example of each.

Run as `python -m tools.check_jsonl data/train.jsonl data/val.jsonl`. The checks are `utils.data.samples`'s own: a file
without mistakes here is one that training takes, and what is reported is what `data.on_bad_sample: skip` would leave
out. Memory does not grow with the file. Exit status: 0 no mistakes, 1 mistakes.
"""

import argparse
import sys
from collections.abc import Sequence

from utils.config.schema import Data
from utils.data.mistakes import ProblemCounts
from utils.data.samples import Sample, read_samples


def check(paths: Sequence[str], prompt: str | None, max_lines: int = 5) -> tuple[ProblemCounts, str]:
    """All mistakes of all files, and what to print about them."""
    counts, text = ProblemCounts(max_lines), []
    for path in paths:
        num_good = num_bad = num_objects = 0
        for item in read_samples(path, prompt):
            if isinstance(item, Sample):
                num_good += 1
                num_objects += len(item.objects)
            else:
                num_bad += item.line > 0
                counts.add(item)
        text.append(f"{path}: {num_good} good samples with {num_objects} objects, {num_bad} bad lines")
    return counts, "\n".join([*text, counts.report()]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSONL data files")
    parser.add_argument(
        "--prompt",
        default=Data().prompt,
        metavar="TEXT",
        help="what data.prompt holds, for lines without a prompt of their own; '' if every line must bring one",
    )
    parser.add_argument("--lines", type=int, default=5, metavar="N", help="line numbers listed per class (default 5)")
    args = parser.parse_args()
    counts, text = check(args.files, args.prompt, max(args.lines, 1))
    print(text)
    sys.exit(1 if counts.num_bad else 0)


if __name__ == "__main__":
    main()
