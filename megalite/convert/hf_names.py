"""Which tensors of a Hugging Face file make which of ours, and back.

Decisions
- One table per style of file. Llama-like files hold one tensor per tensor of ours, as [out, in] like ours. GPT-2's linear weights are
  [in, out], and its q, k and v lie beside each other in one tensor.
- q and k keep their rows: both projects turn channel i with channel i + R/2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Source", "is_leftover", "source_of"]

_LLAMA = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_GPT2 = {
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    **{f"attention.{part}_proj": "attn.c_attn" for part in "qkv"},
    "attention.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_ENDS = {
    "llama": {
        "embedding.word.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.output.weight": "lm_head.weight",
    },
    "gpt2": {
        "embedding.word.weight": "transformer.wte.weight",
        "embedding.position.weight": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.output.weight": "lm_head.weight",
    },
}
# buffers that old files carry along; they hold nothing that a config does not say
_LEFTOVER = re.compile(r"(\.attn\.(bias|masked_bias)|rotary_emb\.inv_freq)$")


@dataclass(frozen=True)
class Source:
    """Where one of our tensors is: the file's tensor, transposed or not, and which third of it (None: all)."""

    name: str
    is_transposed: bool = False
    third: int | None = None

    def take(self, theirs: Tensor) -> Tensor:
        ours = theirs.t() if self.is_transposed else theirs
        return ours if self.third is None else ours.chunk(3)[self.third]


def source_of(name: str, family: str) -> Source:
    """name: our logical name without "model."; family: of `hf_config.FAMILIES`."""
    style = "gpt2" if family == "gpt2" else "llama"
    if name in _ENDS[style]:
        return Source(_ENDS[style][name])
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None, f"no file has a place for {name}"
    layer, part, kind = found.groups()
    if style == "llama":
        return Source(f"model.layers.{layer}.{_LLAMA[part]}.{kind}")
    third = {"attention.q_proj": 0, "attention.k_proj": 1, "attention.v_proj": 2}.get(part)
    is_matrix = kind == "weight" and part.endswith("_proj")
    return Source(f"transformer.h.{layer}.{_GPT2[part]}.{kind}", is_matrix, third)


def is_leftover(name: str) -> bool:
    """Whether a file's tensor is no weight."""
    return _LEFTOVER.search(name) is not None
