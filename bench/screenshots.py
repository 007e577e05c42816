"""An agent that sends a new screenshot with each turn: what each turn computes, encodes and waits.

    python bench/screenshots.py --model bench/models/hybrid-35b-a3b
    python bench/screenshots.py --option enable_prefix_caching=false

Dummy weights with the large vision tower (27 layers of 1152), screenshots of random blocks, a
system prompt of 1,500 tokens and 350 tokens of text a turn. One JSON row a turn: seconds to the
answer's first token and to its end, preparing all images included, tokens computed, images encoded.
The second command is the same with the cache off.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import rows

SYSTEM_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1500, 350, 100
START, PAD, END, VIDEO = 1, 2, 3, 4
"""Token ids for what surrounds and stands for an image; all others are text."""
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=rows.ROOT / "bench/models/hybrid-35b-a3b")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--size", type=int, nargs=2, default=(1920, 1080))
    rows.add_option(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=rows.ROOT / "out" / "screenshots.jsonl")
    arguments = parser.parse_args()
    from milepost import LLM

    options = dict(arguments.option)
    with tempfile.TemporaryDirectory() as folder:
        llm = open_with_tower(LLM, Path(folder), arguments.model, seed=arguments.seed, **options)
    common = {**rows.provenance(), "model": arguments.model.name, "options": options}
    _converse(llm, 2, arguments.size, random.Random(-1))  # what the first images warm up
    llm.reset_prefix_cache()
    found = []
    for row in _converse(llm, arguments.turns, arguments.size, random.Random(arguments.seed)):
        print(json.dumps(row), flush=True)
        found.append({**common, "seed": arguments.seed, **row})
    llm.close()
    rows.write(arguments.out, found)
    return 0


def open_with_tower(make: Any, folder: Path, model: Path, **options: Any) -> Any:
    """Opens the text model, with a vision tower before it, as an `LLM` or `AsyncLLM`."""
    (folder / "config.json").write_text(json.dumps(whole_config(model)), encoding="utf-8")
    given = {"max_num_seqs": 4, "max_model_len": 65536, **options}
    return make(folder, load_format="dummy", skip_tokenizer_init=True, **given)


def whole_config(model: Path) -> dict[str, Any]:
    """Returns the config.json of a text model with a vision tower before it."""
    text = json.loads((model / "config.json").read_text(encoding="utf-8"))
    del text["architectures"]
    # Qwen3.5's text models have Qwen3-Next's shapes, and turn by time, row and column.
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    kind = "qwen3_5_moe" if "num_experts" in text else "qwen3_5"
    return {
        "model_type": kind,
        "text_config": {**text, "model_type": f"{kind}_text"},
        "vision_config": {**TOWER, "out_hidden_size": text["hidden_size"]},
        "image_token_id": PAD,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }


def _converse(
    llm: Any, num_turns: int, size: tuple[int, int], random_: random.Random
) -> list[dict[str, Any]]:
    """Plays one agent; returns a row a turn."""
    from milepost import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    tokens, images, found = text_of(random_, SYSTEM_TOKENS), [], []
    for turn in range(num_turns):
        tokens += [START, PAD, END, *text_of(random_, TURN_TOKENS)]
        images.append(screenshot(size, random_))
        encoded = llm.llm_engine.scheduler.stats.num_encoded
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        began_s = time.perf_counter()
        outputs = llm.stream(prompt, params)
        output = next(outputs)
        first_s = time.perf_counter() - began_s
        *_, output = outputs
        report = output.cache_report
        found.append(
            {
                "turn": turn,
                "first_token_s": round(first_s, 4),
                "seconds": round(time.perf_counter() - began_s, 4),
                "prompt_tokens": report.prompt_tokens,
                "computed_tokens": report.computed,
                "image_tokens_reused": report.image_tokens_reused,
                "images": len(images),
                "images_encoded": llm.llm_engine.scheduler.stats.num_encoded - encoded,
            }
        )
        tokens += output.outputs[0].token_ids
    return found


def text_of(random_: random.Random, num: int) -> list[int]:
    return [random_.randrange(10, 50_000) for _ in range(num)]


def screenshot(size: tuple[int, int], random_: random.Random) -> bytes:
    """Returns a PNG of flat rectangles."""
    from PIL import Image

    made = np.random.default_rng(random_.randrange(2**32))
    pixels = made.integers(0, 256, (27, 48, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
