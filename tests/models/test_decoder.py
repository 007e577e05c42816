"""Layers made of parts: what no architecture has yet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from milepost.kernels.layout.emit import Emit
from milepost.layers.attention import Attention, AttentionShapes
from milepost.layers.context import AttentionSpec, RecurrentSpec
from milepost.layers.gated_delta import SEPARATE, GatedDelta, GatedDeltaShapes
from milepost.layers.mlp import MLP
from milepost.layers.norm import RMSNorm
from milepost.layers.parameters import ModuleScope
from milepost.layers.parts import Layer, ResidualBlock
from milepost.models.decoder import Decoder, DecoderParts
from tests.batches import Part, Pools, build_pools
from tests.numbers import relative_error

SIZE = 16
KIND = ModuleScope(dtype=torch.float64, device=torch.device("cpu"), path="model")
CONFIG = SimpleNamespace(vocab_size=31, hidden_size=SIZE, initializer_range=0.3)
ATTENTION = AttentionShapes(hidden_size=SIZE, num_heads=4, num_kv_heads=2, head_dim=8)
GATED_DELTA = GatedDeltaShapes(
    hidden_size=SIZE,
    num_key_heads=1,
    num_value_heads=2,
    key_dim=8,
    value_dim=4,
    conv_width=4,
    norm_eps=1e-6,
)


def norm(name: str) -> RMSNorm:
    return RMSNorm(SIZE, 1e-6, KIND.under(name))


def both(name: str) -> ResidualBlock:
    """Attention and Gated DeltaNet side by side, norms before and behind them."""
    kind = KIND.under(name)
    return ResidualBlock(
        Attention(ATTENTION, kind.under("attn"), rotary=None),
        GatedDelta(GATED_DELTA, kind.under("delta"), SEPARATE),
        pre=norm(f"{name}.pre"),
        post=norm(f"{name}.post"),
    )


def decoder(*layers: Layer) -> Decoder:
    model = Decoder(
        CONFIG, DecoderParts(layers=list(layers), norm=norm("norm")), KIND, is_tied=False
    )
    model.fill(0)
    return model


def run(model: Decoder, *edges: int) -> Tensor:
    """Logits of one sequence that is cut at the edges."""
    pools, logits = build_pools(model, page_size=16), []
    tokens = torch.arange(edges[-1]) * 7 % 31
    for begin, end in zip((0, *edges), edges, strict=False):
        part = Part(
            pages=[5, 2, 9, 4, 7, 1],
            start=begin,
            length=end - begin,
            slot_in=3 if begin else 0,
            slot_out=3,
        )
        logits.append(model.compute_logits(model(tokens[begin:end], pools.context([part]))))
    return torch.cat(logits)


def test_mixers_side_by_side_and_layers_without_one() -> None:
    model = decoder(
        Layer(ResidualBlock(MLP(SIZE, 24, KIND.under("first")), pre=norm("first_norm"))),
        Layer(both("both")),
        Layer(ResidualBlock(MLP(SIZE, 24, KIND.under("bare")))),
    )
    kinds = [type(spec) for spec in model.layer_specs]
    assert kinds == [AttentionSpec, RecurrentSpec]
    whole = run(model, 90)
    assert relative_error(run(model, 37, 64, 89, 90), whole) < 1e-12
    assert whole.std() > 0.1


def attention(name: str) -> ResidualBlock:
    return ResidualBlock(
        Attention(ATTENTION, KIND.under(name), rotary=None), pre=norm(f"{name}.pre")
    )


def gated_delta(name: str) -> ResidualBlock:
    return ResidualBlock(
        GatedDelta(GATED_DELTA, KIND.under(name), SEPARATE), pre=norm(f"{name}.pre")
    )


def mlp(name: str) -> ResidualBlock:
    return ResidualBlock(MLP(SIZE, 24, KIND.under(name)), pre=norm(f"{name}.pre"))


@pytest.mark.parametrize("last", [attention, gated_delta, both])
def test_only_rows_that_are_sampled_go_on_behind_the_last_cache(last) -> None:
    model = decoder(Layer(gated_delta("first"), mlp("second")), Layer(last("third"), mlp("fourth")))
    parts = [
        Part(pages=[5, 2, 9, 4], start=0, length=50, slot_in=0, slot_out=3, exports={32: 4}),
        Part(pages=[7, 1], start=0, length=1, slot_in=0, slot_out=1),
        Part(pages=[3, 6], start=0, length=17, slot_in=0, slot_out=2),
    ]
    tokens, ends = torch.arange(68) * 7 % 31, [49, 50, 67]
    pools, same = (build_pools(model, page_size=16) for _ in range(2))
    expected = model(tokens, pools.context(parts))[ends]
    found = model(tokens, same.context(parts, last_tokens_only=True))
    assert relative_error(found, expected) < 1e-12
    for mine, other in zip(contents(same), contents(pools), strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num())


def contents(pools: Pools) -> list[Tensor]:
    states = pools.states.values()
    return [*pools.kv.values(), *(each for s in states for each in (s.conv, s.recurrent))]


def test_a_block_in_two_layers_has_one_set_of_weights_and_two_caches() -> None:
    shared = both("shared")
    model = decoder(Layer(shared), Layer(shared))
    assert len(model.layer_specs) == 4
    names = [name for name in model.placements() if "shared" in name]
    assert len(names) == len(set(names))
    assert sum(name.endswith("q_proj.weight") for name in names) == 1
    apart = decoder(Layer(both("first")), Layer(both("second")))
    assert apart.num_bytes > model.num_bytes
    own = dict(shared.named_parameters())
    for layer in apart.layers:
        for name, parameter in layer.blocks[0].named_parameters():
            parameter.copy_(own[name])
    apart.embedding.copy_(model.embedding)
    apart.lm_head.weights[0].values.copy_(model.lm_head.weights[0].values)
    assert torch.equal(run(apart, 50, 51, 70), run(model, 50, 51, 70))


def test_a_tensor_is_filled_by_one_module() -> None:
    kind = replace(KIND, path="model.twice")
    model = decoder(
        Layer(ResidualBlock(MLP(SIZE, 8, kind))), Layer(ResidualBlock(MLP(SIZE, 8, kind)))
    )
    with pytest.raises(AssertionError, match=r"one module fills 'model\.twice\.\w+\.weight'"):
        model.placements()


def test_partials_leave_the_stream_in_its_type():
    """Of a block without a norm before it; fused GEMMs leave partials in float32."""

    class Adds(torch.nn.Module):
        reads = Emit.VALUES

        def run(self, hidden, _ctx, _number):
            assert hidden.dtype == torch.bfloat16
            return hidden.new_ones(len(hidden), 2, SIZE, dtype=torch.float32)

    hidden = torch.zeros(3, SIZE, dtype=torch.bfloat16)
    block = ResidualBlock(Adds())
    for _ in range(2):
        delta = hidden.new_ones(3, 2, SIZE).float()
        hidden, delta = block.run(hidden, delta, None, (0,), ends=False)
        assert hidden.dtype == torch.bfloat16
    assert (hidden == 4).all()
    assert delta.shape == (3, 2, SIZE)
