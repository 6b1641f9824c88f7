"""A model for the tests of other tools: the packaged one with a chat template that has tools, thoughts or neither."""

import json
import shutil
from pathlib import Path

from minillm.engine.loading import DEMO_MODEL

from ..task_models import BERT, write_task_model

PLAIN = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
TOOLS = Path(__file__).parents[1] / "data" / "tool_templates" / "hermes.jinja"


def write_model(folder: Path, template: str) -> Path:
    """A copy of the packaged model with a chat template."""
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def write_encoder(folder: Path) -> Path:
    """A tiny BERT whose checkpoint has a prompt for questions and another one for documents."""
    write_task_model(folder, BERT, seed=1)
    files = {
        "modules": [
            {"path": "", "type": "sentence_transformers.models.Transformer"},
            {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "config_sentence_transformers": {"prompts": {"query": "good ", "document": "bad "}},
        "1_Pooling/config": {"word_embedding_dimension": BERT["hidden_size"], "pooling_mode_mean_tokens": True},
    }
    (folder / "1_Pooling").mkdir()
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
