"""`milepost chat`: a conversation in the terminal, its turns, commands and transcript, with the
cache report after each turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TextIO

from cyclopts import Group, Parameter

from milepost.cli.display import Screen, Shown, seconds
from milepost.cli.flags import ENGINE, ModelArgument, add_flags, field_docs, one_model
from milepost.cli.generate import SAMPLING, StreamingEngine
from milepost.cli.talkers import EngineTalker, Talker, reach
from milepost.config import EngineConfig
from milepost.engine.outputs import RequestOutput
from milepost.errors import ConfigError, InvalidRequestError
from milepost.logs import LogSetup, set_up
from milepost.sampling_params import SamplingParams

CHAT = Group("Chat", sort_key=1)

PROMPT = "> "


def chat_command(
    open_engine: Callable[[EngineConfig], StreamingEngine], screen: Screen, stdin: TextIO
) -> Callable[..., None]:
    """Makes the command, for an engine factory and a terminal."""

    def chat(
        checkpoint: Annotated[ModelArgument, Parameter(group=CHAT)] = None,
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


HELP = """/set NAME VALUE   set a sampling parameter, such as /set temperature 0.7
/set NAME default return to the model's default; /set alone lists what is set
/system TEXT      set the system prompt and start over; without TEXT, remove it
/reset            start over: the cache keeps its contents
/stats            tokens, cached tokens and speed of each turn so far
/save FILE        write the conversation: JSON if FILE ends in .json, else markdown
/help             this list
/quit             quit, as does Ctrl-D. Ctrl-C stops an answer"""
SETTABLE = {
    one.name: one.default
    for one in fields(SamplingParams)
    if one.name not in (*SAMPLING.left_out, "reasoning", "n") and one.default is not MISSING
}
"""Parameters that `/set` takes."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A conversation so far, what answers it, and the screen that shows it."""

    talker: Talker
    screen: Screen
    given: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that were set, by name."""
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    _shown: list[Shown] = field(default_factory=list)
    _saved: set[Path] = field(default_factory=set)
    _newest: RequestOutput | None = None

    def run(self, lines: Iterator[str]) -> None:
        """Answers line after line until the input ends or the user quits."""
        for line in lines:
            if line == "/quit":
                return
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        commands = {
            "/help": lambda _: self.screen.note(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
        }
        if command not in commands:
            self.screen.note(f"{command} is unknown: use {', '.join(commands)} or /quit")
            return
        try:
            commands[command](rest.strip())
        except InvalidRequestError as error:
            self.screen.error(str(error))

    # --- commands ---------------------------------------------------------------------------------

    def _start_over(self) -> None:
        self.turns.clear()
        self._shown.clear()

    def _reset(self, _: str) -> None:
        self._start_over()
        self.screen.note("A new conversation.")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self._start_over()
        kept = "with this system prompt" if self.system else "without a system prompt"
        self.screen.note(f"A new conversation {kept}.")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            self.screen.note(self._settings())
            return
        name = name.lstrip("-").replace("-", "_")
        if name not in SETTABLE:
            raise InvalidRequestError(f"/set {name}: use one of {', '.join(SETTABLE)}")
        if not value.strip():
            now = getattr(self.talker.params(self.given), name)
            self.screen.note(f"{name} is {now!r}: {field_docs(SamplingParams)[name]}")
            return
        given = {key: old for key, old in self.given.items() if key != name}
        if value.strip() != "default":
            given[name] = _value(value.strip())
            self.talker.params(given)
        self.given = given
        self.screen.note(self._settings())

    def _settings(self) -> str:
        said = ", ".join(f"{name} {value!r}" for name, value in self.given.items())
        return f"set: {said}" if said else "nothing is set: the model's defaults apply"

    def _stats(self, _: str) -> None:
        if not self._shown:
            self.screen.note("nothing was answered in this conversation")
            return
        self.screen.summary(self._shown)
        num_tokens = sum(len(one.output.outputs[0].token_ids) for one in self._shown)
        total_s = sum(one.total_s for one in self._shown)
        self.screen.note(
            f"{num_tokens} tokens answered in {seconds(total_s)}"
            f" ({num_tokens / max(total_s, 1e-9):.1f} tokens/s) by {self.talker.name}"
        )

    def _save(self, text: str) -> None:
        try:
            path = Path(text).expanduser()
            is_there = path.exists()
        except (OSError, RuntimeError) as error:  # no such user; a name that is too long
            raise InvalidRequestError(f"/save {text}: {error}") from error
        if not text or not self.turns:
            raise InvalidRequestError(
                f"/save {text}: nothing was said" if text else "/save: name a file"
            )
        if is_there and path not in self._saved:
            raise InvalidRequestError(f"/save {path}: it exists; use another name")
        content = self._json() if path.suffix == ".json" else self._markdown()
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InvalidRequestError(f"/save {path}: {error.strerror}") from error
        self._saved.add(path)
        self.screen.note(f"saved {len(self.turns)} messages to {path}")

    def _json(self) -> str:
        body = {"model": self.talker.name, **self.given, "messages": self._messages()}
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"

    def _markdown(self) -> str:
        names = {"system": "System", "user": "You", "assistant": self.talker.name}
        parts = [f"## {names[one['role']]}\n\n{one['content']}\n" for one in self._messages()]
        return "\n".join(parts)

    # --- turns ------------------------------------------------------------------------------------

    def _messages(self) -> list[dict[str, Any]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def _answer(self, text: str) -> None:
        """Runs one turn. Text answered before Ctrl-C stays in the conversation; a turn without any
        text is removed."""
        self._newest = None
        self.turns.append({"role": "user", "content": text})
        try:
            updates = self._noting(self.talker.stream(self._messages(), self.given))
            self._shown.append(self.screen.show(text, updates, self.talker.params(self.given)))
            self.screen.note("")
        except KeyboardInterrupt:
            self.screen.note("\nstopped")
        except InvalidRequestError as error:
            self.screen.error(str(error))
        answer = self._newest.outputs[0].text if self._newest is not None else ""
        if answer:
            self.turns.append(self.talker.message(answer))
        else:
            self.turns.pop()

    def _noting(self, updates: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
        for update in updates:
            self._newest = update
            yield update


def _value(text: str) -> Any:
    """Returns a typed value: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
