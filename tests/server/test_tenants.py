"""Requests of different salts share nothing, and learn nothing of each other."""

from milepost.engine.wire import Report
from milepost.server.generation import public_losses

PROMPT = list(range(10 + 4 * 64, 10, -1))
"""That nobody else asks of the server, which others use too."""


def ask(client, prompt, salt):
    body = {"cache_salt": salt} if salt else {}
    done = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=1, temperature=0, extra_body=body
    )
    return done.usage.prompt_tokens_details


def test_tenants_do_not_share(client):
    first = ask(client, PROMPT, "tenant a")
    assert first.cached_tokens == 0
    assert ask(client, PROMPT, "tenant a").cached_tokens > 0
    for salt in ("tenant b", None):
        other = ask(client, PROMPT, salt)
        assert other.cached_tokens == 0
        assert other.lost_tokens == first.lost_tokens == {"unseen": len(PROMPT)}


def test_the_operator_sees_the_salt(server, client):
    ask(client, PROMPT[:128], "tenant c")
    before = server.metric("prefix_cache_lost_tokens_total")
    ask(client, PROMPT[:128], "tenant d")
    assert server.metric("prefix_cache_lost_tokens_total") > before
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    (salt,) = [line for line in lines if 'lost_tokens_total{reason="salt"}' in line]
    assert float(salt.split()[-1]) >= 64


def report(prompt_tokens, kv_length, **lost):
    reused = prompt_tokens - sum(lost.values())
    return Report(prompt_tokens, kv_length, reused, reused, lost, 0.0)


def test_the_last_token_tells_nothing_of_other_salts():
    """All but one token known to the tenant itself; whether others know the whole must not show."""
    known = report(128, 64, grid=63, last_token=1)
    unknown = report(128, 64, grid=63, unseen=1)
    assert public_losses([known], 64) == public_losses([unknown], 64)


def test_the_last_token_is_named_where_the_tenant_itself_explains_it():
    assert public_losses([report(128, 128, grid=63, last_token=1)], 64)["last_token"] == 1
    assert public_losses([report(100, 64, grid=35, last_token=1)], 64)["last_token"] == 1


def test_losses_add_up():
    reports = [report(128, 0, salt=64, unseen=64), report(64, 0, unseen=64)]
    assert public_losses(reports, 64) == {"unseen": 192}
