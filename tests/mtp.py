"""Heads of random weights for tiny checkpoints, and what they have to draft: the formula of MTP in
plain torch and float64, with nothing of ours.

Legend: T tokens, C hidden size, H query heads, G KV heads, E head_dim.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor


def add_head(folder: Path, *, fused_experts: bool = False) -> None:
    """Give a saved checkpoint a head of random weights; with experts, one by one or stacked."""
    file, config = folder / "model.safetensors", _config(folder)
    tensors = load_file(file)
    dtype = next(iter(tensors.values())).dtype
    generator = torch.Generator().manual_seed(5)
    for name, shape in _shapes(config).items():
        is_norm = len(shape) == 1
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values *= 0.3 if is_norm else 1.5 * shape[-1] ** -0.5
        tensors[f"mtp.{name}"] = values.to(dtype)
    if fused_experts:
        _stack(tensors, config["num_experts"])
    save_file(tensors, file)


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config") or config


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    size, head_dim = config["hidden_size"], config["head_dim"]
    query, kv = (config[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 2 * size),
        "norm.weight": (size,),
        "pre_fc_norm_embedding.weight": (size,),
        "pre_fc_norm_hidden.weight": (size,),
    }
    layer = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_proj": (2 * query, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, query),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
    }
    if config.get("num_experts"):
        own, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
        layer |= {"mlp.gate": (config["num_experts"], size), "mlp.shared_expert_gate": (1, size)}
        layer |= _mlp("mlp.shared_expert", size, shared)
        for expert in range(config["num_experts"]):
            layer |= _mlp(f"mlp.experts.{expert}", size, own)
    else:
        layer |= _mlp("mlp", size, config["intermediate_size"])
    return shapes | {f"layers.0.{name}.weight": shape for name, shape in layer.items()}


def _mlp(name: str, size: int, units: int) -> dict[str, tuple[int, ...]]:
    projections = {"gate": (units, size), "up": (units, size), "down": (size, units)}
    return {f"{name}.{each}_proj": shape for each, shape in projections.items()}


def _stack(tensors: dict[str, Tensor], num_experts: int) -> None:
    prefix = "mtp.layers.0.mlp.experts"
    gate, up, down = (
        torch.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(num_experts)])
        for part in ("gate", "up", "down")
    )
    tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), 1)
    tensors[f"{prefix}.down_proj"] = down


@dataclass
class Formula:
    """A checkpoint's head, whose experts stand one by one, in float64."""

    folder: Path

    def __post_init__(self) -> None:
        self.config = _config(self.folder)
        held = load_file(self.folder / "model.safetensors")
        self.tensors = {
            name: tensor.double() for name, tensor in held.items() if name.startswith("mtp.")
        }
        (embedding,) = [name for name in held if name.endswith("embed_tokens.weight")]
        self.embedding = held[embedding].double()
        self.lm_head = held.get("lm_head.weight", held[embedding]).double()

    def logits(self, token_ids: Tensor, hidden: Tensor, num_drafts: int) -> Tensor:
        """Of `num_drafts` drafts behind `token_ids` [T + 1], the greedy ones; the model's hidden
        states of the first T are `hidden` [T, C]."""
        rows, found = list(hidden.double()), []
        token_ids = token_ids.clone()
        for _ in range(num_drafts):
            out = self._pass(token_ids[1:], torch.stack(rows))[-1]
            found.append(out @ self.lm_head.T)
            rows.append(out)
            token_ids = torch.cat((token_ids, found[-1].argmax()[None]))
        return torch.stack(found)

    def _pass(self, following: Tensor, hidden: Tensor) -> Tensor:
        """Row t has the token x[t + 1], the hidden state h[t] and the position t."""
        embedded = self._norm(self.embedding[following], "pre_fc_norm_embedding")
        joined = torch.cat((embedded, self._norm(hidden, "pre_fc_norm_hidden")), -1)
        x = self._times(joined, "fc")
        x = x + self._attend(self._norm(x, "layers.0.input_layernorm"))
        x = x + self._feed(self._norm(x, "layers.0.post_attention_layernorm"))
        return self._norm(x, "norm")

    def _attend(self, x: Tensor) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        own, num_tokens = "layers.0.self_attn", len(x)
        query, gate = self._times(x, f"{own}.q_proj").view(num_tokens, heads, -1).chunk(2, -1)
        key = self._times(x, f"{own}.k_proj").view(num_tokens, kv_heads, -1)
        value = self._times(x, f"{own}.v_proj").view(num_tokens, kv_heads, -1)
        query = self._turn(self._norm(query, f"{own}.q_norm"))
        key = self._turn(self._norm(key, f"{own}.k_norm"))
        key, value = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
        scores = torch.einsum("qhe,khe->hqk", query, key) * query.shape[-1] ** -0.5
        future = torch.ones(num_tokens, num_tokens).triu(1).bool()
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("hqk,khe->qhe", shares, value) * gate.sigmoid()
        return self._times(out.flatten(1), f"{own}.o_proj")

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions on the first part of each head."""
        rope = self.config["rope_parameters"]
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        places = torch.arange(0, size, 2, dtype=torch.float64) / size
        angles = torch.arange(len(x))[:, None, None] * rope["rope_theta"] ** -places
        first, second, rest = x.split((size // 2, size // 2, x.shape[-1] - size), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)

    def _feed(self, x: Tensor) -> Tensor:
        own, num_chosen = "layers.0.mlp", self.config.get("num_experts_per_tok")
        if f"mtp.{own}.gate.weight" not in self.tensors:
            return self._mlp(x, own)
        shares, chosen = self._times(x, f"{own}.gate").softmax(-1).topk(num_chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        shared = self._mlp(x, f"{own}.shared_expert")
        out = self._times(x, f"{own}.shared_expert_gate").sigmoid() * shared
        for row in range(len(x)):
            for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
                out[row] += share * self._mlp(x[row], f"{own}.experts.{expert}")
        return out

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = (self._times(x, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self._times(F.silu(gate) * up, f"{name}.down_proj")

    def _times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"mtp.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = 1 + self.tensors[f"mtp.{name}.weight"]
        eps = self.config["rms_norm_eps"]
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale
