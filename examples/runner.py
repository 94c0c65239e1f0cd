"""A model runner's side, whole: `python examples/runner.py [http://127.0.0.1:8321 [KEY]]`.

Prompts of several sequences, decode steps, a draft of which a part is rejected, a fork. The model
is random numbers: what counts is when ids go out, and what the residual waits for. The layers are
done twice, by the service (`residual`) and here (`kv` that travels while the model computes); the
bits are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engram_client import EngramClient, Segment, Session, StepResult, torch_of
from engram_client.local import LocalLayer

PROMPTS = [[0, 671, 6102, 344], [0, 100, 200, 300, 400, 500], [5, 6, 7]]
NUM_DECODED, DRAFT, ACCEPTED = 4, [11, 12, 13, 14], 2


class Runner:
    """A batch of sequences. client: safe in threads, one thread pushes a session at a time."""

    def __init__(self, client: EngramClient) -> None:
        geometry = client.info()["geometry"]
        self._client = client
        self.layers: list[int] = geometry["layer_ids"]
        self._shape = (geometry["hc_mult"], geometry["dim"])
        self._local = {layer: LocalLayer.fetch(client, layer) for layer in self.layers}
        self._ahead = ThreadPoolExecutor(1)
        self.num_tokens = 0

    def forward(self, sessions: Sequence[Session], ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """One step of the model: any number of new ids a sequence. Returns the last residual."""
        # 1. The ids are known: push them, and let kv of every layer come while the model computes.
        new = [Segment(s, token_ids=list(each)) for s, each in zip(sessions, ids, strict=True)]
        kv: Future[StepResult] = self._ahead.submit(
            self._client.step, new, tuple(self.layers), "kv"
        )
        count = sum(map(len, ids))
        h = torch.randn((count, *self._shape)).to(torch.bfloat16)  # the embedding
        for layer in self.layers:
            h = self._model_until(layer, h)
            # 2. The layer is reached. Its kv is here already, so the gate is all that is left.
            answer = kv.result()
            keys_and_value, dead = torch_of(answer.tensors[layer]), torch_of(answer.dead)
            here = self._local[layer].gate(h, keys_and_value, dead)
            # Or: the residual goes to the service. The same positions, named instead of pushed.
            held = [
                Segment(s, position=s.length - len(each), count=len(each))
                for s, each in zip(sessions, ids, strict=True)
            ]
            there = self._client.step(held, (layer,), "residual", residual=h).tensors[layer]
            assert isinstance(there, torch.Tensor)
            if not torch.equal(here.view(torch.int16), there.view(torch.int16)):
                print(f"layer {layer}: other bits than the service's (a GPU, or another CPU)")
            h = there
        self.num_tokens += count
        return h

    def _model_until(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        """Stand in for the layers before this one."""
        return h + torch.randn_like(h) / (1 + layer)


def main(url: str = "http://127.0.0.1:8321", key: str | None = None) -> None:
    with EngramClient(url, api_key=key, owner="examples/runner.py") as client:
        runner = Runner(client)
        sessions = [client.open_session() for _ in PROMPTS]
        runner.forward(sessions, PROMPTS)
        for step in range(NUM_DECODED):
            runner.forward(sessions, [[1000 + step + i] for i in range(len(sessions))])
        # A draft is verified in one step; what the model rejects is cut off again.
        first = sessions[0]
        begin = first.length
        runner.forward([first], [DRAFT])
        first.rewind(begin + ACCEPTED)
        # A second answer to the same prompt: its kv so far is in the service's store.
        fork = first.fork()
        runner.forward([first, fork], [[21], [22]])
        for session in [*sessions, fork]:
            session.close()
        print(f"{runner.num_tokens} tokens through layers {runner.layers}")


if __name__ == "__main__":
    main(*sys.argv[1:])
