"""What a forward pass costs, from a configuration alone: closed forms in the letters of `notation.py`.

Nothing here looks at an operation or at what it says it costs. `backends/counting.py` adds those up over the calls
really made; that both come to the same number, exactly, is what tests and benchmarks hold. What counts as a FLOP is
said in `ops/cost.py`.

With W the width of the token embedding (E but for opt-350m), and b, g, a, r = 1 or 0 where the model has biases,
gains in its norms, and so on, a step of T new tokens, of which R go through the head, takes

    embedding   T E                                       (+ 2 T W E where W < E)
    norm        T (5 E + 5) + 2 g T E                     each of them
    attention   2 T E (H + 2 K) D + b T (H + 2 K) D       project Q, K, V
                + T H D + (4 D + 4) H pairs               scale Q; scores, softmax, values
                + 2 T H D E + b T E + T E                 project out, residual
    MLP         2 T E F + b T F + a T F                   up, activation
                + 2 T F E + b T E + T E                   down, residual
    head        2 R W V                                   (+ 2 R E W where W < E)

where `pairs` counts, over all sequences, the pairs of a new token and a position that it sees.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .models.opt import POSITION_OFFSET, OPTConfig

ACTIVATION_FLOPS = {"relu": 1, "gelu": 20}
"""a, for each element: one comparison; or GELU through the erf of Abramowitz and Stegun, 7.1.26."""


class Part(NamedTuple):
    """What one sequence brings to a step."""

    new: int
    """Its new tokens: all of a prompt, one in decoding"""
    context: int
    """S: cached positions and the new ones"""

    @property
    def pairs(self) -> int:
        """Pairs of a new token and a position that it sees, itself included.

        The new tokens stand at the end of the context, so the last sees all S, the one before it S - 1, and so on:
        n S - n (n - 1) / 2.
        """
        return self.new * self.context - self.new * (self.new - 1) // 2


class Step(NamedTuple):
    """One forward pass."""

    parts: tuple[Part, ...]
    rows: int
    """R: how many rows go through the head"""

    @property
    def tokens(self) -> int:
        """T"""
        return sum(part.new for part in self.parts)

    @property
    def pairs(self) -> int:
        """Pairs of all sequences."""
        return sum(part.pairs for part in self.parts)


def generation(prompt_lengths: Sequence[int], new_tokens: int, *, use_cache: bool) -> Iterator[Step]:
    """The forward passes that generate `new_tokens` after each prompt.

    The first computes the prompts and gives the first token; the token that comes out last is never fed. With a
    cache each later step computes one token of each sequence, the naive way computes all of them again. A prompt that
    is computed in chunks, or a batch that runs in several, takes other steps and the same FLOPs.
    """
    for done in range(new_tokens):
        contexts = [length + done for length in prompt_lengths]
        parts = tuple(Part(1 if use_cache and done else context, context) for context in contexts)
        yield Step(parts, len(parts))


def flops(config: OPTConfig, steps: Iterable[Step]) -> int:
    """FLOPs of some forward passes."""
    return sum(step_flops(config, step) for step in steps)


def step_flops(config: OPTConfig, step: Step) -> int:
    """FLOPs of one forward pass: the module's table, summed."""
    T = step.tokens
    layer = 2 * norm_flops(config, T) + attention_flops(config, T, step.pairs) + mlp_flops(config, T)
    final_norm = norm_flops(config, T) if config.final_norm else 0
    return embedding_flops(config, T) + config.num_layers * layer + final_norm + head_flops(config, step.rows)


def embedding_flops(config: OPTConfig, T: int) -> int:
    """Token embedding, projected where it is narrower, plus position embedding."""
    E, W = config.hidden_size, config.embedding_size
    return T * E + (2 * T * W * E if W != E else 0)


def norm_flops(config: OPTConfig, T: int) -> int:
    """One layer norm: T (5 E + 5), and 2 T E more with gain and bias.

    Five for each element: the mean's sum, the difference, the square and its sum, the scaling. Five for each row: two
    divisions by E, epsilon's addition, the root, its reciprocal.
    """
    E = config.hidden_size
    return T * (5 * E + 5) + 2 * config.norm_affine * T * E


def attention_flops(config: OPTConfig, T: int, pairs: int) -> int:
    """Self-attention of one layer: projections in, attention, projection out, residual.

    Args:
        config: the model
        T: new tokens
        pairs: of a new token and a position that it sees; for each and each head 2 D for the score, 4 for softmax
            (subtraction, exponential, sum, division) and 2 D for the value
    """
    E, H, K, D, b = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim, config.biases
    project_qkv = 2 * T * E * (H + 2 * K) * D + b * T * (H + 2 * K) * D
    attend = T * H * D + (4 * D + 4) * H * pairs
    project_out = 2 * T * H * D * E + b * T * E + T * E
    return project_qkv + attend + project_out


def mlp_flops(config: OPTConfig, T: int) -> int:
    """The feed-forward part of one layer: up, activation, down, residual."""
    E, F, b, a = config.hidden_size, config.intermediate_size, config.biases, ACTIVATION_FLOPS[config.activation]
    return 2 * T * E * F + b * T * F + a * T * F + 2 * T * F * E + b * T * E + T * E


def head_flops(config: OPTConfig, R: int) -> int:
    """The language model head, through the narrower width where there is one."""
    E, V, W = config.hidden_size, config.vocab_size, config.embedding_size
    return 2 * R * W * V + (2 * R * E * W if W != E else 0)


def parameter_count(config: OPTConfig) -> int:
    """Numbers that the checkpoint holds; a tied head is the token embedding and counts once.

    V W + (positions + 2) E + L (layer) + final norm, and 2 W E where W < E, and V W where the head is not tied; a
    layer has E (H + 2 K) D + H D E + 2 E F weights, (H + 2 K) D + E + F + E biases and 2 norms of 2 E.
    """
    E, F, V, W = config.hidden_size, config.intermediate_size, config.vocab_size, config.embedding_size
    H, K, D, b, g = config.num_heads, config.num_kv_heads, config.head_dim, config.biases, config.norm_affine
    weights = E * (H + 2 * K) * D + H * D * E + 2 * E * F
    biases = (H + 2 * K) * D + E + F + E
    layer = weights + b * biases + g * 2 * 2 * E
    embeddings = V * W + position_parameters(config) + (2 * W * E if W != E else 0)
    head = 0 if config.tied_head else V * W
    return embeddings + config.num_layers * layer + config.final_norm * g * 2 * E + head


def vector_parameters(config: OPTConfig) -> int:
    """Those numbers of `parameter_count` that are biases, or gains and biases of norms."""
    E, F, H, K, D = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = config.biases * ((H + 2 * K) * D + E + F + E) + config.norm_affine * 2 * 2 * E
    return config.num_layers * layer + config.final_norm * config.norm_affine * 2 * E


def weight_bytes(config: OPTConfig, number: int) -> int:
    """Memory for all parameters at `number` bytes each; biases and norms at 4."""
    vectors = vector_parameters(config)
    return (parameter_count(config) - vectors) * number + vectors * 4


def cache_bytes(config: OPTConfig, positions: int, number: int) -> int:
    """Memory for keys and values of so many positions: 2 L K D numbers each."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * number


def result_bytes(config: OPTConfig, T: int, R: int, number: int) -> int:
    """Memory for the results of a pass of T tokens with R rows of logits.

    Two layers are held at a time (`backends/arena.py`). In each the two norms and what is added to the residual, 4 E;
    Q, K and V, (H + 2 K) D; attention, H D; the inside of the MLP, F. The logits, in 4 bytes, take the place of
    attention's result once the layers are done.
    """
    E, F, H, K, D = config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = 4 * E + (H + 2 * K) * D + H * D + F
    return 2 * T * layer * number + max(0, R * config.vocab_size * 4 - T * H * D * number)


def position_parameters(config: OPTConfig) -> int:
    """Numbers in the position table, of which a step reads only a row for each token."""
    return (config.max_positions + POSITION_OFFSET) * config.hidden_size
