"""Runs a step on any device with the reference kernels, which define what a step computes."""

from __future__ import annotations

from collections.abc import Sequence

from milepost.images import ImageSettings
from milepost.layers.context import Context
from milepost.models.decoder import Decoder
from milepost.runner import arrays
from milepost.runner.arrays import Geometry
from milepost.runner.choice import score_prompts, wants_scores
from milepost.runner.drafting import Drafting, beginnings
from milepost.runner.graphs import exact_capacity
from milepost.runner.in_flight import InFlightStep
from milepost.runner.pictures import EncodedPictures, rows_of
from milepost.runner.pools import Pools
from milepost.runner.records import RecordRows
from milepost.runner.sampling import SamplingRow, choose
from milepost.runner.staging import on_device
from milepost.runner.tables import HostTables
from milepost.scheduler.plans import StepPlan


class PlainExecutor:
    """Runs `model` over `pools`, launch by launch. `num_requests` bounds the requests that run at
    once, `max_model_len` any sequence."""

    keeps_counts = False

    def __init__(
        self,
        model: Decoder,
        pools: Pools,
        *,
        num_requests: int,
        max_model_len: int,
        image_settings: ImageSettings | None = None,
    ) -> None:
        self.model = model
        self.pictures = EncodedPictures.of(model, image_settings)
        self._pools = pools
        max_pages = -(-max_model_len // pools.page_size)
        sizes = num_requests, max_pages, pools.page_size
        windows = HostTables.of_windows(*sizes) if pools.all_windows is not None else None
        self._tables = HostTables(*sizes, windows)
        self._records = RecordRows(pools.num_record_rows)
        self._geometry = Geometry.of(model, pools, None)
        has_head = model.mtp is not None
        self._drafting = Drafting(model, pools, self._tables, self._geometry) if has_head else None

    def launch(self, plan: StepPlan, before: InFlightStep | None) -> InFlightStep:
        """Runs one forward pass."""
        self._tables.follow(plan)
        self._records.follow(plan)
        capacity = exact_capacity(plan)
        host = arrays.build(plan, self._tables, self._geometry, capacity, records=self._records)
        step = on_device(host, self._pools.device)
        if before is not None:
            places = before.places(plan)
            if places:
                step.token_ids[: len(places)] = before.token_ids[places]
        numbers = plan.sampled_numbers
        is_even = len(numbers) == capacity.num_sampled  # each row is a sampled token
        last_tokens_only = is_even and self.model.ends_early(capacity) and not wants_scores(plan)
        context = Context(
            step=step,
            tables=None,
            kv=self._pools.kv,
            states=self._pools.states,
            conv_states=self._pools.conv_states,
            carried=self._pools.carried,
            conv_records=self._pools.conv_records,
            last_tokens_only=last_tokens_only,
            pictures=rows_of(self.pictures, plan, self._geometry.merge_size),
        )
        hidden = self.model.forward(step.token_ids, context)
        scores = score_prompts(plan, hidden, self.model.compute_logits)
        if not numbers:
            return InFlightStep(plan=plan, numbers=numbers, prompt_scores=scores)
        sampled = hidden if last_tokens_only else hidden[step.last_tokens[: len(numbers)]]
        return InFlightStep(
            plan=plan,
            numbers=numbers,
            logits=self.model.compute_logits(sampled),
            hidden=sampled,
            prompt_scores=scores,
        )

    def sample(self, flight: InFlightStep, rows: Sequence[SamplingRow]) -> None:
        """Samples with the reference."""
        assert flight.logits is not None
        flight.choice = choose(flight.logits, rows)

    def draft(self, flight: InFlightStep, rows: Sequence[SamplingRow], num_drafts: int) -> None:
        """Drafts tokens after the sampled ones, one pass of the head for each."""
        assert self._drafting is not None, "only a model with a head drafts"
        assert flight.hidden is not None
        begun = beginnings(flight.plan, list(flight.read().values()))
        flight.drafts = self._drafting.draft(begun, flight.hidden, rows, num_drafts)
