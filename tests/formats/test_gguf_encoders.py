"""GGUF files of encoders, as llama.cpp's converter writes them: vectors and tokens against llama.cpp's; damage."""

import io
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file

from minillm import Engine
from minillm.backends.numpy import NumpyBackend
from minillm.errors import CheckpointError, MinillmError, UnsupportedModelError
from minillm.formats.gguf.encoders import embedding_entries
from minillm.formats.gguf.file import read_gguf
from minillm.formats.gguf.read_metadata import read_gguf_config
from minillm.formats.gguf.write import write_gguf
from minillm.formats.gguf.write_metadata import gguf_fields
from minillm.formats.load_model import load_model
from minillm.models import config_of
from minillm.tasks.pooling import Dense, EmbeddingSettings

from ..gguf_files import arrays, byte_tokens, finish
from .test_fuzz import damage

NO_ACTIVATION = "torch.nn.modules.linear.Identity"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
}
RAWS: dict[str, dict[str, Any]] = {
    "bert": SIZES | {"model_type": "bert", "hidden_act": "gelu"},
    "bert, one type": SIZES | {"model_type": "bert", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "jina-bert-v2": SIZES | {"model_type": "jina_bert_v2", "num_attention_heads": 6, "hidden_size": 96},
    "nomic-bert": SIZES | {"model_type": "nomic_bert", "rope_parameters": {"rope_theta": 1000.0}},
    "modern-bert": SIZES
    | {"model_type": "modernbert", "num_hidden_layers": 4, "norm_eps": 1e-12, "local_attention": 8}
    | {"global_rope_theta": 500.0, "local_rope_theta": 100.0},
    "modern-bert, all global": SIZES
    | {"model_type": "modernbert", "norm_eps": 1e-12, "hidden_activation": "silu", "global_attn_every_n_layers": 1},
    "gemma-embedding": SIZES
    | {"model_type": "gemma3_text", "use_bidirectional_attention": True, "num_key_value_heads": 2, "head_dim": 16}
    | {"sliding_window": 6, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2, "rms_norm_eps": 1e-6}
    | {"rope_theta": 500.0, "rope_local_base_freq": 100.0, "num_hidden_layers": 4},
}
"""Name, of which the architecture comes first -> config.json"""
FURTHER = {
    "local_attention": ("u", "attention.sliding_window"),
    "sliding_window": ("u", "attention.sliding_window"),
    "sliding_window_pattern": ("u", "attention.sliding_window_pattern"),
    "global_attn_every_n_layers": ("u", "attention.sliding_window_pattern"),
    "hidden_activation": ("s", "hidden_activation"),
    "global_rope_theta": ("f", "rope.freq_base"),
    "local_rope_theta": ("f", "rope.freq_base_swa"),
    "rope_theta": ("f", "rope.freq_base"),
    "rope_local_base_freq": ("f", "rope.freq_base_swa"),
    "num_key_value_heads": ("u", "attention.head_count_kv"),
    "head_dim": ("u", "attention.key_length"),
    "rms_norm_eps": ("f", "attention.layer_norm_rms_epsilon"),
}
"""Field of some of them -> the kind of its entry, and its key"""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijrun!,", "run", "été", "ete", "你"]
WORDS += ["##a", "##b", "##ing", "##n", "##run", "[unused]"]
TEXTS = ["a run, running!", "Running ÉTÉ  a!", "你好 a", "b c d\te f", "x", "anab ab [MASK] b", "ete" * 9]


def phantom(word: str) -> str:
    """A word of a vocab.txt as the converter writes it."""
    if word.startswith("[") and word.endswith("]"):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def write(
    path: Path,
    name: str,
    pooling: int = 1,
    tokenizer: dict[str, Any] | None = None,
    dense: dict[str, np.ndarray] | None = None,
    **entries: Any,
) -> Path:
    """A file of random numbers; the tensors' names are those of the package `gguf`."""
    architecture, raw = name.partition(",")[0], RAWS[name]
    words = tokenizer["tokens"] if tokenizer else [phantom(word) for word in WORDS]
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_layer_norm_eps(raw["layer_norm_eps"])
    if architecture != "gemma-embedding":
        writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if "rope_parameters" in raw:
        writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    for field, (kind, key) in FURTHER.items():
        if field in raw:
            {"u": writer.add_uint32, "f": writer.add_float32, "s": writer.add_string}[kind](
                f"{architecture}.{key}", raw[field]
            )
    ids = {"bos": 2, "eos": 3, "unknown": 1, "seperator": 3, "padding": 0, "cls": 2, "mask": 4}
    usual: dict[str, Any] = {"model": "bert", "token_type_count": raw["type_vocab_size"], "tokens": words}
    usual |= {"token_type": [3 if i < 5 else 1 for i in range(len(words))]}
    usual |= {f"{role}_token_id": i for role, i in ids.items()}
    for key, value in (usual | (tokenizer or {})).items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        kind[type(value)](f"tokenizer.ggml.{key}", value)
    for key, value in entries.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"{architecture}.{key}", value)
    kinds = {kind: arch for arch, kind in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], raw["num_hidden_layers"])
    for ours, values in arrays(raw | {"vocab_size": len(words)}).items():
        stem, _, kind = ours.rpartition(".")
        if "qkv" in stem and stem.endswith(("query", "key", "value")):
            stem = stem.replace("qkv.", "")
        published = names.get_name(f"model.{stem}" if architecture == "gemma-embedding" else stem)
        assert published is not None, ours
        writer.add_tensor(f"{published}.{kind}", values)
    for name, values in (dense or {}).items():
        writer.add_tensor(f"{name}.weight", values)
        writer.add_uint32(f"{architecture}.{name}_feat_in", values.shape[1])
        writer.add_uint32(f"{architecture}.{name}_feat_out", values.shape[0])
    finish(writer)
    return path


def llama_of(path: Path) -> Any:
    """The file in llama.cpp, if it is there."""
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(path), embedding=True, n_ctx=64, verbose=False, n_threads=1, flash_attn=False)


@pytest.mark.parametrize("name", RAWS)
def test_vectors_and_tokens_are_llama_cpps(name: str, tmp_path: Path) -> None:
    for pooling in (1, 2):
        path = write(tmp_path / f"{pooling}.gguf", name, pooling)
        llama = llama_of(path)
        with Engine(path, backend="numpy") as engine:
            assert engine.tokenizer is not None
            for text in TEXTS:
                assert engine.tokenizer.encode(text) == llama.tokenize(text.encode(), special=True), text
                if "[MASK]" in text:
                    continue  # llama.cpp's embed takes it for text
                ours, theirs = engine.embed([text], normalize=False)[0], np.array(llama.embed(text))
                assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max(), text  # its GELU has 16 bits


PIECES = ["<s>", "<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in ("", "a", "run", "the")), *"abcdefghijrunt,é!"]
PIECES += ["run", "ning", "ing", "the", "<mask>"]
SCORES = [0.0] * 4 + [-2.0 - 0.37 * (i % 7) - len(piece) * 0.11 for i, piece in enumerate(PIECES[4:])]
UNIGRAM = {
    "model": "t5",
    "tokens": PIECES,
    "scores": SCORES,
    "token_type": [3, 3, 3, 2, *[1] * (len(PIECES) - 5), 3],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "unknown_token_id": 3,
    "seperator_token_id": 2,
    "padding_token_id": 1,
    "add_bos_token": True,
    "add_eos_token": True,
    "add_space_prefix": True,
    "remove_extra_whitespaces": True,
    "token_type_count": 1,
}
"""Entries of a file of XLM-RoBERTa"""


def test_projections_of_embeddinggemma_are_llama_cpps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"dense_2": (96, 64), "dense_3": (64, 96)}
    dense = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    path = write(tmp_path / "m.gguf", "gemma-embedding", dense=dense)
    llama = llama_of(path)
    with Engine(path, backend="numpy") as engine:
        ours, theirs = engine.embed(["a run"], normalize=False)[0], np.array(llama.embed("a run"))
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()
    bare = write(tmp_path / "bare.gguf", "gemma-embedding", dense={"dense_2": dense["dense_3"]})
    with pytest.raises(CheckpointError, match=r"tensor dense_2.weight should have 64 columns, found \(64, 96\)"):
        Engine(bare, backend="numpy")


def test_pieces_with_scores_are_llama_cpps(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "bert, one type", tokenizer=UNIGRAM)
    llama = llama_of(path)
    with Engine(path, backend="numpy") as engine:
        assert engine.tokenizer is not None
        for text in ["a run, running!", "  the  athe é b", "aéxyz的run", "", "thething", "a<mask> b"]:
            assert engine.tokenizer.encode(text) == llama.tokenize(text.encode(), special=True), text
        ours, theirs = engine.embed(["the run"], normalize=False)[0], np.array(llama.embed("the run"))
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()


def test_bytes_between_cls_and_sep_are_llama_cpps(tmp_path: Path) -> None:
    """ModernBERT's tokenizer: byte-level BPE."""
    symbols = byte_tokens(257)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *symbols]
    entries = {"model": "gpt2", "pre": "modern-bert", "tokens": tokens, "merges": [" ".join(symbols[:2])]}
    entries |= {"token_type": [3] * 5 + [1] * len(symbols)}
    entries |= {f"add_{role}_token": True for role in ("bos", "eos", "sep")}
    path = write(tmp_path / "m.gguf", "modern-bert", tokenizer=entries)
    llama = llama_of(path)
    with Engine(path, backend="numpy") as engine:
        assert engine.tokenizer is not None
        for text in TEXTS[:4]:
            assert engine.tokenizer.encode(text) == llama.tokenize(text.encode(), special=True), text
        ours, theirs = engine.embed(["a run, runn!"], normalize=False)[0], np.array(llama.embed("a run, runn!"))
        assert np.abs(ours - theirs).max() < 0.01 * np.abs(theirs).max()


@pytest.mark.parametrize("name", RAWS)
def test_configuration_and_tokens_are_as_written(name: str, tmp_path: Path) -> None:
    path, raw = write(tmp_path / "m.gguf", name), RAWS[name]
    stored = read_gguf_config(read_gguf(path))
    fields = [field for field in raw if field in stored and field != "type_vocab_size"]
    assert {field: stored[field] for field in fields} == {field: raw[field] for field in fields}
    assert set(SIZES) - {"type_vocab_size", "layer_norm_eps"} <= set(fields)
    model = load_model(path, NumpyBackend())
    assert model.config.output == "states"
    with Engine(path, backend="numpy") as engine:
        assert engine.tokenizer is not None
        ids = engine.tokenizer.encode("Running été 你x")
        assert [WORDS[i] for i in ids] == ["[CLS]", "run", "##n", "##ing", "ete", "你", "[UNK]", "[SEP]"]


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"attention.causal": True}, UnsupportedModelError, r"bert.attention.causal is True; in this .* runs False"),
        ({"expert_count": 8}, UnsupportedModelError, r"bert.expert_count is 8"),
        ({"attention.max_alibi_bias": 8.0}, UnsupportedModelError, r"bert.attention.max_alibi_bias is 8"),
    ],
)
def test_what_would_change_the_results_is_refused(
    entries: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", "bert")
    from .test_gguf_translations import rewritten

    changed = rewritten(path, tmp_path / "changed.gguf", entries, lambda tensors: tensors)
    with pytest.raises(error, match=message):
        read_gguf_config(read_gguf(changed))


def test_a_table_of_positions_of_another_length_is_refused(tmp_path: Path) -> None:
    from .test_gguf_translations import rewritten

    path = write(tmp_path / "m.gguf", "bert")
    changed = rewritten(path, tmp_path / "changed.gguf", {"context_length": 80}, lambda tensors: tensors)
    with pytest.raises(CheckpointError, match=r"position_embd.weight should have context_length 80 rows, found 64"):
        read_gguf_config(read_gguf(changed))


def write_source(folder: Path, name: str) -> Path:
    """A checkpoint folder of an encoder with a tokenizer, and for EmbeddingGemma projections of a text's vector."""
    raw = RAWS[name] | {"vocab_size": len(WORDS), "pad_token_id": 0}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = arrays(raw)
    if name == "gemma-embedding":  # whose checkpoints have gains less 1
        tensors = {key: values - np.float32(values.ndim == 1) for key, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")
    kinds = ["Transformer", "Pooling", *(["Dense", "Dense"] if name == "gemma-embedding" else [])]
    modules = []
    for i, kind in enumerate(kinds):
        path = f"{i}_{kind}" if i else ""
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    pooling = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    for i, (inputs, outputs) in enumerate([(64, 96), (96, 64)][: len(kinds) - 2]):
        own = {"in_features": inputs, "out_features": outputs, "bias": False}
        own["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / f"{2 + i}_Dense" / "config.json").write_text(json.dumps(own), encoding="utf-8")
        weight = np.random.default_rng(i).normal(0, 0.2, (outputs, inputs)).astype(np.float32)
        save_file({"linear.weight": weight}, folder / f"{2 + i}_Dense" / "model.safetensors")
    return folder


WRITTEN = [name for name in RAWS if name != "modern-bert, all global"]  # whose gate is SiLU


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_as_it_was_and_llama_cpp_agrees(name: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", name)
    with Engine(source, backend="numpy") as engine:
        vectors = engine.embed(TEXTS, normalize=False)
    for dtype, tolerance in (("float32", 1e-5), ("float16", 0.01), ("int8", 0.2)):  # BLAS sums in no one order
        write_gguf(source, tmp_path / f"{dtype}.gguf", dtype, progress=False)
        with Engine(tmp_path / f"{dtype}.gguf", backend="numpy") as engine:
            ours = engine.embed(TEXTS, normalize=False)
            assert engine.tokenizer is not None
            ids = [engine.tokenizer.encode(text) for text in TEXTS]
        assert distance(ours, vectors) <= tolerance
        llama = llama_of(tmp_path / f"{dtype}.gguf")
        for i, text in enumerate(TEXTS):
            assert ids[i] == llama.tokenize(text.encode(), special=True), text
            if "[MASK]" not in text:  # llama.cpp's embed takes it for text
                assert distance(ours[i], np.array(llama.embed(text))) <= max(tolerance, 0.01), text


def unigram_tokenizer(steps: str, *, characters: bool) -> Any:
    """A tokenizer as XLM-RoBERTa's, of a SentencePiece model of a few lines, with fairseq's ids of special tokens.

    Args:
        steps: "words" as the first conversions, "pieces" as today's
        characters: with SentencePiece's table of characters
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, *LINES]), model_writer=out, vocab_size=70, hard_vocab_limit=False, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(3, processor.get_piece_size())]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = [*((token, 0.0) for token in special[:4]), *pieces, (special[4], 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, 3, False))
    table = [normalizers.Precompiled(field_of(field_of(out.getvalue(), 3), 2))] if characters else []
    spaces = [normalizers.Strip(left=not characters, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    tokenizer.normalizer = normalizers.Sequence([*table, *(spaces if steps == "pieces" else [])])
    split = [pre_tokenizers.WhitespaceSplit()] if steps == "words" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.Metaspace()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens(special)
    return tokenizer


def field_of(message: bytes, number: int) -> bytes:
    """The last field of this number, which is bytes, of a protocol buffer."""
    at, value = 0, b""

    def varint() -> int:
        nonlocal at
        result = shift = 0
        while True:
            byte = message[at]
            at, result, shift = at + 1, result | (byte & 127) << shift, shift + 7
            if byte < 128:
                return result

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        value = message[at : at + size] if key == number << 3 | 2 else value
        at += size
    return value


LINES = ["A run, running! The cat sat on the mat.", "été naïve Ångström: the 3rd run", "日本語 テスト and 你好"]
LINES += [f"{a} {b} {a}{b}" for a in ("run", "cat", "ing", "the") for b in ("a", "mat", "on", "sat")]
FOREIGN = ["ﬁne ｆｕｌｌ ①½", "a\u00a0 run\t \r\n cat ", "🙂 x🙂🙂y", "<s>the</s> a<mask>b", "", "the " * 9]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("steps", "characters"), [("pieces", True), ("words", True), ("pieces", False)], ids=["pieces", "words", "no table"]
)
def test_xlm_roberta_is_written_and_llama_cpp_agrees(steps: str, characters: bool, tmp_path: Path) -> None:
    tokenizer, source = unigram_tokenizer(steps, characters=characters), tmp_path / "source"
    raw = SIZES | {"model_type": "xlm-roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
    raw |= {"vocab_size": tokenizer.get_vocab_size() + 2, "max_position_embeddings": 66}
    source.mkdir()
    (source / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(arrays(raw), source / "model.safetensors")
    tokenizer.save(str(source / "tokenizer.json"))
    with Engine(source, backend="numpy") as engine:
        vectors = engine.embed([*TEXTS, *FOREIGN], normalize=False)
        plain = [engine.tokenizer.encode(text) for text in [*TEXTS, *FOREIGN]]  # type: ignore[union-attr]
    for dtype, tolerance in (("float32", 0.0), ("int8", 0.2)):
        path = tmp_path / f"{dtype}.gguf"
        write_gguf(source, path, dtype, progress=False)
        llama = llama_of(path)
        with Engine(path, backend="numpy") as engine:
            assert engine.config.max_positions == 64
            ours = engine.embed([*TEXTS, *FOREIGN], normalize=False)
        assert distance(ours, vectors) <= tolerance
        for i, text in enumerate([*TEXTS, *FOREIGN]):
            assert plain[i] == llama.tokenize(text.encode(), special=True), text
            if "<" not in text:  # llama.cpp's embed takes special tokens for text
                assert distance(ours[i], np.array(llama.embed(text))) <= max(tolerance, 0.01), text
    write_gguf(tmp_path / "float32.gguf", tmp_path / "again.gguf", "float32", progress=False)
    assert (tmp_path / "again.gguf").stat().st_size == (tmp_path / "float32.gguf").stat().st_size


def scores_of(path: Path, ids: list[int], labels: int) -> np.ndarray:
    """Logits of a text's labels by llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp")
    llama = llama_of(path)
    llama._batch.add_sequence(ids, 0, True)
    llama._ctx.decode(llama._batch)
    return np.array(llama_cpp.llama_get_embeddings_seq(llama._ctx.ctx, 0)[:labels])


@pytest.mark.longer
@pytest.mark.parametrize(("name", "labels"), [("xlm-roberta", 1), ("xlm-roberta", 3), ("bert", 3)])
def test_a_head_of_labels_is_written_and_llama_cpp_scores_with_it(
    name: str, labels: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_source(tmp_path / "source", "bert")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw |= {"architectures": ["BertForSequenceClassification"], "id2label": {str(i): f"L{i}" for i in range(labels)}}
    (source / "modules.json").unlink()
    if name == "xlm-roberta":
        tokenizer = unigram_tokenizer("pieces", characters=True)
        tokenizer.save(str(source / "tokenizer.json"))
        (source / "vocab.txt").unlink()
        (source / "tokenizer_config.json").unlink()
        raw |= {"model_type": name, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
        raw |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 66}
        raw |= {"architectures": ["XLMRobertaForSequenceClassification"]}
    (source / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(arrays(raw), source / "model.safetensors")
    pairs = [("a run", "the cat sat"), ("running", "été, naïve!")]
    with Engine(source, backend="numpy") as engine:
        encoded, expected = engine.encode(pairs), np.array([r.logits for r in engine.classify(pairs)])  # type: ignore[union-attr]
        scores = [result.score for result in engine.classify(pairs)]  # type: ignore[union-attr]
    path = tmp_path / "m.gguf"
    write_gguf(source, path, "float32", progress=False)
    with Engine(path, backend="numpy") as engine:
        assert engine.labels == tuple(raw["id2label"].values())
        assert [text.token_ids for text in engine.encode(pairs)] == [text.token_ids for text in encoded]
        results: Any = engine.classify(pairs)
    np.testing.assert_array_equal([result.logits for result in results], expected)
    assert [result.score for result in results] == scores
    assert np.ptp(expected, axis=0).min() > 0.01
    if name == "bert":
        [record] = caplog.records
        assert "llama.cpp gives the second text of a pair the type of the first" in record.getMessage()
        with Engine(path, backend="numpy") as engine:
            encoded, expected = engine.encode(["a run"]), np.array([engine.classify("a run").logits])  # type: ignore[union-attr]
    for text, own in zip(encoded, expected, strict=True):
        assert distance(own, scores_of(path, text.token_ids, labels)) < 0.01
    write_gguf(path, tmp_path / "again.gguf", "float32", progress=False)
    assert (tmp_path / "again.gguf").stat().st_size == path.stat().st_size


def test_jina_berts_gate_in_one_tensor_is_read_and_llama_cpp_agrees(tmp_path: Path) -> None:
    """As the published checkpoints have it, and files of today's converter."""
    from .test_gguf_translations import rewritten

    source, name = write_source(tmp_path / "source", "jina-bert-v2"), "encoder.layer.{{}}.mlp.gated_layers{}.weight"
    path = tmp_path / "m.gguf"
    write_gguf(source, path, "float32", progress=False)
    with Engine(source, backend="numpy") as engine:
        expected = engine.embed(TEXTS, normalize=False)

    def joined(tensors: dict[str, np.ndarray], gate: str, up: str, both: str) -> dict[str, np.ndarray]:
        for i in range(2):
            parts = [tensors.pop(pattern.format(i)) for pattern in (gate, up)]
            tensors[both.format(i)] = np.concatenate(parts)
        return tensors

    names = [name.format(part) for part in ("_w", "_v", "")]
    save_file(joined(load_file(source / "model.safetensors"), *names), source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"model_type": "bert"}
    raw |= {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "architectures": ["JinaBertForMaskedLM"]}
    (source / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    blocks = [f"blk.{{}}.ffn_{part}.weight" for part in ("gate", "up", "up")]
    rewritten(path, tmp_path / "one.gguf", {}, lambda tensors: joined(tensors, *blocks))
    llama = llama_of(tmp_path / "one.gguf")
    for folder in (source, tmp_path / "one.gguf"):
        with Engine(folder, backend="numpy") as engine:
            np.testing.assert_array_equal(engine.embed(TEXTS, normalize=False), expected)
    for text, vector in zip(TEXTS[:4], expected, strict=False):
        assert distance(vector, np.array(llama.embed(text))) < 0.01


def test_a_file_written_from_a_file_is_the_same(tmp_path: Path) -> None:
    first, again = tmp_path / "first.gguf", tmp_path / "again.gguf"
    write_gguf(write_source(tmp_path / "source", "gemma-embedding"), first, "float32", progress=False)
    write_gguf(first, again, "float32", progress=False)
    a, b = gguf.GGUFReader(first), gguf.GGUFReader(again)
    assert {t.name: t.data.tobytes() for t in a.tensors} == {t.name: t.data.tobytes() for t in b.tensors}
    assert {k: f.contents() for k, f in a.fields.items()} == {k: f.contents() for k, f in b.fields.items()}


def test_a_head_of_masked_tokens_is_left_out(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "bert")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"architectures": ["BertForMaskedLM"]}
    (source / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(arrays(raw), source / "model.safetensors")
    write_gguf(source, tmp_path / "m.gguf", "float32", progress=False)
    with Engine(source, backend="numpy") as engine, Engine(tmp_path / "m.gguf", backend="numpy") as written:
        np.testing.assert_array_equal(engine.embed(TEXTS), written.embed(TEXTS))


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The norm of the difference of vectors over that of the latter; 8 bits are rounded further by llama.cpp."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"hidden_act": "gelu_new"}, "with gelu alone, not gelu_new"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "written without a head of each token"),
        ("modern-bert", {"norm_bias": True}, "with norm_bias False alone"),
        ("modern-bert", {"hidden_activation": "silu"}, "with gelu alone, not silu"),
        ("modern-bert", {"layer_types": ["sliding_attention"] * 4}, "with windows in all but each n-th layer alone"),
        ("nomic-bert", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "without dynamic rotary scaling"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_not_written(name: str, change: dict[str, Any], message: str) -> None:
    raw = RAWS[name] | {"vocab_size": 40} | change
    with pytest.raises(UnsupportedModelError, match=message):
        gguf_fields(raw, config_of(raw), "m")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "max"}, "GGUF files have no pooling 'max'; expected one of mean, cls, last"),
        (
            {"dense": (Dense(np.eye(2, dtype=np.float32), None, NO_ACTIVATION),)},
            "projections .* in EmbeddingGemma alone",
        ),
    ],
)
def test_poolings_that_files_do_not_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        embedding_entries(EmbeddingSettings(**settings), "bert", "m")


def use(path: Path) -> None:
    """Load a file and embed a text with it."""
    with Engine(path, backend="numpy", max_batch_size=1) as engine:
        engine.embed([[1, 2, 3]])
        if engine.tokenizer is not None:
            engine.tokenizer.encode("a text")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("modern-bert", "gemma-embedding"))]
)
def test_damaged_headers_are_refused_in_one_line_or_work(name: str, tmp_path: Path) -> None:
    dense = {"dense_2": np.ones((8, 64), np.float32)} if name == "gemma-embedding" else None
    whole, generator, refused = write(tmp_path / "whole.gguf", name, dense=dense).read_bytes(), random.Random(1), 0
    start, path = len(whole) - sum(array.nbytes for array in read_arrays(tmp_path / "whole.gguf")), tmp_path / "m.gguf"
    for _ in range(1000):
        path.write_bytes(damage(whole[:start], generator) + whole[start:])
        try:
            use(path)
        except MinillmError as error:
            assert str(error).count("\n") == 0, error
            refused += 1
    assert refused > 500


def read_arrays(path: Path) -> list[np.ndarray]:
    """The tensors of a file."""
    return [tensor.data for tensor in gguf.GGUFReader(path).tensors]
