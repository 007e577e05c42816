"""What a server logs about itself once it accepts requests: one line per subject."""

from __future__ import annotations

from milepost.engine.facts import Facts
from milepost.server.service import Service

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def describe(service: Service) -> list[tuple[str, str]]:
    """(subject, what there is to know of it)."""
    info = service.client.info
    facts = info.facts
    tokens = f"{info.num_pages * info.page_size:,} tokens"
    pages = f"{info.num_pages:,} of {info.page_size} tokens ({tokens})"
    slots = f"{info.num_slots:,}"
    if facts.is_shared:
        pages, slots = f"up to {pages}", f"up to {slots}, in the same memory as the pages"
    else:
        pages += f", {size(info.num_pages * facts.page_bytes)}"
        slots += f", {size(info.num_slots * facts.slot_bytes)}"
    names = ", ".join(service.names)
    memory = f"weights {size(facts.weights_bytes)}, cache {size(facts.cache_bytes)}"
    if service.client.config.tensor_parallel_size > 1:
        memory += " on each device"
    rows = [
        ("model", f"{names}, up to {info.max_model_len:,} tokens"),
        ("device", f"{facts.device}, {facts.dtype}, {_kept(facts)}"),
        ("memory", memory),
        ("pages", pages),
        ("state slots", slots),
        ("parsers", f"tool calls {service.format.calls}, reasoning {service.format.reasoning}"),
    ]
    if facts.num_graphs:
        rows.insert(2, ("graphs", f"{facts.num_graphs} captured steps"))
    return rows


def _kept(facts: Facts) -> str:
    kv = f"KV in {facts.kv_dtype}, " if facts.kv_dtype else ""
    return f"{kv}recurrent states in {facts.state_dtype}"


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves at most three digits."""
    power = 0
    while num_bytes >= 1000 and power < len(_UNITS) - 1:
        num_bytes /= 1024
        power += 1
    return f"{num_bytes:.{1 if power and num_bytes < 10 else 0}f} {_UNITS[power]}"
