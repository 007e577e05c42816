"""Trains Milepost-tiny on one GPU (or, for a trial, a few steps on a CPU).

    python tools/tiny/train.py --data build/tiny --out build/tiny/model

Warm-up, constant rate, then linear decay to zero; the last steps run on rows of 8192 tokens.
Writes the model folder, `curve.csv`, `curve.png` and a checkpoint that --resume goes on from.
The predictor learns the main model's own distribution, because that is what its drafts are
measured by.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import folder
import numpy as np
import torch
import torch.nn.functional as F
from model import Tiny, tiny_config
from muon import Muon
from tokenizers import Tokenizer
from torch import Tensor

MIX = {"chat": 0.5, "python": 0.18, "other": 0.32}
LATE = {"chat": 0.65, "python": 0.13, "other": 0.22}  # while the rate decays


class Rows:
    """Draws training rows; half of those from documents, and all of those from dialogues, begin
    where a text begins."""

    def __init__(self, path: Path, device: torch.device, seed: int):
        arrays = np.load(path)
        self.random = torch.Generator(device).manual_seed(seed)
        self.device = device
        self.tokens = {
            name: torch.from_numpy(arrays[name].astype(np.int16)).to(device) for name in MIX
        }
        self.starts = {name: torch.from_numpy(arrays[f"{name}_starts"]).to(device) for name in MIX}

    def draw(self, rows: int, length: int, mix: dict[str, float]) -> Tensor:
        """Token ids [rows, length], as many rows of each stream as the mix says."""
        counts = [round(share * rows) for share in mix.values()]
        counts[-1] = rows - sum(counts[:-1])
        parts = []
        for name, count in zip(mix, counts, strict=True):
            tokens, starts = self.tokens[name], self.starts[name]
            first = starts[self._below(len(starts), count)]
            if name != "chat":
                inside = self._below(len(tokens), count)
                first = torch.where(torch.arange(count, device=self.device) % 2 == 0, first, inside)
            first = first.clamp(max=len(tokens) - length)
            parts.append(tokens[first[:, None] + torch.arange(length, device=self.device)].long())
        return torch.cat(parts)

    def _below(self, limit: int, count: int) -> Tensor:
        return torch.randint(limit, (count,), generator=self.random, device=self.device)


def losses(model: Tiny, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the next token, and mean divergence of the predictor from the main
    model."""
    ids, targets = rows[:, :-1], rows[:, 1:]
    hidden = model.hidden(ids)
    draft = model.draft_hidden(hidden, targets)
    return head_loss(model.model.embed_tokens.weight, hidden, draft, targets)


def head_loss(
    head: Tensor, hidden: Tensor, draft: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    main = F.linear(hidden, head.to(hidden.dtype)).float().log_softmax(-1)
    loss = -main.gather(-1, targets[..., None]).mean()
    drafted = F.linear(draft[:, :-1], head.to(hidden.dtype)).float().log_softmax(-1)
    teacher = main[:, 1:].detach()
    return loss, (teacher.exp() * (teacher - drafted)).sum(-1).mean()


def heldout_rows(
    data: Path, tokenizer: Tokenizer, length: int, device: torch.device
) -> tuple[Tensor, int]:
    """Held-out documents as rows padded with 0 after their end, and their size in bytes."""
    rows, size = [], 0
    for line in (data / "heldout.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        size += len(text.encode())
        ids = [0, *tokenizer.encode(text).ids]
        for first in range(0, len(ids) - 1, length - 1):
            row = ids[first : first + length]
            rows.append(row + [0] * (length - len(row)))
    return torch.tensor(rows, device=device), size


@torch.no_grad()
def evaluate(model: Tiny, rows: Tensor, size: int, batch: int = 32) -> tuple[float, float]:
    """Bits per byte and draft acceptance on held-out rows (documents cut at the row's length)."""
    bits, agreed, drafts = 0.0, 0, 0
    for part in rows.split(batch):
        ids, targets = part[:, :-1], part[:, 1:]
        hidden = model.hidden(ids)
        main = model.logits(hidden).float()
        real = targets != 0
        bits += F.cross_entropy(main[real], targets[real], reduction="sum").item() / math.log(2)
        draft = model.logits(model.draft_hidden(hidden, targets))[:, :-1].argmax(-1)
        agreed += ((draft == main[:, 1:].argmax(-1)) & real[:, 1:]).sum().item()
        drafts += real[:, 1:].sum().item()
    return bits / size, agreed / drafts


def rate(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the peak learning rate: warm-up, constant, linear to zero over the last `decay` of
    the steps."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (decay * steps))


def optimizers(model: Tiny, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    small = [p for p in model.parameters() if p.dim() != 2]
    embedding = [model.model.embed_tokens.weight]
    groups = [{"params": embedding, "weight_decay": 0.01}, {"params": small, "weight_decay": 0.0}]
    return [
        Muon(matrices, lr, weight_decay=0.05),
        torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True),
    ]


def schedule(args: argparse.Namespace, start: int) -> Iterator[tuple[int, int]]:
    """(step, row length): short rows first, then rows of the full context."""
    long_from = args.steps - int(args.long_share * args.steps)
    for step in range(start, args.until or args.steps):
        yield step, args.long_length if step >= long_from else args.length


def train(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    model = Tiny(tiny_config(tokenizer.get_vocab_size())).to(device)
    chosen = optimizers(model, args.lr)
    rows = Rows(args.data / "train.npz", device, args.seed)
    held, size = heldout_rows(args.data, tokenizer, args.length + 1, device)
    curve: list[dict[str, float]] = []
    start = fresh = 0
    if args.resume:
        saved = torch.load(args.resume, map_location=device, weights_only=False)
        model.load_state_dict(saved["model"])
        start, curve = saved["step"], saved["curve"]
        fresh = 0 if "optimizers" in saved else start  # where the optimizers began, to warm them up
        for optimizer, state in zip(chosen, saved.get("optimizers", []), strict=False):
            optimizer.load_state_dict(state)
        rows.random.manual_seed(args.seed + start)
    run = torch.compile(losses, dynamic=False) if args.compile else losses
    began, spent = time.perf_counter(), curve[-1]["seconds"] if curve else 0.0
    totals = torch.zeros(2, device=device)
    for step, length in schedule(args, start):
        mix = MIX if step < (1 - args.decay) * args.steps else LATE
        batch = rows.draw(max(1, args.tokens // length), length + 1, mix)
        share = rate(step, args.steps, args.warmup, args.decay) * min(
            1.0, (step - fresh + 1) / args.warmup
        )
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * share
        with torch.autocast(device.type, torch.bfloat16):
            loss, drafting = run(model, batch)
        (loss + args.draft_weight * drafting).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        totals += torch.stack((loss.detach(), drafting.detach()))
        if (step + 1) % args.report == 0 or step + 1 == (args.until or args.steps):
            count = (step - start) % args.report + 1
            with torch.autocast(device.type, torch.bfloat16):
                bits, accepted = evaluate(model, held, size)
            mean = (totals / count).tolist()
            totals.zero_()
            seconds = spent + time.perf_counter() - began
            seen = (step + 1) * args.tokens
            curve.append({"step": step + 1, "tokens": seen, "loss": mean[0], "draft": mean[1],
                          "bits_per_byte": bits, "acceptance": accepted, "seconds": seconds})  # fmt: skip  # noqa: E501
            print(" ".join(f"{key} {value:.4g}" for key, value in curve[-1].items()), flush=True)
            save_curve(curve, args.out)
        if (step + 1) % args.save_every == 0 or step + 1 == args.until:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in chosen],
                     "step": step + 1, "curve": curve}  # fmt: skip
            torch.save(state, args.out / "checkpoint.part")
            (args.out / "checkpoint.part").rename(args.out / "checkpoint.pt")
            folder.write(model, args.data / "tokenizer.json", args.out)
    folder.write(model, args.data / "tokenizer.json", args.out)
    save_picture(curve, args.out)


def save_curve(curve: list[dict[str, float]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "curve.csv").open("w") as file:
        writer = csv.DictWriter(file, curve[0])
        writer.writeheader()
        writer.writerows(curve)


def save_picture(curve: list[dict[str, float]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    seen = [point["tokens"] / 1e6 for point in curve]
    left.plot(seen, [point["loss"] for point in curve], label="training loss (nats per token)")
    left.plot(seen, [point["bits_per_byte"] for point in curve], label="held out (bits per byte)")
    left.set(xlabel="million tokens", ylim=(0.5, 3.5))
    left.legend()
    right.plot(seen, [point["acceptance"] for point in curve], label="first draft token, held out")
    right.set(xlabel="million tokens", ylabel="acceptance")
    right.legend(loc="lower right")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "curve.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=Path("build/tiny/model"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=12600)
    parser.add_argument("--until", type=int, default=0, help="stop here with a checkpoint")
    parser.add_argument("--save-every", type=int, default=2000, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--long-length", type=int, default=8192)
    parser.add_argument(
        "--long-share", type=float, default=0.1, help="share of steps at the long length"
    )
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--decay", type=float, default=0.52)
    parser.add_argument("--draft-weight", type=float, default=0.3)
    parser.add_argument("--report", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
