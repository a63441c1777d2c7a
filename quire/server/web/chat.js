// The chat page: conversations in this browser, answers streamed from /v1/chat/completions.

import { call, events } from "./api.js";
import { $, announce, download, h, stored, themeButton } from "./dom.js";
import { MessageView, wireMessages } from "./messages.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const MAX_FILE = 1 << 20;
const wanted = { open: stored("quire.open", "sessionStorage"), model: stored("quire.model") }; // what a reload takes up
const SHORTCUTS = [
  ["Enter", "Send the message"],
  ["Shift Enter", "New line"],
  ["Esc", "Stop the answer, or close a panel"],
  ["/", "Go to the message box"],
  ["Alt N", "New chat"],
  ["Alt ↑", "Edit the last message"],
  ["Alt R", "Regenerate the last answer"],
  ["Alt ,", "Settings"],
  ["Alt K", "Search conversations"],
  ["?", "This list"],
];

const state = {
  conversations: [],
  current: store.newConversation(),
  views: new Map(),
  running: null, // {controller, message, conversation}
  values: settings.load(),
  files: [],
  model: null,
  unable: null, // why nobody can chat here
  follows: true, // the thread's end is in sight, so it stays in sight
};

const thread = $("#thread");
const text = $("#text");

const actions = {
  regenerate: (message) => answer(message.parent),
  edit: (view) =>
    view.edit((content) => {
      if (isBusy()) return;
      const { parent, files } = view.message;
      const added = store.add(state.current, parent, { role: "user", content, files });
      answer(added.id);
    }),
  show(message, by) {
    const all = store.siblings(state.current, message);
    const next = all[all.indexOf(message) + by];
    if (!next || isBusy()) return;
    store.show(state.current, next);
    store.save(state.current);
    renderThread();
    state.views.get(next.id)?.element.focus();
  },
  wantsResult: (message, one) =>
    state.current.leaf !== null &&
    store.path(state.current).some((other) => other.id === message.id) &&
    !store.path(state.current).some((other) => other.role === "tool" && other.tool_call_id === one.id),
  answerTool(message, one, result) {
    if (isBusy()) return;
    const added = store.add(state.current, state.current.leaf, { role: "tool", content: result, tool_call_id: one.id });
    if (message.tool_calls.some((other) => actions.wantsResult(message, other))) {
      store.save(state.current);
      renderThread();
    } else answer(added.id);
  },
};

const isBusy = () => state.running !== null;

// What is shown ------------------------------------------------------------------------------------------------------

function renderThread() {
  state.views.clear();
  const path = store.path(state.current);
  const nodes = path.map((message) => {
    const all = store.siblings(state.current, message);
    const view = new MessageView(message, actions, { place: all.indexOf(message) + 1, total: all.length });
    state.views.set(message.id, view);
    return view.element;
  });
  thread.replaceChildren(...(nodes.length ? [h("div", { class: "column" }, nodes)] : [welcome()]));
  document.title = state.current.title ? `${state.current.title} – Quire` : "Quire";
  if (state.running?.conversation === state.current) state.views.get(state.running.message.id)?.update(true);
  $("#chat-system").value = state.current.system ?? "";
  follow(true);
}

function welcome() {
  if (state.unable) {
    const link = h("a", { href: "docs", text: "What it can do" });
    return h("div", { class: "welcome" }, h("p", { class: "big", text: "This model does not chat" }), h("p", { class: "hint", text: `${state.unable} ` }, link));
  }
  const ideas = ["Explain how a KV cache speeds up decoding", "Write a haiku about patience", "Compare three sorting algorithms in a table"];
  return h(
    "div",
    { class: "welcome" },
    h("p", { class: "big", text: "What would you like to know?" }),
    h("p", { class: "hint", text: "Chats stay in this browser; only this server reads them." }),
    h("ul", {}, ideas.map((idea) => h("li", {}, h("button", { type: "button", text: idea, onclick: () => submit(idea) })))),
  );
}

function renderList() {
  const sought = $("#search").value.trim().toLowerCase();
  const holds = (one) => one.title.toLowerCase().includes(sought) || Object.values(one.messages).some((m) => m.content.toLowerCase().includes(sought));
  const shown = state.conversations.filter((one) => !sought || holds(one)).sort((a, b) => b.updated - a.updated);
  if (!shown.length) {
    $("#conversations").replaceChildren(h("li", { class: "hint", text: sought ? "No chat holds this." : "No chats yet." }));
    return;
  }
  $("#conversations").replaceChildren(
    ...shown.map((one) => {
      const open = h("button", { type: "button", class: "open", text: one.title || "New chat", onclick: () => select(one) });
      if (one.id === state.current.id) open.setAttribute("aria-current", "true");
      const erase = h("button", { type: "button", class: "quiet small icon", "aria-label": `Delete ${one.title}`, text: "✕", onclick: () => erases(one) });
      return h("li", {}, open, erase);
    }),
  );
}

function follow(isWanted = state.follows) {
  state.follows = isWanted;
  if (isWanted) thread.scrollTop = thread.scrollHeight;
  $("#to-end").hidden = isWanted;
}

function showProblem(message, retry) {
  const banner = $("#problem");
  banner.hidden = !message;
  banner.replaceChildren(...(message ? [h("span", { text: message })] : []));
  if (message && retry) banner.append(h("button", { type: "button", class: "small", text: "Try again", onclick: retry }));
}

function showBusy() {
  const busy = isBusy();
  $("#send").hidden = busy;
  $("#stop").hidden = !busy;
  thread.setAttribute("aria-busy", String(busy));
}

// Conversations ------------------------------------------------------------------------------------------------------

function select(conversation) {
  state.current = conversation;
  wanted.open.set(conversation.id);
  renderThread();
  renderList();
  closeSidebar();
  text.focus();
}

function startNew() {
  select(store.newConversation());
}

async function erases(conversation) {
  if (!confirm(`Delete “${conversation.title}”? It is kept nowhere else.`)) return;
  if (state.running?.conversation === conversation) stop();
  state.conversations = state.conversations.filter((one) => one !== conversation);
  await store.remove(conversation.id);
  if (state.current === conversation) startNew();
  else renderList();
}

async function keep(conversation) {
  if (!state.conversations.includes(conversation)) state.conversations.unshift(conversation);
  await store.save(conversation);
}

async function importFile(file) {
  try {
    const found = store.imported(await file.text());
    for (const one of found) await keep(one);
    state.conversations = await store.all();
    renderList();
    announce(`${found.length} conversations imported`);
    if (found.length) select(state.conversations.find((one) => one.id === found[0].id));
  } catch (error) {
    showProblem(error.message);
  }
}

// Asking and answering -----------------------------------------------------------------------------------------------

function submit(content = text.value) {
  if (isBusy() || (!content.trim() && !state.files.length)) return;
  const files = state.files;
  if (!state.current.title) state.current.title = content.trim().split("\n")[0].slice(0, 60) || files[0].name;
  const added = store.add(state.current, state.current.leaf, { role: "user", content, ...(files.length ? { files } : {}) });
  text.value = "";
  state.files = [];
  renderFiles();
  grow();
  answer(added.id);
}

/** Have the model answer after a message, as a new branch if that has an answer already. */
async function answer(parent) {
  if (isBusy()) return;
  const conversation = state.current;
  const path = store.path(conversation, parent);
  const message = store.add(conversation, parent, { role: "assistant", reasoning: "", model: state.model });
  const controller = new AbortController();
  state.running = { controller, message, conversation };
  showProblem(null);
  showBusy();
  renderThread();
  wanted.open.set(conversation.id);
  await keep(conversation);
  renderList();
  const system = conversation.system ?? state.values.system;
  const body = {
    model: state.model,
    messages: wireMessages(path, system),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...settings.parameters(state.values),
  };
  const began = performance.now();
  try {
    const response = await call("v1/chat/completions", { body, signal: controller.signal });
    for await (const chunk of events(response)) take(message, chunk, began);
  } catch (error) {
    if (error.name === "AbortError") message.problem = message.content || message.reasoning ? "Stopped." : "Stopped before the first token.";
    else message.problem = error.message;
    if (error.status === 0 || error.status === 503) watchServer();
  }
  state.running = null;
  showBusy();
  conversation.updated = Date.now();
  await store.save(conversation);
  if (state.current === conversation) {
    const view = state.views.get(message.id);
    view?.update(false);
    follow();
  }
  announce(message.problem && !message.content ? message.problem : `Answer: ${message.content.slice(0, 2000)}`);
}

/** Take in a chunk of an answer. */
function take(message, chunk, began) {
  const { delta, finish_reason: reason } = chunk.choices?.[0] ?? {};
  if (reason) message.finish = reason;
  if (delta) {
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const one of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      const known = (message.tool_calls[one.index] ??= { id: one.id ?? "", name: "", arguments: "" });
      known.id = one.id ?? known.id;
      known.name += one.function?.name ?? "";
      known.arguments += one.function?.arguments ?? "";
    }
  }
  const usage = chunk.usage;
  if (usage?.completion_tokens) {
    const now = performance.now();
    const known = (message.usage ??= { ttft: (now - began) / 1000 });
    known.first ??= now;
    known.prompt = usage.prompt_tokens;
    known.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    known.reasoning = usage.completion_tokens_details?.reasoning_tokens ?? 0;
    if (usage.completion_tokens > (known.completion ?? 0)) {
      known.base ??= usage.completion_tokens;
      known.completion = usage.completion_tokens;
      if (known.completion > known.base) known.rate = (1000 * (known.completion - known.base)) / (now - known.first);
    }
  }
  schedule(message);
}

let scheduled = null;
let savedAt = 0;

/** Show a message before the next paint, once however many chunks come; in a hidden tab a timer does it. */
function schedule(message) {
  if (scheduled) return;
  scheduled = true;
  const paint = () => {
    scheduled = null;
    if (state.running?.message !== message) return;
    state.views.get(message.id)?.update(true);
    follow();
    if (Date.now() - savedAt > 2000) {
      savedAt = Date.now();
      store.save(state.running.conversation); // what a reload finds
    }
  };
  if (document.hidden) setTimeout(paint, 200);
  else requestAnimationFrame(paint);
}

function stop() {
  state.running?.controller.abort();
}

// The server ---------------------------------------------------------------------------------------------------------

let watching = false;

/** Say what the server is busy with until it takes requests. */
async function watchServer() {
  if (watching) return;
  watching = true;
  let wasAway = false;
  for (;;) {
    const found = await serverState();
    if (found === null) break;
    if ($("#status").textContent !== found) $("#status").textContent = found;
    wasAway = true;
    await new Promise((done) => setTimeout(done, 500));
  }
  watching = false;
  $("#status").textContent = "";
  if (!wasAway) return;
  showProblem(null);
  announce("The server is ready");
  loadModels();
}

/** What keeps the server from answering; null: nothing. */
async function serverState() {
  try {
    const response = await fetch(new URL("ready", document.baseURI), { cache: "no-store" });
    if (response.ok || response.status === 401) return null; // with a key, requests say themselves what is wrong
    const { status, detail } = await response.json();
    return `Server ${status}: ${detail} …`;
  } catch {
    return "Server away, trying again …";
  }
}

async function loadModels() {
  try {
    const found = await (await call("v1/models")).json();
    const select = $("#model");
    const able = found.data.filter((one) => !one.tasks?.length || one.tasks.includes("generate"));
    const shown = able.length ? able : found.data;
    select.replaceChildren(...shown.map((one) => h("option", { value: one.id, text: one.id })));
    const before = wanted.model.get();
    state.model = shown.some((one) => one.id === before) ? before : shown[0].id;
    select.value = state.model;
    state.unable = able.length ? null : `${shown[0].id} is for: ${shown[0].tasks.join(", ")}.`;
    $("#composer").hidden = Boolean(state.unable);
    if (state.current.leaf === null) renderThread();
    const size = shown[0].max_model_len;
    select.title = size ? `Context of ${size} tokens` : "";
    showProblem(null);
  } catch (error) {
    showProblem(error.message, loadModels);
    if (error.status === 0) watchServer();
  }
}

// Files --------------------------------------------------------------------------------------------------------------

const isPicture = (file) => /^(image|audio|video)\//.test(file.type) && file.type !== "image/svg+xml";

async function attach(list) {
  const problems = [];
  for (const file of list) {
    const content = file.size > MAX_FILE || isPicture(file) ? "" : await file.text();
    if (isPicture(file)) problems.push(`${file.name} is an image or a recording, and this model reads text only.`);
    else if (file.size > MAX_FILE) problems.push(`${file.name} is larger than 1 MiB.`);
    else if (content.includes("\0")) problems.push(`${file.name} is not a text file. Attach plain text, Markdown, code, CSV or JSON.`);
    else state.files.push({ name: file.name.slice(0, 200), text: content });
  }
  showProblem(problems.join(" "));
  renderFiles();
  text.focus();
}

function renderFiles() {
  $("#files").replaceChildren(
    ...state.files.map((file) =>
      h("li", {}, h("span", { text: file.name }), h("button", {
        type: "button",
        class: "quiet small icon",
        "aria-label": `Remove ${file.name}`,
        text: "✕",
        onclick: () => {
          state.files = state.files.filter((other) => other !== file);
          renderFiles();
        },
      })),
    ),
  );
}

// Controls -----------------------------------------------------------------------------------------------------------

function grow() {
  text.style.height = "auto";
  text.style.height = `${Math.min(240, text.scrollHeight)}px`;
}

function toggleSettings(open = $("#settings").hidden) {
  $("#settings").hidden = !open;
  $("#open-settings").setAttribute("aria-expanded", String(open));
  document.body.classList.toggle("with-settings", open);
  if (open) $("#settings textarea").focus();
  else $("#open-settings").focus();
}

function closeSidebar() {
  document.body.classList.remove("with-sidebar");
  $("#shade").hidden = true;
}

function openSidebar() {
  document.body.classList.add("with-sidebar");
  $("#shade").hidden = false;
  $("#new-chat").focus();
}

function lastView(role) {
  const found = store.path(state.current).filter((message) => message.role === role);
  return state.views.get(found.at(-1)?.id);
}

function onKey(event) {
  const inField = event.target.matches?.("input, textarea, select");
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (isBusy()) stop();
    else if (!$("#settings").hidden) toggleSettings(false);
    else closeSidebar();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey) {
    const act = {
      KeyN: startNew,
      ArrowUp: () => !isBusy() && lastView("user") && actions.edit(lastView("user")),
      KeyR: () => lastView("assistant") && actions.regenerate(lastView("assistant").message),
      Comma: () => toggleSettings(),
      KeyK: () => {
        openSidebar();
        $("#search").focus();
      },
    }[event.code];
    if (!act) return;
    event.preventDefault();
    act();
  } else if (!inField && event.key === "/") {
    event.preventDefault();
    text.focus();
  } else if (!inField && event.key === "?") $("#keys-dialog").showModal();
}

function listen() {
  document.addEventListener("keydown", onKey);
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  text.addEventListener("input", grow);
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  text.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) {
      event.preventDefault();
      attach(event.clipboardData.files);
    }
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
  thread.addEventListener("scroll", () => {
    state.follows = thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
    $("#to-end").hidden = state.follows;
  });
  new ResizeObserver(() => follow()).observe(thread); // the message box grew: what was in sight stays in sight
  $("#to-end").addEventListener("click", () => follow(true));
  $("#chat-system").addEventListener("change", (event) => {
    state.current.system = event.target.value.trim() || null;
    if (state.conversations.includes(state.current)) store.save(state.current);
  });
  $("#stop").addEventListener("click", stop);
  $("#new-chat").addEventListener("click", startNew);
  $("#search").addEventListener("input", renderList);
  $("#open-sidebar").addEventListener("click", openSidebar);
  $("#close-sidebar").addEventListener("click", closeSidebar);
  $("#shade").addEventListener("click", closeSidebar);
  $("#open-settings").addEventListener("click", () => toggleSettings());
  $("#close-settings").addEventListener("click", () => toggleSettings(false));
  $("#keys").addEventListener("click", () => $("#keys-dialog").showModal());
  $("#attach").addEventListener("click", () => $("#file").click());
  $("#file").addEventListener("change", async (event) => {
    await attach(event.target.files);
    event.target.value = "";
  });
  $("#export").addEventListener("click", () => download("quire-chats.json", store.exported(state.conversations)));
  $("#import").addEventListener("click", () => $("#import-file").click());
  $("#import-file").addEventListener("change", async (event) => {
    if (event.target.files[0]) await importFile(event.target.files[0]);
    event.target.value = "";
  });
  $("#model").addEventListener("change", (event) => {
    state.model = event.target.value;
    wanted.model.set(state.model);
  });
  $("#shortcuts").append(...SHORTCUTS.flatMap(([keys, what]) => [h("dt", {}, keys.split(" ").map((key) => h("kbd", { text: key }))), h("dd", { text: what })]));
}

async function main() {
  themeButton($("#theme"));
  settings.build($("#fields"), state.values, () => announce("Setting changed"));
  listen();
  renderThread();
  showBusy();
  loadModels();
  watchServer();
  state.conversations = await store.all();
  const open = state.conversations.find((one) => one.id === wanted.open.get());
  if (open) select(open);
  else renderList();
  text.focus();
  document.body.dataset.ready = "yes";
  performance.mark("quire-ready");
}

main();
