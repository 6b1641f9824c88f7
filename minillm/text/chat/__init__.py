"""Conversations as prompts in the format a model was trained on: messages, tools, the checkpoint's chat template."""

from .answer_parser import AnswerParser
from .call_grammar import call_grammar
from .call_parser import CallParser, parser_of, read_calls
from .calls import FORMATS, Answer, CallFormat, ToolCall
from .reasoning import REASONING_FORMATS, ReasoningFormat, split_reasoning
from .template import RENDER_ARGUMENTS, ChatTemplate, Messages, refuse_documents
from .tools import read_tools

__all__ = [
    "FORMATS",
    "REASONING_FORMATS",
    "RENDER_ARGUMENTS",
    "Answer",
    "AnswerParser",
    "CallFormat",
    "CallParser",
    "ChatTemplate",
    "Messages",
    "ReasoningFormat",
    "ToolCall",
    "call_grammar",
    "parser_of",
    "read_calls",
    "read_tools",
    "refuse_documents",
    "split_reasoning",
]
