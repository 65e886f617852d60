"""The shape of a model: how many bytes its weights and its KV take, and how many operations a token costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What timing and memory depend on: a decoder of equal layers, dense, with full attention.

    Sizes count elements. An operation (flop) is a multiplication or an addition.

    Raises:
        ValueError: a size is not an int of at least 1, or the query heads are no multiple of the KV heads.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    """The longest context that the model was made for."""
    dtype_bytes: int = 2
    """Of one element of weights and KV."""
    gated_mlp: bool = True
    """Three matrices in an MLP (gate, up, down) instead of two."""
    tied_embeddings: bool = False
    """The head's matrix is the embedding's."""
    other_parameters: int = 0
    """Norms, biases, learned positions, projections of embeddings: in memory, but next to nothing to compute."""
    embedding_size: int | None = None
    """Numbers in the embedding of a token, where they are not `hidden_size`."""

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_context_tokens",
            "dtype_bytes",
        ):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field}={value!r} is not allowed: give an int of at least 1")
        if type(self.other_parameters) is not int or self.other_parameters < 0:
            raise ValueError(f"other_parameters={self.other_parameters!r} is not allowed: give an int of at least 0")
        if self.embedding_size is not None and (type(self.embedding_size) is not int or self.embedding_size < 1):
            raise ValueError(
                f"embedding_size={self.embedding_size!r} is not allowed: give an int of at least 1, or None"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not allowed with num_kv_heads={self.num_kv_heads}: "
                "give a multiple of it, as each KV head serves equally many query heads"
            )

    @property
    def layer_matrix_parameters(self) -> int:
        """Numbers in the matrices of all layers: each is multiplied with every token."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (query + key_value)  # q and output; k and v
        mlp = (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def embedding_parameters(self) -> int:
        """Numbers in the table of token embeddings, and in the head."""
        return self.vocab_size * (self.embedding_size or self.hidden_size)

    @property
    def parameters(self) -> int:
        """All numbers of the model, a tied matrix counted once."""
        tables = 1 if self.tied_embeddings else 2
        return self.layer_matrix_parameters + tables * self.embedding_parameters + self.other_parameters

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        return self.parameters * self.dtype_bytes

    @property
    def step_weight_bytes(self) -> int:
        """Weights that every step reads: all but an embedding that is not also the head, where rows are looked up."""
        looked_up = 0 if self.tied_embeddings else self.embedding_parameters
        return (self.parameters - looked_up) * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token, all layers and KV heads."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def flops_per_token(self) -> int:
        """Of the layers' matrices for one token: two for each number. Without attention, and without the head."""
        return 2 * self.layer_matrix_parameters

    @property
    def head_flops(self) -> int:
        """To get one position's logits."""
        return 2 * self.embedding_parameters

    @property
    def attention_flops_per_pair(self) -> int:
        """Of scores and weighted sum for one query and one key, all layers and query heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    def attention_flops(self, new_tokens: int, cached_tokens: int = 0) -> int:
        """Of causal attention of `new_tokens` tokens to `cached_tokens` before them and to each other.

        Counts `new * (cached + new / 2)` pairs, so half of the diagonal: the chunks of a prompt add up to the whole.
        """
        return self.attention_flops_per_pair * new_tokens * (2 * cached_tokens + new_tokens) // 2
