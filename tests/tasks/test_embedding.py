"""Texts to vectors and to labels: packing, pooling, truncation, pairs, refusals. Needs no torch."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.cli.main import run
from minillm.cli.models import places
from minillm.errors import (
    CheckpointError,
    EngineStateError,
    ParameterError,
    PromptError,
    TaskError,
    UnsupportedModelError,
)
from minillm.formats.write_checkpoint import write_checkpoint as write_checkpoint_in
from minillm.models import config_of, published, tensor_shapes
from minillm.models.base import weights_of
from minillm.progress import watching
from minillm.tasks.embedding import Classification, TextPasses
from minillm.text.tokenizer import EncodedText, Tokenizer

from ..encoders import CONFIGS, texts
from ..task_models import word_tokenizer, write_weights
from ..tiny import tiny_tensors, write_checkpoint

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "good", "bad", "un", "##good", "##ly", "the", "."]


def write_encoder(folder: Path, name: str = "bert", **fields: Any) -> Path:
    """A checkpoint folder of an encoder with a vocab.txt of 96 tokens."""
    raw = CONFIGS[name] | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = {name: tensor.load() for name, tensor in tiny_tensors(raw).items()}
    save_file(tensors, folder / "model.safetensors")
    vocabulary = WORDS + [f"w{i}" for i in range(96 - len(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}), encoding="utf-8")
    return folder


def as_sentence_transformer(folder: Path, *modules: str, pooling: dict[str, Any] | None = None, **more: Any) -> Path:
    """Add the files of sentence-transformers to a checkpoint folder."""
    kinds = ["Transformer", *modules]
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if not i else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    for i, kind in enumerate(kinds):
        if kind == "Pooling":
            (folder / f"{i}_Pooling").mkdir(exist_ok=True)
            flags = {"pooling_mode_mean_tokens": True} if pooling is None else pooling
            (folder / f"{i}_Pooling" / "config.json").write_text(json.dumps(flags), encoding="utf-8")
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("classifier"), "bert, pairs")


def passes_of(engine: Engine) -> TextPasses:
    assert engine._text_passes is not None
    return engine._text_passes


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


# --- vectors ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("numpy", marks=pytest.mark.slow), "cpu"])
def test_many_texts_in_packed_passes_have_the_vectors_that_they_have_alone(encoder: Path, name: str) -> None:
    ids = texts(40, seed=1)
    with Engine(encoder, backend=name) as engine:
        passes_of(engine)._budget = 64
        vectors = engine.embed(ids)
        assert (vectors.shape, vectors.dtype) == ((40, 32), np.float32)
        first, last = engine.embed(ids, pooling="cls"), engine.embed(ids, pooling="last")
        for i, each in enumerate(ids):
            close(engine.embed(each), vectors[i])
            states = engine.hidden_states(each)
            close([first[i], last[i]], [states[0], states[-1]])
        close(engine.embed([]), np.empty((0, 32)))


def test_pooling(encoder: Path) -> None:
    with Engine(encoder) as engine:
        states = engine.hidden_states("a good film.")
        assert states.shape == (6, 32)  # [CLS] and [SEP] too
        close(engine.embed("a good film."), states.mean(axis=0))
        close(engine.embed("a good film.", pooling="cls"), states[0])
        close(engine.embed("a good film.", pooling="last"), states[-1])
        several = engine.hidden_states(["a", "a good film."])
        assert [each.shape for each in several] == [(3, 32), (6, 32)]


def test_normalisation_and_dimensions(encoder: Path) -> None:
    with Engine(encoder) as engine:
        plain = engine.embed("a good film")
        close(engine.embed("a good film", normalize=True), plain / np.linalg.norm(plain))
        short = engine.embed("a good film", normalize=True, dimensions=8)
        close(short, plain[:8] / np.linalg.norm(plain[:8]))
        for wrong in (0, 33, "8", True):
            with pytest.raises(ParameterError, match="dimensions should be"):
                engine.embed("a", dimensions=wrong)  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="pooling 'min' is not known: expected one of mean, cls, last"):
            engine.embed("a", pooling="min")  # type: ignore[arg-type]


def test_a_decoder_embeds_by_its_last_token_also_a_text_of_several_passes(checkpoint: Path) -> None:
    ids = texts(3, seed=3, longest=60)
    with Engine(checkpoint) as whole, Engine(checkpoint) as chunked:
        passes_of(chunked)._budget = 16
        for each, states in zip(ids, whole.hidden_states(ids), strict=True):
            close(whole.embed(each), states[-1])
            close(chunked.embed(each), states[-1])
            close(chunked.embed(each, pooling="mean"), states.mean(axis=0))
        assert whole.generate([5, 6, 7], max_new_tokens=2, min_new_tokens=2).token_ids  # and it still generates


# --- folders of sentence-transformers ---------------------------------------------------------------------------------


def test_a_sentence_transformers_folder_is_followed(tmp_path: Path) -> None:
    folder = as_sentence_transformer(
        write_encoder(tmp_path),
        "Pooling",
        "Dense",
        "Normalize",
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        sentence_bert_config={"max_seq_length": 7},
        config_sentence_transformers={"prompts": {"query": "the good ", "document": ""}, "default_prompt_name": None},
    )
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(5, 32)).astype(np.float32), rng.normal(size=5).astype(np.float32)
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 32, "out_features": 5, "bias": True}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense), encoding="utf-8")
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    with Engine(folder) as engine:
        first = engine.hidden_states("a film")[0]
        expected = np.tanh(weight @ first + bias)
        close(engine.embed("a film"), expected / np.linalg.norm(expected))
        close(engine.embed("a film", normalize=False), expected)
        close(engine.embed("film", prompt_name="query"), engine.embed("the good film"))
        close(engine.embed("film", prompt="the good "), engine.embed("the good film"))
        with pytest.raises(PromptError, match="encode takes a list of texts, found one"):
            engine.encode("a film")
        [encoded] = engine.encode(["a " * 20])
        assert (len(encoded.token_ids), encoded.token_ids[-1], encoded.truncated) == (7, WORDS.index("[SEP]"), True)
        with pytest.raises(ParameterError, match="prompt_name 'q' is not known: expected one of query, document"):
            engine.embed("a", prompt_name="q")
        with pytest.raises(ParameterError, match="leave one out"):
            engine.embed("a", prompt_name="query", prompt="a")
        with pytest.raises(ParameterError, match="token ids were given"):
            engine.embed([5, 6], prompt="a")
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense | {"in_features": 31}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="in_features should be 32, the width before it; found 31"):
        Engine(folder)


def test_a_norm_may_follow_the_pooling(tmp_path: Path) -> None:
    folder = as_sentence_transformer(write_encoder(tmp_path), "Pooling", "LayerNorm")
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(2, 32)).astype(np.float32)
    (folder / "2_LayerNorm").mkdir()
    config = folder / "2_LayerNorm" / "config.json"
    config.write_text(json.dumps({"dimension": 32}), encoding="utf-8")
    save_file({"norm.weight": weight, "norm.bias": bias}, folder / "2_LayerNorm" / "model.safetensors")
    with Engine(folder) as engine:
        mean = engine.hidden_states("a good film").mean(axis=0)
        expected = (mean - mean.mean()) / np.sqrt(mean.var() + 1e-5) * weight + bias
        close(engine.embed("a good film"), expected)
    config.write_text(json.dumps({"dimension": 31}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="dimension should be 32, the width before it"):
        Engine(folder)


def test_a_table_of_vectors_has_the_mean_of_a_texts_tokens(tmp_path: Path) -> None:
    tokenizer = word_tokenizer("bert")
    table = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16)).astype(np.float32)
    module = tmp_path / "0_StaticEmbedding"
    module.mkdir()
    tokenizer.save(str(module / "tokenizer.json"))
    save_file({"embedding.weight": table}, module / "model.safetensors")
    modules = [{"type": "sentence_transformers.models.StaticEmbedding", "path": "0_StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    ids = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    with Engine(tmp_path) as engine:
        close(engine.embed("the cat sat"), table[ids].mean(axis=0))
        close(engine.embed("the cat sat", pooling="max"), table[ids].max(axis=0))
    with pytest.raises(UnsupportedModelError, match="it is not quantised"):
        write_checkpoint_in(tmp_path, tmp_path / "int8", "int8")
    save_file({"table": table}, module / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a static embedding has the tensor .*; found table"):
        Engine(tmp_path)


def test_tokens_of_a_prompt_may_be_left_out_of_the_mean(tmp_path: Path) -> None:
    pooling = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    with Engine(as_sentence_transformer(write_encoder(tmp_path), "Pooling", pooling=pooling)) as engine:
        states = engine.hidden_states("the good film .")  # [CLS] the good film . [SEP]
        close(engine.embed("film .", prompt="the good "), states[3:].mean(axis=0))


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        *(((name,), None, f"the module '{name}'; minillm runs Tr") for name in ("WordWeights", "CNN", "LSTM", "BoW")),
        (("Normalize",), None, "Transformer, Normalize; minillm runs Transformer, Pooling, then Dense and Layer"),
        (("Pooling", "Normalize", "Pooling"), None, "Pooling, Normalize, Pooling; minillm runs"),
        (("Pooling",), {"pooling_mode": "median"}, "pooling by 'median'; minillm runs mean, cls"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    tmp_path: Path, modules: tuple[str, ...], pooling: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(as_sentence_transformer(write_encoder(tmp_path), *modules, pooling=pooling))


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("cosine", lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
        ("dot", lambda a, b: a @ b),
        ("euclidean", lambda a, b: -np.sqrt(((a - b) ** 2).sum())),
        ("manhattan", lambda a, b: -abs(a - b).sum()),
    ],
)
def test_the_folder_says_where_vectors_are_cut_and_how_they_are_compared(tmp_path: Path, name: str, alike: Any) -> None:
    said = {"truncate_dim": 5, "similarity_fn_name": name}
    folder = as_sentence_transformer(write_encoder(tmp_path), "Pooling", "Normalize", config_sentence_transformers=said)
    with Engine(folder) as engine:
        whole = engine.hidden_states("a good film").mean(axis=0)
        vector, other = engine.embed(["a good film", "bad"])
        close(vector, (whole / np.linalg.norm(whole))[:5])
        close(engine.embed("a good film", normalize=True), whole[:5] / np.linalg.norm(whole[:5]))
        close(engine.embed("a good film", normalize=False, dimensions=7), whole[:7])
        close(engine.embedding.compare(vector, other), alike(vector, other))
    said["truncate_dim"] = 0
    as_sentence_transformer(folder, "Pooling", config_sentence_transformers=said)
    with pytest.raises(CheckpointError, match="truncate_dim should be at least 1, found 0"):
        Engine(folder)


def test_a_model_generates_whatever_stands_in_modules_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_checkpoint(tmp_path)
    with Engine(folder) as engine:
        expected = engine.generate([5, 6, 7], max_new_tokens=4).token_ids
    for modules, message in (
        (("LogitScore",), "config.json is missing, and modules.json lists this module"),
        (("Pooling", "WordWeights"), "the module 'WordWeights'"),
        (("Normalize",), "Transformer, Normalize; minillm runs"),
    ):
        as_sentence_transformer(folder, *modules)
        caplog.clear()
        with Engine(folder) as engine:
            assert engine.generate([5, 6, 7], max_new_tokens=4).token_ids == expected
            [record] = caplog.records
            assert message in record.getMessage()
            for call in (engine.embed, engine.classify):
                with pytest.raises(UnsupportedModelError, match=message):
                    call("a")  # type: ignore[operator]


def test_a_decoder_scores_by_the_logits_of_two_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = as_sentence_transformer(write_checkpoint(tmp_path), "LogitScore")
    (folder / "1_LogitScore").mkdir()
    for false, sign in ((8, 1), (None, 0)):
        said = {"true_token_id": 7, "false_token_id": false}
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(said), encoding="utf-8")
        with Engine(folder) as engine:
            [encoded] = engine.encode([("a film", "good")])
            logits = engine.forward(encoded.token_ids)[-1]
            score = logits[7] - sign * logits[8]
            close(engine.classify(("a film", "good"), function="none").score, score)
            close(engine.classify(("a film", "good")).score, 1 / (1 + np.exp(-score)))
    assert run(["classify", "-m", str(folder), "--pairs", "a film\tgood", "--function", "none"]) == 0
    assert capsys.readouterr().out == f"LABEL_0 {logits[7]:.4f}\n"
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 512}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="should be below 512, the size of the vocabulary; found 512 and None"):
        Engine(folder)


# --- labels -----------------------------------------------------------------------------------------------------------


def test_labels_scores_and_logits(classifier: Path) -> None:
    with Engine(classifier) as engine:
        [found] = engine.classify(["a good film"])  # type: ignore[misc]
        assert isinstance(found, Classification)
        exponentials = np.exp(found.logits)
        by_name = {each.label: each.score for each in found.labels}
        assert set(by_name) == {"no", "yes", "maybe"}
        close([by_name["no"], by_name["yes"], by_name["maybe"]], exponentials / exponentials.sum())
        assert [each.score for each in found.labels] == sorted(by_name.values(), reverse=True)
        assert (found.label, found.score) == (found.labels[0].label, found.labels[0].score)
        assert found.prompt_tokens == 5
        best = engine.classify("a good film", top_k=1, function="none")
        assert isinstance(best, Classification)
        assert len(best.labels) == 1
        close(best.score, found.logits.max())
        sigmoid = engine.classify("a good film", function="sigmoid")
        assert isinstance(sigmoid, Classification)
        close(sigmoid.score, 1 / (1 + np.exp(-found.logits.max())))
        for wrong in (0, True, "2"):
            with pytest.raises(ParameterError, match="top_k should be"):
                engine.classify("a", top_k=wrong)  # type: ignore[arg-type]
        with pytest.raises(ParameterError, match="function 'relu' is not known: expected one of softmax,"):
            engine.classify("a", function="relu")  # type: ignore[arg-type]


def test_a_pair_has_two_types_of_tokens(classifier: Path) -> None:
    with Engine(classifier) as engine:
        [encoded] = engine.encode([("a film", "good")])
        assert [WORDS[i] for i in encoded.token_ids] == ["[CLS]", "a", "film", "[SEP]", "good", "[SEP]"]
        assert encoded.types == [0, 0, 0, 0, 1, 1]
        pair, same = engine.classify(("a film", "good")), engine.classify(encoded)
        assert isinstance(pair, Classification)
        assert isinstance(same, Classification)
        close(pair.logits, same.logits)
        as_one_text = engine.classify(encoded._replace(types=[0] * 6))
        assert isinstance(as_one_text, Classification)
        assert np.abs(as_one_text.logits - pair.logits).max() > 1e-3
        several = engine.classify([("a film", "good"), ("a", "bad"), "film"])
        assert isinstance(several, list)
        close(several[0].logits, pair.logits)


def test_long_texts_are_cut_and_that_is_told_once(classifier: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(classifier) as engine, caplog.at_level(logging.WARNING, "minillm"):
        engine.classify([("a " * 100, "good " * 10), "film " * 70])
        assert [record.getMessage() for record in caplog.records] == [
            "a text was cut to 64 tokens, the most that this model reads; told once"
        ]
        [encoded] = engine.encode([("a " * 100, "good " * 10)])
        assert (len(encoded.token_ids), encoded.types.count(1)) == (64, 11)
        [both] = engine.encode([("a " * 100, "good " * 100)])
        assert (len(both.token_ids), both.types.count(1)) == (64, 32)
        with pytest.raises(PromptError, match="more than 64 tokens"):
            engine.classify("film " * 70, truncate=False)
        with pytest.raises(PromptError, match="70 tokens; the context holds 64"):
            engine.classify([5] * 70, truncate=False)


# --- engines ----------------------------------------------------------------------------------------------------------


def test_calls_for_another_kind_of_model_are_refused_in_one_line(
    encoder: Path, classifier: Path, checkpoint: Path
) -> None:
    calls = {
        "generate": lambda engine: engine.generate("a"),
        "stream": lambda engine: engine.stream("a"),
        "chat": lambda engine: engine.chat([{"role": "user", "content": "a"}]),
        "score": lambda engine: engine.score("a"),
        "forward": lambda engine: engine.forward("a"),
        "attention": lambda engine: engine.attention("a"),
        "add": lambda engine: engine.add("a"),
    }
    for folder in (encoder, classifier):
        with Engine(folder) as engine:
            for call in calls.values():
                with pytest.raises(TaskError, match="needs a model that generates text; this bert model"):
                    call(engine)
    for folder in (encoder, checkpoint):
        with (
            Engine(folder) as engine,
            pytest.raises(TaskError, match="classify needs a checkpoint for"),
        ):
            engine.classify("a")


def test_a_helper_of_a_model_that_generates_nothing_is_refused(encoder: Path) -> None:
    with pytest.raises(TaskError, match="draft needs a model that generates text; this bert model"):
        Engine(encoder, draft=encoder)


@pytest.mark.slow
def test_an_encoder_decoder_is_refused_in_one_line() -> None:
    with Engine.random("t5-small", max_batch_size=1, cache_bytes=2**22) as engine:
        for call in (engine.embed, engine.hidden_states, engine.classify):
            with pytest.raises(TaskError, match="this t5 model"):
                call([5, 6])
    raw = published()["t5-small"]
    for architecture in ("T5ForTokenClassification", "T5EncoderModel"):
        with pytest.raises(UnsupportedModelError, match="of this family minillm runs the encoder-decoder"):
            config_of(raw | {"architectures": [architecture]})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (3, PromptError, "a prompt should be text or a list of token ids, found 3"),
        ([], None, ""),
        ([5, 96], PromptError, "token id 96 is outside the vocabulary of 96"),
        ([[]], PromptError, "the prompt is empty"),
        (["a", None], PromptError, "found None"),
        (np.array(5), PromptError, r"found array\(5\)"),
        (EncodedText([], []), PromptError, "the text is empty|the prompt is empty"),
        (EncodedText([5, 96], [0, 0]), PromptError, "token id 96 is outside the vocabulary of 96"),
        (EncodedText([5] * 65, [0] * 65), PromptError, "the prompt has 65 tokens; the context holds 64"),
        (EncodedText([5, 6], [0]), PromptError, "a type from 0 on for each of its 2 tokens, found"),
        (EncodedText([5, 6], [0, -1]), PromptError, "a type from 0 on for each of its 2 tokens, found"),
    ],
)
def test_texts_that_are_none(encoder: Path, text: Any, error: type[Exception] | None, message: str) -> None:
    with Engine(encoder) as engine:
        if error is None:
            assert engine.embed(text).shape == (0, 32)
        else:
            with pytest.raises(error, match=message):
                engine.embed(text)


def test_a_closed_engine_refuses(encoder: Path) -> None:
    engine = Engine(encoder)
    engine.close()
    with pytest.raises(EngineStateError):
        engine.embed("a")


@pytest.mark.longer
def test_threads_share_an_engine(encoder: Path) -> None:
    ids = texts(12, seed=5)
    with Engine(encoder) as engine:
        passes_of(engine)._budget = 32
        expected, found = engine.embed(ids), {}

        def embed(i: int) -> None:
            found[i] = engine.embed(ids)

        threads = [threading.Thread(target=embed, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            close(found[i], expected)


def test_progress_counts_texts(encoder: Path) -> None:
    seen: list[tuple[str, int | None, int]] = []
    with Engine(encoder) as engine:
        passes_of(engine)._budget = 64
        with watching(lambda work: seen.append((work.title, work.total, work.done))):
            engine.embed(texts(30))
        assert seen[-1] == ("embedding", 30, 30)
        assert len(seen) > 3


@pytest.mark.longer
def test_formats(encoder: Path) -> None:
    ids = texts(4, seed=8)
    with Engine(encoder, dtype="float32") as engine:
        expected = engine.embed(ids, normalize=True)
    for dtype, least in {"bfloat16": 0.999, "float16": 0.9999, "int8": 0.99, "int4": 0.8}.items():
        with Engine(encoder, dtype=dtype) as engine:
            similarity = (engine.embed(ids, normalize=True) * expected).sum(axis=1)
            assert similarity.min() > least, dtype


@pytest.mark.slow
def test_an_encoder_of_a_published_shape_with_random_weights() -> None:
    with Engine.random("all-MiniLM-L6-v2", max_batch_size=1) as engine:
        assert engine.embed([[5, 6, 7]]).shape == (1, 384)
        assert engine.summary()["parameters"] == 22_565_376


def test_lora_of_single_requests_is_refused_by_name(encoder: Path) -> None:
    with Engine(encoder) as engine, pytest.raises(ParameterError, match="no adapter of this name"):
        engine.embed("a", lora="x")


def test_a_classifier_of_any_decoder(tmp_path: Path) -> None:
    """A head of labels in the place of the LM head, read at the last token that is no padding."""
    fields = {"architectures": ["OPTForSequenceClassification"], "num_labels": 3, "pad_token_id": 1}
    folder = write_checkpoint(tmp_path, **fields)
    shapes = tensor_shapes(config_of(json.loads((folder / "config.json").read_text(encoding="utf-8"))))
    assert shapes["score.weight"] == (3, 32)
    assert "lm_head.weight" not in shapes
    with Engine(folder) as engine:
        whole, padded = engine.classify([[5, 6, 7], [5, 6, 7, 1, 1]])  # type: ignore[misc]
        close(whole.logits, padded.logits)
        score = weights_of(engine.runner.model.head)[0].data  # type: ignore[attr-defined]
        close(whole.logits, score @ engine.embed([5, 6, 7]))


def test_a_quantised_copy_embeds_as_its_source(tmp_path: Path) -> None:
    """The files of sentence-transformers are copied: pooling and normalisation stay."""
    pooling = {"pooling_mode_cls_token": True}
    folder = as_sentence_transformer(write_encoder(tmp_path / "a"), "Pooling", "Normalize", pooling=pooling)
    write_checkpoint_in(folder, tmp_path / "b", "int8", progress=False)
    with Engine(folder, dtype="int8") as engine, Engine(tmp_path / "b") as copied:
        close(copied.embed(["a good film", "bad"]), engine.embed(["a good film", "bad"]))


def test_commands_that_generate_refuse_an_encoder(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["inspect", "--prompt", "a"], ["chat"], ["generate", "--prompt", "a"], ["compare", "--prompt", "a"]):
        assert run([words[0], "--model", str(encoder), *words[1:]]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.endswith("a model that generates text; this bert model has no head: it embeds texts, use embed")


def test_the_folders_of_modules_are_no_models(encoder: Path, tmp_path: Path) -> None:
    as_sentence_transformer(write_encoder(tmp_path / "a"), "Pooling")
    assert [path for _, path, _ in places([tmp_path])] == [tmp_path / "a"]


def test_a_vocab_txt(encoder: Path) -> None:
    tokenizer = Tokenizer.from_folder(encoder)
    assert [WORDS[i] for i in tokenizer.encode("A ungoodly FILM.")] == [
        *("[CLS]", "a", "un", "##good", "##ly", "film", ".", "[SEP]")
    ]
    assert tokenizer.decode(tokenizer.encode("a ungoodly film")) == "a ungoodly film"


def test_a_decoder_that_is_published_without_its_head_gives_vectors(tmp_path: Path) -> None:
    """As Qwen3-Embedding 8B: a causal architecture, an LM head of its own by config.json, and no tensor of it."""
    raw = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    write_weights(tmp_path, raw)
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with Engine(tmp_path, backend="numpy") as engine:
        expected = engine.hidden_states([[5, 6, 7]])[0][-1]
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        Engine(tmp_path, backend="numpy")
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    with Engine(tmp_path, backend="numpy") as engine:
        found = engine.embed([[5, 6, 7]])[0]
        with pytest.raises(TaskError, match="has no head: it embeds texts"):
            engine.generate([5, 6])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
