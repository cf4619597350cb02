"""ms-swift's own forms of `/infer/` and its own client, out of the published package of `VERSION`.

The package is installed without its dependencies, once, into a folder of its own in the environment. Only the two
modules with the forms and the client are loaded; what they import from the rest of ms-swift and do not need here is
replaced.
"""

import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from tests.packages import folder_with

VERSION = "4.6.0"


@cache
def load() -> SimpleNamespace:
    """Return modules `protocol` and `vllm_client` of ms-swift; skip the test if the package cannot be had."""
    folder = folder_with(f"ms-swift=={VERSION}", dependencies=False)
    optional = ("trl", "vllm", "vllm_ascend", "vllm_kunlun", "vllm_metax")
    absent = {f"is_{name}_available": lambda: False for name in optional}
    with patch.dict(sys.modules):
        _replace("swift", folder / "swift")
        _replace("swift.template", Messages=list[dict[str, Any]], Tool=dict)
        _replace("swift.utils", **absent, SafeMediaPath=None, remove_response=None, synchronize=None)
        sys.modules["swift.utils"].get_torch_device = MagicMock()
        _replace("swift.metrics", Metric=dict)
        engine = _replace("swift.infer_engine", folder / "swift" / "infer_engine", AdapterRequest=dict)
        _replace("swift.rlhf_trainers", folder / "swift" / "rlhf_trainers")
        addresses = ("format_host_for_url", "is_valid_ipv6_address", "resolve_hostname")
        others = ("broadcast_tensor_for_vllm_weight_sync", "peft_config_to_dict")
        _replace("swift.rlhf_trainers.utils", **dict.fromkeys(addresses + others, lambda host: host))
        protocol = importlib.import_module("swift.infer_engine.protocol")
        engine.RequestConfig = protocol.RequestConfig
        client = importlib.import_module("swift.rlhf_trainers.vllm_client")
    client.is_vllm_available = lambda: True  # only what receives weights needs it, and that is not used here
    return SimpleNamespace(protocol=protocol, client=client)


def _replace(name: str, folder: Path | None = None, **attributes: Any) -> Any:
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = [str(folder)] if folder else []
    vars(module).update(attributes)
    return module


def read_answer(answer: dict[str, Any]) -> Any:
    """Return an answer as their `RolloutOutput`. Fails where it ignored a field or converted a value."""
    output = load().protocol.RolloutOutput.model_validate(answer)
    assert_kept(answer, output.model_dump(mode="json"))
    return output


def assert_kept(sent: Any, read: Any) -> None:
    """Everything that was sent is in what was read, with the same value and type."""
    if isinstance(sent, dict):
        assert sent.keys() <= read.keys(), f"unknown to ms-swift: {sent.keys() - read.keys()}"
        for key, value in sent.items():
            assert_kept(value, read[key])
    elif isinstance(sent, list):
        assert len(sent) == len(read)
        for one, other in zip(sent, read, strict=True):
            assert_kept(one, other)
    else:
        assert (type(sent), sent) == (type(read), read)
