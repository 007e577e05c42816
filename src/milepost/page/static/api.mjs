// What the page asks of its server. Addresses are relative: it may stand behind a prefix.

const KEY = "milepost-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function useKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw new Refused(response.status, body.error?.message ?? `status ${response.status}`);
  }
  return response;
}

export const getJson = async (path) => (await ask(path)).json();

// The events of a chat completion that streams, as objects.
export async function* complete(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new Refused(parsed.error.code, parsed.error.message);
      yield parsed;
    }
  }
}
