"""Which architectures the formula knows, each as what sets its blocks apart, read from transformers 5.24's modules.

A family is named as Hugging Face's `model_type` is, its linear layers as Hugging Face's modules are. A field that is a
`Flag` is told by the configuration. Another architecture is traced (`memfit --trace`), not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Flag:
    """A key of the configuration, and what the family takes where the key is absent."""

    key: str
    default: bool = False


@dataclass(frozen=True)
class Family:
    """A decoder of blocks of attention and feed-forward between norms; the defaults are Llama's."""

    norm: str = "rms"  # or `rms_late`, whose gain comes before the cast back, or `layer`, fused and with a bias
    norms: str = "before"  # where a block's norms stand: before its halves, after them, or around them
    parallel: Flag | None = None  # both halves read the block's input, by one norm where `shares_norm`
    shares_norm: bool = True
    embedding: str = "embed_tokens"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or the name of one linear for all three
    output: str = "o_proj"
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    activation: str = "hidden_act"  # the key that names it
    default_activation: str = "silu"
    attention_bias: Flag | bool = False  # on q, k and v
    output_bias: Flag | bool = False
    mlp_bias: Flag | bool = False
    head_bias: bool = False
    query_key_norms: str | None = None  # over a `head`, or over the whole `width`
    partial_rotary: float | None = None  # the share of a head that is turned, where it is put together with the rest
    float32_rotary: bool = False
    tied: bool = False  # where the configuration does not say
    head_dim: int | None = None  # where the configuration does not say
    score_cap: Flag | None = None  # attention's soft cap, which has no path in SDPA, and the logits'
    logit_cap: Flag | None = None
    window: int | None = None  # where the configuration does not say
    slides: int | None = None  # 1: every layer has a window where one is named; n: all but each nth; None: none has
    dropouts: tuple[str, str] = ("", "")  # keys: of the embedding's, of the residual stream's
    stated: tuple[str, ...] = ()  # keys whose absence means a size of Hugging Face's own, so they must be there
    has_key_value_heads: bool = True
    flags: tuple[str, ...] = ()  # keys that must be absent, null or False, since the formula does not count them


_KV = ("num_key_value_heads",)
_BIAS, _MLP_BIAS = Flag("attention_bias"), Flag("mlp_bias")
_GEMMA = Family(
    norm="rms_late", attention_bias=_BIAS, output_bias=_BIAS, default_activation="gelu_pytorch_tanh", tied=True,
    head_dim=256, stated=_KV, flags=("use_bidirectional_attention",),
)  # fmt: skip
_GEMMA_2 = replace(
    _GEMMA, norms="around", activation="hidden_activation", score_cap=Flag("attn_logit_softcapping", True),
    logit_cap=Flag("final_logit_softcapping", True), window=4096, slides=2,
)  # fmt: skip

FAMILIES = {
    "llama": Family(attention_bias=_BIAS, output_bias=_BIAS, mlp_bias=_MLP_BIAS),
    "mistral": Family(window=4096, slides=1, stated=_KV),
    "qwen2": Family(attention_bias=True, stated=_KV, flags=("use_sliding_window",)),
    "qwen3": Family(
        attention_bias=_BIAS, output_bias=_BIAS, query_key_norms="head", stated=(*_KV, "head_dim"),
        flags=("use_sliding_window",),
    ),
    "smollm3": Family(
        attention_bias=_BIAS, output_bias=_BIAS, mlp_bias=_MLP_BIAS, tied=True, stated=_KV,
        flags=("use_sliding_window",),
    ),
    "olmo2": Family(
        norm="rms_late", norms="after", attention_bias=_BIAS, output_bias=_BIAS, query_key_norms="width",
        float32_rotary=True,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3_text": replace(
        _GEMMA_2, query_key_norms="head", score_cap=Flag("attn_logit_softcapping"),
        logit_cap=Flag("final_logit_softcapping"), slides=6,
    ),
    "phi3": Family(
        qkv=("qkv_proj",), feed_forward=("gate_up_proj", "down_proj"), partial_rotary=1.0, slides=1,
        dropouts=("embd_pdrop", "resid_pdrop"),
    ),
    "phi": Family(
        norm="layer", parallel=Flag("", True), output="dense", feed_forward=("fc1", "fc2"), gated=False,
        default_activation="gelu_new", attention_bias=True, output_bias=True, mlp_bias=True, head_bias=True,
        partial_rotary=0.5, dropouts=("embd_pdrop", "resid_pdrop"), flags=("qk_layernorm",),
    ),
    "gpt_neox": Family(
        norm="layer", parallel=Flag("use_parallel_residual", True), shares_norm=False, embedding="embed_in",
        qkv=("query_key_value",), output="dense", feed_forward=("dense_h_to_4h", "dense_4h_to_h"), gated=False,
        default_activation="gelu", attention_bias=Flag("attention_bias", True),
        output_bias=Flag("attention_bias", True), mlp_bias=True, partial_rotary=0.25,
        dropouts=("hidden_dropout", "hidden_dropout"), has_key_value_heads=False,
    ),
    "starcoder2": Family(
        norm="layer", feed_forward=("c_fc", "c_proj"), gated=False, default_activation="gelu_pytorch_tanh",
        attention_bias=Flag("use_bias", True), output_bias=Flag("use_bias", True), mlp_bias=Flag("use_bias", True),
        tied=True, slides=1, stated=_KV, dropouts=("embedding_dropout", "residual_dropout"),
    ),
}  # fmt: skip
