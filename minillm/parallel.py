"""The processes that share a model, and the part of it that each has.

Tensor parallelism (Shoeybi et al., "Megatron-LM", arXiv 1909.08053) shares each layer: a rank has some of the heads, of
the MLP's columns and of the vocabulary, and the ranks' results are summed. Pipeline parallelism shares the layers: a
stage computes some and sends the hidden states to the next. With both, each stage is shared by `tensor` ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ParameterError

__all__ = ["Parallel"]

MICRO_BATCH_TOKENS = 32
"""The least tokens in a part of a pass: with fewer a stage takes as long for a part as for all of them"""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Degrees of tensor and pipeline parallelism."""

    tensor: int = 1
    """Devices that share each matrix"""
    pipeline: int = 1
    """Stages, each with a share of the layers"""
    micro_batches: int | None = None
    """Parts of a pass on which the stages work at the same time; by default two for each stage. A pass with few tokens
    has fewer: the weights are read for each part"""

    def __post_init__(self) -> None:
        degrees = {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline}
        if self.micro_batches is not None:
            degrees["micro_batches"] = self.micro_batches
        for name, value in degrees.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ParameterError(f"{name} should be a whole number from 1, found {value!r:.60}")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tensor * self.pipeline

    def micro_batches_of(self, tokens: int) -> int:
        """Number of parts of a pass. With M of them and S stages, a stage waits for (S - 1) / (M + S - 1) of the time
        (Huang et al., "GPipe", arXiv 1811.06965, section 2.3).
        """
        if self.pipeline == 1:
            return 1
        most = 2 * self.pipeline if self.micro_batches is None else self.micro_batches
        return max(1, min(most, tokens // MICRO_BATCH_TOKENS))

    def stage_of(self, rank: int) -> int:
        """Number of a rank's stage: neighbouring ranks, which often share a machine, share a stage."""
        return rank // self.tensor

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    def check_layers(self, layers: int, encoder_layers: int = 0, per_layer_width: int = 0) -> None:
        """Check that a model's layers can be shared by the stages.

        Raises:
            ParameterError: there are more stages than layers; or several, and an encoder beside the decoder, or
                embeddings of single layers.
        """
        if self.pipeline > max(layers, 1):  # static embeddings have no layers
            raise ParameterError(f"pipeline_parallel {self.pipeline} is more than the model's num_layers {layers}")
        if encoder_layers and self.pipeline > 1:
            raise ParameterError(
                f"pipeline_parallel {self.pipeline} is not offered with an encoder-decoder, each of whose decoder's "
                "layers reads the encoder's result: use tensor_parallel"
            )
        if per_layer_width and self.pipeline > 1:
            raise ParameterError(
                f"pipeline_parallel {self.pipeline} is not offered with per-layer embeddings, which are computed "
                "before the first layer: use tensor_parallel"
            )

    def layers_of(self, rank: int, sizes: Sequence[int]) -> range:
        """The layers of a rank's stage.

        Args:
            rank: the rank
            sizes: what a token costs in each layer, and at the end in the LM head, in any unit. The stages are cut so
                that the most expensive one costs as little as possible, and every one has a layer.

        Raises:
            ParameterError: there are more stages than layers.
        """
        L = len(sizes) - 1
        self.check_layers(L)
        costs = [*sizes[: L - 1], sizes[L - 1] + sizes[L]]  # the head is in the last stage
        bounds = _balanced(costs, self.pipeline)
        stage = self.stage_of(rank)
        return range(bounds[stage], bounds[stage + 1])


def _balanced(costs: Sequence[int], parts: int) -> list[int]:
    """The cuts of a list into contiguous parts, none empty, whose largest sum is least. [parts + 1]"""
    L = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [sums[:]]  # [p - 1][n]: the least largest sum of the first n in p parts
    cuts: list[list[int]] = []
    for part in range(1, parts):
        row, cut = [0] * (L + 1), [0] * (L + 1)
        for n in range(part + 1, L + 1):
            cut[n] = min(range(part, n), key=lambda m: max(best[-1][m], sums[n] - sums[m]))
            row[n] = max(best[-1][cut[n]], sums[n] - sums[cut[n]])
        best.append(row)
        cuts.append(cut)
    bounds = [L]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return [0, *reversed(bounds)]
