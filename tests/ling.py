"""Tiny checkpoints of Ling 3.0, and its head, in plain torch where transformers has less than is
published.

Legend: T tokens, C hidden size, H heads, E entries of a query.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

LIMITS = "expert_swiglu_limit_list", "share_expert_swiglu_limit_list"
_SIZES: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "head_dim": 12,
    "kv_lora_rank": 24,
    "layer_group_size": 3,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 20,
    "n_group": 3,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 5,
    "num_key_value_heads": 6,
    "num_local_experts": 9,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "rope_theta": 10000.0,
    "topk_group": 2,
    "v_head_dim": 14,
}
_FLASH = {"expert_swiglu_limit_list": [0, 0, 0, 0.3, 0.3]}
_FLASH |= {"share_expert_swiglu_limit_list": [0, 0, 0.4, 0.3, 0.5]}


def ling(**settings: Any) -> PreTrainedModel:
    """Returns a model with these settings besides its own sizes: by default with the limits of
    Ling-3.0-flash, or with a `q_lora_rank` with the queries of Ling-3.0-tiny."""
    if not hasattr(transformers, "BailingHybridConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no BailingHybridConfig")
    rank = settings.pop("q_lora_rank", None)
    given = _SIZES | ({} if rank else _FLASH) | settings
    count, size = given["num_hidden_layers"], given["layer_group_size"]
    whole = count // size * size
    kinds = ["linear_attention", "full_attention"]
    # Layers past the last whole group attend, as published; transformers has them otherwise.
    given["layer_types"] = [kinds[(i + 1) % size == 0 or i >= whole] for i in range(count)]
    config = transformers.BailingHybridConfig(**given)
    config.q_lora_rank = rank
    model = transformers.BailingHybridForCausalLM(config)
    for index, layer in enumerate(model.model.layers):
        if layer.block_type == "full_attention" and rank:
            _narrow(layer.self_attn, rank)
        if hasattr(layer.mlp, "experts"):
            limits = [(*given.get(name, ()), *[0] * count)[index] for name in LIMITS]
            _limit(layer.mlp, *limits)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.data.copy_(torch.randn(tensor.shape))
        if name.endswith("A_log"):
            tensor.data.zero_()
        if name.endswith("dt_bias"):
            # Inputs far below zero remember: without them half of the bound is forgotten at once.
            tensor.data.copy_(torch.linspace(-7, -1, tensor.numel()))
    return model


def _narrow(attention: nn.Module, rank: int) -> None:
    """Gives attention queries by way of a latent, which is normed, unless transformers has done so
    (from 5.24 on); and projections of a size that matters."""
    projection = attention.q_proj
    if projection is None:
        narrow, wide = attention.q_a_proj, attention.q_b_proj
    else:
        narrow = nn.Linear(projection.in_features, rank, bias=False)
        wide = nn.Linear(rank, projection.out_features, bias=False)
        attention.q_proj = nn.Sequential(narrow, nn.RMSNorm(rank, 1e-6), wide)
    for each in (narrow, wide):
        nn.init.normal_(each.weight, std=0.2)


def _limit(mlp: nn.Module, limit: float, shared_limit: float) -> None:
    """Gives experts the limits that transformers' have not."""

    def run_shared(module: nn.Module, rows: Tensor) -> Tensor:
        active = _within(module.gate_proj(rows), module.up_proj(rows), shared_limit)
        return module.down_proj(active)

    def run(module: nn.Module, rows: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in range(len(module.gate_up_proj)):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            halves = F.linear(rows[token], module.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(_within(*halves, limit), module.down_proj[expert])
            output.index_add_(0, token, made * shares[token, place, None])
        return output

    mlp.shared_experts.forward = MethodType(run_shared, mlp.shared_experts)
    mlp.experts.forward = MethodType(run, mlp.experts)


def _within(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    active = F.silu(gate)
    return active.clamp(max=limit) * up.clamp(-limit, limit) if limit else active * up


_RENAMED = (
    (r"q_proj\.0\.", "q_a_proj."),
    (r"q_proj\.1\.", "q_a_layernorm."),
    (r"q_proj\.2\.", "q_b_proj."),
)
_PUBLISHED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "linear_head_dim": "head_dim",
}


def write_ling(folder: Path) -> None:
    """Gives a checkpoint that transformers saved the published names."""
    file, path = folder / "model.safetensors", folder / "config.json"
    config = json.loads(path.read_text())
    delta = [i for i, kind in enumerate(config["layer_types"]) if kind == "linear_attention"]
    deltas = "|".join(map(str, delta))
    renamed = ((rf"(layers\.({deltas})\.attention\.)dense\.", r"\1o_proj."), *_RENAMED)
    tensors = load_file(file)
    for old, new in renamed:
        tensors = {re.sub(old, new, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, file)
    for old, new in _PUBLISHED.items():
        config[new] = config.pop(old)
    for name in ("layer_types", "mlp_layer_types", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    config |= {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "gated_attention_proj_granularity_type": "head_wise",
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "no_kda_lora": True,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
        "rope_scaling": None,
        "rotary_dim": config["qk_rope_head_dim"],
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "topk_method": "noaux_tc",
    }
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config))


class LingHead:
    """The head of a checkpoint, as transformers' own layer computes it. Making it gives the
    checkpoint in `folder`, which `build` made, a head of random weights."""

    def __init__(self, folder: Path, model: PreTrainedModel, layer: PreTrainedModel) -> None:
        """`layer` is a model of one layer, with latent attention and experts."""
        self.model, self.layer = model, layer
        size, dtype = model.config.hidden_size, model.dtype
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int, spread: float) -> Tensor:
            return torch.randn(shape, generator=generator).mul(spread).to(dtype)

        norms = "enorm", "hnorm", "final_layernorm"
        self.own = {name: 1 + draw(size, spread=0.3) for name in norms}
        self.own["eh_proj"] = draw(size, 2 * size, spread=size**-0.5)
        file, path = folder / "model.safetensors", f"model.layers.{model.config.num_hidden_layers}"
        tensors = load_file(file)
        tensors |= {f"{path}.{name}.weight": tensor for name, tensor in self.own.items()}
        beside = folder / "head"
        layer.save_pretrained(beside)
        write_ling(beside)
        for name, tensor in load_file(beside / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                tensors[name.replace("model.layers.0", path)] = tensor
        save_file(tensors, file)

    @torch.no_grad()
    def logits(self, token_ids: Tensor, hidden: Tensor, num_drafts: int) -> Tensor:
        """Of `num_drafts` drafts behind `token_ids` [T + 1], the greedy ones; the model's hidden
        states of the first T are `hidden` [T, C]."""
        rows, found = list(hidden), []
        for _ in range(num_drafts):
            rows.append(self._pass(token_ids[1:], torch.stack(rows))[-1])
            found.append(self.model.lm_head(rows[-1]))
            token_ids = torch.cat((token_ids, found[-1].argmax()[None]))
        return torch.stack(found)

    def _pass(self, following: Tensor, hidden: Tensor) -> Tensor:
        embedded = self._norm(self.model.model.embed_tokens(following), "enorm")
        joined = torch.cat((embedded, self._norm(hidden, "hnorm")), -1) @ self.own["eh_proj"].T
        inner = self.layer.model
        inner.norm.weight.data.copy_(self.own["final_layernorm"])
        return inner(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], self.own[name], self.model.config.rms_norm_eps)
