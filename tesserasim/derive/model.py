"""What a model is, as far as its kernels are concerned; parameters and KV bytes follow from it.

Counts are of the whole model, before any sharding. All widths are in elements.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_BYTES = 2  # of one number in the cache: bf16


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention. `window`: keys that a query sees; 0: all before it."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # an RMS norm over each head of queries and keys
    sinks: bool = False  # a learnt logit per head that takes part in the softmax

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    def parameters(self, hidden: int) -> int:
        qkv = self.q_width + 2 * self.kv_width
        extra = qkv * self.qkv_bias + hidden * self.o_bias + self.heads * self.sinks + 2 * self.head_dim * self.qk_norm
        return hidden * qkv + self.q_width * hidden + extra

    @property
    def kv_per_token(self) -> int:
        """Bytes that one token adds to the cache."""
        return 2 * self.kv_width * KV_BYTES


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent and one rotary key."""

    heads: int
    q_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope: int  # width of a head's part without rotation
    rope: int
    v_dim: int

    @property
    def qk_dim(self) -> int:
        return self.nope + self.rope

    @property
    def latent(self) -> int:
        """Width of what the cache holds of a token."""
        return self.kv_rank + self.rope

    def parameters(self, hidden: int) -> int:
        q_out = self.heads * self.qk_dim
        q = hidden * self.q_rank + self.q_rank + self.q_rank * q_out if self.q_rank else hidden * q_out
        kv = hidden * self.latent + self.kv_rank + self.kv_rank * self.heads * (self.nope + self.v_dim)
        return q + kv + self.heads * self.v_dim * hidden

    @property
    def kv_per_token(self) -> int:
        return self.latent * KV_BYTES


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated feed-forward."""

    inter: int
    bias: bool = False

    def parameters(self, hidden: int) -> int:
        return 3 * hidden * self.inter + (2 * self.inter + hidden) * self.bias

    active_parameters = parameters


@dataclass(frozen=True, slots=True)
class Experts:
    """A router over gated feed-forwards, and a shared one that every token takes (`shared` 0: none)."""

    count: int
    topk: int
    inter: int
    shared: int = 0
    bias: bool = False  # of the experts' layers and of the router
    router_extra: int = 0  # further parameters of the router, of which one per expert (a correction of its scores)
    shared_gate: bool = False

    def _rest(self, hidden: int) -> int:
        router = hidden * self.count + self.count * self.bias + self.router_extra
        return router + 3 * hidden * self.shared + hidden * self.shared_gate

    def _one(self, hidden: int) -> int:
        return 3 * hidden * self.inter + (2 * self.inter + hidden) * self.bias

    def parameters(self, hidden: int) -> int:
        return self._rest(hidden) + self.count * self._one(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self._rest(hidden) + self.topk * self._one(hidden)


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention | Latent
    ffn: Dense | Experts


@dataclass(frozen=True)
class Model:
    """A decoder of `layers`, each with two norms, an embedding and a head (`tied`: of one table)."""

    name: str
    kind: str  # model_type of the configuration
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layer, ...]
    positions: int  # longest context it is made for
    stored: str = "bf16"  # how the published weights are stored, where the configuration says it
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return self._total(active=False)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses; of the input table, all."""
        return self._total(active=True)

    @property
    def multiplied_parameters(self) -> int:
        """Active parameters without the input table, which is looked up: 2 FLOP each per token, but for biases."""
        return self.active_parameters - (0 if self.tied else self.vocab * self.hidden)

    def _total(self, active: bool) -> int:
        h = self.hidden
        total = self.vocab * h * (1 if self.tied else 2) + h
        for layer in self.layers:
            ffn = layer.ffn.active_parameters(h) if active else layer.ffn.parameters(h)
            total += layer.attention.parameters(h) + ffn + 2 * h
        return total

    @property
    def kv_per_token(self) -> int:
        """Bytes of cache that one more token of one sequence takes. Windows do not count: caches keep all."""
        return sum(layer.attention.kv_per_token for layer in self.layers)
