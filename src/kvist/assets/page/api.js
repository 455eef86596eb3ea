// The server's routes: JSON, streams of events, and errors as people can read them. Owns the key, which lives as long as the
// browser's tab. Knows nothing of what is shown.

const KEY = "kvist.key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

/** A request's id: ours, so that its live figures can be asked for before its first token is there. */
export function requestId() {
  const parts = crypto.getRandomValues(new Uint8Array(12));
  return `page-${Array.from(parts, (part) => part.toString(16).padStart(2, "0")).join("")}`;
}

function headers(extra = {}) {
  return key.get() ? { authorization: `Bearer ${key.get()}`, ...extra } : extra;
}

async function failure(response) {
  const retryAfter = Number(response.headers.get("retry-after")) || 0;
  let told = { message: `the server answered ${response.status}` };
  try {
    told = (await response.json()).error ?? told;
  } catch (error) {
    console.info("an error without a body", response.status, error.name);
  }
  return new ApiError(told.message, { status: response.status, code: told.code ?? "", retryAfter });
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached; is it running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function post(path, body, { signal, id } = {}) {
  const extra = { "content-type": "application/json", ...(id ? { "x-request-id": id } : {}) };
  return send(path, { method: "POST", headers: headers(extra), body: JSON.stringify(body), signal });
}

/** The first served model's facts. */
export async function model() {
  const answer = await (await send("v1/models", { headers: headers() })).json();
  return answer.data[0];
}

/** Live figures of a request. */
export async function live(id) {
  return (await send(`kvist/live/${encodeURIComponent(id)}`, { headers: headers() })).json();
}

/** What output token `token` of a request read. */
export async function microscope(id, token, signal) {
  return (await post("kvist/microscope", { request_id: id, token }, { signal })).json();
}

/** The events of a streamed answer, parsed; `heard` is called when the server has begun. An error in the stream is thrown. */
export async function* stream(path, body, { signal, id, heard }) {
  const response = await post(path, body, { signal, id });
  heard();
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw new ApiError(value.error.message, { code: value.error.code ?? "" });
    yield value;
  }
  throw new ApiError("the stream broke off before its end");
}

/** The `data:` of server-sent events; comments (the server's signs of life) are left out. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
