"""Conversations as prompts in the format a model was trained on: messages, tools, the checkpoint's chat template."""

from .call_grammar import call_grammar
from .call_parser import CallParser, read_calls
from .calls import FORMATS, Answer, CallFormat, ToolCall
from .template import RENDER_ARGUMENTS, ChatTemplate, Messages, refuse_documents
from .tools import read_tools

__all__ = [
    "FORMATS",
    "RENDER_ARGUMENTS",
    "Answer",
    "CallFormat",
    "CallParser",
    "ChatTemplate",
    "Messages",
    "ToolCall",
    "call_grammar",
    "read_calls",
    "read_tools",
    "refuse_documents",
]
