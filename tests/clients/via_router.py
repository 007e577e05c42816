"""A plugin of pytest: the server that tests ask is vllm-router, in front of two that prefill and
two that decode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROLES = ("--prefill", "--prefill", "--decode", "--decode")

NOT_PASSED_ON = {
    "what the router answers itself": (
        "test_models",
        "test_operations",
        "test_async_client_and_early_close",
        "test_the_first_call_ends_an_answer_that_may_have_one[False]",
        "test_the_first_call_ends_an_answer_that_may_have_one[True]",
        "test_deleted_is_gone",
        "test_nobody_else_finds_what_is_stored",
        "test_chat_refusals_name_the_field[changes2-messages[0]]",
        "test_chat_refusals_name_the_field[changes6-parallel_tool_calls]",
        "test_refusals_name_the_field[changes1-400-temperature]",
        "test_refusals_name_the_field[changes5-400-n]",
        "test_refusals_name_the_field[changes11-400-prompt]",
        "test_refusals_name_the_field[changes18-400-seed]",
    ),
    "fields that it adds, drops or sets": (
        "test_unknown_fields_are_ignored_and_named",
        "test_a_header_holds_no_more_than_names",
        "test_streams_name_them_too",
        "test_usage_in_every_chunk",
        "test_a_prompt_that_is_too_long_fits_with_minus_one",
        "test_ids_are_the_callers_own",
    ),
    "the next turn goes to another server, which has not stored, cached or logged the one before": (
        "test_access_log_has_the_cache_report",
        "test_chat_hits_on_the_second_turn",
        "test_a_function_is_called_and_its_output_taken",
        "test_a_conversation_goes_on_where_it_was_stored",
        "test_cache_control_is_a_mark_and_usage_tells_of_it",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start servers of their own have no router before them: left out, too."""
    known = {name for names in NOT_PASSED_ON.values() for name in names}
    items[:] = [item for item in items if item.name not in known and _asks(item)]


def _asks(item: pytest.Item) -> bool:
    return bool({"server", "client", "http"} & set(getattr(item, "fixturenames", ())))


def pytest_collection_finish() -> None:
    """`serving` is what the fixture starts."""
    from tests.clients.test_clients import TRANSFER, routing
    from tests.server import conftest

    serving = conftest.serving

    @contextlib.contextmanager
    def routed(folder: Path) -> Iterator[conftest.Server]:
        with contextlib.ExitStack() as stack:
            flags = ("--kv-transfer-config", TRANSFER)
            servers = [stack.enter_context(serving(folder, *flags)) for _ in ROLES]
            pairs = zip(ROLES, servers, strict=True)
            roles = [flag for role, one in pairs for flag in (role, one.url)]
            how = "--vllm-pd-disaggregation", "--policy", "round_robin"
            router = stack.enter_context(routing(*how, *roles))
            yield conftest.Server(servers[-1].process, router.url, servers[-1].log)

    conftest.serving = routed
