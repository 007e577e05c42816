"""The training-time model: Qwen3.5's dense text architecture plus one multi-token-prediction layer.

Parameters have exactly the names and shapes of transformers' `Qwen3_5ForCausalLM` (and of the
`mtp.*` tensors in Qwen3-Next and Qwen3.5 checkpoints), so that a state dict is a checkpoint. Only
whole rows are computed, from a zero state; there is no cache. The gated delta rule runs in chunks:
everything inside a chunk is batched matrix products, and the scan over chunks is one affine step
S' = M S + N a chunk.

Shapes: B batch, L tokens, D hidden, H value heads, N chunks, C tokens a chunk, K and V head sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig

CHUNK = 64


def tiny_config(vocab_size: int = 6144) -> Qwen3_5TextConfig:
    config: Qwen3_5TextConfig = Qwen3_5TextConfig.from_dict(
        {
            "vocab_size": vocab_size,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100000.0,
                "partial_rotary_factor": 0.25,
            },
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "full_attention_interval": 4,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "architectures": ["Qwen3_5ForCausalLM"],
            "dtype": "bfloat16",
        }
    )
    return config


class Norm(nn.Module):
    """RMS norm whose weight is stored minus one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class GatedNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y.type_as(x) * F.silu(gate.float())).type_as(x)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of strictly lower [..., C, C] by merging diagonal blocks of size 1, 2, 4,
    ..."""
    size = lower.shape[-1]
    inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower).contiguous()
    width = 1
    while width < size:
        shape = (*lower.shape[:-2], size // (2 * width), 2 * width, size // (2 * width), 2 * width)
        blocks = (
            lower.view(shape).diagonal(dim1=-4, dim2=-2)[..., width:, :width, :].movedim(-1, -3)
        )
        old = inverse.view(shape).diagonal(dim1=-4, dim2=-2)
        top = old[..., :width, :width, :].movedim(-1, -3)
        bottom = old[..., width:, width:, :].movedim(-1, -3)
        old[..., width:, :width, :] = -(bottom @ blocks @ top).movedim(-3, -1)
        width *= 2
    return inverse


# Both are opaque operators, so that torch.compile neither unrolls nor breaks at them.
@torch.library.custom_op("tiny::inverse", mutates_args=())
def inverse(lower: Tensor) -> Tensor:
    return unit_lower_inverse(lower.contiguous())


@inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return lower.new_empty(lower.shape)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    transposed: Tensor = ctx.saved_tensors[0].mT
    return -(transposed @ grad @ transposed).tril(-1)


def _inverse_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del inputs
    ctx.save_for_backward(output)


inverse.register_autograd(_inverse_backward, setup_context=_inverse_context)


@torch.library.custom_op("tiny::scan", mutates_args=())
def scan(step: Tensor, add: Tensor) -> Tensor:
    """States before each chunk: S[0] = 0, S[i + 1] = step[i] S[i] + add[i]; all [N, B * H, K, K or
    V]."""
    states = torch.zeros_like(add, memory_format=torch.contiguous_format)
    for i in range(step.shape[0] - 1):
        torch.baddbmm(add[i], step[i], states[i], out=states[i + 1])
    return states


@torch.library.custom_op("tiny::scan_backward", mutates_args=())
def scan_backward(step: Tensor, grad: Tensor) -> Tensor:
    """Gradients of the states that each chunk leaves."""
    after = torch.zeros_like(grad, memory_format=torch.contiguous_format)
    for i in range(step.shape[0] - 1, 0, -1):
        torch.baddbmm(grad[i], step[i].mT, after[i], out=after[i - 1])
    return after


@scan.register_fake
@scan_backward.register_fake
def _(step: Tensor, add: Tensor) -> Tensor:
    del step
    return add.new_empty(add.shape)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    step, states = ctx.saved_tensors
    after = scan_backward(step, grad)
    return after @ states.mT, after


def _scan_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


scan.register_autograd(_scan_backward, setup_context=_scan_context)


def _l2(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def gated_delta(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from a zero state (Yang et al. 2024, section 3.3).

    query, key [B, L, H, K] (not normalised), value [B, L, H, V], log decay and beta [B, L, H], all
    float32, L a multiple of 64; returns [B, L, H, V].
    """
    batch, length, heads, width = value.shape
    chunks = length // CHUNK

    def arrange(x: Tensor) -> Tensor:  # [B, L, H, *] -> [N, B, H, C, *]
        x = x.view(batch, chunks, CHUNK, heads, *x.shape[3:])
        return x.permute(1, 0, 3, 2, *range(4, x.dim())).contiguous()

    query, key, value = (
        arrange(x) for x in (_l2(query) * query.shape[-1] ** -0.5, _l2(key), value)
    )
    total = arrange(decay).cumsum(-1)
    beta = arrange(beta)[..., None]
    pair = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    solve = inverse(((key * beta) @ key.mT * pair).tril(-1))
    new = solve @ (value * beta)
    read = solve @ (key * beta * total.exp()[..., None])
    last = total[..., -1:]
    late = (key * (last - total).exp()[..., None]).mT
    eye = torch.eye(key.shape[-1], device=key.device, dtype=key.dtype)
    step = last.exp()[..., None] * eye - late @ read
    states = scan(step.flatten(1, 2), (late @ new).flatten(1, 2)).view(
        chunks, batch, heads, -1, width
    )
    new = new - read @ states
    out: Tensor = (query * total.exp()[..., None]) @ states + ((query @ key.mT) * pair) @ new
    return out.permute(1, 0, 3, 2, 4).reshape(batch, length, heads, width)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.key_heads, self.value_heads = (
            config.linear_num_key_heads,
            config.linear_num_value_heads,
        )
        self.key_size, self.value_size = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        self.split = [keys, keys, values]
        hidden, kernel = config.hidden_size, config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, kernel, groups=2 * keys + values, bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(0.01, 16).log())
        self.norm = GatedNorm(self.value_size, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)

    def _mix(self, x: Tensor) -> Tensor:
        """Causal depthwise convolution as a sum of shifted products, then silu; x is [B, L,
        channels]."""
        weight = self.conv1d.weight.squeeze(1).float()
        taps = weight.shape[-1]
        padded = F.pad(x.float(), (0, 0, taps - 1, 0))
        mixed = padded[:, : x.shape[1]] * weight[:, 0]
        for i in range(1, taps):
            mixed = mixed + padded[:, i : i + x.shape[1]] * weight[:, i]
        return F.silu(mixed)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        del rotary
        batch, length, _ = x.shape
        query, key, value = self._mix(self.in_proj_qkv(x)).split(self.split, -1)
        query, key = (y.view(batch, length, self.key_heads, self.key_size) for y in (query, key))
        repeat = self.value_heads // self.key_heads
        query, key = (y.repeat_interleave(repeat, 2) for y in (query, key))
        value = value.view(batch, length, self.value_heads, self.value_size)
        beta = self.in_proj_b(x).float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(
            self.in_proj_a(x).float() + self.dt_bias.float()
        )
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta(query, key, value, decay, beta)
        gate = self.in_proj_z(x).view(batch, length, self.value_heads, self.value_size)
        mixed: Tensor = self.out_proj(self.norm(out.type_as(x), gate).flatten(2))
        return mixed


class Attention(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size, hidden = config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(hidden, 2 * self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.q_norm = Norm(self.size, config.rms_norm_eps)
        self.k_norm = Norm(self.size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        query, gate = self.q_proj(x).view(batch, length, self.heads, -1).chunk(2, -1)
        key = self.k_proj(x).view(batch, length, self.kv_heads, self.size)
        value = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        query = rotate(self.q_norm(query).transpose(1, 2), *rotary)
        key = rotate(self.k_norm(key).transpose(1, 2), *rotary)
        out = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), is_causal=True, enable_gqa=True
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())
        return mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1).type_as(x)


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return mixed


class Layer(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x), rotary)
        mixed: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return mixed


class Backbone(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types or ())
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Predictor(nn.Module):
    """The multi-token-prediction layer: final hidden state of t and embedding of t + 1 give token
    t + 2."""

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_embedding = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, embedding: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1)
        drafted: Tensor = self.norm(self.layers[0](self.fc(x), rotary))
        return drafted


class Tiny(nn.Module):
    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.mtp = Predictor(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (4 if deep else 1))

    def rotary(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        settings: Any = self.config.rope_parameters
        size = int(self.config.head_dim * settings["partial_rotary_factor"])
        inverse_frequency = settings["rope_theta"] ** -(
            torch.arange(0, size, 2, device=device) / size
        )
        angles = torch.arange(length, device=device)[:, None] * inverse_frequency
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states [B, L, D] after the last norm: what the head and the predictor
        read."""
        rotary = self.rotary(ids.shape[1], ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rotary)
        last: Tensor = self.model.norm(x)
        return last

    def draft_hidden(self, hidden: Tensor, following: Tensor) -> Tensor:
        """The predictor's hidden states, given final hidden states and the ids one place further
        on."""
        rotary = self.rotary(following.shape[1], following.device)
        drafted: Tensor = self.mtp(hidden, self.model.embed_tokens(following), rotary)
        return drafted

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.type_as(hidden))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tiny:
    """The model of a finished folder."""
    model = Tiny(Qwen3_5TextConfig(**json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval()
