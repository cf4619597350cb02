"""GLM-4.1V as a third party would add it: a record and a builder of a tiny checkpoint.

pytest -p tests.glm -m "not e2e" tests/e2e/test_families.py -k glm4v      the conformance suite with it
deepspeed --module tests.glm train_stage2.py --config FILE                a program of this project with it
python -m tests.glm rollout_server.py --config FILE
"""

import runpy
import sys
from typing import Any

from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

from tests.e2e import processes
from tests.families import BUILDERS, IMAGE_PX
from tools.make_demo import CHAT_TEMPLATE, MERGE_SIZE, PATCH_SIZE, build_tokenizer
from utils.families import FAMILIES, Family


def glm4v() -> tuple[Any, dict[str, Any]]:
    tokenizer = build_tokenizer()
    names = [f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end")]
    special = [*names, "<|image|>", "<|video|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    budget = {"shortest_edge": 2 * IMAGE_PX**2, "longest_edge": 2 * IMAGE_PX**2}  # counts both frames of a still image
    patches = {"size": budget, "patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": MERGE_SIZE}
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Glm4vVideoProcessor(**patches),
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", image),
    )
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "attention_bias": True,
    }
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
    }
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "image_size": IMAGE_PX, "patch_size": PATCH_SIZE}
    vision |= {"out_hidden_size": 64, "intermediate_size": 128}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(_IDS, special, strict=True)}
    return processor, {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **ids}


_IDS = [f"{kind}_{side}_token_id" for kind in ("image", "video") for side in ("start", "end")]
_IDS += ["image_token_id", "video_token_id"]
FAMILIES["glm4v"] = Family("GLM-4.1V", "visual", frozenset({"merger"}))
BUILDERS["glm4v"] = glm4v
processes.RUN_THROUGH[:] = ["tests.glm"]

if __name__ == "__main__":
    program = next(argument for argument in sys.argv[1:] if argument.endswith(".py"))  # behind the launcher's own
    sys.argv.remove(program)
    runpy.run_path(program, run_name="__main__")
