"""`make bench`: compare this project with the baselines, print a table, write benchmarks/results.json.

`python -m benchmarks [TOPIC ...]` runs only the named topics and replaces their entries. `data` runs only if named: it
decodes the images of a million lines, twice. docs/performance.md explains each line.
"""

import argparse
import importlib
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; engine and learner share the cores
os.environ.setdefault("DS_ACCELERATOR", "cpu")

TOPICS = ("cpu_work", "learner", "sync", "overlap")
LONG = ("data",)
RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "topics", nargs="*", metavar="TOPIC", help=f"any of {', '.join(TOPICS)} (default: these), {', '.join(LONG)}"
    )
    topics = parser.parse_args().topics or TOPICS
    if unknown := set(topics) - {*TOPICS, *LONG}:
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    from benchmarks.harness import print_table, write_results
    from tools.demo import exit_on_sigterm

    exit_on_sigterm()
    results = []
    for topic in topics:
        start = time.monotonic()
        found = importlib.import_module(f"benchmarks.bench_{topic}").run()
        write_results(RESULTS, found)
        results += found
        print(f"{topic}: {time.monotonic() - start:.0f} s", flush=True)
    print_table(results)


if __name__ == "__main__":
    main()
