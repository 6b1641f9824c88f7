"""Conversations as prompts in the format a model was trained on: messages, and the checkpoint's chat template."""

from .template import RENDER_ARGUMENTS, ChatTemplate, Messages, refuse_tools

__all__ = ["RENDER_ARGUMENTS", "ChatTemplate", "Messages", "refuse_tools"]
