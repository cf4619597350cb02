"""Weight sync as in most trainers: each tensor is announced by one HTTP call and sent by one broadcast.

Modelled on TRL's `VLLMClient.update_named_param`, with the improvements that cost nothing: one kept-alive connection,
call and broadcast at the same time, tensors merged in advance, one layerwise reload around the whole update.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from utils.sync.weight_sync import WeightSync


def sync_per_tensor(sync: WeightSync, tensors: dict[str, torch.Tensor], version: str) -> None:
    """Send `tensors` (checkpoint names) to the first server of `sync`, over its communicator."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group = sync.transport.groups[0]
    label = {"run_id": sync.run_id, "version": version}
    with ThreadPoolExecutor(1) as pool:
        sync.client.post(0, "/start_weight_update/", {**label, "pause": "wait"})
        for name, tensor in tensors.items():
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            body = {"run_id": sync.run_id, "names": [name], "dtype_names": [dtype], "shapes": [shape]}
            announced = pool.submit(sync.client.post, 0, "/update_weights/", body)
            group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()
            announced.result()
        sync.client.post(0, "/finish_weight_update/", label)
