"""Rendered conversations against transformers' apply_chat_template. Needs the reference extra."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the comparison needs the reference extra")
transformers = pytest.importorskip("transformers", reason="the comparison needs the reference extra")

from minillm import Engine  # noqa: E402
from minillm.errors import PromptError  # noqa: E402
from minillm.formats import open_model  # noqa: E402
from minillm.text.chat import ChatTemplate  # noqa: E402

from ..conversations import CONVERSATIONS, NAMES, TEMPLATES, assistant, system, user, write_tokenizer  # noqa: E402
from ..tiny import write_checkpoint  # noqa: E402

pytestmark = pytest.mark.reference

OPTIONS: dict[str, dict[str, Any]] = {
    "answer": {"add_generation_prompt": True},
    "no answer": {"add_generation_prompt": False},
    "go on": {"continue_final_message": True},
}
VARIABLES: dict[str, dict[str, Any]] = {
    "headers": {"date_string": "24 Dec 1999"},
    "qwen3": {"enable_thinking": False},
    "smol": {"model": "X"},
    "generation": {"eos_token": "<|other|>"},
    "json": {"sep_token": None},
}

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
THEIR_MARK = "CONTINUE_FINAL_MESSAGE_TAG"


def both(folder: Path) -> tuple[Any, ChatTemplate]:
    """One folder as transformers reads it, and as we do."""
    template = open_model(folder).chat_template
    assert template is not None
    return transformers.AutoTokenizer.from_pretrained(folder), template


def assert_same(theirs: Any, ours: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> bool:
    """The same text, True; or both refuse, False."""
    variables = options.pop("chat_template_kwargs", {})
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **options, **variables)
    except Exception:  # of many kinds
        with pytest.raises(PromptError):
            ours.render(messages, **options, chat_template_kwargs=variables)
        return False
    if expected.count(THEIR_MARK):  # of a message to go on with that is written twice, they leave it in the text
        with pytest.raises(PromptError, match="more than once"):
            ours.render(messages, **options)
        return False
    assert ours.render(messages, **options, chat_template_kwargs=variables) == expected
    return True


@pytest.mark.parametrize("name", NAMES)
def test_each_template_gives_the_same_text(name: str, tmp_path: Path) -> None:
    theirs, ours = both(write_tokenizer(tmp_path, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")))
    variants = [*OPTIONS.values()]
    if name in VARIABLES:
        variants.append({"add_generation_prompt": True, "chat_template_kwargs": VARIABLES[name]})
    same = [assert_same(theirs, ours, messages, **o) for messages in CONVERSATIONS.values() for o in variants]
    assert sum(same) >= len(same) / 2


def test_parts_thoughts_and_other_keys_are_passed_on_alike(tmp_path: Path) -> None:
    parts = [user([{"type": "text", "text": "a"}, {"type": "text", "text": " b "}]), assistant([])]
    cases = {
        "macros": [parts, [*parts[:1], assistant([{"type": "text", "text": "c "}])]],
        "qwen3": [[user("a"), assistant("b", **{key: "hm"}), user("c")][:n] for key in THOUGHTS for n in (2, 3)],
        "json": [[user("a"), assistant("b", name="c")], [user("a"), assistant("b", name=None, tool_calls=None)]],
    }
    for name, conversations in cases.items():
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        theirs, ours = both(write_tokenizer(tmp_path / name, source))
        for messages in conversations:
            assert assert_same(theirs, ours, messages, add_generation_prompt=True)


def test_the_folder_is_read_alike(tmp_path: Path) -> None:
    tokens = "".join(f"{{{{ {name}_token }}}}|" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image"))
    layouts: dict[str, dict[str, Any]] = {
        "file before config": {"chat_template": "config"},
        "config": {"chat_template": f"config {tokens}"},
        "list": {"chat_template": [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]},
        "tokens": {"chat_template": tokens, "sep_token": "<sep>", "mask_token": None, "image_token": "<image>"},
        "no tokens": {"chat_template": tokens, "bos_token": None},
        "named": {
            "chat_template": "{{ boi_token }}{{ x }}",
            "extra_special_tokens": {"boi_token": "<boi>", "x": "<x>"},
        },
        "new layout": {"chat_template": tokens, "added_tokens_decoder": {"2": {"content": "</s>", "special": True}}},
    }
    for name, settings in layouts.items():
        folder = write_tokenizer(tmp_path / name, f"file {tokens}", **settings)
        if name != "file before config":
            (folder / "chat_template.jinja").unlink()
        (folder / "special_tokens_map.json").write_text('{"cls_token": "<cls>", "eos_token": {"content": "<pad>"}}')
        assert assert_same(*both(folder), [user("Hi")], add_generation_prompt=True)


def test_the_prompt_has_the_same_token_ids(tmp_path: Path) -> None:
    """The template writes the first token, which the tokenizer would write too."""
    folder = write_checkpoint(tmp_path, max_position_embeddings=256)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + (TEMPLATES / "chatml.jinja").read_text())
    messages = [system("S"), user("Hi</s>"), assistant("日本")]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    with Engine(folder) as engine:
        assert engine.chat(messages, max_new_tokens=1).prompt_token_ids == expected
    assert expected.count(2) == 2  # </s>: what the template begins with, and what the user wrote
