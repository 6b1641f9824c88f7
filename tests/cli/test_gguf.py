"""The command line on GGUF files: every command takes one, and a folder with several asks which."""

import shutil

import numpy as np
import pytest

from minillm import Engine
from minillm.cli.main import run
from minillm.errors import CheckpointError, ModelNotFoundError, ParameterError
from minillm.formats.gguf.write import write_gguf

from ..formats.test_gguf_writing import CONFIGS, write_folder
from ..gguf_files import write_llama


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, and the file made of it."""
    folder = tmp_path_factory.mktemp("gguf")
    source = write_folder(folder / "source", CONFIGS["qwen2"]["plain"])
    write_gguf(source, folder / "m.gguf", "int8")
    return source, folder / "m.gguf"


def out(capsys, *args):
    assert run([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


@pytest.mark.longer
def test_every_command_takes_a_file(made, capsys, tmp_path):
    _, file = made
    (tmp_path / "text").write_text("Hello there, how are you?", encoding="utf-8")
    assert out(capsys, "generate", "--model", file, "--prompt", "Hello", "--max-new-tokens", "4")
    assert '"He"' in out(capsys, "tokenize", "--model", file, "--prompt", "Hello")
    assert "would say next" in out(capsys, "inspect", "--model", file, "--prompt", "Hello")
    assert "int8" in out(capsys, "analyze", file, "--hardware", "a100")
    assert out(capsys, "perplexity", "--model", file, "--text", tmp_path / "text", "--dtype", "auto")


def test_quantize_writes_a_file(made, capsys, tmp_path):
    source, file = made
    out(capsys, "quantize", source, tmp_path / "again.gguf", "--dtype", "int8")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


def test_a_folder_with_one_file_stands_for_it(made, tmp_path):
    shutil.copyfile(made[1], tmp_path / "m.gguf")
    with Engine(tmp_path) as engine:
        assert engine.config.model_type == "qwen2"


def test_a_folder_with_several_files_asks_which(made, tmp_path):
    for name in ("b.gguf", "a.gguf"):
        shutil.copyfile(made[1], tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds several GGUF files: name one of a\.gguf, b\.gguf"):
        Engine(tmp_path)
    with Engine(tmp_path / "a.gguf") as engine:
        assert engine.tokenizer is not None


def test_a_revision_of_a_file_is_refused(made):
    with pytest.raises(ParameterError, match="revision 'main' has no effect on the local file"):
        Engine(made[1], revision="main")


def test_a_tokenizer_and_a_draft_from_files(made):
    source, file = made
    with Engine(source, tokenizer=file, draft=file, backend="numpy") as engine, Engine(file, backend="numpy") as alone:
        assert engine.tokenizer.encode("Hello") == alone.tokenizer.encode("Hello")
        assert engine.generate([5, 6], max_new_tokens=3).token_ids


def test_shards_are_one_model(tmp_path):
    import gguf

    write_llama(tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", split_max_tensors=8)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shards = sorted(tmp_path.glob("m-*.gguf"))
    assert len(shards) > 2
    (tmp_path / "whole.gguf").rename(tmp_path / "whole")
    with Engine(tmp_path / "whole") as whole, Engine(tmp_path) as folder, Engine(shards[1]) as second:
        np.testing.assert_allclose(folder.forward([1, 2]), whole.forward([1, 2]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second.forward([1, 2]), whole.forward([1, 2]), rtol=1e-4, atol=1e-4)
    shards[-1].unlink()
    with pytest.raises(CheckpointError, match=rf"is the first of {len(shards)} files, and .* is missing"):
        Engine(tmp_path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        Engine(tmp_path / "no.gguf")
