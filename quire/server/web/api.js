// Talking to the server. The API key goes in a header, never in an address, and is kept for the session only.

import { $, h, stored } from "./dom.js";

const key = stored("quire.key", "sessionStorage");

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let asking = null;

/** Ask for the key, once however many requests want it; ApiError if the user declines. */
function askKey(isWrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = keyDialog(isWrong ? "The server did not accept this key." : "");
    dialog.addEventListener("close", () => {
      asking = null;
      const given = $("input", dialog).value.trim();
      dialog.remove();
      if (dialog.returnValue === "ok" && given) {
        key.set(given);
        resolve();
      } else reject(new ApiError("The server asks for an API key.", 401));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

function keyDialog(problem) {
  return h(
    "dialog",
    { id: "key-dialog", "aria-labelledby": "key-title" },
    h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title", text: "API key" }),
      h("p", { text: "This server asks for a key. It is kept until this tab is closed and sent to this server only." }),
      h("label", {}, "Key ", h("input", { type: "password", autocomplete: "off", spellcheck: "false" })),
      h("p", { class: "problem", role: "alert", text: problem }),
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", class: "quiet", text: "Cancel", onclick: (event) => event.target.closest("dialog").close() }),
        h("button", { value: "ok", class: "primary", text: "Use this key" }),
      ),
    ),
  );
}

/** A response that is well; ApiError with the server's own words otherwise, status 0 if it cannot be reached. */
export async function call(path, { body, signal, method } = {}) {
  const url = new URL(path, document.baseURI);
  for (;;) {
    const sent = key.get();
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
      if (key.get() === sent) await askKey(sent !== null);
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
