"""The dashboard of the cache: hits, reasons for misses, states and pages, tiers, other engines."""

from __future__ import annotations

from queries import HITS, REASONS, Dashboard, Panel, gauge, ours, pool, quantiles, share

CACHE = Dashboard(
    file="grafana-cache.json",
    uid="milepost-cache",
    title="Milepost: the cache",
    rows={
        "Hits and misses": [
            HITS,
            REASONS,
            Panel(
                title="Prompt tokens by source",
                text="Tokens a second.",
                is_stacked=True,
                queries=[(ours("prompt_tokens_by_source", "source"), "{{source}}")],
            ),
            Panel(
                title="Prompt tokens computed for a request",
                queries=quantiles("request_prefill_kv_computed_tokens"),
            ),
            Panel(
                title="Hit rate of preempted requests",
                text="Share of their tokens that were still cached when they returned.",
                unit="percentunit",
                queries=[(share("resumed_hits", "resumed_tokens"), "reused")],
            ),
            Panel(
                title="Waits for another's prefix",
                text="A second: a request waits for a step while another one computes its prefix.",
                queries=[(ours("prefix_waits"), "waits")],
            ),
        ],
        "States and pages": [
            Panel(title="Use of the pages", unit="percentunit", queries=pool("kv_cache")),
            Panel(
                title="Use of the state slots",
                text="0 where states lie beside pages, in one memory.",
                unit="percentunit",
                queries=pool("state_cache"),
            ),
            Panel(
                title="States a second",
                text="Skipped: there was no slot. Declined: others are worth more.",
                queries=[
                    (ours(f"checkpoints_{what}"), what)
                    for what in ("made", "used", "skipped", "declined")
                ],
            ),
            Panel(
                title="States evicted a second, by cause",
                is_stacked=True,
                queries=[(ours("checkpoints_evicted", "cause"), "{{cause}}")],
            ),
            Panel(
                title="States evicted unused",
                text="Share of evicted states from which no request had resumed.",
                unit="percentunit",
                queries=[(share("checkpoints_evicted_unused", "checkpoints_evicted"), "unused")],
            ),
            Panel(
                title="Pages a second",
                text="Duplicate: computed twice by requests side by side.",
                queries=[(ours(f"pages_{what}"), what) for what in ("evicted", "duplicate")],
            ),
        ],
        "Host memory and disk": [
            Panel(
                title="Tokens loaded a second, by source",
                is_stacked=True,
                queries=[(ours("prefix_cache_loaded_tokens", "source"), "{{source}}")],
            ),
            Panel(
                title="Use of the tiers",
                unit="percentunit",
                queries=[(gauge("max", "tier_usage_perc", "tier, what"), "{{tier}} {{what}}")],
            ),
            Panel(
                title="Items in the tiers",
                text="Pages and states.",
                queries=[(gauge("sum", "tier_items", "tier"), "{{tier}}")],
            ),
            Panel(
                title="Items copied a second",
                queries=[
                    (ours("tier_stored_items"), "to host memory"),
                    (ours("tier_written_items"), "to disk"),
                    (ours("tier_states_too_late"), "states evicted before there was room"),
                ],
            ),
            Panel(
                title="Loads a second",
                queries=[(ours("tier_loads"), "loads"), (ours("tier_failed_loads"), "failed")],
            ),
            Panel(
                title="Pauses of the disk a second",
                text="The directory did not respond and was left alone.",
                queries=[(ours("tier_disk_rests"), "pauses")],
            ),
        ],
        "Other engines": [
            Panel(
                title="Transfers a second",
                queries=[
                    (ours("kv_transfers"), "fetched"),
                    (ours("kv_transfer_failures"), "failed"),
                ],
            ),
            Panel(
                title="Bytes fetched a second",
                unit="Bps",
                queries=[(ours("kv_transfer_bytes"), "fetched")],
            ),
            Panel(
                title="Leases a second",
                queries=[
                    (ours(f"kv_leases_{what}"), what) for what in ("granted", "expired", "refused")
                ],
            ),
        ],
    },
)
