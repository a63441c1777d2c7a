// The console's panels: each draws one part of a frame.

import { $, bytes, count, duration, h, svg } from "./dom.js";

const probe = document.body.appendChild(h("i", { hidden: true }));

/** Colours of the style sheet as they are now, in the form that canvases take. */
function colours(...names) {
  return names.map((name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  });
}

const PHASES = {
  held: ["held", "--c-wait"],
  parked: ["parked", "--c-cached"],
  queued: ["queued", "--c-wait"],
  preempted: ["preempted", "--c-wait"],
  prefill: ["prefill", "--c-prompt"],
  decode: ["decode", "--c-used"],
};

/** A canvas as sharp as the screen, cleared: its context, width and height in CSS pixels. */
function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 300;
  canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function tiles(section, frame, samples) {
  const { load } = frame;
  const hit = load.prefix_queries ? load.prefix_hits / load.prefix_queries : null;
  const items = [
    ["Generated", count(load.generation_rate), "tokens/s", samples.map((one) => one[2])],
    ["Prompt", count(load.prompt_rate), "tokens/s", samples.map((one) => one[1])],
    ["Running", count(load.running), load.prefilling ? `${load.prefilling} in prefill` : "requests", samples.map((one) => one[3])],
    ["Waiting", count(load.waiting), load.prefill_tokens_left ? `${count(load.prefill_tokens_left)} prompt tokens left` : "requests", samples.map((one) => one[4])],
    ["TTFT, median", duration(load.ttft.p50), tails(load.ttft)],
    ["Inter-token, median", duration(load.itl.p50), tails(load.itl)],
    ["KV in use", `${(100 * load.kv_usage).toFixed(0)} %`, `${count(load.preemptions)} preemptions`, samples.map((one) => one[5])],
    ["Prefix hits", hit === null ? "–" : `${(100 * hit).toFixed(0)} %`, `${count(load.prefix_hits)} of ${count(load.prefix_queries)} tokens`],
  ];
  if (section.children.length !== items.length) {
    section.replaceChildren(...items.map(([name]) => h("div", { class: "tile" }, h("h2", { text: name }), h("p", { class: "value" }), h("p", { class: "hint" }), svg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", {})))));
  }
  items.forEach(([, value, note, series], index) => {
    const tile = section.children[index];
    $(".value", tile).textContent = value;
    $(".hint", tile).textContent = note;
    $("path", tile).setAttribute("d", series ? sparkline(series.slice(-120)) : "");
  });
}

/** The slow ends, each on a line of its own where a tile is narrow. */
const tails = ({ p90, p99 }) => [`p90 ${duration(p90)} ·`, `p99 ${duration(p99)}`].map((text) => text.replaceAll(" ", "\u00a0")).join(" ");

function sparkline(values) {
  if (values.length < 2) return "";
  const most = Math.max(...values, 1e-9);
  return values.map((value, i) => `${i ? "L" : "M"}${((100 * i) / (values.length - 1)).toFixed(1)} ${(23 - (21 * value) / most).toFixed(1)}`).join("");
}

/** Tokens per second and the queue over the recording; `cursor` is the moment that is shown. */
export function rates(canvas, samples, cursor, isLive) {
  const { context, width, height } = surface(canvas, 150);
  const end = isLive ? (samples.at(-1)?.[0] ?? cursor) : Math.max(cursor, samples.at(-1)?.[0] ?? cursor);
  const span = Math.max(60, Math.min(600, end - (samples[0]?.[0] ?? end)));
  const x = (at) => width - ((end - at) / span) * (width - 44) - 2;
  const shown = samples.filter((one) => end - one[0] <= span);
  const most = Math.max(10, ...shown.map((one) => Math.max(one[1], one[2])));
  const y = (value) => height - 20 - (value / most) * (height - 34);
  grid(context, width, height, most, span);
  const waiting = Math.max(1, ...shown.map((one) => one[4]));
  const [wait, prompt, used, ink] = colours("c-wait", "c-prompt", "c-used", "ink");
  context.fillStyle = wait;
  context.globalAlpha = 0.18;
  shown.forEach((one, index) => {
    const size = (one[4] / waiting) * (height - 34) * 0.4;
    const next = shown[index + 1];
    const right = next && next[0] - one[0] < 3 ? x(next[0]) : x(one[0]) + 2;
    context.fillRect(x(one[0]), height - 20 - size, right - x(one[0]), size);
  });
  context.globalAlpha = 1;
  for (const [column, tone] of [[1, prompt], [2, used]]) {
    context.strokeStyle = tone;
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.beginPath();
    let last = null;
    for (const one of shown) {
      if (last === null || one[0] - last > 3) context.moveTo(x(one[0]), y(one[column]));
      else context.lineTo(x(one[0]), y(one[column]));
      last = one[0];
    }
    context.stroke();
  }
  if (!isLive) {
    context.strokeStyle = ink;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x(cursor), 4);
    context.lineTo(x(cursor), height - 18);
    context.stroke();
  }
  const last = shown.at(-1);
  canvas.setAttribute("aria-label", last ? `Throughput: ${count(last[2])} generated and ${count(last[1])} prompt tokens per second, at most ${count(most)}` : "Throughput: nothing yet");
}

function grid(context, width, height, most, span) {
  [context.strokeStyle, context.fillStyle] = colours("line", "soft");
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(height - 20 - share * (height - 34)) + 0.5;
    context.beginPath();
    context.moveTo(40, y);
    context.lineTo(width, y);
    context.stroke();
    context.textAlign = "right";
    context.fillText(count(most * share), 34, y + 4);
  }
  context.textAlign = "left";
  context.fillText(`−${Math.round(span)} s`, 42, height - 5);
  context.textAlign = "right";
  context.fillText("now", width - 2, height - 5);
}

/** One bar per step: its height is its time, its colour the way it ran, the dark part the share of prompt tokens. */
export function steps(canvas, legend, note, list, hover) {
  const { context, width, height } = surface(canvas, 120);
  const shown = list.slice(-Math.max(20, Math.floor((width - 44) / 5)));
  const ways = [...new Set(shown.map((one) => one[6] || "step"))].sort();
  const [soft, promptTone, ...palette] = colours("soft", "c-prompt", "c-used", "c-shared", "c-cached");
  const most = Math.max(1e-4, ...shown.map((one) => one[2]));
  const bar = 5;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = soft;
  context.textAlign = "right";
  context.fillText(duration(most).replace(/\.\d ms/, " ms"), 40, 14);
  shown.forEach((one, index) => {
    const size = Math.max(1, (one[2] / most) * (height - 8));
    const left = width - (shown.length - index) * bar;
    context.fillStyle = palette[ways.indexOf(one[6] || "step") % palette.length];
    context.globalAlpha = hover === index ? 0.6 : 1;
    context.fillRect(left, height - size, bar - 1, size);
    const prompt = one[4] ? (one[5] / one[4]) * size : 0;
    context.fillStyle = promptTone;
    context.fillRect(left, height - prompt, bar - 1, prompt);
    context.globalAlpha = 1;
  });
  const entry = (kind, text) => h("span", {}, h("i", { class: `dot ${kind}` }), text);
  if (legend.dataset.ways !== ways.join()) {
    legend.dataset.ways = ways.join();
    legend.replaceChildren(...ways.map((way, i) => entry(["used", "shared", "cached"][i % 3], way)), entry("prompt", "share of prompt tokens"));
  }
  const one = shown[hover] ?? shown.at(-1);
  note.textContent = one ? `Step ${one[0]}: ${one[4]} tokens planned (${one[5]} of prompts) in ${one[3]} rows, ${duration(one[2])}, ${one[6] || "unknown way"}` : "No step yet.";
  canvas.setAttribute("aria-label", `Steps as bars. ${note.textContent}`);
  return { at: (x) => shown.length - Math.ceil((width - x) / bar) };
}

export function requests(body, list, now, select, selected) {
  const known = new Map([...body.children].map((row) => [row.dataset.id, row]));
  const rows = list.map((one) => {
    const row = known.get(one.id) ?? requestRow(one, select);
    const [label, name] = PHASES[one.phase];
    const cells = row.children;
    row.classList.toggle("selected", one.id === selected);
    const cell = (index, text) => {
      if (cells[index].textContent !== text) cells[index].textContent = text;
    };
    const isPrompt = one.phase === "prefill";
    const phase = isPrompt ? `prefill ${count(one.num_computed)} of ${count(one.num_tokens)}` : one.phase === "decode" ? `decode ${count(one.num_tokens - one.num_prompt_tokens)}` : label;
    const times = one.num_preemptions ? `preempted ×${one.num_preemptions}` : "";
    const words = [one.phase === "preempted" ? times : phase, one.grammar && "grammar", one.phase !== "preempted" && times];
    $(".phase", row).textContent = words.filter(Boolean).join(" · ");
    $(".phase", row).style.setProperty("--tone", `var(${name})`);
    const total = isPrompt ? one.num_tokens : (one.max_tokens ?? one.num_tokens) - one.num_prompt_tokens;
    const done = isPrompt ? one.num_computed : one.phase === "decode" ? one.num_tokens - one.num_prompt_tokens : 0;
    const meter = $("progress", row);
    meter.max = Math.max(1, total);
    meter.value = Math.min(done, total);
    cell(3, one.num_cached > 0 ? count(one.num_cached) : "–");
    cell(4, one.num_blocks ? count(one.num_blocks) : "–");
    cell(5, duration(Math.max(0, now - one.since)));
    cell(6, (one.why ?? "").replace(/[\w-]{20,}/g, shortId)); // requests are named as in the first column
    return row;
  });
  const isSame = rows.length === body.children.length && rows.every((row, index) => body.children[index] === row);
  if (!isSame) body.replaceChildren(...rows);
}

const shortId = (id) => id.slice(-14);

function requestRow(one, select) {
  const open = h("button", { type: "button", class: "quiet small", text: shortId(one.id), title: one.id, onclick: () => select(one.id) });
  return h("tr", { "data-id": one.id }, h("td", {}, open), h("td", {}, h("span", { class: "phase" })), h("td", { class: "bar-cell" }, h("progress", { "aria-label": "Progress" })), h("td", { class: "num" }), h("td", { class: "num" }), h("td", { class: "num" }), h("td", { class: "why" }));
}

/** The map of each pool: a square per cell; the blocks of a chosen request stand out. */
export function blocks(box, pools, row) {
  while (box.children.length > pools.length) box.lastChild.remove();
  pools.forEach((pool, index) => {
    const canvas = box.children[index] ?? box.appendChild(h("canvas", { role: "img" }));
    const width = canvas.clientWidth || 300;
    const cells = pool.states.length;
    const size = Math.max(3, Math.min(18, Math.floor(Math.sqrt((width * 230) / Math.max(1, cells)))));
    const columns = Math.floor(width / size);
    const { context } = surface(canvas, Math.ceil(cells / columns) * size);
    const tones = colours("c-free", "c-cached", "c-used", "c-shared");
    for (let cell = 0; cell < cells; cell += 1) {
      const state = Number(pool.states[cell]);
      context.globalAlpha = row === null || row === undefined || row < 0 || (state === 2 && pool.owners[cell] === row) ? 1 : 0.25;
      context.fillStyle = tones[state];
      context.fillRect((cell % columns) * size, Math.floor(cell / columns) * size, size - 1, size - 1);
    }
    context.globalAlpha = 1;
    const used = pool.num_blocks - pool.num_free;
    canvas.setAttribute("aria-label", `${count(used)} of ${count(pool.num_blocks)} blocks in use, ${count(pool.num_cached)} cached; ${pool.cell_blocks} per square`);
  });
}

/** Prompts that begin alike, as layers: each node below the one that it goes on after. */
export function tree(box, nodes, blockSize) {
  const total = nodes.filter((one) => one[1] < 0).reduce((sum, one) => sum + one[2] + one[4], 0);
  if (!total) {
    box.replaceChildren(h("p", { class: "empty", text: "No prompt is cached yet." }));
    return;
  }
  const places = new Map();
  const next = new Map([[-1, 0]]);
  const rows = nodes.map(([id, parent, size, used, below]) => {
    const left = next.get(parent) ?? 0;
    const share = (size + below) / total;
    next.set(parent, left + share);
    next.set(id, left);
    const depth = parent < 0 ? 0 : places.get(parent) + 1;
    places.set(id, depth);
    return { left, share, depth, size, used, below };
  });
  const shown = rows.filter((one) => one.depth < 6 && one.share > 0.004);
  const deepest = Math.max(...shown.map((one) => one.depth));
  const picture = svg("svg", { viewBox: `0 0 1000 ${(deepest + 1) * 30}`, preserveAspectRatio: "none", role: "img", "aria-label": `Prefix tree of ${nodes.length} runs, ${count(total * blockSize)} tokens` });
  for (const one of shown) {
    const title = `${count(one.size * blockSize)} tokens${one.used ? `, ${one.used} of ${one.size} blocks in use` : ", unused"}${one.below ? `, ${count(one.below * blockSize)} below` : ""}`;
    picture.append(svg("rect", { class: one.used ? "used" : "cached", x: one.left * 1000, y: one.depth * 30, width: Math.max(2, one.share * 1000 - 2), height: 27, rx: 3 }, svg("title", { text: title })));
  }
  picture.style.height = `${(deepest + 1) * 30}px`;
  box.replaceChildren(picture);
}

export function hits(box, load, misses) {
  const found = Object.entries(misses ?? {}).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1, load.prefix_hits, ...found.map((one) => one[1]));
  const line = (name, tokens, kind) => h("li", {}, h("span", { text: name }), h("span", { class: "num", text: count(tokens) }), h("progress", { class: kind, max: most, value: tokens, "aria-label": name }));
  box.replaceChildren(
    h("ul", { class: "bars" }, line("Found in the cache (tokens)", load.prefix_hits, "used"), found.map(([why, tokens]) => line(`Missed: ${why}`, tokens, "wait"))),
    found.length ? "" : h("p", { class: "hint", text: "Reasons for misses are counted while this page is open." }),
  );
}

export function memory(list, total, engine) {
  const lines = engine.memory ?? [];
  const supply = Math.max(1, engine.memory_supply);
  total.textContent = lines.length ? `${bytes(lines.reduce((sum, one) => sum + one[1], 0))} of ${bytes(supply)}` : "";
  const most = Math.max(1, ...lines.map((one) => one[1]));
  if (list.dataset.told === JSON.stringify(lines)) return;
  list.dataset.told = JSON.stringify(lines);
  list.className = "bars";
  list.replaceChildren(...lines.map(([name, size, note]) => h("li", { title: note }, h("span", { text: name }), h("span", { class: "num", text: bytes(size) }), h("progress", { class: "shared", max: most, value: size, "aria-label": name }))));
}

export function ended(body, list, select) {
  const known = new Map([...body.children].map((row) => [row.dataset.id, row]));
  const rows = list.slice(-60).reverse().map((one) => {
    const id = `${one.id} ${one.at}`;
    return known.get(id) ?? h(
      "tr",
      { "data-id": id },
      h("td", {}, h("button", { type: "button", class: "quiet small", text: one.id.slice(-14), title: one.id, onclick: () => select(one.id) })),
      h("td", { class: one.error ? "problem" : "", text: one.error ?? one.reason }),
      h("td", { class: "num", text: count(one.num_prompt_tokens) + (one.num_cached ? ` (${count(one.num_cached)})` : "") }),
      h("td", { class: "num", text: count(one.num_tokens) }),
      ...[one.queue, one.ttft, one.itl].map((value) => h("td", { class: "num", text: duration(value) })),
    );
  });
  body.replaceChildren(...rows);
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function log(box, lines) {
  const last = lines.at(-1);
  const told = last ? `${lines.length} ${last[0]} ${last[2]}` : "";
  if (box.dataset.told === told) return;
  box.dataset.told = told;
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  box.replaceChildren(...lines.slice(-300).map(([at, level, text]) => h("div", { class: `line ${level}` }, h("time", { text: clock(at) }), h("b", { text: level }), h("span", { text }))));
  if (follows) box.scrollTop = box.scrollHeight;
}

/** A request's life as a line of phases, and its events as a list. */
export function timeline(dialog, id, track, events, request, now) {
  $("#request-title", dialog).textContent = id;
  const end = track.end ? track.end.at : now;
  const span = Math.max(0.001, end - track.since);
  const phases = track.phases.map(([at, phase, why], index) => ({ at, phase, why, to: track.phases[index + 1]?.[0] ?? end }));
  const picture = svg("svg", { viewBox: "0 0 1000 46", preserveAspectRatio: "none", role: "img", "aria-label": "Phases over time" });
  for (const one of phases) {
    const left = ((one.at - track.since) / span) * 1000;
    picture.append(svg("rect", { x: left, y: 4, width: Math.max(2, ((one.to - one.at) / span) * 1000 - 1), height: 26, rx: 3, class: `p-${one.phase}` }, svg("title", { text: `${one.phase}: ${duration(one.to - one.at)}${one.why ? `, ${one.why}` : ""}` })));
  }
  for (const event of events) {
    const left = ((event[1] - track.since) / span) * 1000;
    if (left >= 0 && left <= 1000) picture.append(svg("rect", { x: left, y: 34, width: 2, height: 9, class: `e-${event[3]}` }));
  }
  $("#request-line", dialog).replaceChildren(picture);
  const state = track.end ? `Ended: ${track.end.error ?? track.end.reason}, ${count(track.end.num_tokens)} tokens in ${duration(span)}` : request ? `${request.phase}${request.why ? `: ${request.why}` : ""} · ${count(request.num_tokens)} tokens known, ${count(request.num_computed)} computed · row ${request.row ?? "none"}` : "Not there at this moment.";
  $("#request-state", dialog).textContent = state;
  const words = {
    started: (e) => `started with ${count(e[4])} of ${count(e[5])} tokens cached`,
    resumed: (e) => `resumed with ${count(e[4])} of ${count(e[5])} tokens cached`,
    chunk: (e) => `computed ${count(e[4])} prompt tokens, ${count(e[5])} in all`,
    preempted: (e) => `preempted for lack of KV blocks, time ${e[4]}`,
  };
  const lines = [
    [track.since, "arrived"],
    ...phases.filter((one) => one.why).map((one) => [one.at, `${one.phase}: ${one.why}`]),
    ...events.map((event) => [event[1], words[event[3]](event)]),
    ...(track.end ? [[track.end.at, `ended: ${track.end.error ?? track.end.reason}`]] : []),
  ].sort((a, b) => a[0] - b[0]);
  $("#request-events", dialog).replaceChildren(...lines.slice(-80).map(([at, text]) => h("li", {}, h("time", { text: `+${duration(Math.max(0, at - track.since))}` }), h("span", { text }))));
  const prompt = $("#request-prompt", dialog);
  prompt.hidden = !request?.prompt;
  prompt.textContent = request?.prompt ?? "";
}
