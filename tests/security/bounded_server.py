"""The rollout server's front with its real tokenizer and an engine that answers at once: `python -m ... PORT MODEL`."""

import sys
from types import SimpleNamespace

import uvicorn

from tests.server.test_engine import STUCK_S, FakeLLM
from utils.data.encoding import load_processor
from utils.server.app import make_app
from utils.server.engine import RolloutEngine
from utils.server.front import front_config
from utils.server.images import ImageStore
from utils.server.weight_updates import WeightUpdates


class QuickLLM(FakeLLM):
    """Answers with a hash of the prompt's token ids."""

    async def generate(self, prompt, params, request_id, data_parallel_rank, lora_request=None):
        answer = hash(tuple(prompt["prompt_token_ids"])) % 1000
        output = SimpleNamespace(
            text=str(answer), token_ids=[answer], logprobs=None, finish_reason="length", stop_reason=None
        )
        output.weight_versions = []
        yield SimpleNamespace(
            prompt_token_ids=prompt["prompt_token_ids"],
            outputs=[output],
            prompt_logprobs=[
                None,
                *({token: SimpleNamespace(logprob=-1.0, rank=1)} for token in prompt["prompt_token_ids"][1:]),
            ],
        )


def main(port: str, model: str) -> None:
    llm = QuickLLM()
    engine = RolloutEngine(llm, load_processor(model), ImageStore([]), model, 2, 60 * STUCK_S)
    config = front_config(make_app(engine, WeightUpdates(engine, "gloo"), None))
    config.port = int(port)
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
