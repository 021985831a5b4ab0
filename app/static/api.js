// Calls to the server that this page came from: the key, errors as exceptions, and streams of events.

/** What the server said was wrong. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

/** A key that lives as long as the tab; null: none. */
export class Key {
  constructor(name) {
    this.name = name;
  }

  get value() {
    return sessionStorage.getItem(this.name);
  }

  set value(text) {
    if (text) sessionStorage.setItem(this.name, text);
    else sessionStorage.removeItem(this.name);
  }
}

export const apiKey = new Key("graftserve.key");
export const adminKey = new Key("graftserve.admin-key");

/** JSON from a path; `body` makes it a POST. Throws ApiError. */
export async function call(path, { body, key = apiKey, signal } = {}) {
  const response = await send(path, body, key, signal);
  return response.json();
}

/** The events of a streamed answer, parsed, without the closing one. Throws ApiError, also for an error event. */
export async function* events(path, body, signal) {
  const response = await send(path, body, apiKey, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, { status: response.status });
      yield event;
    }
  }
  throw new ApiError("The connection ended in the middle of the answer.");
}

async function send(path, body, key, signal) {
  const headers = {};
  if (key.value) headers.Authorization = `Bearer ${key.value}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await problem(response);
  return response;
}

async function problem(response) {
  const { status } = response;
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { status, param: error.param });
  } catch {
    return new ApiError(`The server answered with status ${status}.`, { status });
  }
}
