"""The magic `%%minillm` of Jupyter and IPython: a cell, or the rest of a line, is the prompt.

    %load_ext minillm

    %%minillm --max-new-tokens 20 --temperature 0.8
    Once upon a time

The options are those of `minillm generate`. The text appears as it is generated. In a notebook each token then has its
shade, the deeper the less likely it was; `--top-logprobs 3` adds the alternatives. The `Generation` is the cell's value
(`_`, `Out`). `--model` is what `Engine` loads, or a variable that holds an engine. A model stays loaded until another
is named; an engine of yours stays open.

Source: https://ipython.readthedocs.io/en/stable/config/custommagics.html, IPython 9
"""

import argparse
import shlex
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.display import clear_output

from ..cli.generate import limited
from ..cli.options import COMMON, add_generation_options, add_model_options, engine_options, generation_fields
from ..cli.output import show
from ..cli.parser import Parser
from ..engine.engine import Engine
from ..engine.results import Generation
from ..errors import MinillmError, PromptError

DESCRIPTION = "Continue the text of the cell, or of the line."


class MinillmMagic:
    """The magic of one shell, with the engine that it has loaded."""

    def __init__(self, shell: Any) -> None:
        """A magic for an IPython shell; nothing is loaded before the first prompt."""
        self.shell, self.parser = shell, _parser()
        self._engine: Engine | None = None
        self._options: dict[str, Any] = {}

    def __call__(self, line: str, cell: str | None = None) -> Generation | None:
        """Continue a cell, without its last line break, or the text in the line; None after --help.

        Raises:
            UsageError: a wrong option, or the error of the engine, which IPython shows in one line.
        """
        try:
            args = self.parser.parse_args(shlex.split(line))
            return self._continue(args, cell)
        except SystemExit:  # after --help
            return None
        except (MinillmError, ValueError) as error:  # shlex raises a ValueError
            raise UsageError(str(error)) from None

    def close(self) -> None:
        """Free the model that is loaded."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._options = None, {}

    def _continue(self, args: argparse.Namespace, cell: str | None) -> Generation:
        if (cell is None) == (args.text is None):
            raise PromptError("the prompt is the text of the cell below %%minillm, or stands in quotes after %minillm")
        prompt = args.text if cell is None else cell.removesuffix("\n")
        engine, fields = self._engine_of(args), {"logprobs": True} | generation_fields(args)
        if args.chat:
            events = engine.stream_chat([{"role": "user", "content": prompt}], **fields)
        else:
            events = engine.stream(prompt, **limited(engine, fields))
        seen = []
        for event in events:
            seen.append(event)
            if event.index == 0:
                show(event.text, end="")
        if hasattr(self.shell, "kernel"):  # a notebook, which shows the value in place of the text
            clear_output(wait=True)
        else:
            print()
        return Generation.of(events.request.given_ids, seen, engine.tokenizer, events.request.thoughts)

    def _engine_of(self, args: argparse.Namespace) -> Engine:
        """The engine in the variable that `--model` names, else the one with the options, loaded if it is not yet."""
        options = engine_options(args)
        variable = self.shell.user_ns.get(args.model)
        if isinstance(variable, Engine):
            if options:
                raise PromptError(f"{min(options)} is an option of Engine, and {args.model} is an engine: set it there")
            return variable
        options |= {"model": args.model}
        if self._engine is None or options != self._options:
            self.close()
            self._engine, self._options = Engine(**options), options
        return self._engine


class MagicParser(Parser):
    """A parser whose errors are IPython's."""

    def error(self, message: str) -> NoReturn:
        """Raise an error that IPython shows in one line."""
        raise UsageError(message)


def _parser() -> Parser:
    parser = MagicParser(prog="%%minillm", description=DESCRIPTION)
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="of %%minillm in a line: the prompt, in quotes")
    parser.add_argument(
        "--chat", action="store_true", help="answer the text as a message, by the model's chat template"
    )
    add_model_options(parser, chosen="--lora")
    add_generation_options(parser, output=True)
    parser.shorten(COMMON | {"chat"})
    return parser
