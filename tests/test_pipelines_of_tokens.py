"""Pipelines of heads of tokens, and zero-shot classification, beside those of transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minillm import pipeline
from minillm.errors import ParameterError, PromptError

from . import huggingface

pytestmark = pytest.mark.reference

SPECIAL = ("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]")  # MPNet's padding is token 1, whatever its configuration says
PIECES = (
    *("the", "a", "cat", "dog", "bird", "sat", "ran", "on", "mat", "##s", "##ter", "micro", "##soft", "com", "##pany"),
    *("red", "blue", "##ish", "house", "road", "is", "was", "good", "bad", "in", "paris", ".", ",", "?", "this"),
    *("example", "about", "sports", "pol", "##itics"),
)
TEXTS = [
    "Microsoft company was in Paris, a good company.",
    "the reddish cats sat on the mat",
    "Zebra sat on the blueish house",
    "the cats ran on the road in paris . " * 5,
]
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
# fmt: off
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "pad_token_id": 1,
    "max_position_embeddings": 40, "vocab_size": len(SPECIAL) + len(PIECES),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES | {"hidden_act": "relu"}),
    "roberta": ("Roberta", SIZES),
    "xlm-roberta": ("XLMRoberta", SIZES | {"hidden_act": "relu"}),
    "camembert": ("Camembert", SIZES),
    "mpnet": ("MPNet", SIZES),
    "electra": ("Electra", SIZES | {"embedding_size": 8, "hidden_act": "relu"}),
    "distilbert": ("DistilBert", {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "pad_token_id": 1, "max_position_embeddings": 40,
        "vocab_size": SIZES["vocab_size"], "activation": "relu",
    }),
    "modernbert": ("ModernBert", SIZES | {
        "local_attention": 8, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True,
        "decoder_bias": True, "cls_token_id": 2, "sep_token_id": 3, "eos_token_id": 3, "bos_token_id": 2,
    }),
    "deberta-v2": ("DebertaV2", SIZES | {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0,
    }),
    "deberta": ("Deberta", SIZES | {"relative_attention": True, "pos_att_type": "c2p", "hidden_act": "relu"}),
    "nomic_bert": ("NomicBert", SIZES),
    "gte": ("Gte", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
}
TWO_STACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "pad_token_id": 1,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "max_position_embeddings": 40,
        "vocab_size": SIZES["vocab_size"], "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3,
    }),
}
# fmt: on


def word_pieces() -> Tokenizer:
    """BERT's tokenizer of these pieces."""
    tokenizer = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate((*SPECIAL, *PIECES))}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def spaced_words() -> Tokenizer:
    """Pieces of a unigram model, in which a space is a part of the next token."""
    words = [*(f"▁{piece}" for piece in PIECES if piece[0] != "#"), *(piece.strip("#") for piece in PIECES)]
    words = list(dict.fromkeys(words))[: len(PIECES) - 2]
    entries = [(token, 0.0) for token in SPECIAL] + [("▁", -9.0)] + [(w, -1.0 - i / 50) for i, w in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=0))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def write(
    folder: Path,
    family: str,
    head: str,
    labels: tuple[str, ...] = LABELS,
    tokenizer: Tokenizer | None = None,
    **more: Any,
) -> Path:
    """A tiny checkpoint of a family with a head, as transformers writes it."""
    name, fields = (FAMILIES | TWO_STACKS)[family]
    raw = fields | {"model_type": family, "architectures": [f"{name}{head}"]} | more
    if "Masked" not in head:
        raw |= {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (tokenizer or word_pieces()).save(str(folder / "tokenizer.json"))
    roles = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    types = ["token_type_ids"] if family in ("bert", "electra", "nomic_bert", "gte") else []
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24, "mask_token": "[MASK]", **roles}
    settings["model_input_names"] = ["input_ids", *types, "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}{head}")
    model = kind(transformers.AutoConfig.from_pretrained(folder)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1 if "norm.weight" in name.lower() else 0, 2 if "embeddings" in name else 0.3)
        if head == "ForTokenClassification":  # no label is the likeliest everywhere
            model.classifier.weight *= 4
            ids = torch.arange(5, SIZES["vocab_size"])[None]
            model.classifier.bias -= model(ids[:, :20]).logits[0].mean(dim=0)
    return huggingface.save(model, folder)


def assert_same(ours: Any, theirs: Any) -> None:
    """Two results: the same keys and values, scores to 1e-4."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == (pytest.approx(value, abs=1e-4) if key in ("score", "scores") else value)
    else:
        assert len(ours) == len(theirs)
        for own, other in zip(ours, theirs, strict=True):
            assert_same(own, other)


# --- labels of tokens -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["word pieces", "spaced words"])
def labellers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """Their pipeline and ours."""
    tokenizer = word_pieces() if request.param == "word pieces" else spaced_words()
    folder = write(tmp_path_factory.mktemp("labels"), "bert", "ForTokenClassification", tokenizer=tokenizer)
    theirs = transformers.pipeline("token-classification", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("ner", folder) as ours:
        yield theirs, ours


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_labels_of_tokens_and_entities_are_theirs(strategy: str, labellers: Any) -> None:
    theirs, ours = labellers
    options: list[dict[str, Any]] = [{}, {"ignore_labels": []}, {"ignore_labels": ["B-LOC", "LOC"]}]
    if strategy != "none":
        options += [{"stride": 5}, {"stride": 11, "ignore_labels": []}]
    for given in options:
        for inputs in (TEXTS, TEXTS[0], TEXTS[:1]):
            results = theirs(inputs, aggregation_strategy=strategy, **given)
            assert_same(ours(inputs, aggregation_strategy=strategy, **given), results)
    assert len({entity["entity" if strategy == "none" else "entity_group"] for entity in results[0]}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_tokens_of_a_family_are_theirs(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family, "ForTokenClassification")
    theirs = transformers.pipeline("token-classification", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("token-classification", folder) as ours:
        assert_same(ours(TEXTS[:2], ignore_labels=[]), theirs(TEXTS[:2], ignore_labels=[]))


# --- masked tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [*((family, {}) for family in FAMILIES), ("deberta", {"legacy": False}), ("deberta-v2", {"legacy": False})],
)
def test_masked_tokens_of_a_family_are_theirs(family: str, fields: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, family, "ForMaskedLM", **fields)
    theirs = transformers.pipeline("fill-mask", str(folder), device="cpu", dtype=torch.float32)
    texts = ["the cat sat on the [MASK] .", "a [MASK] [MASK] in paris", "is this [MASK]"]
    with pipeline("fill-mask", folder) as ours:
        for inputs in (texts, texts[0], texts[1], texts[:1]):
            assert_same(ours(inputs), theirs(inputs))
        assert_same(ours(texts[0], top_k=2), theirs(texts[0], top_k=2))
        for targets in ("mat", ["mat", "house", "##ish"]):
            assert_same(ours(texts, targets=targets), theirs(texts, targets=targets))
        with torch.no_grad():  # its vectors are those without the head
            ids = theirs.tokenizer(TEXTS[1], return_tensors="pt")
            states = theirs.model.base_model(**ids).last_hidden_state[0].numpy()
        np.testing.assert_allclose(ours.engine.hidden_states(TEXTS[1]), states, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "fields"), [("bert", {}), ("deberta-v2", {"legacy": True}), ("deberta-v2", {"legacy": False})]
)
def test_a_matrix_of_its_own_fills_masks(family: str, fields: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, family, "ForMaskedLM", tie_word_embeddings=False, **fields)
    theirs = transformers.pipeline("fill-mask", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("fill-mask", folder) as ours:
        assert_same(ours("the [MASK] sat"), theirs("the [MASK] sat"))


# --- answers ----------------------------------------------------------------------------------------------------------

QUESTION = "who was in paris ?"


def best_spans(folder: Path, context: str, *, limit: int, stride: int, top_k: int, longest: int) -> list[Any]:
    """Answers by transformers' logits: the probability of every span of every window, equal texts added up."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    cut = {"truncation": "only_second", "max_length": limit, "stride": stride, "return_overflowing_tokens": True}
    encoded = tokenizer(QUESTION, context, return_offsets_mapping=True, **cut)
    scores: dict[tuple[str, int, int], float] = {}
    none = []
    for i, ids in enumerate(encoded["input_ids"]):
        inputs = {name: torch.tensor([encoded[name][i]]) for name in tokenizer.model_input_names}
        own = torch.tensor([owner == 1 for owner in encoded.sequence_ids(i)])
        own[0] = True
        with torch.no_grad():
            output = model(**inputs)
        start, end = (
            logits[0].masked_fill(~own, -1e9).softmax(0) for logits in (output.start_logits, output.end_logits)
        )
        none.append(float(start[0] * end[0]))
        window = []
        for first in range(1, len(ids)):
            for last in range(first, min(len(ids), first + longest)):
                if own[first] and own[last]:
                    place = encoded["offset_mapping"][i][first][0], encoded["offset_mapping"][i][last][1]
                    window.append((float(start[first] * end[last]), *place))
        for score, begin, stop in sorted(window, reverse=True)[:top_k]:
            text = context[begin:stop].lower()
            known = next((key for key in scores if key[0] == text), (text, begin, stop))
            scores[known] = scores.get(known, 0) + score
    scores[("", 0, 0)] = min(none)
    best = sorted(scores.items(), key=lambda item: -item[1])[:top_k]
    return [
        {"score": score, "start": begin, "end": stop, "answer": context[begin:stop]} for (_, begin, stop), score in best
    ]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.exhaustive] * (family == "deberta"))
        for family in FAMILIES
        if family not in ("nomic_bert", "gte")
    ],
)
def test_answers_are_the_likeliest_spans_by_the_logits_of_theirs(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family, "ForQuestionAnswering", ("a", "b"))
    with pipeline("question-answering", folder, align_to_words=False, handle_impossible_answer=True) as ours:
        for context in TEXTS:
            for limit, stride, top_k, longest in ((24, 12, 4, 15), (16, 3, 3, 2)):
                expected = best_spans(folder, context, limit=limit, stride=stride, top_k=top_k, longest=longest)
                given = {"max_seq_len": limit, "doc_stride": stride, "top_k": top_k, "max_answer_len": longest}
                assert_same(ours(question=QUESTION, context=context, **given), expected)


# --- labels that a call names, and of the mean of all tokens ----------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "bart"])
@pytest.mark.parametrize("names", [("contradiction", "neutral", "entailment"), ("ENTAILMENT", "not_entailment")])
def test_labels_that_a_call_names_are_theirs(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    folder = write(tmp_path, family, "ForSequenceClassification", names)
    theirs = transformers.pipeline("zero-shot-classification", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("zero-shot-classification", folder) as ours:
        for given in (
            {"candidate_labels": ["sports", "politics", "a bird"]},
            {"candidate_labels": "sports, politics", "multi_label": True},
            {"candidate_labels": ["paris"], "hypothesis_template": "is this {} ?"},
        ):
            for inputs in (TEXTS, TEXTS[0], TEXTS[3:]):  # the last is cut
                assert_same(ours(inputs, **given), theirs(inputs, **given))


def test_labels_of_the_mean_of_all_tokens_are_theirs(tmp_path: Path) -> None:
    folder = write(tmp_path, "modernbert", "ForSequenceClassification")
    theirs = transformers.pipeline("text-classification", str(folder), device="cpu", dtype=torch.float32)
    with pipeline("text-classification", folder) as ours:
        texts = TEXTS[:3]
        assert_same(ours(texts, top_k=None), theirs(texts, top_k=None))


def test_mistakes_with_masks_and_labels_are_one_line(tmp_path: Path) -> None:
    with pipeline("fill-mask", write(tmp_path / "masks", "bert", "ForMaskedLM")) as fill:
        for options, message in (
            ({"targets": 3}, "targets should be texts, found 3"),
            ({"targets": [3]}, "targets should be texts, found"),
            ({"targets": "\ud800"}, "the text is not valid UTF-8"),
        ):
            with pytest.raises((ParameterError, PromptError), match=message):
                fill("the [MASK] sat", **options)
        with pytest.raises(PromptError, match="no mask in its first 24 tokens, to which it was cut: shorten it"):
            fill("the cat " * 30 + "[MASK]")
        with pytest.raises(PromptError, match="expected text, found None"):
            fill.engine.fill_masks(None)  # type: ignore[arg-type]
    labels = ("contradiction", "neutral", "entailment")
    folder = write(tmp_path / "pairs", "bert", "ForSequenceClassification", labels)
    with pipeline("zero-shot-classification", folder) as classify:
        assert classify([], ["cat", "dog"]) == []
        for template in (np.array(["a", "b"]), "", [], 3):
            with pytest.raises(ParameterError, match="hypothesis_template should be text with"):
                classify("the cat", ["cat"], hypothesis_template=template)
