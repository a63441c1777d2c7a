// One message on the page, and what can be done with it.

import { copyButton, count, h } from "./dom.js";
import { codeBlock, MarkdownView } from "./markdown.js";

/** What the model is sent of a message. */
export function wireMessages(path, system) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "user") found.push({ role: "user", content: withFiles(message) });
    else if (message.role === "tool") found.push({ role: "tool", tool_call_id: message.tool_call_id, content: message.content });
    else if (message.content || message.tool_calls?.length) {
      const calls = message.tool_calls?.map((one) => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } }));
      found.push({ role: "assistant", content: message.content, ...(calls?.length ? { tool_calls: calls } : {}) });
    }
  }
  return found;
}

function withFiles(message) {
  const files = (message.files ?? []).map((file) => `File ${file.name}:\n\`\`\`\n${file.text}\n\`\`\`\n\n`);
  return files.join("") + message.content;
}

/** A message as an article. `actions` are the chat's: regenerate, edit, show, wantsResult, answerTool. */
export class MessageView {
  constructor(message, actions, { place, total } = { place: 1, total: 1 }) {
    this.message = message;
    this.actions = actions;
    this.body = h("div", { class: "body" });
    this.meta = h("div", { class: "meta" });
    const who = { user: "You", assistant: "Answer", tool: "Tool result" }[message.role];
    this.element = h(
      "article",
      { class: `message ${message.role}`, "data-id": message.id, "aria-label": who, tabindex: "-1" },
      h("h2", { class: "offscreen", text: who }),
      this.body,
      this.meta,
    );
    this.place = place;
    this.total = total;
    this.text = null;
    this.build();
  }

  build() {
    this.body.replaceChildren();
    const { message } = this;
    if (message.role === "user") {
      if (message.files?.length) {
        this.body.append(h("ul", { class: "chips" }, message.files.map((file) => h("li", { text: file.name, title: `${count(file.text.length)} characters` }))));
      }
      this.body.append(h("div", { class: "said", text: message.content }));
    } else if (message.role === "tool") {
      this.body.append(codeBlock(message.content, "result"));
    } else {
      this.thinking = h("div", { class: "prose" });
      this.summary = h("summary", { text: "Thinking" });
      this.details = h("details", { class: "thinking", hidden: true }, this.summary, this.thinking);
      this.thinkingView = new MarkdownView(this.thinking);
      this.prose = h("div", { class: "prose" });
      this.view = new MarkdownView(this.prose);
      this.calls = h("div", { class: "calls" });
      this.problem = h("p", { class: "problem" });
      this.body.append(this.details, this.prose, this.calls, this.problem);
    }
    this.update(false);
  }

  /** Show what the message holds now. */
  update(isLive) {
    const { message } = this;
    if (message.role === "assistant") {
      const isThinking = isLive && message.reasoning && !message.content;
      this.details.hidden = !message.reasoning;
      this.summary.textContent = isThinking ? "Thinking …" : thought(message);
      this.details.classList.toggle("live", Boolean(isThinking));
      this.thinkingView.update(message.reasoning ?? "");
      this.view.update(message.content);
      this.element.classList.toggle("live", isLive);
      this.calls.replaceChildren(...(message.tool_calls ?? []).map((one) => this.call(one, isLive)));
      const isEmpty = !isLive && !message.content && !message.reasoning && !message.tool_calls?.length;
      this.problem.textContent = message.problem ?? (isEmpty ? "The model said nothing." : "");
    }
    if (!isLive) this.meta.replaceChildren(...this.metaNodes());
    else this.meta.replaceChildren(h("span", { class: "figures", text: figures(message) }));
  }

  call(one, isLive) {
    let shown = one.arguments;
    try {
      shown = JSON.stringify(JSON.parse(one.arguments), null, 2);
    } catch {
      // Still being written.
    }
    const block = h("section", { class: "call", "aria-label": `Call of ${one.name}` }, h("h3", {}, "Calls ", h("code", { text: one.name })), codeBlock(shown, "json"));
    if (!isLive && this.actions.wantsResult(this.message, one)) {
      const field = h("textarea", { rows: 2, "aria-label": `Result of ${one.name}`, placeholder: "What the tool gives back" });
      const send = h("button", { type: "button", class: "small", text: "Give result" });
      send.addEventListener("click", () => this.actions.answerTool(this.message, one, field.value));
      block.append(h("div", { class: "result" }, field, send));
    }
    return block;
  }

  metaNodes() {
    const { message, actions } = this;
    const nodes = [];
    if (this.total > 1) {
      const step = (by, label, sign) => {
        const button = h("button", { type: "button", class: "quiet small icon", "aria-label": label, text: sign });
        button.disabled = this.place + by < 1 || this.place + by > this.total;
        button.addEventListener("click", () => actions.show(message, by));
        return button;
      };
      nodes.push(h("span", { class: "branches", role: "group", "aria-label": "Branches" }, step(-1, "Previous branch", "‹"), h("span", { text: `${this.place} / ${this.total}` }), step(1, "Next branch", "›")));
    }
    const button = (text, act) => h("button", { type: "button", class: "quiet small", text, onclick: act });
    if (message.role === "user") nodes.push(button("Edit", () => actions.edit(this)), copyButton(() => message.content));
    if (message.role === "assistant") {
      if (message.content) nodes.push(copyButton(() => message.content));
      nodes.push(button("Regenerate", () => actions.regenerate(message)));
      nodes.push(h("span", { class: "figures", text: figures(message) }));
    }
    return nodes;
  }

  /** Let the user write the message anew: a branch beside it. */
  edit(send) {
    const field = h("textarea", { rows: 3, "aria-label": "Edit the message", value: this.message.content });
    const done = () => this.build();
    const submit = () => {
      if (field.value.trim()) send(field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        submit();
      }
    });
    this.body.replaceChildren(
      h("div", { class: "editing" }, field, h("div", { class: "row end" }, h("button", { type: "button", class: "quiet small", text: "Cancel", onclick: done }), h("button", { type: "button", class: "small primary", text: "Send as a branch", onclick: submit }))),
    );
    this.meta.replaceChildren();
    field.style.height = `${Math.min(400, field.scrollHeight + 4)}px`;
    field.focus();
  }
}

function thought(message) {
  const tokens = message.usage?.reasoning;
  return tokens ? `Thought for ${count(tokens)} tokens` : "Thinking";
}

/** Tokens and speed in a line. */
function figures(message) {
  const usage = message.usage;
  if (!usage) return message.model ?? "";
  const parts = [];
  if (usage.prompt) parts.push(`${count(usage.prompt)} prompt${usage.cached ? ` (${count(usage.cached)} cached)` : ""}`);
  parts.push(`${count(usage.completion ?? 0)} tokens`);
  if (usage.rate) parts.push(`${usage.rate.toFixed(1)} tok/s`);
  if (message.finish === "length") parts.push("cut off at the length limit");
  if (usage.ttft !== undefined) parts.push(`first after ${usage.ttft < 1 ? `${Math.round(usage.ttft * 1000)} ms` : `${usage.ttft.toFixed(1)} s`}`);
  return parts.join(" · ");
}
