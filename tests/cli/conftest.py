import io
import itertools

import pytest
from rich.console import Console

from milepost.cli.display import Screen
from milepost.cli.main import main
from milepost.engine.outputs import CacheReport, CompletionOutput, Logprob, RequestOutput
from milepost.errors import InvalidRequestError
from milepost.sampling_params import SamplingParams


class FakeEngine:
    """Answers every prompt with its words in capitals; a prompt seen before is a hit up to 4s."""

    def __init__(self, config, *, template=None, sampling_defaults=None):
        self.config = config
        self.requests = []
        self._seen = set()
        self.chat_template = template
        self.sampling_defaults = sampling_defaults or {}

    def get_tokenizer(self):
        return None if self.config.skip_tokenizer_init else self

    def get_default_sampling_params(self):
        return SamplingParams(**self.sampling_defaults)

    def stream(self, prompt, sampling_params):
        self.requests.append((prompt, sampling_params))
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt["prompt_token_ids"]))
        if not text.strip():
            raise InvalidRequestError("prompt='': use one token or more")
        return self._answer(text, sampling_params)

    def stream_chat(self, messages, sampling_params):
        self.requests.append((messages, sampling_params))
        return self._answer(messages[-1]["content"], sampling_params)

    def _answer(self, text, params):
        words = text.split()
        reused = len(words) // 4 * 4 if text in self._seen else 0
        lost = {"grid": len(words) - reused} if reused else {"unseen": len(words)}
        self._seen.add(text)
        report = CacheReport(
            prompt_tokens=len(words),
            kv_length=reused,
            state_length=reused,
            reused=reused,
            lost=lost,
        )
        most = params.max_tokens or len(words)
        for count in range(1, min(len(words), most) + 1):
            is_last = count == min(len(words), most)
            yield RequestOutput(
                request_id="0",
                prompt=text,
                prompt_token_ids=list(range(len(words))),
                outputs=[
                    self._output(i, words[:count], len(words) > most, is_last, params)
                    for i in range(params.n)
                ],
                finished=is_last,
                num_cached_tokens=reused,
                cache_report=report,
            )

    def _output(self, index, words, is_cut, is_last, params):
        has_text = not self.config.skip_tokenizer_init and params.detokenize
        entry = {7: Logprob(logprob=-0.5, rank=2, decoded_token=" a"), 8: Logprob(logprob=-0.1)}
        return CompletionOutput(
            index=index,
            text=" ".join(words).upper() if has_text else "",
            token_ids=[7] * len(words),
            logprobs=[entry] * len(words) if params.logprobs is not None else None,
            finish_reason=("length" if is_cut else "stop") if is_last else None,
        )


class Terminal(io.StringIO):
    """A terminal that keeps each write."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def isatty(self):
        return True


class Session:
    """Runs command lines against a fake engine and keeps what they wrote."""

    def __init__(self, template=None):
        self.template = template
        self.sampling_defaults = {}
        self.engines = []

    def open_engine(self, config):
        self.engines.append(self._make(config))
        return self.engines[-1]

    def _make(self, config):
        return FakeEngine(config, template=self.template, sampling_defaults=self.sampling_defaults)

    @property
    def requests(self):
        return self.engines[-1].requests

    def run(self, *arguments, stdin="", answers=None):
        """The exit status; `stdin` is the text that stands there, or a stream."""
        ticks = itertools.count()
        self.answers = answers or io.StringIO()
        reports = Console(file=io.StringIO(), width=200, highlight=False)
        screen = Screen(answers=self.answers, reports=reports, clock=lambda: next(ticks) * 0.25)
        stream = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        status = main(arguments, open_engine=self.open_engine, screen=screen, stdin=stream)
        self.out = self.answers.getvalue()
        self.err = reports.file.getvalue()
        return status


@pytest.fixture
def session():
    return Session()


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def chat_session():
    return Session(template="{{ messages }}")
