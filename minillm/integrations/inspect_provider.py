"""minillm's models in Inspect (package `inspect-ai`), in this process: its provider "minillm", by an entry point.

    inspect eval task.py --model minillm/HuggingFaceTB/SmolLM2-135M-Instruct -M dtype=int8
    inspect eval task.py --model minillm/packaged

`-M` has arguments of `Engine`. Samples that run at once share a batch. In Python `get_model("minillm/NAME",
engine=engine)` takes an engine, which stays open.

Source: https://inspect.aisi.org.uk/extensions.html#model-apis, inspect-ai 0.3.285: `model/_model.py`
"""

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="minillm")  # type: ignore[untyped-decorator]
def minillm() -> type[ModelAPI]:
    """The provider, imported when it is first used."""
    from .inspect_model import MinillmAPI

    return MinillmAPI
