"""Requests of different salts share nothing, and learn nothing of each other."""

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
