// Sampling settings: what each means, and how it goes into a request. Empty: the model's own default.

import { h, stored } from "./dom.js";

const kept = stored("quire.settings");

const FIELDS = [
  { name: "system", label: "System prompt of all chats", kind: "text", rows: 4, help: "The model reads it before the conversation, in chats that have none of their own." },
  { name: "temperature", kind: "number", min: 0, max: 2, step: 0.1, label: "Temperature", help: "0 is greedy: always the most probable token. 1 samples as the model was trained; above 1 gets wild." },
  { name: "top_p", kind: "number", min: 0.01, max: 1, step: 0.01, label: "Top p", help: "Samples only among the most probable tokens that together reach this probability." },
  { name: "top_k", kind: "integer", min: -1, step: 1, label: "Top k", help: "The number of most probable tokens to sample from; -1 takes all." },
  { name: "min_p", kind: "number", min: 0, max: 1, step: 0.01, label: "Min p", help: "Drops tokens whose probability is below this share of the most probable token's." },
  { name: "max_tokens", kind: "integer", min: 1, step: 1, label: "Longest answer", help: "In tokens. Empty: until the model ends it, or the context is full." },
  { name: "repetition_penalty", kind: "number", min: 0.1, max: 2, step: 0.05, label: "Repetition penalty", help: "Above 1 makes tokens of the conversation less probable; 1 is off." },
  { name: "presence_penalty", kind: "number", min: -2, max: 2, step: 0.1, label: "Presence penalty", help: "Above 0 favours tokens that the answer does not have yet." },
  { name: "frequency_penalty", kind: "number", min: -2, max: 2, step: 0.1, label: "Frequency penalty", help: "Like presence, and more with each time a token was used." },
  { name: "seed", kind: "integer", step: 1, label: "Seed", help: "The same seed, settings and messages give the same answer." },
  { name: "stop", kind: "list", label: "Stop at", help: "One text per line; the answer ends before it." },
  { name: "thinking", kind: "choice", choices: ["default", "on", "off"], label: "Thinking", help: "For models whose template can turn it on and off." },
  { name: "tools", kind: "json", rows: 4, label: "Tools", help: "A JSON list of function definitions, as the chat API takes it. You are asked for the result of each call." },
];

export function load() {
  try {
    return JSON.parse(kept.get()) ?? {};
  } catch {
    return {};
  }
}

const save = (values) => kept.set(JSON.stringify(values));

/** Fill the panel; `changed` is told of each value that can be used. */
export function build(panel, values, changed) {
  const inputs = FIELDS.map((field) => row(field, values, changed));
  const reset = h("button", { type: "button", class: "quiet", text: "Back to the model's defaults" });
  reset.addEventListener("click", () => {
    for (const name of Object.keys(values)) delete values[name];
    save(values);
    changed();
    panel.replaceChildren();
    build(panel, values, changed);
  });
  panel.append(...inputs, reset);
}

function row(field, values, changed) {
  const id = `set-${field.name}`;
  const problem = h("p", { class: "problem", id: `${id}-problem` });
  const input = control(field, id, values[field.name]);
  input.addEventListener("change", () => {
    const { value, error } = read(field, input);
    problem.textContent = error ?? "";
    input.setAttribute("aria-invalid", String(Boolean(error)));
    if (error) return;
    if (value === undefined) delete values[field.name];
    else values[field.name] = value;
    save(values);
    changed();
  });
  const isWide = ["text", "json", "list"].includes(field.kind);
  return h(
    "div",
    { class: isWide ? "field wide" : "field" },
    h("label", { for: id, text: field.label }),
    input,
    h("p", { class: "hint", id: `${id}-help`, text: field.help }),
    problem,
  );
}

function control(field, id, value) {
  const common = { id, "aria-describedby": `${id}-help ${id}-problem` };
  if (field.kind === "choice") {
    const select = h("select", common, field.choices.map((choice) => h("option", { value: choice, text: choice })));
    select.value = value ?? "default";
    return select;
  }
  if (["text", "json", "list"].includes(field.kind)) {
    const shown = field.kind === "list" ? (value ?? []).join("\n") : field.kind === "json" && value ? JSON.stringify(value, null, 1) : value;
    return h("textarea", { ...common, rows: field.rows ?? 2, spellcheck: field.kind === "text", value: shown ?? "" });
  }
  const { min, max, step } = field;
  return h("input", { ...common, type: "number", inputmode: "decimal", min, max, step, placeholder: "default", value: value ?? "" });
}

function read(field, input) {
  const text = input.value.trim();
  if (text === "" || (field.kind === "choice" && text === "default")) {
    return input.validity?.badInput ? { error: "This is not a number." } : {};
  }
  if (field.kind === "number" || field.kind === "integer") {
    const value = Number(text);
    if (!Number.isFinite(value) || (field.kind === "integer" && !Number.isInteger(value))) return { error: "This is not a number that can be used." };
    if (value < field.min || value > field.max) return { error: `Between ${field.min} and ${field.max ?? "any size"}.` };
    return { value };
  }
  if (field.kind === "list") return { value: text.split("\n").filter(Boolean).slice(0, 16) };
  if (field.kind === "json") {
    try {
      const value = JSON.parse(text);
      return Array.isArray(value) ? { value } : { error: "A list is wanted: [...]" };
    } catch (error) {
      return { error: `Not JSON: ${error.message}` };
    }
  }
  return { value: input.value };
}

/** The part of a request that settings decide. */
export function parameters(values) {
  const { system, thinking, tools, ...rest } = values;
  const found = { ...rest };
  if (thinking) found.chat_template_kwargs = { enable_thinking: thinking === "on" };
  if (tools?.length) found.tools = tools;
  return found;
}
