"""minillm chat, of models with and without a chat template: lines, commands, a full context, a terminal."""

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from minillm import Engine
from minillm.cli import chat
from minillm.cli.conversation import Conversation, Thought
from minillm.cli.main import run
from minillm.errors import PromptError, UsageError

from ..conversations import TEMPLATES, assistant, system, user
from ..tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that talks in Qwen3's form, and likes to end a text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("chat"), seed=2, max_position_embeddings=400)
    source = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return folder


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Lines that the user types."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_each_line_is_a_turn_of_one_conversation(folder, monkeypatch, capsys):
    say(monkeypatch, "Hi", "And?")
    arguments = [
        "--model",
        str(folder),
        "--max-new-tokens",
        "6",
        "--chat-template-kwargs",
        '{"enable_thinking": false}',
        "--temperature",
        "0",
    ]
    assert run(["chat", "--system", "Be brief.", "--stats", *arguments]) == 0
    captured = capsys.readouterr()
    messages = [system("Be brief."), user("Hi")]
    told = {"max_new_tokens": 6, "chat_template_kwargs": {"enable_thinking": False}}
    with Engine(folder) as engine:
        first = engine.chat(messages, **told)
        second = engine.chat([*messages, assistant(first.text), user("And?")], **told)
    assert captured.out == f"{first.text}\n{second.text}\n"
    counts = [tuple(map(int, re.findall(r"\d+", line)[:3])) for line in captured.err.splitlines()]
    assert [prompt for prompt, _, _ in counts] == [len(first.prompt_token_ids), len(second.prompt_token_ids)]
    assert counts[0][2] == 0
    # The empty thoughts before the first answer are gone by then: what precedes them is found.
    assert counts[1][2] >= len(first.prompt_token_ids) - len("<think>\n\n</think>\n\n")
    assert all(prompt == computed + cached for prompt, computed, cached in counts)


def test_special_tokens_are_not_shown(folder, monkeypatch, capsys, tmp_path):
    with Engine(folder) as engine:
        answer = engine.chat([user("Hi")], max_new_tokens=12, eos_token_id=[])
        tokens = [engine.tokenizer.token(token_id) for token_id in answer.token_ids]
    token = next(token for token in tokens if len(token) > 2 and token.isalpha())
    before = answer.text[: answer.text.index(token)]
    assert before
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": token}))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer.token_ids[tokens.index(token)]]}))
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == before + "\n"


@pytest.mark.longer
def test_what_goes_wrong_is_one_line(folder, monkeypatch, capsys, tmp_path):
    demo = "this model has no chat template: leave it out"
    cases = {
        ("--system", "S"): f"--system: {demo}",
        ("--chat-template-kwargs", "{}"): f"--chat-template-kwargs: {demo}",
        ("--model", str(folder), "--chat-template-kwargs", "{"): "should be a JSON object",
        ("--model", str(folder), "--chat-template-kwargs", "[]"): "should be a JSON object",
        ("--model", str(folder), "--chat-template-kwargs", '{"thinking": 1}'): "does not use 'thinking'",
    }
    for arguments, words in cases.items():
        say(monkeypatch, "Hi")
        assert run(["chat", *arguments]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert len(captured.err.splitlines()) == 1
        assert captured.out == ""


def test_a_template_that_knows_no_system_says_so(folder, monkeypatch, capsys, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "chat_template.jinja").write_text((TEMPLATES / "gemma.jinja").read_text())
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other), "--system", "S"]) == 2
    assert capsys.readouterr().err.endswith("refuses the messages: there is no role system\n")


def test_a_chat_serves_the_checkpoints_beams_and_goes_on_with_one_answer(folder, monkeypatch, capsys, tmp_path):
    other = shutil.copytree(folder, tmp_path / "model")
    settings = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4}
    (other / "generation_config.json").write_text(json.dumps(settings))
    say(monkeypatch, "Hi")
    assert run(["chat", "--model", str(other), "--max-new-tokens", "4"]) == 0
    with Engine(other) as engine:
        expected = engine.chat([user("Hi")], num_return_sequences=1, max_new_tokens=4).text
    assert capsys.readouterr().out == expected + "\n"


# --- raw text ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    with Engine(max_batch_size=1, prefix_cache=True) as engine:
        yield engine


def said(pieces) -> str:
    return "".join(pieces)


@pytest.mark.longer
def test_raw_text_computes_only_what_is_new(engine):
    conversation = Conversation(engine)
    said(conversation.ask("A list of colors: red,", {"max_new_tokens": 8}))
    known = [token for message in conversation.messages for token in message.token_ids]
    before = engine.stats.prefill_tokens
    answer = said(conversation.ask("A list of animals: cat,", {"max_new_tokens": 8}))
    line = engine.tokenizer.encode("\nA list of animals: cat,", add_special_tokens=False)
    assert engine.stats.prefill_tokens - before == len(line) + 1  # and the last token of the answer before
    assert conversation.computed_tokens == len(line) + 1
    assert conversation.prompt_tokens == conversation.computed_tokens + conversation.cached_tokens == len(known + line)
    with Engine(max_batch_size=1) as fresh:
        assert fresh.generate(known + line, max_new_tokens=8).text == answer


def test_lines_are_continued_as_raw_text_and_empty_ones_are_nothing(monkeypatch, capsys):
    """An empty line once ended the chat, and what else was pasted went to the user's shell."""
    say(monkeypatch, "A list of colors: red,", "", "  ", "Count from 3 to 9:")
    assert run(["chat", "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(" orange, yellow,\n") and len(captured.out.splitlines()) == 2
    assert "raw text" in captured.err


def test_a_message_that_is_too_long_says_so_and_is_not_kept(engine, monkeypatch, capsys):
    say(monkeypatch, "red, " * 300)
    assert run(["chat"]) == 2
    error = capsys.readouterr().err
    assert "512" in error and "template adds" not in error
    conversation = Conversation(engine)
    with pytest.raises(PromptError, match="512"):
        said(conversation.ask("red, " * 300, {}))
    assert conversation.messages == []


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_context_drops_the_oldest_exchanges_and_says_so(folder, monkeypatch, capsys):
    with Engine(folder, prefix_cache=True) as engine:
        conversation = Conversation(engine, "Be brief.")
        for i in range(40):
            said(conversation.ask(f"word{i} " * 6, {"max_new_tokens": 8}))
        assert 0 < conversation.forgotten < len(conversation.messages) == 80
        seen = [{"role": m.role, "content": m.content} for m in conversation.messages[conversation.forgotten : -1]]
        expected = engine.chat([system("Be brief."), *seen], max_new_tokens=8)
        assert expected.text == conversation.messages[-1].content
        assert len(expected.prompt_token_ids) == conversation.prompt_tokens <= 400 - 8
    say(monkeypatch, *["many words of a message " * 4] * 20)
    assert run(["chat", "--model", str(folder), "--max-new-tokens", "4"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes and all(re.fullmatch("the context is full: .* first \\d+ exchanges?", note) for note in notes)


def test_retry_undo_more_and_clear(engine):
    conversation, four = Conversation(engine), {"max_new_tokens": 4}
    first = said(conversation.ask("A list of colors: red,", four))
    assert conversation.finish_reason == "length"
    rest = said(conversation.more({"max_new_tokens": 6}))
    with Engine(max_batch_size=1) as fresh:
        whole = fresh.generate("A list of colors: red,", max_new_tokens=10).text
    assert first + rest == conversation.messages[-1].content == whole
    assert said(conversation.retry(four)) == first == conversation.messages[-1].content
    assert len(conversation.messages) == 2
    assert conversation.used_tokens == 8 + 4
    with pytest.raises(PromptError):
        said(conversation.ask("red, " * 300, four))
    assert conversation.used_tokens == 8 + 4
    said(conversation.ask("1, 2,", four))
    assert conversation.used_tokens > 8 + 4 + 4
    assert conversation.undo() == "1, 2,"
    assert conversation.used_tokens == 8 + 4
    assert conversation.undo() == "A list of colors: red,"
    assert conversation.used_tokens == 0
    with pytest.raises(UsageError, match="nothing was said"):
        conversation.undo()
    assert said(conversation.ask("A list of colors: red,", four)) == first
    conversation.clear()
    assert conversation.messages == []


def test_an_answer_that_is_stopped_stays_as_far_as_it_is(engine):
    conversation = Conversation(engine)
    pieces = conversation.ask("A list of colors: red,", {"max_new_tokens": 20})
    beginning = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.finish_reason == "abort" and not engine.busy
    assert conversation.messages[-1].content == beginning
    assert (beginning + said(conversation.more({"max_new_tokens": 18}))).startswith(" orange, yellow, green, blue")


@pytest.mark.longer
def test_a_conversation_is_saved_and_loaded(folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.json"
    few = ["--model", str(folder), "--max-new-tokens", "6", "--temperature", "0"]
    say(monkeypatch, "/system Be brief.", "Hi", f"/save {file}")
    assert run(["chat", *few]) == 0
    first = capsys.readouterr().out
    say(monkeypatch, "/system Be brief.", "Hi", "And?")
    assert run(["chat", *few]) == 0
    second = capsys.readouterr().out.removeprefix(first)
    saved = json.loads(file.read_text())
    assert saved["system"] == "Be brief." and [each["role"] for each in saved["messages"]] == ["user", "assistant"]
    say(monkeypatch, f"/load {file}", "And?")
    assert run(["chat", *few]) == 0
    assert capsys.readouterr().out == second
    with Engine(folder) as engine:
        conversation = Conversation(engine)
        conversation.load(file)
        assert conversation.used_tokens > len(saved["messages"])
    for text in ("{", "[1]", '{"messages": [{"role": "assistant", "content": "a"}]}', '[{"role": "user"}]'):
        file.write_text(text)
        say(monkeypatch, f"/load {file}")
        assert run(["chat", *few]) == 2
        captured = capsys.readouterr()
        assert "talk.json" in captured.err and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_help_and_the_line_below_the_prompt_fit_a_narrow_terminal(width, engine, monkeypatch, capsys):
    """At 40 columns the line was the name of the model, without the use of the context."""
    monkeypatch.setattr(chat, "terminal_width", lambda: width)
    talk = chat.Chat(Conversation(engine), {}, "SmolLM2-135M-Instruct.Q4_1.gguf")
    talk._rate = 70
    talk._help("")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line.startswith(("/", "Alt-Enter", "    ")) for line in lines)
    line = talk._toolbar()
    assert "0 of 512 tokens · 70 tokens/s" in line and len(line) <= width
    assert ("SmolLM2" in line) == (width >= 80)


@pytest.mark.longer
def test_fields_are_set_in_a_chat_as_by_flags(monkeypatch, capsys):
    prompt = "Once upon a time"
    flags = ["--temperature", "1", "--seed", "3", "--top-k", "50", "--max-new-tokens", "8"]
    say(monkeypatch, prompt)
    assert run(["chat", *flags]) == 0
    expected = capsys.readouterr().out
    typed = [f"/set {flag} {value}" for flag, value in zip(flags[::2], flags[1::2], strict=True)]
    say(monkeypatch, *typed, prompt, "/undo", "/set temperature 0", prompt)
    assert run(["chat"]) == 0
    *answer, last = capsys.readouterr().out.splitlines()
    assert "\n".join(answer) + "\n" == expected != last + "\n"
    with Engine() as engine:
        assert engine.generate(prompt, max_new_tokens=8).text == last


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nothing", "no command /nothing"),
        ("/set top_q 1", "no field top_q to set: did you mean top_p?"),
        ("/set zzz 1", "no field zzz to set: there are max_new_tokens, "),
        ("/set temperature x", "temperature should be a number, 0 for greedy search, or default; found 'x'"),
        ("/clear the table", "/clear stands alone, found 'the table' after it"),
        ("/quit now", "/quit stands alone"),
        ("/set top_p 2", "top_p should be"),
        ("/set stopping_criteria 1", "no field stopping_criteria"),
        ("/set num_beams 2.5", "num_beams should be"),
        ("/set num_beam_groups 2", "num_beam_groups"),
        ("/save", "name a file"),
        ("/load /nowhere/x", "/nowhere/x"),
        ("/more", "no answer"),
        ("/retry", "nothing was said"),
        ("/system You are kind.", "no chat template"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(line, words, monkeypatch, capsys):
    say(monkeypatch, line, "never read")
    assert run(["chat"]) == 2
    captured = capsys.readouterr()
    assert words in captured.err.splitlines()[-1] and len(captured.err.splitlines()) == 2
    assert captured.out == ""


def test_thoughts_are_no_part_of_the_answer_and_are_kept(tmp_path, monkeypatch, capsys):
    pytest.importorskip("llguidance", reason="needs the extra `guided`")
    folder = write_checkpoint(tmp_path, max_position_embeddings=400)
    template = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}\n{% endfor %}<think>"
    (folder / "chat_template.jinja").write_text(template + "{# </think> #}", encoding="utf-8")
    with Engine(folder, prefix_cache=True) as engine:
        talk, said = Conversation(engine), {"guided_regex": "Hm, so\\.</think>\nYes\\.", "max_new_tokens": 60}
        pieces = [*talk.ask("Hi", said)]
        thoughts = "".join(piece for piece in pieces if isinstance(piece, Thought))
        assert (thoughts, "".join(pieces)) == ("Hm, so.", "Hm, so.Yes.")
        assert (talk.messages[-1].reasoning, talk.messages[-1].content) == ("Hm, so.", "Yes.")
        talk.save(tmp_path / "talk.json")
        other = Conversation(engine)
        other.load(tmp_path / "talk.json")
        assert other._encode_all(other.messages) == talk._encode_all(talk.messages)
        chat.show_answer(iter(pieces))
        assert capsys.readouterr() == ("Yes.", "Hm, so.")
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        chat.show_answer(iter(pieces))
        assert capsys.readouterr() == ("\x1b[2mHm, so.\x1b[0m\n\nYes.", "")
        parts = [*talk.ask("Hi", said | {"max_new_tokens": 8})]
        parts += talk.more(said | {"guided_regex": "\\.</think>Yes\\."})
        assert talk.messages[-1].content == "Yes." and talk.messages[-1].reasoning


# --- a terminal -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_in_a_terminal_a_paste_is_one_message_ctrl_c_stops_an_answer_and_ctrl_d_ends(tmp_path):
    from ..terminal import Terminal

    terminal = Terminal([sys.executable, "-m", "minillm", "chat"], XDG_STATE_HOME=str(tmp_path))
    banner = terminal.read_until(">")
    assert re.search(r"the model in the package · \w+ · \w+ · context 512 tokens · /help lists commands", banner)
    terminal.write("\x1b[200~A list of\n\ncolors: red,\x1b[201~\r")
    terminal.read_until("orange")
    terminal.read_until(">")
    terminal.type("/set max_new_tokens 450")
    terminal.type("/set min_new_tokens 450")
    terminal.type("Once upon a time")
    terminal.read_until("there was")
    terminal.write("zebra")  # is not shown in the answer
    answer = terminal.read_until(".")
    terminal.write("\x03")
    answer += terminal.read_until(">")
    assert "zebra" not in answer
    terminal.type(f"/save {tmp_path}/talk.json")
    terminal.type("/nonsense")
    terminal.read_until("no command /nonsense")
    terminal.read_until(">")
    terminal.write("\x04")
    terminal.read_until("\0")
    assert terminal.close() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [each["content"] for each in messages[::2]] == ["A list of\n\ncolors: red,", "Once upon a time"]
    assert messages[3]["content"].startswith(" there was") and len(messages[3]["content"]) < 1500
    history = tmp_path / "minillm" / "chat_history"
    assert "Once upon a time" in history.read_text() and history.stat().st_mode & 0o777 == 0o600


# --- with what was computed -------------------------------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize("raw", [False, True])
def test_a_conversation_goes_on_in_another_process_without_being_computed_again(
    raw, folder, tmp_path, monkeypatch, capsys
):
    file, model = tmp_path / "talk.safetensors", folder
    if raw:
        model = write_checkpoint(tmp_path / "raw", seed=2, max_position_embeddings=400)
    few = ["chat", "--stats", "--model", str(model), "--max-new-tokens", "20", "--temperature", "0"]
    begin = ["Hi " * 40, "So?"] if raw else ["/system Be brief.", "Hi " * 40, "So?"]
    say(monkeypatch, *begin, f"/save {file}", "And?")
    assert run(few) == 0
    whole = capsys.readouterr()
    say(monkeypatch, "And?")
    assert run([*few, "--load", str(file)]) == 0
    rest = capsys.readouterr()
    assert whole.out.endswith(rest.out) and rest.out
    assert "4 messages" in rest.err
    counts = r"prompt of (\d+) tokens, (\d+) computed, (\d+) cached"
    last, again = (tuple(map(int, re.findall(counts, text)[-1])) for text in (whole.err, rest.err))
    assert again[0] == last[0] == sum(again[1:]) and again[1] <= last[1] and again[1] < 30 < 100 < again[2]
    say(monkeypatch, f"/load {file}", "And?")  # as a command
    assert run(few) == 0
    assert capsys.readouterr().out == rest.out


def test_what_a_full_context_has_dropped_stays_dropped(tmp_path):
    model = write_checkpoint(tmp_path / "small", seed=2, max_position_embeddings=64)
    fields = {"max_new_tokens": 6, "do_sample": False}
    with Engine(model, backend="numpy") as engine:
        talk = Conversation(engine)
        for number in range(6):
            "".join(talk.ask(f"Count {number}, please.", fields))
        assert talk.forgotten
        talk.save(tmp_path / "talk.safetensors")
        expected = "".join(talk.ask("And?", fields))
    with Engine(model, backend="numpy") as engine:
        again = Conversation(engine)
        again.load(tmp_path / "talk.safetensors")
        assert "".join(again.ask("And?", fields)) == expected
        assert (again.forgotten, again.messages) == (talk.forgotten, talk.messages)
        assert again.cached_tokens >= again.prompt_tokens - 10


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("talk.safetensors", ["--dtype", "int8"], "was computed with weights in 'float32', and"),
        ("cut.safetensors", [], "is truncated, damaged or no stored prefix"),
        ("none.safetensors", [], "cannot be read: No such file or directory"),
        ("text.safetensors", [], "has the keys and values of a text, and no conversation: name a file of /save"),
        ("none.json", [], "cannot be read: No such file or directory"),
        ("talk.safetensors", ["--system", "Be brief."], "--system: the conversation of --load has a system"),
    ],
)
def test_a_file_that_does_not_fit_ends_the_chat_with_one_line(
    name, options, reason, folder, tmp_path, monkeypatch, capsys
):
    model = ["--model", str(folder), "--backend", "numpy"]
    say(monkeypatch, "Hi", f"/save {tmp_path / 'talk.safetensors'}")
    assert run(["chat", *model, "--max-new-tokens", "2"]) == 0
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "talk.safetensors").read_bytes()[:-9])
    with Engine(folder, backend="numpy") as engine:
        engine.save_prefix(tmp_path / "text.safetensors", "Hi")
    capsys.readouterr()
    say(monkeypatch, "Hi")
    assert run(["chat", *model, *options, "--load", str(tmp_path / name)]) != 0
    captured = capsys.readouterr()
    assert captured.out == "" and reason in captured.err
    assert len(captured.err.splitlines()) <= 2 and "Traceback" not in captured.err


def test_nothing_said_is_not_saved_with_what_was_computed(folder, tmp_path):
    with Engine(folder, backend="numpy") as engine, pytest.raises(UsageError, match="nothing was said yet"):
        Conversation(engine).save(tmp_path / "talk.safetensors")
    assert not list(tmp_path.iterdir())
