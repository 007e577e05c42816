"""`milepost chat`: a conversation in the terminal, with the cache report after each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, TextIO

from cyclopts import Group, Parameter

from milepost.cli.conversation import Conversation
from milepost.cli.display import Screen
from milepost.cli.flags import add_flags, one_model
from milepost.cli.generate import ENGINE, SAMPLING, StreamingEngine
from milepost.cli.talkers import EngineTalker, Talker, reach
from milepost.config import EngineConfig
from milepost.errors import ConfigError, InvalidRequestError
from milepost.logs import LogSetup, set_up

CHAT = Group("Chat", sort_key=1)

PROMPT = "> "


def chat_command(
    open_engine: Callable[[EngineConfig], StreamingEngine], screen: Screen, stdin: TextIO
) -> Callable[..., None]:
    """Makes the command, for an engine factory and a terminal."""

    def chat(
        checkpoint: Annotated[
            str | None, Parameter(help="The same as --model.", group=CHAT)
        ] = None,
        /,
        *,
        system: Annotated[
            str | None, Parameter(group=CHAT, help="System prompt of the conversation.")
        ] = None,
        url: Annotated[
            str | None,
            Parameter(
                group=CHAT,
                help="Talk to a running server with OpenAI's API, such as http://127.0.0.1:8000, "
                "in place of loading a model. --model then names one of those it serves.",
            ),
        ] = None,
        api_key: Annotated[str | None, Parameter(group=CHAT, help="Key for --url.")] = None,
        markdown: Annotated[
            bool,
            Parameter(
                group=CHAT,
                help="Render answers as markdown on a terminal. Where output is piped, they are "
                "always written as they are.",
            ),
        ] = True,
        verbose: Annotated[
            bool, Parameter(group=CHAT, negative=(), help="Log what the engine does.")
        ] = False,
        **settings: Any,
    ) -> None:
        """Talk to a model, and see after each turn which tokens came from the cache.

        Type `/help` for the commands. Lines may also come from a pipe.
        """
        settings["model"] = one_model(checkpoint, settings.get("model"))
        SAMPLING.build(settings)
        set_up(LogSetup(is_detailed=verbose))
        if url is not None:
            talker: Talker = _server(url, api_key, settings)
        else:
            talker = _engine(open_engine, screen, settings)
        shows = replace(screen, is_markdown=markdown and screen.answers.isatty())
        screen.note(f"Type a message to {talker.name}, or /help.")
        given = {key: value for key, value in SAMPLING.given(settings).items() if value is not None}
        Conversation(talker=talker, screen=shows, given=given, system=system).run(lines(stdin))

    return add_flags(chat, [SAMPLING, ENGINE])


def _engine(
    open_engine: Callable[[EngineConfig], StreamingEngine],
    screen: Screen,
    settings: Mapping[str, Any],
) -> EngineTalker:
    config = ENGINE.build(settings)
    if config.skip_tokenizer_init:
        raise InvalidRequestError("a chat needs the tokenizer: leave out --skip-tokenizer-init")
    screen.loading(config.model)
    return EngineTalker(open_engine(config), config.model or "the embedded model")


def _server(url: str, key: str | None, settings: Mapping[str, Any]) -> Talker:
    others = [name for name in ENGINE.given(settings) if name != "model"]
    if others:
        flag = others[0].replace("_", "-")
        raise ConfigError(f"--{flag} with --url: the server has loaded its model; leave it out")
    return reach(url, settings["model"], key)


def lines(stdin: TextIO) -> Iterator[str]:
    """Yields the typed lines; a terminal's line editing is used if there is one."""
    if not stdin.isatty():
        yield from (line.strip() for line in stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` edits and remembers lines once it is there
    while True:
        try:
            yield input(PROMPT).strip()
        except EOFError:
            return
