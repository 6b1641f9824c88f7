"""minillm chat: a conversation in the terminal, which keeps the K/V cache between turns."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends import working_time
from ..decoding.checkpoint_fields import chat_sampling
from ..decoding.fields import FIELDS
from ..decoding.settings import is_on
from ..errors import MinillmError, ParameterError, PromptError, UsageError, listed, printable
from ..progress import showing
from .conversation import Conversation, Thought
from .options import (
    COMMON,
    add_generation_options,
    add_model_options,
    generation_fields,
    load_engine,
    resolve_settings,
    sequences_of,
)
from .output import columns_of, flow, note, read_first, show, terminal_width, text_alone
from .parser import Parser

if TYPE_CHECKING:
    from ..engine.engine import Engine

DESCRIPTION = (
    "Chat with the model, turn by turn, in the format of its chat template; a model without one continues each message "
    "as raw text. The model sees the whole conversation, of which only the new part is computed. /help lists commands; "
    "Ctrl-C stops an answer, Ctrl-D ends the chat. Without a terminal, each line of standard input is a message."
)
PROMPT = "> "
SAMPLING = "By default as the checkpoint says, else temperature 0.8 with min-p 0.05; temperature 0 is greedy search."
HISTORY_LIMIT = 1 << 20
"""Bytes of the history file; a longer one begins anew"""


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("conversation", "For models with a chat template.")
    group.add_argument("--system", metavar="TEXT", help="system message, before the first turn")
    group.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="""more variables for the chat template, such as '{"enable_thinking": false}'""",
    )
    add_model_options(parser, parallel=True, chosen="--lora")
    add_generation_options(parser, words={"sampling": SAMPLING})
    parser.add_argument("--load", type=Path, metavar="FILE", help="go on with a conversation that /save has written")
    parser.add_argument("--stats", action="store_true", help="after each turn: tokens computed and found in the cache")
    parser.shorten(COMMON)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from ..decoding.prompts import need_tokenizer

    if sys.stdin is None:
        raise PromptError("standard input is closed: a chat reads its lines from it")
    fields, variables = generation_fields(args), _variables(args.chat_template_kwargs)
    if fields.get("num_return_sequences", 1) > 1:
        raise ParameterError("--num-return-sequences: a chat continues with one answer: leave it out")
    fields["num_return_sequences"] = 1  # overrides the checkpoint's default
    name = Path(args.model).name if args.model else "the model in the package"
    engine = load_engine(args, sequences=sequences_of(resolve_settings(args, fields)))
    need_tokenizer(engine.tokenizer)  # before a line is read
    defaults = engine.generation_defaults
    if not (
        is_on("num_beams", defaults.get("num_beams") or 1) or defaults.get("penalty_alpha")
    ):  # its own search stays
        engine.generation_defaults = {**defaults, **chat_sampling(defaults)}
    if engine.chat_template is None:
        for option in ("system", "chat_template_kwargs"):
            if getattr(args, option) is not None:
                raise ParameterError(f"--{option.replace('_', '-')}: this model has no chat template: leave it out")
        print("This model has no chat template: each message is continued as raw text.", file=sys.stderr)
    chat = Chat(Conversation(engine, args.system, variables), fields, name, show_stats=args.stats)
    if args.load is not None:
        if args.system is not None:
            raise ParameterError("--system: the conversation of --load has a system message, or none: leave one out")
        chat.load(args.load)
    if sys.stdin.isatty():
        chat.run_in_terminal()
    else:
        chat.run_lines()


def _variables(text: str | None) -> dict[str, Any]:
    """Parse --chat-template-kwargs."""
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ParameterError(f'--chat-template-kwargs should be a JSON object, such as {{"a": 1}}, found {text!r:.40}')
    return value


class Chat:
    """The loop of messages and commands."""

    def __init__(
        self, conversation: Conversation, fields: dict[str, Any], name: str, *, show_stats: bool = False
    ) -> None:
        """Args:
        conversation: with the model
        fields: fields of `GenerationConfig`; `/set` changes them
        name: the model's, for the banner
        show_stats: print statistics after each answer
        """
        self.conversation = conversation
        self.fields = fields
        self.name = name
        self.show_stats = show_stats
        self._rate = 0.0  # tokens per second of the last answer

    def load(self, path: Path) -> None:
        """Go on with a saved conversation, and say how long it is."""
        self.conversation.load(path)
        note(f"{len(self.conversation.messages)} messages")

    @property
    def asked(self) -> dict[str, Any]:
        """The fields of a request. Beam search does not sample unless that is asked for."""
        return _without_sampled_beams(self.fields)

    @property
    def engine(self) -> "Engine":
        """The conversation's engine."""
        return self.conversation.engine

    def run_lines(self) -> None:
        """Take each line of standard input as a message or a command, until it ends. An error ends the chat.

        Raises:
            MinillmError: the first message or command that fails.
        """
        while (line := _read_line()) is not None:
            if line.strip() and not self._handle(line):
                break

    def run_in_terminal(self) -> None:
        """Converse until /quit or Ctrl-D. Ctrl-C stops an answer; an error is shown, and the chat goes on."""
        from ..models.base import stored_format

        signal.signal(signal.SIGINT, signal.default_int_handler)
        runner, context = self.engine.runner, f"context {self.engine.context:,} tokens"
        dtype = stored_format(runner.model).name
        note(f"{self.name} · {dtype} · {runner.backend.name} · {context} · /help lists commands, Ctrl-D ends")
        read = _editor(self._toolbar)
        while True:
            try:
                line = read()
                if line is None or (line.strip() and not self._handle(line)):
                    return
            except KeyboardInterrupt:  # an answer stays as far as it is; a line that was typed goes
                continue
            except MinillmError as error:
                note(str(error))

    def _toolbar(self) -> str:
        """The line below the prompt: the name, and more as far as it fits."""
        used, holds = self.conversation.used_tokens, self.engine.context
        rate = f" · {self._rate:.0f} tokens/s" if self._rate else ""
        numbers = f"{used:,} of {holds:,} tokens{rate}"
        full, width = f" {self.name} · {numbers} · /help", terminal_width()
        return full if width is None or columns_of(full) <= width else f" {numbers}"

    def _handle(self, line: str) -> bool:
        """Do what a line says. Returns False for the end."""
        if not line.startswith("/"):
            self._print(self.conversation.ask(line, self.asked))
            return True
        word, _, rest = line[1:].partition(" ")
        commands = ((method, arguments) for names, method, arguments, _ in COMMANDS if word in names.split())
        command = next(commands, None)
        if command is None:
            raise UsageError(f"no command /{word}: /help lists them; a message may begin with a space and then a /")
        method, arguments = command
        if rest.strip() and not arguments:
            raise UsageError(
                f"/{word} stands alone, found {rest.strip()!r:.40} after it; a message may begin with a space"
            )
        return method(self, rest.strip()) is not False

    def _print(self, pieces: Iterator[str]) -> None:
        """Print an answer as it is generated, then what is to say about it."""
        conversation, forgotten = self.conversation, self.conversation.forgotten
        conversation.answer_tokens = 0
        with text_alone(), _without_echo(), closing(pieces):  # type: ignore[type-var]  # a generator
            answer = read_first(pieces)
            began = working_time()
            with showing(False):
                try:
                    show_answer(answer)
                finally:
                    print(flush=True)
                    elapsed, tokens = working_time() - began, conversation.answer_tokens
                    self._rate = (tokens - 1) / elapsed if tokens > 1 and elapsed > 0 else 0.0
        if conversation.forgotten > forgotten:
            gone = (conversation.forgotten + 1) // 2
            note(f"the context is full: the model no longer sees the first {gone} exchange{'s' * (gone > 1)}")
        if conversation.finish_reason == "length" and sys.stdin.isatty():
            count = f"{tokens} token{'s' * (tokens > 1)}"
            note(f"stopped at the limit, after {count}: /more goes on, /set max_new_tokens changes it")
        if self.show_stats:
            self._stats("")

    # --- commands ------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        rows = [(f"/{names.split()[0]} {arguments}", text) for names, _method, arguments, text in COMMANDS]
        for word, text in (*rows, ("Alt-Enter, Ctrl-J", "a new line in a message; pasted text is one message")):
            print("\n".join(flow(f"{word:<22} ", text.split(), terminal_width())))

    def _clear(self, _: str) -> None:
        self.conversation.clear()

    def _retry(self, _: str) -> None:
        self._print(self.conversation.retry(self.asked))
        if not draws_afresh(self.engine, self.asked):
            note("the same settings give the same answer: /set temperature 0.8 lets it vary")

    def _more(self, _: str) -> None:
        self._print(self.conversation.more(self.asked))

    def _undo(self, _: str) -> None:
        note(f"taken back: {self.conversation.undo():.60}")

    def _system(self, text: str) -> None:
        if text:
            self.conversation.set_system(None if text == "none" else text)
        else:
            print(self.conversation.system or "no system message")

    def _save(self, path: str) -> None:
        self.conversation.save(_path(path), lora=self.fields.get("lora"))

    def _load(self, path: str) -> None:
        self.load(_path(path))

    def _set(self, text: str) -> None:
        word, _, value = text.partition(" ")
        if not word:
            fields = {name: value for name, value in self.fields.items() if name != "num_return_sequences"}
            print("\n".join(f"{name} {value}" for name, value in fields.items()) or "nothing is set")
            return
        changed = changed_fields(self.fields, word.lstrip("-").replace("-", "_"), value.strip())
        self.engine.request([0], **_without_sampled_beams(changed))  # raises where they do not go together
        self.fields.clear()
        self.fields.update(changed)

    def _stats(self, _: str) -> None:
        last = self.conversation
        prompt = f"prompt of {last.prompt_tokens} tokens, {last.computed_tokens} computed, {last.cached_tokens} cached"
        note(f"{prompt}; {self._rate:.1f} tokens/s")

    def _quit(self, _: str) -> bool:
        return False


COMMANDS: tuple[tuple[str, Callable[[Chat, str], bool | None], str, str], ...] = (
    ("help ?", Chat._help, "", "this list"),
    ("clear new", Chat._clear, "", "forget what was said; the system message stays"),
    ("retry", Chat._retry, "", "answer the last message again"),
    ("more", Chat._more, "", "continue an answer that was stopped"),
    ("undo", Chat._undo, "", "take back the last message and its answer"),
    ("system", Chat._system, "[TEXT|none]", "show or replace the system message"),
    ("set", Chat._set, "[NAME VALUE]", "show or change a generation field: /set temperature 0.7, /set seed default"),
    ("save", Chat._save, "FILE", "write the conversation as JSON; to a *.safetensors also what was computed of it"),
    ("load", Chat._load, "FILE", "go on with a saved conversation"),
    ("stats", Chat._stats, "", "tokens and speed of the last answer"),
    ("quit exit bye", Chat._quit, "", "end the chat; so does Ctrl-D"),
)
"""Names of a command, its method, its arguments, its help."""


def show_answer(pieces: Iterator[str]) -> None:
    """Print an answer piece by piece; thoughts dim and apart on a terminal, on standard error if only that is one."""
    terminal, thinking = sys.stdout.isatty(), False
    dim = terminal and not os.environ.get("NO_COLOR")
    for piece in pieces:
        if isinstance(piece, Thought) and not terminal:
            show(piece, end="", file=sys.stderr)
            continue
        if piece and isinstance(piece, Thought) != thinking:
            thinking = not thinking
            print(("\x1b[2m" if thinking else "\x1b[0m") if dim else "", end="" if thinking else "\n\n", flush=True)
        show(piece, end="")
    if thinking and dim:
        print("\x1b[0m", end="", flush=True)


def changed_fields(fields: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """Generation fields with one of them set as typed: a value, `on` or `off` for a switch, `default` to unset it.

    Raises:
        ParameterError: there is no such field, or the value is none of it.
    """
    names = [name for name, setting in FIELDS.items() if setting.flag and setting.group not in ("output", "guided")]
    if name not in names or name == "num_return_sequences":
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {listed(names, 300)}"
        raise ParameterError(f"no field {printable(name)} to set: {hint}")
    setting, changed = FIELDS[name], dict(fields)
    changed.pop(name, None)
    if name == "temperature" and value in ("0", "0.0"):  # as other programs say greedy search
        effective = {
            name: value for name, value in changed.items() if FIELDS[name].needs not in ("do_sample", "mirostat")
        }
        return effective | {"do_sample": False}
    if value == "default":
        if name == "temperature" and changed.get("do_sample") is False:
            del changed["do_sample"]
        return changed
    try:
        if " " not in (setting.flag or ""):  # a switch
            changed[name] = {"on": True, "off": False}[value]
        else:
            words = [setting.read.word(word) for word in (value.split() if setting.read.many else [value])]
            changed[name] = words if setting.read.many else words[0]
        setting.read(changed[name])
    except (KeyError, ValueError):
        expected = "on or off" if " " not in (setting.flag or "") else setting.read.expected
        expected = "a number, 0 for greedy search" if name == "temperature" else expected
        raise ParameterError(f"{name} should be {expected}, or default; found {value!r:.40}") from None
    if setting.needs in ("do_sample", "mirostat"):
        changed["do_sample"] = True
    return changed


def _without_sampled_beams(fields: dict[str, Any]) -> dict[str, Any]:
    return {"do_sample": False} | fields if fields.get("num_beams", 1) > 1 else fields


def draws_afresh(engine: "Engine", fields: dict[str, Any]) -> bool:
    """True if requests with these fields draw random numbers that no seed fixes."""
    settings = engine.request([0], **fields).settings
    return bool(settings.do_sample) and "seed" not in fields


@contextmanager
def _without_echo() -> Iterator[None]:
    """Keys typed inside the `with` block do not show in the answer: they wait for the next prompt."""
    try:
        import termios
    except ImportError:  # not on Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _path(text: str) -> Path:
    if not text:
        raise UsageError("name a file")
    return Path(text).expanduser()


def _read_line() -> str | None:
    """One line of standard input; None at its end."""
    try:
        return input()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input should be UTF-8 text; byte {error.start} is not") from None


def _editor(toolbar: Callable[[], str]) -> Callable[[], str | None]:
    """A function that reads a message from the terminal, with editing and the history of earlier chats."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = _history_file()
    session: PromptSession[str] = PromptSession(
        history=InMemoryHistory() if path is None else FileHistory(path),
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        bottom_toolbar=toolbar,
    )

    def read() -> str | None:
        try:
            return session.prompt(PROMPT)
        except EOFError:
            return None

    return read


def _history_file() -> Path | None:
    """The file of earlier messages, which only the user can read; None if there can be none."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "minillm"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        too_long = path.exists() and path.stat().st_size > HISTORY_LIMIT
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if too_long else 0), 0o600))
    except OSError:
        return None
    return path
