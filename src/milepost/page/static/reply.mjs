// One answer as it comes, and what it cost. Knows nothing of the page.

import { brief, count, losses, plural, wait } from "./words.mjs";

// Fills an assistant's message from the events of a stream. The clock is the caller's.
export class Reply {
  constructor(message, now) {
    this.message = message;
    this.began = now;
    this.first = null;
    this.last = now;
    this.usage = null;
    this.finish = null;
  }

  get hasText() {
    const { content, reasoning, calls } = this.message;
    return Boolean(content || reasoning || calls.length);
  }

  // Returns the new {content, reasoning}, and whether a call has changed.
  take(event, now) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0] ?? {};
    this.finish = choice.finish_reason ?? this.finish;
    const delta = choice.delta ?? {};
    const content = delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const calls = delta.tool_calls ?? [];
    if (content || reasoning || calls.length) {
      this.first ??= now;
      this.last = now;
    }
    this.message.content += content;
    this.message.reasoning += reasoning;
    for (const call of calls) this.takeCall(call);
    return { content, reasoning, hasCall: calls.length > 0 };
  }

  takeCall({ index, id, function: called }) {
    const call = (this.message.calls[index] ??= { id: id ?? "", name: "", input: "" });
    call.name += called?.name ?? "";
    call.input += called?.arguments ?? "";
  }

  // Notes with the message how it ended; `note` says what ended it from outside.
  end(note = "") {
    const details = this.usage?.prompt_tokens_details ?? {};
    const tokens = this.usage?.completion_tokens ?? 0;
    this.message.report = {
      note,
      finish: this.finish,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: details.cached_tokens ?? 0,
      lost: details.lost_tokens ?? {},
      tokens,
      total: this.usage?.total_tokens ?? 0,
      firstMs: this.first === null ? null : this.first - this.began,
      rate: tokens > 1 && this.first !== null ? (1000 * (tokens - 1)) / Math.max(this.last - this.first, 1) : null,
    };
  }
}

// The report of an answer whose page was closed before its end.
export const unfinished = () => ({ note: "not finished", finish: null, prompt: null, cached: 0, lost: {}, tokens: 0, total: 0, firstMs: null, rate: null });

// The line below an answer.
export function reportLine({ note, prompt, cached, lost, tokens, firstMs, rate }) {
  const parts = [];
  if (note) parts.push(note);
  if (prompt !== null) {
    parts.push(`${count(cached)} of ${plural(prompt, "prompt token")} cached`);
    if (cached < prompt) parts.push(`computed: ${losses(lost)}`);
  }
  if (firstMs !== null) parts.push(`first token ${wait(firstMs)}`);
  if (tokens) parts.push(plural(tokens, "token"));
  if (rate !== null) parts.push(`${brief(rate)} tokens/s`);
  return parts.join(" · ");
}

// Why an answer is not whole, or nothing.
export function cutBy({ finish, total, tokens }, maxModelLen) {
  if (finish !== "length") return "";
  if (maxModelLen && total >= maxModelLen) return `Cut off: the model takes no more than ${plural(maxModelLen, "token")}.`;
  return `Cut off at the limit of ${plural(tokens, "token")} for an answer.`;
}
