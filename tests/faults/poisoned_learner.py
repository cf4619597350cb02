"""`train_stage2.py` with nan as the pixels of one sample, `POISONED_SAMPLE`, and so a nan loss of its row."""

import os
import sys

import torch

import train_stage2
from utils.packing import Batch
from utils.targets import Segment


def main() -> None:
    set_up = train_stage2.set_up

    def poisoned(*args: object) -> train_stage2.Stage2:
        run = set_up(*args)
        collate = run.session.collate

        def spoil(row: list[Segment]) -> Batch:
            batch = collate(row)
            if os.environ["POISONED_SAMPLE"] in batch.sample_ids:
                batch.vision["pixel_values"][:] = torch.nan
            return batch

        run.session.collate = spoil
        return run

    train_stage2.set_up = poisoned
    sys.argv[0] = "train_stage2.py"  # named in its report about the end
    train_stage2.main()


if __name__ == "__main__":
    main()
