"""Folders of cross-encoders and rerankers as sentence-transformers writes them, beside the scores that it computes."""

import json
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the reference extra")
pytest.importorskip("transformers", reason="needs the reference extra")

import torch
import transformers

from minillm import Engine
from minillm.errors import UnsupportedModelError
from minillm.server import make_app

from .. import huggingface
from ..server.client import post
from ..task_models import BERT, ONE_LABEL, THREE_LABELS, WORDS, write_task_model
from .sentence_folders import (
    PAIRS,
    PARTS,
    TEMPLATE,
    TEXTS,
    base,
    bytes_tokenizer,
    close,
    cross_encoder,
    edit,
    scores_of,
    sentence_transformers,
    settings_of,
    write_decoder,
)

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]

# --- cross-encoders ---------------------------------------------------------------------------------------------------


CROSS_ENCODERS = [
    *((THREE_LABELS, activation, True) for activation in (None, "Identity", "Sigmoid", "Softmax")),
    (ONE_LABEL, None, False),
    (ONE_LABEL, "Identity", False),
    (THREE_LABELS, None, False),
]


@pytest.mark.parametrize(
    ("labels", "activation", "prompt"),
    [
        pytest.param(*case, marks=() if case in CROSS_ENCODERS else pytest.mark.exhaustive)
        for case in product([ONE_LABEL, THREE_LABELS], [None, "Identity", "Sigmoid", "Softmax"], [False, True])
    ],
)
def test_a_cross_encoder_scores_as_there(labels: Any, activation: str | None, prompt: bool, tmp_path: Path) -> None:
    folder = write_task_model(tmp_path / "plain", BERT | labels)
    function = None if activation is None else getattr(torch.nn, activation)()
    options = {"prompts": {"query": "how are"}, "default_prompt_name": "query"} if prompt else {}
    made = sentence_transformers.CrossEncoder(str(folder), activation_fn=function, device="cpu", **options)
    made.save_pretrained(str(tmp_path / "saved"))
    theirs = sentence_transformers.CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(PAIRS)
    close(scores_of(tmp_path / "saved", PAIRS), np.reshape(theirs, (len(PAIRS), -1)))
    if activation is None:  # as saved by a release that said nothing
        saved = json.loads(settings_of(tmp_path / "saved").read_text())
        del saved["activation_fn"]
        settings_of(tmp_path / "saved").write_text(json.dumps(saved))
        close(scores_of(tmp_path / "saved", PAIRS), np.reshape(theirs, (len(PAIRS), -1)))


@pytest.mark.parametrize("labels", [ONE_LABEL, THREE_LABELS], ids=["one label", "three"])
@pytest.mark.parametrize(
    "said",
    [
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax", "version": "4.1.0"}},
        {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
    ],
    ids=["identity", "sigmoid", "softmax", "short"],
)
@pytest.mark.parametrize("modules", [False, True], ids=["", "modules"])
def test_a_function_in_config_json_counts(labels: Any, said: Any, modules: bool, tmp_path: Path) -> None:
    folder = write_task_model(tmp_path / "plain", BERT | labels | said)
    theirs = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    expected = np.reshape(theirs.predict(PAIRS), (len(PAIRS), -1))
    if modules:
        theirs.save_pretrained(str(tmp_path / "saved"))
        saved = json.loads(settings_of(tmp_path / "saved").read_text()) | {"activation_fn": None}
        settings_of(tmp_path / "saved").write_text(json.dumps(saved))
        edit(tmp_path / "saved" / "config.json", **said)
        folder = tmp_path / "saved"
    close(scores_of(folder, PAIRS), expected)


def test_a_cross_encoder_that_is_a_decoder_reads_white_space_as_it_is(tmp_path: Path) -> None:
    folder = write_decoder(
        tmp_path / "plain", "LlamaForSequenceClassification", tokenizer=bytes_tokenizer(), num_labels=1
    )
    made = sentence_transformers.CrossEncoder(str(folder), device="cpu")
    made.save_pretrained(str(tmp_path / "saved"))
    pairs = [(f" {first} ", f"  {second}") for first, second in PAIRS]
    close(np.ravel(scores_of(tmp_path / "saved", pairs)), made.predict(pairs))
    assert np.abs(made.predict(pairs) - made.predict(PAIRS)).max() > 0.01


# --- causal LMs that score --------------------------------------------------------------------------------------------

YES, NO = WORDS.index("good") + 3, WORDS.index("bad") + 3


def write_reranker(folder: Path, template: str | None, no: int | None = NO, **options: Any) -> Any:
    """A reranker as sentence-transformers saves it, loaded there."""
    calls = options.pop("processing_kwargs", {"chat_template": {"add_generation_prompt": True}})
    plain = str(write_decoder(folder / "plain", template=template))
    model = base.Transformer(plain, transformer_task="text-generation", processing_kwargs=calls)
    made = sentence_transformers.CrossEncoder(
        modules=[model, cross_encoder.LogitScore(YES, no)], device="cpu", **options
    )
    made.save_pretrained(str(folder / "saved"))
    return sentence_transformers.CrossEncoder(str(folder / "saved"), device="cpu")


@pytest.mark.parametrize("template", [None, TEMPLATE, PARTS], ids=["no template", "texts", "parts"])
@pytest.mark.parametrize("no", [NO, None], ids=["", "one token"])
def test_a_reranker_by_logits_scores_as_there(template: str | None, no: int | None, tmp_path: Path) -> None:
    prompts = {"prompts": {"web": "small road"}, "default_prompt_name": "web"}
    theirs = write_reranker(tmp_path, template, no, **prompts)
    close(np.ravel(scores_of(tmp_path / "saved", PAIRS)), theirs.predict(PAIRS))
    close(np.ravel(scores_of(tmp_path / "saved", PAIRS, prompt="blue")), theirs.predict(PAIRS, prompt="blue"))
    raw = theirs.predict(PAIRS, activation_fn=torch.nn.Identity())
    close(np.ravel(scores_of(tmp_path / "saved", PAIRS, function="none")), raw)
    assert len({round(float(score), 2) for score in raw}) > 1


def test_a_text_that_is_cut_keeps_the_end_of_the_template(tmp_path: Path) -> None:
    long = [("the cat", "a dog ran on the road and " * 20), (" ".join(WORDS) * 4, "a cat")]
    for restored in (True, False):
        calls = {"chat_template": {"add_generation_prompt": True, "restore_suffix": restored}}
        folder = tmp_path / str(restored)
        theirs = write_reranker(folder, TEMPLATE, processing_kwargs=calls)
        close(np.ravel(scores_of(folder / "saved", long)), theirs.predict(long))


@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
def test_a_reranker_by_logits_is_served_beside_its_completions(activation: str, tmp_path: Path) -> None:
    theirs = write_reranker(tmp_path, TEMPLATE, activation_fn=getattr(torch.nn, activation)())
    ranked = theirs.rank(TEXTS[0], TEXTS[1:])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager").eval()
    with Engine(tmp_path / "saved", backend="numpy", progress=False) as engine:
        ids = engine.tokenizer.encode(TEXTS[0]) if engine.tokenizer is not None else []
        assert [engine.generate(ids, max_new_tokens=6, eos_token_id=[]).token_ids] == huggingface.generate(
            model, ids, max_new_tokens=6
        )[0]
        app = make_app(engine)
        found = post(app, "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]}).json()["results"]
        assert [one["index"] for one in found] == [one["corpus_id"] for one in ranked]
        close([one["relevance_score"] for one in found], [one["score"] for one in ranked])
        assert post(app, "/v1/completions", {"prompt": "the cat", "max_tokens": 3}).status_code == 200
        assert post(app, "/v1/embeddings", {"input": "the cat"}).status_code == 404


def test_modules_that_are_not_run_leave_generation_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_reranker(tmp_path, TEMPLATE)
    folder = tmp_path / "saved"
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["type"] = "somebody.Own"
    (folder / "modules.json").write_text(json.dumps(listed))
    with Engine(folder, backend="numpy", progress=False) as engine:
        [record] = caplog.records
        assert "the module 'Own'" in record.getMessage()
        assert engine.generate([5, 6, 7], max_new_tokens=2).token_ids
        for call in (lambda: engine.embed("the cat"), lambda: engine.classify(PAIRS), lambda: engine.encode(TEXTS)):
            with pytest.raises(UnsupportedModelError, match="the module 'Own'; minillm runs Transformer, Pooling"):
                call()
        assert post(make_app(engine), "/v1/embeddings", {"input": "the cat"}).status_code == 404


def test_a_template_that_writes_no_pairs_is_told(tmp_path: Path) -> None:
    from minillm.errors import PromptError

    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}the"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = write_reranker(tmp_path, template)
    with pytest.raises(ValueError, match="cannot carry"):
        theirs.predict(PAIRS)
    with (
        Engine(tmp_path / "saved", backend="numpy", progress=False) as engine,
        pytest.raises(PromptError, match="leaves out messages of the role query or document"),
    ):
        engine.classify(PAIRS)
