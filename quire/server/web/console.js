// The console: one stream of frames, shown live or at a moment of the last ten minutes.

import { call, lines } from "./api.js";
import { $, count, download, themeButton } from "./dom.js";
import * as panels from "./panels.js";
import { Recording } from "./recording.js";

const recording = new Recording();
const state = { index: null, frame: null, selected: null, hover: -1, steps: null, isOpenFile: false };
const isLive = () => state.index === null;

function select(id) {
  state.selected = id;
  const dialog = $("#request");
  if (!dialog.open) dialog.showModal();
  show();
}

/** The frame that is to be seen now. */
function chosen() {
  if (!recording.frames.length) return null;
  if (!isLive()) return recording.frameAt(Math.min(state.index, recording.frames.length - 1));
  return state.frame;
}

let engine = null; // the last view that came

function show() {
  const frame = chosen();
  if (!frame) return;
  const at = frame.at;
  const view = frame.engine ?? (isLive() ? engine : null) ?? { requests: [], pools: [], prefixes: [], memory: [], misses: {} };
  const before = (list, key) => (isLive() ? list : list.filter((one) => key(one) <= at));
  const samples = before(recording.samples, (one) => one[0]);
  panels.tiles($("#tiles"), frame, samples);
  panels.rates($("#rates"), recording.samples, at, isLive());
  state.steps = panels.steps($("#steps"), $("#steps-legend"), $("#step-note"), before(recording.steps, (one) => one[1]), state.hover);
  panels.requests($("#requests tbody"), view.requests, at, select, state.selected);
  $("#no-requests").hidden = view.requests.length > 0;
  $("#request-counts").textContent = `${count(frame.load.running)} run, ${count(frame.load.waiting)} wait${view.num_more_waiting ? `, ${count(view.num_more_waiting)} not shown` : ""}`;
  const picked = view.requests.find((one) => one.id === state.selected);
  panels.blocks($("#maps"), view.pools, $("#request").open ? (picked?.row ?? null) : null);
  $("#kv-counts").textContent = view.pools.map((pool) => `${count(pool.num_blocks - pool.num_free)} of ${count(pool.num_blocks)}`).join(" + ");
  const blockSize = recording.hello?.engine?.block_size ?? 16;
  panels.tree($("#tree"), view.prefixes, blockSize);
  $("#tree-counts").textContent = view.prefixes.length ? `${count(view.prefixes.length)} runs${view.num_more_prefix_blocks ? `, ${count(view.num_more_prefix_blocks)} blocks not shown` : ""}` : "";
  panels.hits($("#hits"), frame.load, view.misses);
  panels.memory($("#memory"), $("#memory-total"), view);
  panels.ended($("#ended tbody"), before(recording.ended, (one) => one.at), select);
  panels.log($("#log"), before(recording.log, (one) => one[0]));
  showRestarts(before(recording.restarts, (one) => one[0]));
  if ($("#request").open && state.selected) showRequest(picked, at);
  const pill = $("#health");
  if (pill.textContent !== frame.status) pill.textContent = frame.status;
  pill.title = frame.detail;
  pill.dataset.status = frame.status;
  showPlayer(at);
}

function showRequest(request, at) {
  const known = recording.tracks.get(state.selected) ?? recording.tracks.get(`0_${state.selected}`);
  const end = recording.ended.findLast((one) => one.id === state.selected);
  const track = known ?? (end && { since: end.since, phases: [], end });
  if (!track) return;
  const events = recording.events.filter((event) => event[2] === state.selected && event[1] <= at);
  panels.timeline($("#request"), state.selected, track, events, request, at);
}

function showRestarts(list) {
  const starts = list.filter((one) => one[1] === "ready").length;
  const last = list.at(-1);
  $("#restarts").textContent = starts > 1 ? `engine restarted ${starts - 1}×, last: ${last[1]} at ${new Date(last[0] * 1000).toLocaleTimeString("en-GB")}` : "no engine restarts";
}

function showPlayer(at) {
  const scrub = $("#scrub");
  const last = recording.frames.length - 1;
  scrub.max = String(Math.max(0, last));
  if (isLive()) scrub.value = String(Math.max(0, last));
  $("#live-button").disabled = isLive() || state.isOpenFile;
  $("#pause").setAttribute("aria-pressed", String(!isLive()));
  $("#pause").disabled = state.isOpenFile;
  const ago = (recording.frames.at(-1)?.at ?? at) - at;
  const when = new Date(at * 1000).toLocaleTimeString("en-GB");
  $("#moment").textContent = isLive() ? `live, ${when}` : `${when}, ${Math.round(ago)} s before the end`;
  scrub.setAttribute("aria-valuetext", $("#moment").textContent);
  document.body.classList.toggle("past", !isLive());
}

function seek(index) {
  const before = recording.frames.length;
  state.index = index === null ? null : Math.max(0, Math.min(index, before - 1));
  show();
}

/** Read the stream for as long as the page is open; when it ends, open it again. */
async function watch() {
  let wait = 500;
  while (!state.isOpenFile) {
    try {
      const response = await call("console/events" + location.search);  // ?model=NAME, where there are several
      for await (const line of lines(response)) {
        if (!line) continue;
        if (state.isOpenFile) return;
        wait = 500;
        take(line);
      }
      problem("The server ended the stream. Trying again …");
    } catch (error) {
      if (error.status === 401) {
        problem("The console needs the API key. Reload the page to enter it.");
        return;
      }
      problem(`${error.message} Trying again …`);
    }
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(5000, wait * 1.5);
  }
}

function take(line) {
  const dropped = recording.frames.length;
  const message = recording.take(line);
  problem(null);
  if (message.type === "hello") {
    const { engine: info } = message;
    $("#what").textContent = [message.models[0], info && `${info.architecture || "engine"}, context ${count(info.max_model_len)}`].filter(Boolean).join(" · ");
    return;
  }
  state.frame = message;
  if (message.engine) engine = message.engine;
  const gone = dropped + 1 - recording.frames.length;
  if (!isLive() && gone > 0) state.index = Math.max(0, state.index - gone);
  if (!document.hidden && (isLive() || state.isOpenFile)) show();
  else if (!isLive()) showPlayer(chosen().at);
  document.body.dataset.frames = String(Number(document.body.dataset.frames ?? 0) + 1);
}

function problem(text) {
  const banner = $("#problem");
  banner.hidden = !text;
  banner.textContent = text ?? "";
}

async function openFile(file) {
  const given = (await file.text()).split("\n").filter(Boolean);
  try {
    const checked = given.map((line) => JSON.parse(line));
    if (checked[0]?.type !== "hello" || checked.length < 2) throw new Error("no frames");
  } catch {
    problem("This file is not a recording of the console.");
    return;
  }
  state.isOpenFile = true;
  recording.clear();
  for (const line of given) take(line);
  $("#what").textContent += " · a recording";
  seek(0);
}

function main() {
  themeButton($("#theme"));
  window.addEventListener("themechange", show);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  window.addEventListener("resize", show);
  document.addEventListener("visibilitychange", () => !document.hidden && show());
  $("#live-button").addEventListener("click", () => seek(null));
  $("#pause").addEventListener("click", () => seek(isLive() ? recording.frames.length - 1 : null));
  $("#scrub").addEventListener("input", (event) => seek(Number(event.target.value)));
  $("#save").addEventListener("click", () => download("quire-console.ndjson", recording.text(), "application/x-ndjson"));
  $("#open").addEventListener("click", () => $("#open-file").click());
  $("#open-file").addEventListener("change", (event) => event.target.files[0] && openFile(event.target.files[0]));
  $("#request").addEventListener("close", () => {
    state.selected = null;
    show();
  });
  const canvas = $("#steps");
  canvas.addEventListener("mousemove", (event) => {
    state.hover = state.steps?.at(event.offsetX) ?? -1;
    show();
  });
  canvas.addEventListener("mouseleave", () => {
    state.hover = -1;
    show();
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, textarea") || document.querySelector("dialog[open]")) return;
    const at = state.index ?? recording.frames.length - 1;
    if (event.key === " " && event.target === document.body) {
      event.preventDefault();
      seek(isLive() ? at : null);
    } else if (event.key === "ArrowLeft") seek(at - 1);
    else if (event.key === "ArrowRight" && !isLive()) seek(at + 1);
  });
  watch();
}

main();
