// The server's endpoints: JSON requests, streams of tokens, the API key, and the bytes of each token.

const KEY = "minillm.key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let askForKey = null; // (message) -> Promise<string | null>, asked at most once at a time
let asking = null;

/** Sets the function that asks the user for an API key when the server answers 401. */
export function onMissingKey(ask) {
  askForKey = ask;
}

/** Sends a request, again with a key if the server asks for one. Throws ApiError with the server's own message. */
async function send(path, body, signal) {
  for (let attempt = 0; ; attempt++) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body ? "POST" : "GET", headers, signal, cache: "no-store", body: body && JSON.stringify(body),
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (response.ok) return response;
    const { message } = await errorOf(response);
    if (response.status !== 401 || !askForKey || attempt === 5) throw new ApiError(message, response.status);
    if (key === sessionStorage.getItem(KEY)) { // else another request has already got a new one
      asking ??= askForKey(key ? message : "").finally(() => (asking = null));
      const given = await asking;
      if (!given) throw new ApiError(message, 401);
      sessionStorage.setItem(KEY, given);
    }
  }
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return { message: oneLine(error.message ?? error) };
  } catch {
    return { message: `The server answered ${response.status}.` };
  }
}

function oneLine(text) {
  return String(text).replace(/\s+/g, " ").trim();
}

export async function get(path, signal) {
  return (await send(path, null, signal)).json();
}

export async function post(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** The JSON objects of a stream of server-sent events, up to "[DONE]". Throws ApiError for one with an error. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError("The connection ended before the answer did.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(oneLine(event.error.message ?? event.error));
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Continues token ids by /v1/completions. Yields {tokens, finish, usage}: the new tokens, each as
 * {id, logprob, top: [{id, logprob}]} with the alternatives best first, the reason of the end, and the usage.
 */
export async function* continuation(prompt, fields, signal) {
  const beams = (fields.num_beams ?? 1) > 1; // beam search gives no alternatives
  const response = await send("v1/completions", {
    prompt, stream: true, stream_options: { include_usage: true }, logprobs: beams ? 0 : 5,
    return_token_ids: true, return_tokens_as_token_ids: true, ...fields,
  }, signal);
  for await (const { choices: [choice] = [], usage } of events(response)) {
    yield { tokens: choice ? tokensOf(choice) : [], finish: choice?.finish_reason ?? null, usage: usage ?? null };
  }
}

/** Alternatives of tokens that were not streamed with them: the model reads `ids` once more. One entry per position. */
export async function scored(model, ids, signal) {
  const answer = await post("v1/completions", {
    model, prompt: ids, echo: true, max_tokens: 0, logprobs: 5, return_tokens_as_token_ids: true,
  }, signal);
  return tokensOf(answer.choices[0]);
}

const numberOf = (name) => Number(name.slice("token_id:".length));

function tokensOf({ token_ids: ids, logprobs }) {
  if (!logprobs) return (ids ?? []).map((id) => ({ id, logprob: null, top: [] }));
  return logprobs.tokens.map((name, i) => ({
    id: numberOf(name),
    logprob: logprobs.token_logprobs[i],
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {})
      .map(([other, logprob]) => ({ id: numberOf(other), logprob }))
      .sort((a, b) => b.logprob - a.logprob)
      .slice(0, 5),
  }));
}

/** The texts and bytes of tokens, fetched once each. */
export class Vocabulary {
  #known = new Map();

  constructor(model) {
    this.model = model;
  }

  async load(ids, signal) {
    const missing = [...new Set(ids)].filter((id) => !this.#known.has(id));
    for (let first = 0; first < missing.length; first += 1000) {
      const part = missing.slice(first, first + 1000);
      const { tokens } = await post("inspect/tokens", { model: this.model, token_ids: part }, signal);
      tokens.forEach((token, i) => this.#known.set(part[i], { ...token, bytes: Uint8Array.from(token.bytes) }));
    }
  }

  /** {text, bytes, special} of a token that was loaded. */
  get(id) {
    return this.#known.get(id) ?? { text: `[${id}]`, bytes: new Uint8Array(), special: false };
  }

  /** The text of each token, "" while a character is incomplete, which the token that completes it shows. */
  texts(tokens) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return tokens.map(({ id }) => {
      const { bytes, special } = this.get(id);
      return special ? "" : decoder.decode(bytes, { stream: true });
    });
  }
}
