"""Imported once by the process that `peers` are forked from: vLLM over the emulated NCCL, no thread started."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from vllm.distributed.device_communicators import pynccl

from tests.emulated_nccl import patches
from utils.sync import nccl, vllm_worker  # noqa: F401

torch.set_num_threads(1)
patches.patch_torch(torch, setattr)
patches.patch_pynccl(pynccl, setattr)
patches.patch_nccl(nccl, setattr)
