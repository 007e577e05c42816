"""The dashboard of a server: latency, load, the cache in short, speculation, processes."""

from __future__ import annotations

from queries import (
    HITS,
    REASONS,
    Dashboard,
    Panel,
    chosen,
    gauge,
    latency,
    ours,
    pool,
    quantiles,
    rate,
    share,
)

ENGINE = "milepost_engine_process"


def open_files(process: str) -> str:
    return f"{chosen(f'{process}_open_fds')} / {chosen(f'{process}_max_fds')}"


SERVER = Dashboard(
    file="grafana.json",
    uid="milepost",
    title="Milepost",
    rows={
        "Latency": [
            latency("Time to first token", "time_to_first_token_seconds"),
            latency("Time per output token", "request_time_per_output_token_seconds"),
            latency("Between two deliveries", "inter_token_latency_seconds"),
            latency("Whole request", "e2e_request_latency_seconds"),
            latency("Time in the queue", "request_queue_time_seconds"),
            latency("Prefill", "request_prefill_time_seconds", "From admission to first token."),
        ],
        "Load": [
            Panel(
                title="Requests",
                text="Deferred: another request computes the same prefix, or the cache is worth "
                "more to others.",
                queries=[
                    (gauge("sum", "num_requests_running"), "running"),
                    (gauge("sum", "num_requests_waiting_by_reason", "reason"), "{{reason}}"),
                ],
            ),
            Panel(
                title="Tokens a second",
                queries=[
                    (ours("prompt_tokens"), "prompt"),
                    (ours("prompt_tokens_computed"), "prompt, computed"),
                    (ours("generation_tokens"), "answers"),
                ],
            ),
            Panel(title="Tokens in a step", queries=quantiles("iteration_tokens_total")),
            Panel(
                title="Ends a second",
                queries=[
                    (ours("request_success", "finished_reason"), "{{finished_reason}}"),
                    (ours("request_disconnects"), "client gone"),
                    (ours("num_preemptions"), "preempted"),
                ],
            ),
            Panel(
                title="Refused a second, by status",
                queries=[(ours("request_refused", "status"), "{{status}}")],
            ),
            Panel(
                title="HTTP requests a second",
                queries=[(rate("http_requests", "handler, status"), "{{handler}} {{status}}")],
            ),
        ],
        "Cache": [
            HITS,
            REASONS,
            Panel(title="Use of the pages", unit="percentunit", queries=pool("kv_cache")),
        ],
        "Speculation": [
            Panel(
                title="Share of drafts accepted",
                unit="percentunit",
                queries=[
                    (
                        share("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
                        "accepted",
                    )
                ],
            ),
            Panel(
                title="Share accepted, by position",
                text="Of the times that drafts were verified.",
                unit="percentunit",
                queries=[
                    (
                        f"{ours('spec_decode_num_accepted_tokens_per_pos', 'position')} / "
                        f"on () group_left () {ours('spec_decode_num_drafts')}",
                        "{{position}}",
                    )
                ],
            ),
        ],
        "Processes": [
            Panel(
                title="Memory",
                unit="bytes",
                queries=[
                    (chosen("process_resident_memory_bytes"), "{{instance}} HTTP"),
                    (
                        chosen(f"{ENGINE}_resident_memory_bytes"),
                        "{{instance}} engine",
                    ),
                ],
            ),
            Panel(
                title="Processor",
                text="Cores in use.",
                queries=[
                    (rate("process_cpu_seconds", "instance"), "{{instance}} HTTP"),
                    (
                        rate(f"{ENGINE}_cpu_seconds", "instance"),
                        "{{instance}} engine",
                    ),
                ],
            ),
            Panel(
                title="Open files",
                text="Share of the limit.",
                unit="percentunit",
                queries=[
                    (open_files("process"), "{{instance}} HTTP"),
                    (open_files(ENGINE), "{{instance}} engine"),
                ],
            ),
        ],
    },
)
