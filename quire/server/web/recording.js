// The last ten minutes of frames, bounded in time and size, and what is gathered from them for charts and timelines.

export const SPAN = 600; // seconds
const MAX_CHARS = 40_000_000; // of frames that are kept as text
const MAX_STEPS = 20_000;
const MAX_EVENTS = 20_000;
const MAX_TRACKS = 2_000;
const MAX_ENDED = 300;
const MAX_LINES = 1_000;

export class Recording {
  constructor() {
    this.hello = null;
    this.clear();
  }

  clear() {
    this.frames = []; // {at, line}, oldest first; parsed when shown
    this.chars = 0;
    this.samples = []; // [at, prompt rate, generation rate, running, waiting, kv]
    this.steps = [];
    this.events = [];
    this.ended = [];
    this.log = [];
    this.restarts = [];
    this.tracks = new Map(); // request id -> {since, phases: [[at, phase]], end}
  }

  /** Take a line in; returns what it says. */
  take(line) {
    const message = JSON.parse(line);
    if (message.type === "hello") this.begin(message, line);
    else if (message.type === "frame") this.add(message, line);
    return message;
  }

  begin(hello, line) {
    this.hello = hello;
    this.helloLine = line;
    if (!this.samples.length) this.samples = hello.history;
    const known = new Set(this.ended.map((one) => one.id + one.at));
    this.ended.push(...hello.ended.filter((one) => !known.has(one.id + one.at)));
    const lastLine = this.log.at(-1)?.[0] ?? 0;
    this.log.push(...hello.log.filter((one) => one[0] > lastLine));
    const lastRestart = this.restarts.at(-1)?.[0] ?? 0;
    this.restarts.push(...hello.restarts.filter((one) => one[0] > lastRestart));
  }

  add(frame, line) {
    this.frames.push({ at: frame.at, line });
    this.chars += line.length;
    const { load, engine } = frame;
    this.samples.push([frame.at, load.prompt_rate, load.generation_rate, load.running, load.waiting, load.kv_usage]);
    this.ended.push(...frame.ended);
    this.log.push(...frame.log);
    this.restarts.push(...frame.restarts);
    if (engine) {
      this.steps.push(...engine.steps);
      this.events.push(...engine.events);
      for (const one of engine.requests) this.track(one, engine.at);
    }
    for (const one of frame.ended) {
      for (const [id, track] of this.tracks) if (id === one.id || id.endsWith(`_${one.id}`)) track.end = one;
    }
    this.trim(frame.at - SPAN);
  }

  track(request, at) {
    let track = this.tracks.get(request.id);
    if (!track) {
      track = { since: request.since, phases: [], end: null };
      this.tracks.set(request.id, track);
      if (this.tracks.size > MAX_TRACKS) this.tracks.delete(this.tracks.keys().next().value);
    }
    if (track.phases.at(-1)?.[1] !== request.phase) track.phases.push([track.phases.length ? at : request.since, request.phase, request.why ?? ""]);
    if (track.phases.length > 200) track.phases.shift();
  }

  trim(oldest) {
    let drop = 0;
    while (drop < this.frames.length - 1 && (this.frames[drop].at < oldest || this.chars > MAX_CHARS)) {
      this.chars -= this.frames[drop].line.length;
      drop += 1;
    }
    if (drop) this.frames.splice(0, drop);
    cut(this.samples, this.samples.findIndex((one) => one[0] >= oldest));
    cut(this.steps, this.steps.length - MAX_STEPS);
    cut(this.events, this.events.length - MAX_EVENTS);
    cut(this.ended, this.ended.length - MAX_ENDED);
    cut(this.log, this.log.length - MAX_LINES);
  }

  /** The last frame at or before a moment, with the last view of an engine that there was then. */
  frameAt(index) {
    const frame = JSON.parse(this.frames[index].line);
    for (let at = index - 1; !frame.engine && at >= 0 && index - at < 240; at -= 1) {
      const before = JSON.parse(this.frames[at].line);
      frame.engine = before.engine;
    }
    return frame;
  }

  text() {
    return [this.helloLine, ...this.frames.map((frame) => frame.line)].join("\n");
  }
}

function cut(list, count) {
  if (count > 0) list.splice(0, count);
}
