"""Panels and their queries, which keep to what the dashboard's variables choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CHOSEN = 'model_name=~"$model", instance=~"$instance"'
CHOSEN_INSTANCE = 'instance=~"$instance"'

Query = tuple[str, str]
"""An expression, and its legend."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart over time; `is_stacked` if its lines add up."""

    title: str
    queries: Sequence[Query]
    text: str = ""
    unit: str = "short"
    is_stacked: bool = False


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """Rows of panels, by their titles."""

    file: str
    uid: str
    title: str
    rows: dict[str, Sequence[Panel]]


def chosen(name: str, labels: str = "") -> str:
    """Returns the selector of a metric of the chosen models and instances."""
    is_ours = name.startswith("milepost:")
    own = CHOSEN if is_ours else CHOSEN_INSTANCE
    return f"{name}{{{', '.join(part for part in (labels, own) if part)}}}"


def rate(name: str, by: str = "", labels: str = "") -> str:
    """Returns a counter's increase a second, summed over all but the label `by`."""
    over = f" by ({by})" if by else ""
    return f"sum{over} (rate({chosen(f'{name}_total', labels)}[$__rate_interval]))"


def ours(name: str, by: str = "", labels: str = "") -> str:
    return rate(f"milepost:{name}", by, labels)


def share(part: str, whole: str) -> str:
    return f"{ours(part)} / {ours(whole)}"


def quantiles(name: str) -> list[Query]:
    buckets = f"sum by (le) (rate({chosen(f'milepost:{name}_bucket')}[$__rate_interval]))"
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return [(f"histogram_quantile({q}, {buckets})", legend) for legend, q in shares.items()]


def latency(title: str, name: str, text: str = "") -> Panel:
    return Panel(title=title, text=text, unit="s", queries=quantiles(name))


def gauge(operation: str, name: str, by: str = "", labels: str = "") -> str:
    over = f" by ({by})" if by else ""
    return f"{operation}{over} ({chosen(f'milepost:{name}', labels)})"


def pool(name: str) -> list[Query]:
    running = gauge("max", f"{name}_usage_perc", "instance")
    cached = gauge("max", f"{name}_cached_perc", "instance")
    return [(running, "{{instance}} running"), (cached, "{{instance}} cached")]


HITS = Panel(
    title="Hit rate of the prefix cache",
    text="Share of prompt tokens that were not computed. From outside the device: host memory, "
    "disk, other engines.",
    unit="percentunit",
    is_stacked=True,
    queries=[
        (share("prefix_cache_local_hits", "prefix_cache_queries"), "on the device"),
        (share("external_prefix_cache_hits", "prefix_cache_queries"), "from outside"),
    ],
)
REASONS = Panel(
    title="Prompt tokens computed, by reason",
    text="Tokens a second; with the reused ones they add up to all prompt tokens.",
    is_stacked=True,
    queries=[(ours("prefix_cache_lost_tokens", "reason"), "{{reason}}")],
)
