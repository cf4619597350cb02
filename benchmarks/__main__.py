"""`make bench`: compare this project with the baselines, print a table, write benchmarks/results.json.

`python -m benchmarks [TOPIC ...]` runs only the named topics and replaces their entries. docs/performance.md explains
each line.
"""

import argparse
import importlib
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch is imported; engine and learner share the cores
os.environ.setdefault("DS_ACCELERATOR", "cpu")

TOPICS = ("cpu_work", "data", "learner", "sync", "overlap")
RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help=f"any of {', '.join(TOPICS)} (default: all)")
    topics = parser.parse_args().topics or TOPICS
    if unknown := set(topics) - set(TOPICS):
        parser.error(f"no such topic: {', '.join(sorted(unknown))}")
    from benchmarks.harness import print_table, write_results

    results = []
    for topic in topics:
        start = time.monotonic()
        results += importlib.import_module(f"benchmarks.bench_{topic}").run()
        print(f"{topic}: {time.monotonic() - start:.0f} s", flush=True)
    write_results(RESULTS, results)
    print_table(results)


if __name__ == "__main__":
    main()
