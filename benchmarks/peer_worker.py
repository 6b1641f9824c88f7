"""One engine in a process of its own, for `against_peers.py`: tasks come in as JSON lines, seconds go out.

    python peer_worker.py ENGINE MODEL THREADS
    python peer_worker.py checkpoint SHAPE FOLDER

MODEL is a published shape for minillm, which makes random weights itself, and a folder for the others; the second form
writes those. Each engine stays loaded, so that a burst measures the work alone. Everything is greedy and float32.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """What an engine must be able to do."""

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds from the first generated token of all prompts to the last."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first generated token."""


class Minillm:
    """This engine, with the `max_batch_size` that a user would choose who knows the batch."""

    def __init__(self, shape: str, _: int) -> None:
        self._shape = shape
        self._size = 0
        self._engine_of(1)

    def _engine_of(self, size: int) -> Any:
        """The engine for a batch size; it is made anew when the size changes."""
        from minillm import Engine

        if size != self._size:
            self._engine = None  # its memory is free before the next one's is taken
            self._engine, self._size = Engine.random(self._shape, max_batch_size=size), size
        return self._engine

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        engine = self._engine_of(len(prompts))
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=new_tokens, eos_token_id=())
        engine.step()
        began = time.perf_counter()
        while engine.busy:
            engine.step()
        return time.perf_counter() - began

    def prefill(self, prompt: list[int]) -> float:
        engine = self._engine_of(1)
        began = time.perf_counter()
        engine.generate(prompt, max_new_tokens=1, eos_token_id=())
        return time.perf_counter() - began


class Transformers:
    """Hugging Face transformers on torch, eager, with its dynamic cache; a loop by hand, which spares generate()'s."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(folder, dtype=torch.float32).eval()

    def _step(self, ids: Any, past: Any) -> tuple[Any, Any]:
        """One forward pass: the likeliest next token of each row [N, 1], and the cache."""
        output = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        ids, past = self._step(self._torch.tensor(prompts), None)
        began = time.perf_counter()
        for _ in range(new_tokens - 1):
            ids, past = self._step(ids, past)
        ids.tolist()
        return time.perf_counter() - began

    def prefill(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        self._step(self._torch.tensor([prompt]), None)[0].tolist()
        return time.perf_counter() - began


class CTranslate2:
    """CTranslate2's generator; its tokens are words, which the checkpoint's tokenizer calls t0, t1 ..."""

    def __init__(self, folder: str, threads: int) -> None:
        import ctranslate2

        self._generator = ctranslate2.Generator(
            str(Path(folder) / "ctranslate2"), compute_type="float32", inter_threads=1, intra_threads=threads
        )

    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Greedy; the moment at which each token came out, of all prompts in turn."""
        moments: list[float] = []

        def note(_: Any) -> bool:
            moments.append(time.perf_counter())
            return False  # go on

        words = [[f"t{i}" for i in prompt] for prompt in prompts]
        self._generator.generate_batch(
            words, max_length=new_tokens, min_length=new_tokens, sampling_topk=1, include_prompt_in_result=False,
            callback=note,
        )  # fmt: skip
        if len(moments) != len(prompts) * new_tokens:
            raise RuntimeError(f"{len(prompts) * new_tokens} tokens were asked for and {len(moments)} came")
        return moments

    def decode(self, prompts: list[list[int]], new_tokens: int) -> float:
        moments = self._generate(prompts, new_tokens)
        return moments[-1] - moments[len(prompts) - 1]

    def prefill(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        return self._generate([prompt], 1)[-1] - began


PEERS: dict[str, Callable[[str, int], Peer]] = {
    "minillm": Minillm,
    "transformers": Transformers,
    "ctranslate2": CTranslate2,
}


def write_checkpoint(shape: str, folder: str) -> None:
    """Random weights in a published shape for transformers, and in `folder`/ctranslate2 the same converted."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from minillm.models.opt import SHAPES

    torch.manual_seed(0)
    library: Any = transformers
    library.OPTForCausalLM(library.OPTConfig(**SHAPES[shape])).save_pretrained(folder)
    words = {f"t{i}": i for i in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t3"))  # the converter wants one
    library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t2", eos_token="t2", pad_token="t1", unk_token="t3"
    ).save_pretrained(folder)
    try:
        from ctranslate2.converters import TransformersConverter
    except ImportError:
        return
    TransformersConverter(folder).convert(str(Path(folder) / "ctranslate2"))


def prompt(number: int, length: int, vocab_size: int) -> list[int]:
    """Token ids that differ from prompt to prompt and avoid the special ones."""
    return [4 + (7919 * i + 104_729 * number) % (vocab_size - 4) for i in range(length)]


def serve(peer: Peer, replies: Any) -> None:
    """Answer tasks until standard input ends."""
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        prompts = [prompt(i, task["prompt"], task["vocab_size"]) for i in range(task["batch"])]
        decode = task["new_tokens"] > 1
        seconds = peer.decode(prompts, task["new_tokens"]) if decode else peer.prefill(prompts[0])
        print(json.dumps({"seconds": seconds}), file=replies, flush=True)


def main() -> None:
    """See the module's text."""
    engine, model, third = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the replies
    if engine == "checkpoint":
        write_checkpoint(model, third)
    else:
        serve(PEERS[engine](model, int(third)), replies)


if __name__ == "__main__":
    main()
