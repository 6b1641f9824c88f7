"""Folders as sentence-transformers writes them, beside what it computes with them: vectors and similarities."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch

from minillm import Engine
from minillm.errors import CheckpointError, ParameterError, TaskError, UnsupportedModelError
from minillm.formats.sentence_files import read_modules
from minillm.server import make_app
from minillm.tasks.quantized_vectors import quantize_vectors

from ..server.client import post
from ..task_models import BERT, WORDS, word_tokenizer, write_task_model
from .late import Late
from .sentence_folders import (
    TEMPLATE,
    TEXTS,
    base,
    close,
    cross_encoder,
    edit,
    encoder,
    parts,
    sentence_transformers,
    settings_of,
    sparse,
    write_decoder,
)

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

# --- vectors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_and_similarities_are_those_of_the_folder(similarity: str, normalize: bool, tmp_path: Path) -> None:
    modules = [base.Transformer(str(encoder(tmp_path))), parts.Pooling(32, "cls"), parts.Dense(32, 12)]
    made = sentence_transformers.SentenceTransformer(
        modules=[*modules, *([parts.Normalize()] if normalize else [])],
        similarity_fn_name=similarity,
        truncate_dim=7,
        device="cpu",
    )
    made.save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    vectors = theirs.encode(TEXTS)
    assert vectors.shape == (5, 7)
    similar = theirs.similarity(vectors[:1], vectors)[0].tolist()
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        close(engine.embed(TEXTS), vectors)
        close(engine.embed(TEXTS, normalize=True), theirs.encode(TEXTS, normalize_embeddings=True))
        assert engine.embed(TEXTS, dimensions=9).shape == (5, 9)
        app = make_app(engine)
        scores = post(app, "/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
        close([one["score"] for one in scores], similar)
        ranked = post(app, "/rerank", {"query": TEXTS[0], "documents": TEXTS}).json()["results"]
    assert [one["index"] for one in ranked] == np.argsort(-np.array(similar), kind="stable").tolist()


@pytest.mark.parametrize(
    "mode",
    [
        *("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        ("max", "cls"),
        ("mean", "lasttoken", "weightedmean"),
    ],
)
@pytest.mark.parametrize("include_prompt", [True, False], ids=["", "without prompt"])
def test_every_pooling_is_as_there(mode: Any, include_prompt: bool, tmp_path: Path) -> None:
    width = 32 * (1 if isinstance(mode, str) else len(mode))
    pooling = parts.Pooling(32, mode, include_prompt=include_prompt)
    modules = [base.Transformer(str(encoder(tmp_path))), pooling, parts.Dense(width, 12)]
    theirs = sentence_transformers.SentenceTransformer(modules=modules, prompts={"query": "how are "}, device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS))
        close(engine.embed(TEXTS, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))


def test_a_norm_after_the_pooling_is_as_there(tmp_path: Path) -> None:
    norm = parts.LayerNorm(32)
    with torch.no_grad():
        norm.norm.weight.normal_()
        norm.norm.bias.normal_()
    modules = [base.Transformer(str(encoder(tmp_path))), parts.Pooling(32), norm, parts.Dense(32, 12)]
    theirs = sentence_transformers.SentenceTransformer(modules=modules, device="cpu")
    theirs.save(str(tmp_path / "saved"))
    with Engine(tmp_path / "saved") as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS))


def layered(folder: Path, raw: dict[str, Any], start: int, *, all_states: bool) -> Any:
    """A model whose vectors are pooled from the states of several layers."""
    config = {"output_hidden_states": True} if all_states else {}
    transformer = base.Transformer(str(write_task_model(folder, raw)), config_kwargs=config)
    weights = torch.nn.Parameter(torch.tensor([3.0, -0.5, 1.25][start:]))
    mixed = parts.WeightedLayerPooling(32, num_hidden_layers=2, layer_start=start, layer_weights=weights)
    return sentence_transformers.SentenceTransformer(modules=[transformer, mixed, parts.Pooling(32)], device="cpu")


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("start", [0, 1])
def test_weighted_layers_are_pooled_as_there(start: int, backend: str, tmp_path: Path) -> None:
    layered(tmp_path / "plain", BERT, start, all_states=True).save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    expected = theirs.encode(TEXTS)
    with Engine(tmp_path / "saved", backend=backend, progress=False) as engine:
        close(engine.embed(TEXTS), expected)
        close(engine.embed(TEXTS[1]), expected[1])
    plain = sentence_transformers.SentenceTransformer(modules=[theirs[0], theirs[2]], device="cpu")
    assert np.abs(plain.encode(TEXTS) - expected).max() > 0.1


def test_weighted_layers_without_the_states_are_the_last_one_as_there(tmp_path: Path) -> None:
    layered(tmp_path / "plain", BERT, 1, all_states=False).save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    with Engine(tmp_path / "saved", progress=False) as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS))


def test_weights_of_more_layers_than_there_are_are_refused(tmp_path: Path) -> None:
    layered(tmp_path / "plain", BERT, 1, all_states=True).save_pretrained(str(tmp_path / "saved"))
    for start, message in ((0, r"should hold \{'layer_weights': \(3,\)\}"), (3, "layer_start should be from 0 to 2")):
        edit(tmp_path / "saved" / "1_WeightedLayerPooling" / "config.json", layer_start=start)
        with pytest.raises(CheckpointError, match=message):
            Engine(tmp_path / "saved")


MASKED = BERT | {"architectures": ["BertForMaskedLM"]}


def splade(folder: Path, *pooling: str, **options: Any) -> Any:
    """A sparse encoder, saved and loaded there."""
    transformer = base.Transformer(str(write_task_model(folder / "plain", MASKED)), transformer_task="fill-mask")
    modules = [transformer, sparse.SpladePooling(*pooling)]
    made = sentence_transformers.SparseEncoder(modules=modules, device="cpu", **options)
    made.save_pretrained(str(folder / "saved"))
    return sentence_transformers.SparseEncoder(str(folder / "saved"), device="cpu")


@pytest.mark.parametrize(
    "pooling",
    [
        *(("max", "relu"), ("sum", "log1p_relu")),
        *(pytest.param(case, marks=pytest.mark.exhaustive) for case in (("sum", "relu"), ("max", "log1p_relu"))),
    ],
)
def test_a_sparse_encoder_has_the_weights_of_there(pooling: tuple[str, str], tmp_path: Path) -> None:
    theirs = splade(tmp_path, *pooling, prompts={"query": "how are "}, max_active_dims=9)
    expected = theirs.encode(TEXTS, convert_to_sparse_tensor=False)
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        close(engine.embed(TEXTS), expected)
        close(engine.embed(TEXTS, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query").to_dense())
        ours: Any = engine.embed_sparse(TEXTS, most=4)
        for vector, pairs in zip(ours, theirs.decode(expected, top_k=4), strict=True):
            assert vector.tokens == tuple(token for token, _ in pairs)
            close(vector.weights, [weight for _, weight in pairs])
        first, second = engine.embed_sparse(TEXTS[:2])
        close([first.dot(second)], [float(expected[0] @ expected[1])])
        similar = theirs.similarity(expected[:1], expected)[0]
        np.testing.assert_allclose(engine.score_pairs(TEXTS[0], TEXTS), similar, rtol=1e-5)
        with pytest.raises(ParameterError, match="this model's are sparse"):
            engine.embed(TEXTS, dimensions=3)


def test_a_masked_language_model_is_a_sparse_encoder_as_there(tmp_path: Path) -> None:
    folder = write_task_model(tmp_path, MASKED)
    expected = sentence_transformers.SparseEncoder(str(folder), device="cpu").encode(TEXTS).to_dense()
    with Engine(folder, progress=False) as engine:
        for vector, row in zip(engine.embed_sparse(TEXTS), expected.numpy(), strict=True):  # type: ignore[arg-type]
            close(vector.weights, row[vector.token_ids])
            assert np.count_nonzero(row) == len(vector.weights)


def test_a_sparse_encoder_of_an_old_release_is_read(tmp_path: Path) -> None:
    expected = splade(tmp_path).encode(TEXTS).to_dense()
    path = tmp_path / "saved" / "modules.json"
    path.write_text(path.read_text().replace(".Transformer", ".MLMTransformer"))
    (tmp_path / "saved" / "sentence_bert_config.json").write_text('{"max_seq_length": 64, "do_lower_case": false}')
    with Engine(tmp_path / "saved", progress=False) as engine:
        close(engine.embed(TEXTS), expected)


def test_a_module_that_is_not_run_is_refused_by_name(tmp_path: Path) -> None:
    theirs = base, parts, cross_encoder, sparse, Late("sentence_transformers.multi_vector_encoder.modules")
    packages = [pytest.importorskip(package._name) for package in theirs]
    kinds = {name for package in packages for name in package.__all__ if isinstance(getattr(package, name), type)}
    refused = set()
    for kind in kinds:
        (tmp_path / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.{kind}", "path": ""}]))
        try:
            read_modules(tmp_path)
        except UnsupportedModelError as error:
            assert f"the module {kind!r}; minillm runs Transformer" in str(error)
            refused.add(kind)
    assert kinds - refused == {
        *("Transformer", "MLMTransformer", "StaticEmbedding", "Pooling", "WeightedLayerPooling", "SpladePooling"),
        *("Dense", "LayerNorm", "Normalize", "Dropout", "LogitScore", "MultiVectorMask"),
    }


def static_embedding() -> Any:
    """A module with a random table."""
    tokenizer = word_tokenizer("bert")
    table = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16))
    return parts.StaticEmbedding(tokenizer, embedding_weights=table.astype(np.float32))


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_that_are_looked_up_are_as_there(normalize: bool, tmp_path: Path) -> None:
    modules = [static_embedding(), parts.Dense(16, 12), *([parts.Normalize()] if normalize else [])]
    theirs = sentence_transformers.SentenceTransformer(modules=modules, truncate_dim=8, device="cpu")
    theirs.save_pretrained(str(tmp_path))
    with Engine(tmp_path) as engine:
        close(engine.embed([*TEXTS, TEXTS[1] * 300]), theirs.encode([*TEXTS, TEXTS[1] * 300]))
        with pytest.raises(TaskError, match="has no head: it embeds texts"):
            engine.generate(TEXTS[0])


@pytest.mark.parametrize("factors", [False, True])
def test_rows_and_factors_of_model2vec_are_folded_as_there(factors: bool, tmp_path: Path) -> None:
    theirs = sentence_transformers.SentenceTransformer(modules=[static_embedding()], device="cpu")
    theirs.save_pretrained(str(tmp_path))
    rng, count = np.random.default_rng(1), word_tokenizer("bert").get_vocab_size()
    tensors = {"embeddings": rng.normal(size=(9, 16)).astype(np.float32), "mapping": rng.integers(0, 9, count)}
    if factors:
        tensors["weights"] = rng.uniform(0, 2, count)
    save_file(tensors, tmp_path / "model.safetensors")
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
    with Engine(tmp_path) as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS).astype(np.float32))


def test_flags_of_several_poolings_have_the_order_of_there(tmp_path: Path) -> None:
    made = [base.Transformer(str(encoder(tmp_path))), parts.Pooling(32)]
    sentence_transformers.SentenceTransformer(modules=made, device="cpu").save_pretrained(str(tmp_path / "saved"))
    flags = {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}
    (tmp_path / "saved" / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS))


def test_a_decoder_whose_texts_the_chat_template_writes_embeds_them_so(tmp_path: Path) -> None:
    model = base.Transformer(str(write_decoder(tmp_path / "plain", "LlamaModel", TEMPLATE)))
    assert "message" in model.modality_config
    prompts = {"query": "red"}
    made = sentence_transformers.SentenceTransformer(
        modules=[model, parts.Pooling(32, "lasttoken")], prompts=prompts, device="cpu"
    )
    made.save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        close(engine.embed(TEXTS), theirs.encode(TEXTS))
        close(engine.embed(TEXTS, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_residual": True}, "use_residual is true"),
        ({"module_output_name": "scores"}, "module_output_name is 'scores'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name is 'token_embeddings'"),
    ],
)
def test_a_projection_of_another_kind_is_refused_by_name(fields: Any, message: str, tmp_path: Path) -> None:
    modules = [base.Transformer(str(encoder(tmp_path))), parts.Pooling(32), parts.Dense(32, 32)]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    edit(tmp_path / "saved" / "2_Dense" / "config.json", **fields)
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(tmp_path / "saved")


def test_what_is_not_read_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    modules = [base.Transformer(str(encoder(tmp_path))), parts.Pooling(32)]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    Engine(tmp_path / "saved").close()
    assert not caplog.records
    edit(settings_of(tmp_path / "saved"), similarity_fn_name="maxsim", requirements={}, new=3)
    edit(tmp_path / "saved" / "sentence_bert_config.json", query_length=4, model_args={})
    Engine(tmp_path / "saved").close()
    [record] = caplog.records
    for name in ("similarity_fn_name", "new", "query_length"):
        assert f"config.json: {name}" in record.getMessage() or f"transformers.json: {name}" in record.getMessage()
    assert "model_args" not in record.getMessage() and "requirements" not in record.getMessage()


# --- late interaction -------------------------------------------------------------------------------------------------


def same_vectors(engine: Engine, theirs: Any, texts: Sequence[str]) -> None:
    for role, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        ours: Any = engine.embed_tokens(list(texts), role)  # type: ignore[arg-type]
        for vectors, expected in zip(ours, encode(list(texts)), strict=True):
            close(vectors, expected)


EXPANSIONS: list[Any] = [
    None,
    {"strategy": "fixed", "attend": False, "length": 9, "token": "road"},
    {"strategy": "fixed", "attend": True, "length": 9, "token": "road"},
    {"strategy": "min", "attend": False, "length": 9, "token": "road"},
]


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("expansion", EXPANSIONS, ids=["none", "fixed", "attended", "min"])
def test_a_late_interaction_folder_has_the_vectors_and_scores_of_there(
    expansion: Any, backend: str, tmp_path: Path
) -> None:
    late = Late("sentence_transformers.multi_vector_encoder.modules")
    limits = {"document_length": 8} if expansion is None else {}
    transformer = base.Transformer(str(encoder(tmp_path)), query_expansion=expansion, **limits)
    projection = parts.Dense(
        32, 12, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
    )
    modules = [transformer, projection, late.MultiVectorMask(skiplist_words=["the", "red"])]
    made = sentence_transformers.MultiVectorEncoder(
        modules=[*modules, parts.Normalize(module_input_name="token_embeddings")],
        prompts={"query": "how are ", "document": "big "},
        similarity_fn_name="meanmaxsim" if expansion is None else "maxsim",
        device="cpu",
    )
    made.save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.MultiVectorEncoder(str(tmp_path / "saved"), device="cpu")
    texts = [*TEXTS, "the cat and the dog and the bird and the house and a road"]
    query = theirs.encode_query(texts[:1])
    expected = theirs.similarity(query, theirs.encode_document(texts))[0].tolist()
    with Engine(tmp_path / "saved", backend=backend, progress=False) as engine:
        same_vectors(engine, theirs, texts)
        close(engine.score_pairs(texts[0], texts), expected)
        with pytest.raises(TaskError, match="has vectors of tokens, none of a text: use embed_tokens"):
            engine.embed(texts)
        app = make_app(engine)
        body = {"query": texts[0], "documents": texts, "truncate_prompt_tokens": -1}
        ranked = post(app, "/rerank", body).json()["results"]
        close([result["relevance_score"] for result in ranked], sorted(expected, reverse=True))
        assert post(app, "/v1/embeddings", {"input": "the cat"}).status_code == 404


def test_a_folder_of_pylate_is_read_as_there(tmp_path: Path) -> None:
    modules = [base.Transformer(str(encoder(tmp_path))), parts.Dense(32, 12, bias=False)]
    sentence_transformers.SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path / "saved"))
    folder = tmp_path / "saved"
    for name in ("module_input_name", "module_output_name"):
        saved = json.loads((folder / "1_Dense" / "config.json").read_text())
        saved.pop(name, None)
        (folder / "1_Dense" / "config.json").write_text(json.dumps(saved))
    said = {"query_prefix": "blue ", "document_prefix": "unheard ", "query_length": 11, "document_length": 9}
    said |= {"attend_to_expansion_tokens": False, "skiplist_words": ["the"], "prompts": {"query": "blue how "}}
    edit(settings_of(folder), model_type="ColBERT", **said)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"mask_token": "?"}))
    theirs = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    with Engine(folder, backend="numpy", progress=False) as engine:
        assert engine.tokenizer is not None and engine.tokenizer.mask_token_id == WORDS.index("?") + 4
        same_vectors(engine, theirs, TEXTS)


# --- vectors in fewer bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_vectors_in_fewer_bits_are_as_there(precision: Any) -> None:
    quantize = Late("sentence_transformers.util.quantization").quantize_embeddings
    vectors = np.random.default_rng(0).normal(size=(120, 13)).astype(np.float32)
    ranges = np.array([[-1.0] * 13, [1.0] * 13], np.float32)
    for options in ({}, {"ranges": ranges}):
        ours, theirs = quantize_vectors(vectors, precision, **options), quantize(vectors, precision, **options)
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype


def test_vectors_in_fewer_bits_that_are_impossible_are_refused() -> None:
    vectors = np.ones((2, 13), np.float32)
    for given, options, message in (
        (vectors, {"precision": "int4"}, "precision 'int4' is not known: expected one of float32, int8"),
        (vectors[0], {"precision": "int8"}, "int8 needs ranges"),
        (vectors, {"precision": "int8", "ranges": vectors[:, :3]}, r"ranges should have the shape \(2, 13\)"),
    ):
        with pytest.raises(ParameterError, match=message):
            quantize_vectors(given, **options)  # type: ignore[arg-type]
