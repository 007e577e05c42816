"""`milepost chat`: a conversation in the terminal, with the cache report after each turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TextIO

from cyclopts import Group, Parameter

from milepost.cli.display import Screen
from milepost.cli.flags import add_flags, one_model
from milepost.cli.generate import ENGINE, SAMPLING, StreamingEngine
from milepost.cli.logs import log_to_stderr
from milepost.config import EngineConfig
from milepost.engine.outputs import RequestOutput
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams

CHAT = Group("Chat", sort_key=1)

PROMPT = "> "
HELP = """/system TEXT   set the system prompt and start over; without TEXT, remove it
/reset         start over: the cache keeps its contents
/help          this list
/quit          quit, as does Ctrl-D. Ctrl-C stops an answer"""


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
        config = ENGINE.build(settings)
        if config.skip_tokenizer_init:
            raise InvalidRequestError("a chat needs the tokenizer: leave out --skip-tokenizer-init")
        log_to_stderr(verbose)
        screen.loading(config.model)
        engine = open_engine(config)
        params = replace(engine.get_default_sampling_params(), **SAMPLING.given(settings))
        screen.note("Type a message, or /help.")
        Conversation(engine=engine, screen=screen, params=params, system=system).run(stdin)

    return add_flags(chat, [SAMPLING, ENGINE])


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A conversation so far, with the engine and screen that continue it."""

    engine: StreamingEngine
    screen: Screen
    params: SamplingParams
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    _newest: RequestOutput | None = None

    def run(self, stdin: TextIO) -> None:
        """Answer line after line until the input ends."""
        for line in lines(stdin):
            command, _, rest = line.partition(" ")
            match command:
                case "":
                    continue
                case "/quit":
                    return
                case "/help":
                    self.screen.note(HELP)
                case "/reset":
                    self.turns.clear()
                    self.screen.note("A new conversation.")
                case "/system":
                    self.system = rest.strip() or None
                    self.turns.clear()
                    kept = "with this system prompt" if self.system else "without a system prompt"
                    self.screen.note(f"A new conversation {kept}.")
                case _ if command.startswith("/"):
                    self.screen.note(f"{command} is unknown: use /help, /system, /reset or /quit")
                case _:
                    self._answer(line)

    def _answer(self, text: str) -> None:
        """Run one turn. Text answered before Ctrl-C stays in the conversation; a turn without any
        text is removed."""
        self._newest = None
        head = [{"role": "system", "content": self.system}] if self.system else []
        self.turns.append({"role": "user", "content": text})
        try:
            updates = self.engine.stream_chat([*head, *self.turns], self.params)
            self.screen.show(text, self._noting(updates), self.params)
            self.screen.note("")
        except KeyboardInterrupt:
            self.screen.note("\nstopped")
        except InvalidRequestError as error:
            self.screen.error(str(error))
        answer = self._newest.outputs[0].text if self._newest is not None else ""
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def _noting(self, updates: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        for update in updates:
            self._newest = update
            yield update


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
