"""`milepost generate`: answers prompts in the terminal and shows their cache reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO

from cyclopts import Group, Parameter

from milepost.cli.display import Screen, ids_of, text_of
from milepost.cli.flags import ENGINE, Flags, Whole, add_flags
from milepost.config import EngineConfig
from milepost.engine.outputs import RequestOutput
from milepost.errors import InvalidRequestError
from milepost.logs import LogSetup, set_up
from milepost.sampling_params import SamplingParams

PROMPTS = Group("Prompts", sort_key=1)
SAMPLING = Flags(
    config=SamplingParams,
    group=Group("Sampling", sort_key=2),
    renamed={"seed": "sampling_seed"},
    left_out=("logit_bias", "structured_outputs"),
    defaults={"max_tokens": None},  # an answer is shown whole
)

PromptInput = str | Mapping[str, Any]


class StreamingEngine(Protocol):
    """The part of `milepost.LLM` that commands use. Both streams yield cumulative outputs."""

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer, or None with skip_tokenizer_init."""

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters used for flags that are not given."""

    def stream(
        self, prompt: PromptInput, sampling_params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Yields outputs of one prompt: a string, or {"prompt_token_ids": [...]}."""

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """Yields outputs of one conversation."""


def generate_command(
    open_engine: Callable[[EngineConfig], StreamingEngine], screen: Screen, stdin: TextIO
) -> Callable[..., None]:
    """Makes the command, for an engine factory and a terminal."""

    def generate(
        *prompts: Annotated[str, Parameter(group=PROMPTS, help="What to answer.")],
        prompt_file: Annotated[
            list[Path] | None,
            Parameter(
                group=PROMPTS,
                negative_iterable=(),
                allow_leading_hyphen=True,
                help="Read a prompt from this file, or from standard input if it is `-`. "
                "May be given several times.",
            ),
        ] = None,
        system: Annotated[
            str | None, Parameter(group=PROMPTS, help="System prompt of each conversation.")
        ] = None,
        chat: Annotated[
            bool | None,
            Parameter(
                group=PROMPTS,
                help="Put prompts into the model's chat template. The default if there is one.",
            ),
        ] = None,
        repeat: Annotated[
            Whole,
            Parameter(group=PROMPTS, help="Ask everything this many times, to see the cache work."),
        ] = 1,
        verbose: Annotated[
            bool, Parameter(group=PROMPTS, negative=(), help="Log what the engine does.")
        ] = False,
        **settings: Any,
    ) -> None:
        """Answer prompts, and show which of their tokens came from the cache.

        Prompts come as arguments, from files, or from standard input. Answers go to standard output
        as they are made; reports go to standard error.
        """
        SAMPLING.build(settings)  # reports a mistake before the weights are loaded
        config = ENGINE.build(settings)
        _check(system, chat, repeat, config)
        texts = _read_prompts(prompts, prompt_file or [], stdin)
        set_up(LogSetup(is_detailed=verbose))
        screen.loading(config.model)
        engine = open_engine(config)
        params = replace(engine.get_default_sampling_params(), **SAMPLING.given(settings))
        ask = _asking(engine, params, system, chat)
        visible = text_of if engine.get_tokenizer() and params.detokenize else ids_of
        shown = []
        for number, text in enumerate(texts * repeat, start=1):
            if len(texts) * repeat > 1:
                screen.heading(number, len(texts) * repeat, text)
            shown.append(screen.show(text, ask(text), params, visible))
        if len(shown) > 1:
            screen.summary(shown)
        screen.hint(shown, config.page_size)

    return add_flags(generate, [SAMPLING, ENGINE])


def _check(system: str | None, chat: bool | None, repeat: int, config: EngineConfig) -> None:
    if repeat < 1:
        raise InvalidRequestError(f"--repeat {repeat}: use 1 or more")
    if system is not None and chat is False:
        raise InvalidRequestError("--system with --no-chat: a plain prompt has no system prompt")
    if config.skip_tokenizer_init and (chat or system is not None):
        raise InvalidRequestError(
            "--chat and --system need a tokenizer: leave out --skip-tokenizer-init"
        )


def _read_prompts(prompts: Sequence[str], files: Sequence[Path], stdin: TextIO) -> list[str]:
    """Returns all prompts: arguments, then files; standard input if there is neither.

    A newline at the end of a file is not part of its prompt.
    """
    if not prompts and not files:
        if stdin.isatty():
            raise InvalidRequestError(
                "no prompt: give one as an argument, with --prompt-file, or on standard input"
            )
        prompt = stdin.read().removesuffix("\n")
        if not prompt:
            raise InvalidRequestError("no prompt: standard input is empty")
        return [prompt]
    return [*prompts, *(_read_file(path, stdin) for path in files)]


def _read_file(path: Path, stdin: TextIO) -> str:
    try:
        text = stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"--prompt-file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"--prompt-file {path}: use UTF-8 text ({error})") from error
    return text.removesuffix("\n")


def _asking(
    engine: StreamingEngine, params: SamplingParams, system: str | None, chat: bool | None
) -> Callable[[str], Iterator[RequestOutput]]:
    """Returns a function that sends a prompt's text as a request."""
    tokenizer = engine.get_tokenizer()
    if tokenizer is None:
        return lambda text: engine.stream({"prompt_token_ids": _token_ids(text)}, params)
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if not (has_template if chat is None else chat) and system is None:
        return lambda text: engine.stream(text, params)
    head = [] if system is None else [{"role": "system", "content": system}]
    return lambda text: engine.stream_chat([*head, {"role": "user", "content": text}], params)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise InvalidRequestError(
            f"prompt {text[:40]!r}: with --skip-tokenizer-init use token ids, such as '5 17 3'"
        ) from error
