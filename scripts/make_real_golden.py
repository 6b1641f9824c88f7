"""Makes tests/real/expected.json: the results of transformers on SmolLM2-135M-Instruct, from its GGUF file.

    python scripts/make_real_golden.py        # needs the reference extra; fetches the model

transformers reads the file by itself and computes in float32. The results: greedy continuations, beams with their
scores, answers in a chat, the likeliest tokens after a prompt, the mean surprise over a text, and what is inside.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from fetch_smollm2 import SHA256, fetch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import huggingface  # noqa: E402

FILE = ROOT / "tests" / "real" / "expected.json"
TEXT = ROOT / "tests" / "real" / "alice.txt"
"""The beginning of Lewis Carroll's "Alice's Adventures in Wonderland" (1865), which is in the public domain"""
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Photosynthesis is the process by which",
    "Es war einmal ein König, der",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "Question: How many legs does a spider have?\nAnswer: A spider has eight legs.\n"
    "Question: How many legs does a dog have?\nAnswer:",
]
NEW_TOKENS = 40
BEAMS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 16},
    {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 24, "early_stopping": True, "length_penalty": -0.5},
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ],
]
ANSWER_TOKENS = 60
LEAST_LEAD = 1e-3
"""Of a greedy token's logit over the next best one: with less, rounding might decide between the two"""
LIKELIEST = 5
SHOWN = 6
"""Numbers of a residual stream"""
ABLATED = [(0, 0), (3, 5), (12, 2), (20, 8), (29, 4)]
"""Layers and heads"""


class Model:
    """The file as transformers reads it."""

    def __init__(self, path: Path) -> None:
        loader: Any = transformers.AutoModelForCausalLM
        self.model = loader.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        self.ends = [self.model.config.eos_token_id]

    def greedy(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """The tokens and the text of a greedy continuation."""
        [tokens], _ = huggingface.generate(self.model, prompt, max_new_tokens=new_tokens, eos_token_id=self.ends)
        best = torch.tensor(huggingface.logits(self.model, prompt + tokens)[len(prompt) - 1 : -1]).topk(2).values
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if (lead := float((best[:, 0] - best[:, 1]).min())) < LEAST_LEAD:
            raise SystemExit(f"{text!r}: two tokens are only {lead:.1e} apart; choose another prompt")
        return {"tokens": tokens, "text": text}

    def continuation(self, prompt: str) -> dict[str, Any]:
        """A prompt, its greedy continuation, and the likeliest tokens after it."""
        ids = self.tokenizer.encode(prompt)
        logs, tokens = torch.tensor(huggingface.logits(self.model, ids)[-1]).log_softmax(-1).topk(LIKELIEST)
        likeliest = [[token, log] for token, log in zip(tokens.tolist(), logs.tolist(), strict=True)]
        return {"prompt": prompt, "prompt_tokens": ids, "likeliest": likeliest} | self.greedy(ids, NEW_TOKENS)

    def beams(self, prompts: list[str], fields: dict[str, Any]) -> dict[str, Any]:
        """The beams of each prompt and their scores."""
        results = [
            huggingface.generate(self.model, self.tokenizer.encode(prompt), eos_token_id=self.ends, **fields)
            for prompt in prompts
        ]
        sequences, scores = ([result[i] for result in results] for i in (0, 1))
        return {"fields": fields, "prompts": prompts, "sequences": sequences, "scores": scores}

    def answer(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """A conversation as the template writes it, and the greedy answer."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return {"messages": messages, "rendered": text, "prompt_tokens": ids} | self.greedy(ids, ANSWER_TOKENS)

    def surprise(self, text: str) -> dict[str, Any]:
        """Tokens of a text and their mean negative log-likelihood."""
        ids = torch.tensor([self.tokenizer.encode(text)])
        with torch.no_grad():
            loss = self.model(ids, labels=ids).loss.item()
        return {"tokens": ids.shape[1], "mean_surprise": loss, "perplexity": math.exp(loss)}

    def inside(self, prompt: str) -> dict[str, Any]:
        """The last token's residual stream after each layer but the last (some numbers, and the length), and the
        logarithm of the likeliest token's probability without one head.
        """
        ids = self.tokenizer.encode(prompt)
        with torch.no_grad():
            states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[1:-1]
        rows = [state[0, -1] for state in states]
        logits = torch.tensor(huggingface.logits(self.model, ids)[-1])
        token, width = int(logits.argmax()), self.model.config.head_dim
        ablated = []
        for layer, head in ABLATED:

            def without(_: Any, inputs: Any, first: int = head * width) -> Any:
                changed = inputs[0].clone()
                changed[..., first : first + width] = 0
                return (changed,)

            handle = self.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(without)
            log = torch.tensor(huggingface.logits(self.model, ids)[-1]).log_softmax(-1)[token]
            handle.remove()
            ablated.append([layer, head, float(log)])
        return {
            "prompt": prompt,
            "residual": [row[:SHOWN].tolist() for row in rows],
            "lengths": [float(row.norm()) for row in rows],
            "token": token,
            "log_prob": float(logits.log_softmax(-1)[token]),
            "ablated": ablated,
        }


def expected(path: Path) -> dict[str, Any]:
    """All results on the model in a file."""
    model = Model(path)
    return {
        "continuations": [model.continuation(prompt) for prompt in PROMPTS],
        "beams": [model.beams(PROMPTS[:3], fields) for fields in BEAMS],
        "chats": [model.answer(messages) for messages in CHATS],
        "text": model.surprise(TEXT.read_text(encoding="utf-8")),
        "inside": model.inside(PROMPTS[0]),
    }


def main() -> None:
    """Write the file."""
    made_by = {
        "script": "scripts/make_real_golden.py",
        "sha256": SHA256,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    lines: list[str] = []
    for name, value in ({"made_by": made_by} | expected(fetch())).items():
        cases = value if isinstance(value, list) else [value]
        text = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        lines.append(f'"{name}": ' + (f"[\n{text}\n]" if isinstance(value, list) else text))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"written: {FILE}")


if __name__ == "__main__":
    main()
