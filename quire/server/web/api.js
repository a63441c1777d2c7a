// Talking to the server. The API key goes in a header, never in an address, and is kept for the session only.

import { $ } from "./dom.js";

const KEY = "quire.key";
let memory = null; // where storage is off

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function key() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

export function forgetKey() {
  memory = null;
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // It was never kept.
  }
}

export const hasKey = () => key() !== null;

let asking = null;

/** Ask for the key in the page's dialog, once however many requests want it; ApiError if the user declines. */
function askKey(isWrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = $("#key-dialog");
    const field = $("input", dialog);
    $(".problem", dialog).textContent = isWrong ? "The server did not accept this key." : "";
    field.value = "";
    dialog.addEventListener(
      "close",
      () => {
        asking = null;
        const given = field.value.trim();
        field.value = "";
        if (dialog.returnValue !== "ok" || !given) {
          reject(new ApiError("The server asks for an API key.", 401));
          return;
        }
        memory = given;
        try {
          sessionStorage.setItem(KEY, given);
        } catch {
          // It lives as long as the page, then.
        }
        resolve();
      },
      { once: true },
    );
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

/** A response that is well; ApiError with the server's own words otherwise, status 0 if it cannot be reached. */
export async function call(path, { body, signal, method } = {}) {
  const url = new URL(path, document.baseURI);
  for (;;) {
    const sent = key();
    const headers = {};
    if (sent !== null) headers.authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(url, {
        method: method ?? (body === undefined ? "GET" : "POST"),
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.");
    }
    if (response.ok) return response;
    if (response.status === 401) {
      if (key() === sent) await askKey(sent !== null);
      continue;
    }
    throw new ApiError(await reason(response), response.status);
  }
}

async function reason(response) {
  try {
    const found = await response.json();
    return found.error?.message ?? `The server answered with status ${response.status}.`;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

/** The lines of a body as they come. */
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The data of server-sent events, parsed; ends with [DONE]. ApiError if the stream ends before, or tells of one. */
export async function* events(response) {
  for await (const line of lines(response)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const found = JSON.parse(data);
    if (found.error) throw new ApiError(found.error.message ?? "The answer ended with an error.");
    yield found;
  }
  throw new ApiError("The connection ended before the answer did.");
}
