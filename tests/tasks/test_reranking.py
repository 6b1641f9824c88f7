"""Rerankers without files of sentence-transformers, and scores of pairs whatever scores them. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from minillm import Engine
from minillm.errors import CheckpointError, ParameterError, PromptError, TaskError
from minillm.server import make_app

from ..server.client import post
from ..task_models import BERT, ONE_LABEL, THREE_LABELS, WORDS, write_task_model, write_weights

TEXTS = ["the cat sat on the mat", "a dog ran", "the red house"]
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
GEMMA = QWEN3 | {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}


def write_reranker(folder: Path, raw: dict[str, Any], answers: tuple[str, ...]) -> Path:
    """A tiny checkpoint with a tokenizer of words and signs, which begins texts with <bos> if it is asked to."""
    special = ["<bos>", "<|im_start|>", "<|im_end|>", "<unk>"]
    words = [*WORDS, *answers, "Query", "Document", "Instruct", "A", "B", ":", "<", ">", "<think>", "system", "user"]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([*special, *words]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    write_weights(folder, raw | {"vocab_size": len(vocabulary)})
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": len(vocabulary)}), encoding="utf-8")
    roles = {"bos_token": "<bos>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_qwen3_reranker_is_the_probability_of_yes_under_its_published_prompt(tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "Qwen3-Reranker-0.6B", QWEN3, ("yes", "no"))
    with Engine(folder, backend="numpy", progress=False) as engine:
        assert engine.tokenizer is not None

        def ids(text: str) -> list[int]:
            return engine.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[union-attr]

        # the model card's code, step by step
        prefix = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        )
        suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        task = "Given a web search query, retrieve relevant passages that answer the query"
        expected, differences = [], []
        for document in TEXTS[1:]:
            body = f"<Instruct>: {task}\n<Query>: {TEXTS[0]}\n<Document>: {document}"
            logits = engine.forward([*ids(prefix), *ids(body), *ids(suffix)])[-1]
            exponentials = np.exp(logits[[ids("no")[0], ids("yes")[0]]].astype(np.float64))
            expected.append(exponentials[1] / exponentials.sum())
            differences.append(logits[ids("yes")[0]] - logits[ids("no")[0]])
        scores = engine.score_pairs(TEXTS[0], TEXTS[1:])
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        pairs = [(TEXTS[0], document) for document in TEXTS[1:]]
        plain: Any = engine.classify(pairs, function="none")
        np.testing.assert_allclose([result.score for result in plain], differences, atol=1e-4)
        asked: Any = engine.classify(pairs, function="none", prompt="how are you ?")
        assert np.abs(asked[0].score - plain[0].score) > 1e-3
        results = post(make_app(engine), "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()["results"]
        assert {result["index"]: pytest.approx(result["relevance_score"]) for result in results} == {
            0: scores[0],
            1: scores[1],
        }
        with pytest.raises(PromptError, match=r"scores pairs \(query, document\), found one text"):
            engine.classify("the cat")
        long = engine.encode([(TEXTS[0], "dog " * 400)])[0]
        assert (len(long.token_ids), long.truncated) == (256, True)
        assert long.token_ids[-len(ids(suffix)) :] == ids(suffix)
        braces = engine.encode([("{document}", "{query}")])[0].token_ids
        body = f"<Instruct>: {task}\n<Query>: {{document}}\n<Document>: {{query}}"
        assert braces == [*ids(prefix), *ids(body), *ids(suffix)]


def test_bge_reranker_is_the_logit_of_yes(tmp_path: Path) -> None:
    folder = tmp_path / "models--BAAI--bge-reranker-v2-gemma" / "snapshots" / ("0" * 40)
    write_reranker(folder, GEMMA, ("Yes",))
    with Engine(folder, backend="numpy", progress=False) as engine:
        assert engine.tokenizer is not None
        question = (
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'."
        )
        text = f"A: {TEXTS[0]}\nB: {TEXTS[1]}\n{question}"  # of words: encoded as a whole or in parts, the same
        token_ids = [0, *engine.tokenizer.encode(text, add_special_tokens=False)]
        yes = engine.tokenizer.encode("Yes", add_special_tokens=False)[0]
        np.testing.assert_allclose(engine.score_pairs(TEXTS[0], TEXTS[1:2]), [engine.forward(token_ids)[-1][yes]], 1e-4)


def test_the_answers_of_a_named_reranker_must_be_tokens(tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "my-qwen3-reranker", QWEN3, ("yes",))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(CheckpointError, match="a reranker of this name answers with yes or no"):
        Engine(folder)


def test_pairs_are_scored_by_rerankers_and_by_vectors(tmp_path: Path) -> None:
    with Engine(write_task_model(tmp_path / "one", BERT | ONE_LABEL), progress=False) as engine:
        classified: Any = engine.classify([(TEXTS[0], text) for text in TEXTS])
        np.testing.assert_allclose(engine.score_pairs(TEXTS[0], TEXTS), [one.score for one in classified])
    with Engine(write_task_model(tmp_path / "vectors", BERT), progress=False) as engine:
        vectors = engine.embed(TEXTS, normalize=True)
        np.testing.assert_allclose(engine.score_pairs(TEXTS[0], TEXTS), vectors @ vectors[0], atol=1e-5)
        np.testing.assert_allclose(engine.score_pairs(TEXTS, TEXTS), np.ones(3), atol=1e-5)
        for documents in ("a dog", TEXTS[:1]):
            with pytest.raises(ParameterError, match="documents should be a list of texts, with one query or as many"):
                engine.score_pairs(TEXTS, documents)
    with (
        Engine(write_task_model(tmp_path / "three", BERT | THREE_LABELS), progress=False) as engine,
        pytest.raises(TaskError, match="score_pairs needs a reranker; this model has 3 labels: use classify"),
    ):
        engine.score_pairs(TEXTS[0], TEXTS)
