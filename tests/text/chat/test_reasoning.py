"""Thoughts told from answers: each format, in pieces of any size, and which format a template has."""

import random

import pytest

from minillm.text.chat import FORMATS, REASONING_FORMATS, AnswerParser, CallParser
from minillm.text.chat.calls import ContentDelta, ReasoningDelta
from minillm.text.chat.reasoning import reasoning_format_of, split_reasoning

from ...conversations import TEMPLATES

LEAD = "<|start|>assistant<|channel|>final<|message|>"
SPLIT = [
    ("think", "<think>\nHm, 1 < 2.\n\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes."),
    ("think", " \n<think>Hm </thin k></think>Yes <think>no</think>", "Hm </thin k>", "Yes <think>no</think>"),
    ("think", "<think>\n\n</think>\n\nYes.", "", "Yes."),
    ("think", "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
    ("think", "<thinking> is none", "", "<thinking> is none"),
    ("think", " a", "", " a"),
    ("mistral", "[THINK]Hm[/THINK]Yes", "Hm", "Yes"),
    ("seed", "<seed:think>Hm</seed:think>Yes", "Hm", "Yes"),
    ("cohere", "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", "Hm", "Yes"),
    ("granite", "Here is my thought process:\nHm\n\nHere is my response:\nYes", "Hm", "Yes"),
    ("harmony", f"<|channel|>analysis<|message|>Hm<|end|>{LEAD}Yes", "Hm", "Yes"),
    ("harmony", "<|channel|>final<|message|>Yes", "", "Yes"),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "answer"), SPLIT)
def test_thoughts_and_answer_are_apart_in_pieces_of_any_size(name: str, text: str, reasoning: str, answer: str) -> None:
    form, rng = REASONING_FORMATS[name], random.Random(1)
    assert split_reasoning(text, form) == (reasoning, answer)
    for _ in range(40):
        parser, thoughts, content, at = form.parser(), "", "", 0
        deltas = []
        while at < len(text):
            size = rng.randint(1, 7)
            deltas += parser.push(text[at : at + size])
            at += size
        for delta in [*deltas, *parser.finish()]:
            assert delta.text
            thoughts += delta.text if isinstance(delta, ReasoningDelta) else ""
            content += delta.text if isinstance(delta, ContentDelta) else ""
        assert (thoughts, content) == (reasoning, answer)


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_thoughts_that_are_cut_off_are_no_answer(name: str) -> None:
    form = REASONING_FORMATS[name]
    for opened in (True, False):
        whole = ("" if opened else form.begin) + "Hm, well" + form.end
        for end in range(len(whole)):
            reasoning, answer = split_reasoning(whole[:end], form, opened=opened, cut=True)
            assert "Hm, well".startswith(reasoning) and answer == "", whole[:end]
    assert split_reasoning("Hm" + form.end + "Yes", form, opened=True) == ("Hm", "Yes")


def test_a_prompt_opens_thoughts_only_at_its_end() -> None:
    form = REASONING_FORMATS["think"]
    assert form.opened_by("<|im_start|>assistant\n<think>\n")
    assert not form.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not form.opened_by("<|im_start|>user\nWhat does <think><|im_end|>\n<|im_start|>assistant\n")


def test_the_format_is_the_template_s() -> None:
    formats = {path.stem: reasoning_format_of(path.read_text(encoding="utf-8")) for path in TEMPLATES.glob("*.jinja")}
    assert {name for name, form in formats.items() if form is not None} >= {"qwen3"}
    assert all(form is None for name, form in formats.items() if name.startswith(("llama", "gemma", "chatml")))
    for form in REASONING_FORMATS.values():
        written = "{{ '" + f"{form.begin} {form.end}" + "' }}"
        assert reasoning_format_of(written) is form


def test_calls_in_thoughts_are_thoughts_and_those_after_them_are_calls() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    for size in (1, 4, 1000):
        text = f"<think>I could {call}.</think>\n\nSo: {call}"
        parser = AnswerParser(REASONING_FORMATS["think"].parser(), CallParser(FORMATS["hermes"], {"f"}))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        assert (reasoning, content.strip()) == (f"I could {call}.", "So:") and parser.called
