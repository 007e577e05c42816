"""Nemotron-H, one mixer or feed-forward a layer, against transformers: logits of whatever a prefill
or an answer resumes from."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost import LLM
from milepost.errors import ConfigError, UnsupportedModelError
from milepost.models import LoadOptions, load_model
from tests.checkpoints import save
from tests.engines import VOCAB_SIZE, ask, open_llm, tiering_of, tokens
from tests.models.resuming import Resuming

CONFIGURATIONS = {
    "experts": {},
    "latent": {
        "chunk_size": 128,
        "hybrid_override_pattern": "EM*E",
        "moe_latent_size": 12,
        "n_group": 3,
        "n_groups": 1,
        "norm_topk_prob": False,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "time_step_limit": (0.05, 0.25),
        "topk_group": 2,
    },
    "dense": {
        "conv_kernel": 3,
        "hybrid_override_pattern": "M-M*-",
        "num_key_value_heads": 1,
        "use_bias": True,
        "use_conv_bias": False,
    },
    "odd_sizes": {
        "head_dim": 10,
        "hidden_size": 40,
        "hybrid_override_pattern": "*M",
        "mamba_num_heads": 5,
        "n_groups": 5,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "ssm_state_size": 7,
    },
    "nothing_in_pages": {"hybrid_override_pattern": "M-M-"},
    "shared_expert_of_another_size": {
        "hybrid_override_pattern": "M*E",
        "moe_shared_expert_intermediate_size": 30,
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_match_transformers_wherever_they_resume(name, tmp_path):
    reference = save("nemotron_h", tmp_path, vocab_size=VOCAB_SIZE, **CONFIGURATIONS[name])
    llm = open_llm(
        tmp_path, max_num_batched_tokens=160 if name == "latent" else 96, page_size=16, num_slots=32
    )
    grid = llm.llm_engine.scheduler.cache.grid
    run = Resuming.beside(llm, reference).run

    history = run(tokens(200), 0)  # in chunks, then decodes
    run(tokens(200), 192 // grid * grid)  # a page
    run([*history, *tokens(30, 1)], 204)  # the answer's end, inside a page
    shared = tokens(83, 2)
    run([*shared, *tokens(40, 3)], 0)
    run([*shared, *tokens(40, 4)], 64 if grid == 64 else 0)  # where the first prefill was cut
    run([*shared, *tokens(40, 5)], 83)  # the branch point, inside a page


def test_other_layouts_load_alike(tmp_path, caplog):
    """transformers' own names, experts in one tensor; and heads that draft, which are left out, and
    that is said."""
    caplog.set_level("INFO")
    save("nemotron_h", tmp_path)
    before = dict(load_model(tmp_path)[0].named_parameters())
    file = tmp_path / "model.safetensors"
    published = load_file(file)
    assert "backbone.layers.1.mixer.experts.5.up_proj.weight" in published
    tensors = {"mtp.layers.0.eh_proj.weight": torch.zeros(2, 2)}
    for name, tensor in published.items():
        if ".experts." not in name:
            tensors[name.replace("backbone.", "model.")] = tensor
    for layer, projection in product((1, 5), ("up_proj", "down_proj")):
        prefix = f"layers.{layer}.mixer.experts"
        own = [published[f"backbone.{prefix}.{i}.{projection}.weight"] for i in range(6)]
        tensors[f"model.{prefix}.{projection}"] = torch.stack(own)
    save_file(tensors, file)
    assert "MTP" not in caplog.text
    after = dict(load_model(tmp_path)[0].named_parameters())
    assert "left out the MTP head, 1 tensors under mtp: of model_type='nemotron_h'" in caplog.text
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], parameter) for name, parameter in before.items())


def test_dummy_experts_add_nothing_that_all_tokens_share(tmp_path):
    """Else routers choose more alike from layer to layer, and decodes read few experts."""
    save("nemotron_h", tmp_path, num_experts_per_tok=1)
    model, _ = load_model(tmp_path, LoadOptions(load_format="dummy"))
    (experts,) = model.layers[1].blocks[0].parts
    hidden = torch.randn(4096, 48, generator=torch.Generator().manual_seed(0))
    mixed = experts.partials(hidden).sum(1)
    assert mixed.mean(0).norm() < 0.1 * mixed.norm(dim=1).mean()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"conv_kernel": 1},
        {"hybrid_override_pattern": "M?"},
        {"mlp_hidden_act": "silu"},
        {"n_groups": 7},
        {"n_shared_experts": 2},
        {"num_experts_per_tok": 9},
    ],
    ids=str,
)
def test_what_would_be_ignored_is_refused(changes, tmp_path):
    path = tmp_path / "config.json"
    save("nemotron_h", tmp_path)
    config = json.loads(path.read_text()) | changes
    if "hybrid_override_pattern" in changes:
        del config["layers_block_type"]
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError):
        load_model(tmp_path, LoadOptions(load_format="dummy"))


def test_pages_that_hold_nothing_have_a_bound(tmp_path):
    """Also on the way to host memory and disk; else the host would count a page for each byte."""
    save("nemotron_h", tmp_path, vocab_size=VOCAB_SIZE, hybrid_override_pattern="M-M-")
    options = {"skip_tokenizer_init": True, "cpu_cache_gib": 0.1}
    llm = LLM(str(tmp_path), cache_dir=str(tmp_path / "cache"), cache_disk_gib=0.5, **options)
    assert llm.llm_engine.scheduler.cache.pages.capacity < 2**17
    tiers = tiering_of(llm.llm_engine).tiers
    assert tiers.host.budgets["pages"].capacity < 2**17
    assert tiers.disk.budgets["pages"].capacity < 2**17
    for number, seen in ((0, 0), (1, 0), (0, 192)):
        (output,) = ask(llm, tokens(200, number))
        assert output.num_cached_tokens == seen
    with pytest.raises(ConfigError, match=r"num_pages=1000000000: use at most"):
        LLM(str(tmp_path), num_pages=10**9, num_slots=4, **options)
