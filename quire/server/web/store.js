// Conversations, kept in this browser and nowhere else. A conversation is a tree of messages: an edit or another
// answer is a sibling, and `leaf` says which branch is shown.

import { newId } from "./dom.js";

const NAME = "quire";
const STORE = "conversations";
const ROLES = ["user", "assistant", "tool"];

let opening = null;
const memory = new Map(); // where there is no IndexedDB (a private window)

function database() {
  opening ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null);
  });
  return opening;
}

async function run(mode, act) {
  const db = await database();
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const request = act(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

export async function all() {
  const found = (await run("readonly", (store) => store.getAll())) ?? [...memory.values()];
  return found.sort((a, b) => b.updated - a.updated);
}

export async function save(conversation) {
  memory.set(conversation.id, conversation);
  await run("readwrite", (store) => store.put(structuredClone(conversation)));
}

export async function remove(id) {
  memory.delete(id);
  await run("readwrite", (store) => store.delete(id));
}

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, messages: {}, system: null };
}

/** Add a message after `parent` and show its branch. */
export function add(conversation, parent, message) {
  const added = { id: newId(), parent, created: Date.now(), content: "", ...message };
  conversation.messages[added.id] = added;
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  return added;
}

/** The messages from the first to the shown leaf. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null && conversation.messages[id]; id = conversation.messages[id].parent) {
    found.push(conversation.messages[id]);
  }
  return found.reverse();
}

/** A message and its alternatives, oldest first. */
export function siblings(conversation, message) {
  return Object.values(conversation.messages)
    .filter((other) => other.parent === message.parent)
    .sort((a, b) => a.created - b.created);
}

/** Show the newest branch below a message. */
export function show(conversation, message) {
  let last = message;
  for (;;) {
    const below = Object.values(conversation.messages).filter((other) => other.parent === last.id);
    if (!below.length) break;
    last = below.reduce((a, b) => (a.created >= b.created ? a : b));
  }
  conversation.leaf = last.id;
}

export const exported = (conversations) => JSON.stringify({ quire: 1, conversations }, null, 1);

/** Conversations of an exported text; Error with what is wrong. Only fields that are known are taken over. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (data?.quire !== 1 || !Array.isArray(data.conversations)) throw new Error("This is not an export of Quire's chat.");
  return data.conversations.map(readConversation);
}

function readConversation(given) {
  const made = newConversation();
  made.title = String(given.title ?? "").slice(0, 200);
  made.created = Number(given.created) || made.created;
  made.updated = Number(given.updated) || made.updated;
  made.system = typeof given.system === "string" ? given.system : null;
  for (const [id, message] of Object.entries(given.messages ?? {})) {
    if (!ROLES.includes(message?.role) || typeof message.content !== "string") throw new Error(`Message ${id} cannot be read.`);
    const kept = { id, parent: message.parent ?? null, role: message.role, content: message.content, created: Number(message.created) || 0 };
    for (const name of ["reasoning", "model", "tool_call_id", "problem", "finish"]) if (typeof message[name] === "string") kept[name] = message[name];
    if (Array.isArray(message.tool_calls)) {
      kept.tool_calls = message.tool_calls.map((one) => ({ id: String(one.id), name: String(one.name), arguments: String(one.arguments) }));
    }
    if (Array.isArray(message.files)) kept.files = message.files.map((one) => ({ name: String(one.name), text: String(one.text) }));
    if (message.usage && typeof message.usage === "object") {
      kept.usage = Object.fromEntries(Object.entries(message.usage).filter(([, value]) => typeof value === "number"));
    }
    made.messages[id] = kept;
  }
  for (const message of Object.values(made.messages)) {
    if (message.parent !== null && !Object.hasOwn(made.messages, message.parent)) throw new Error(`Message ${message.id} has no parent.`);
  }
  const ends = new Set(Object.keys(made.messages));
  for (const id of ends) {
    let at = id;
    for (let steps = 0; at !== null; steps += 1, at = made.messages[at].parent) {
      if (steps > ends.size) throw new Error("The messages go round in a circle.");
    }
  }
  made.leaf = Object.hasOwn(made.messages, given.leaf) ? given.leaf : null;
  return made;
}
