"""Tiny checkpoints of AliceAI, and the model in plain torch around transformers' own attention,
Kimi Delta Attention and experts: transformers has no class for it.

Legend: B sequences, T tokens, S sources, C hidden size, X experts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import KimiLinearConfig, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

_SIZES: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 5,
}


class Router(nn.Module):
    """Chooses experts by sigmoids and a correction; the weights are those without it."""

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__()
        self.num_chosen, self.normalises = config.num_experts_per_tok, config.norm_topk_prob
        self.weight = nn.Parameter(torch.randn(config.num_experts, config.hidden_size) * 0.2)
        self.e_score_correction_bias = nn.Parameter(torch.randn(config.num_experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits [T, X], weights and experts of each token."""
        logits = F.linear(rows, self.weight)
        scores = logits.sigmoid()
        experts = (scores + self.e_score_correction_bias).topk(self.num_chosen).indices
        weights = scores.gather(-1, experts)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts


class Mixing(nn.Module):
    """A softmax over sources, by what one query finds in their norms."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1, bias=False)
        nn.init.normal_(self.proj.weight, std=size**-0.5)
        self.norm_weight = nn.Parameter(torch.ones(size))

    def forward(self, sources: list[Tensor]) -> Tensor:
        """Returns the mixture [B, T, C] of S sources [B, T, C]."""
        stacked = torch.stack(sources)
        normed = F.rms_norm(stacked, stacked.shape[-1:], self.norm_weight, 1e-6)
        return (self.proj(normed).softmax(0) * stacked).sum(0)


class AliceAIForCausalLM(Qwen3NextForCausalLM):
    """Qwen3-Next with the parts that AliceAI has in place of its own."""

    def __init__(self, config: Qwen3NextConfig, block_size: int) -> None:
        super().__init__(config)
        self.block_size, size = block_size, config.hidden_size
        delta = KimiLinearConfig(
            hidden_size=size,
            linear_conv_kernel_dim=config.linear_conv_kernel_dim,
            linear_head_dim=config.linear_key_head_dim,
            linear_num_heads=config.linear_num_key_heads,
            num_hidden_layers=config.num_hidden_layers,
            layer_types=["linear_attention"] * config.num_hidden_layers,
            rms_norm_eps=config.rms_norm_eps,
        )
        for index, layer in enumerate(self.model.layers):
            if layer.block_type == "linear_attention":
                layer.linear_attn = KimiLinearDeltaAttention(delta, index)
                for name, tensor in layer.linear_attn.named_parameters():
                    nn.init.normal_(tensor, std=0.2)
                    if name.endswith("A_log"):
                        tensor.data.copy_(torch.linspace(-3, 0.5, tensor.numel()).view_as(tensor))
            layer.mlp.gate = Router(config)
            if index:
                layer.attn_res = Mixing(size)
            layer.mlp_res = Mixing(size)
        self.model.attnres_final = Mixing(size)

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """Returns logits of whole sequences [B, T]."""
        inner, sums = self.model, []
        sources = [inner.embed_tokens(input_ids)]
        positions = torch.arange(input_ids.shape[1])[None]
        angles = inner.rotary_emb(sources[0], positions)
        for index, layer in enumerate(inner.layers):
            if index % self.block_size == 0:
                sources, sums = sources + sums, []
            mixed = layer.attn_res(sources + sums) if index else sources[0]
            rows = layer.input_layernorm(mixed)
            if layer.block_type == "linear_attention":
                output = layer.linear_attn(rows)
            else:
                output, _ = layer.self_attn(rows, position_embeddings=angles, attention_mask=None)
            sums = [output + sum(sums)]
            rows = layer.post_attention_layernorm(layer.mlp_res(sources + sums))
            sums = [sums[0] + layer.mlp(rows)]
        hidden = inner.norm(inner.attnres_final(sources + sums))
        return CausalLMOutput(logits=self.lm_head(hidden))


def alice(sizes: dict[str, Any], **changes: Any) -> AliceAIForCausalLM:
    """Returns a model with these sizes besides its own."""
    given = sizes | _SIZES | changes
    block_size = given.pop("block_attn_res_block_size", 2)
    return AliceAIForCausalLM(Qwen3NextConfig(**given), block_size)


_RENAMED = (
    (r"forget_gate\.(f_|dt_bias)", r"\1"),
    (r"forget_gate\.A_log", "a_log_bias"),
    (r"(attn|mlp)_res\.proj", r"\1_res_proj"),
    (r"(attn|mlp)_res\.norm_weight", r"\1_res_norm_weight"),
    (r"attnres_final\.(proj|norm_weight)", r"attnres_final.res_\1"),
)


def write_alice(model: AliceAIForCausalLM, folder: Path) -> None:
    """Gives a checkpoint that transformers saved the published names and settings, and a tensor of
    the head that is not run."""
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = {"mtp.fc.weight": torch.ones(2, 2)}
    for name, tensor in load_file(file).items():
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        if name.endswith("a_log_bias"):
            tensor = tensor.flatten()
        if name.endswith("linear_attn.conv1d.weight"):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace("conv1d", f"{letter}_conv1d")] = part.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    config = json.loads(path.read_text()) | {
        "architectures": ["AliceAIForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_alice_ai.AliceAIConfig"},
        "block_attn_res_block_size": model.block_size,
        "kda_allow_negative_eigenvalues": False,
        "model_type": "alice_ai",
        "num_nextn_predict_layers": 1,
        "number_of_conv_states": 3,
        "router_bias_correction": True,
        "router_score_function": "sigmoid",
    }
    path.write_text(json.dumps(config))
