"use strict";
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

// Text of peers is untrusted: it becomes text nodes, and never markup. Signs that reorder text are not shown.
const clean = (text) => String(text ?? "").replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, "?");

function make(name, kind = "", ...content) {
  const node = document.createElement(name);
  if (kind) node.className = kind;
  node.append(...content);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // an unchanged node keeps a selection in it
}

// Brings the children of `parent` to `items`, one each. Children of earlier items with the same key are kept.
function sync(parent, items, key, build, update) {
  const old = parent.nodes ?? new Map(), nodes = new Map();
  items.forEach((item, place) => {
    let id = key(item, place);
    while (nodes.has(id)) id += "+"; // two nodes of one key would leave one in the page for ever
    const node = old.get(id) ?? build(item, place);
    old.delete(id);
    nodes.set(id, node);
    update?.(node, item);
    if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null);
  });
  for (const node of old.values()) node.remove();
  parent.nodes = nodes;
}

const number = (value, digits = 1) =>
  value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: value >= 100 ? 0 : digits });
// Four digits, with an exponent if the number is very small or large.
const short = (value) => (value == null ? "–" : String(Number(value.toPrecision(4))));
let newest_s = 0, newest = null, isOverTime = false; // time of the overview on the page, the overview, and an axis

// Times before the last 20 hours have a date.
function clock(at_s) {
  const at = new Date(at_s * 1000), day = at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return `${newest_s - at_s > 72000 ? `${day} ` : ""}${at.toLocaleTimeString("en-GB")}`;
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 360000 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86400)} days`;
}

// ---------------------------------------------------------------------- curves

function buildCurve({ name }) {
  const figure = make("figure"), svg = document.createElementNS(SVG, "svg"), output = make("output");
  svg.setAttribute("viewBox", "0 0 300 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("tabindex", "0");
  for (const [tag, kind] of [["line", "grid"], ["path", "area"], ["path", "curve"], ["line", "mark"]]) {
    const part = document.createElementNS(SVG, tag);
    part.setAttribute("class", kind);
    svg.append(part);
  }
  figure.append(make("figcaption", "", make("span"), output), svg, make("div", "axis", make("span"), make("span")));
  figure.dataset.curve = name;
  const point = (event) => choose(figure, (event.offsetX / svg.clientWidth) * figure.span + figure.begin);
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => choose(figure, null));
  svg.addEventListener("blur", () => choose(figure, null));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], points = figure.points;
    if (!by || !points.length) return;
    event.preventDefault();
    const at = points.findIndex(([place]) => place === figure.chosen);
    choose(figure, points[Math.max(0, Math.min(points.length - 1, (at < 0 ? points.length : at) + by))][0]);
  });
  return figure;
}

// Shows the value at a time or step, or the newest one.
function choose(figure, at) {
  const { points, begin, span, nameOfPlace } = figure, output = figure.querySelector("output");
  const near = (best, one) => (Math.abs(one[0] - at) < Math.abs(best[0] - at) ? one : best);
  const found = points.length && (at === null ? points.at(-1) : points.reduce(near));
  figure.chosen = at === null ? null : found?.[0];
  setText(output, found ? short(found[1]) + (at === null ? "" : ` at ${nameOfPlace(found[0])}`) : "not measured");
  const x = found && at !== null ? ((found[0] - begin) / span) * 300 : -9, mark = figure.querySelector(".mark");
  for (const [key, value] of [["x1", x], ["x2", x], ["y1", 0], ["y2", x < 0 ? 0 : 100]]) mark.setAttribute(key, value);
}

// `places`: the times or steps of the values. Curves of rates begin at 0, and have gaps where surveys failed.
function updateCurve(figure, { title, places, values, width, isRate, isOverTime }) {
  setText(figure.querySelector("figcaption span"), title);
  figure.points = places.map((place, index) => [place, values[index]]).filter(([, value]) => value != null);
  figure.nameOfPlace = isOverTime ? clock : (step) => `step ${step.toLocaleString("en")}`;
  const found = figure.points.map(([, value]) => value), most = Math.max(...found, ...(isRate ? [0] : []));
  const least = isRate ? 0 : Math.min(...found);
  figure.begin = places[0] ?? 0;
  figure.span = Math.max((places.at(-1) ?? 0) - figure.begin, width);
  const x = (place) => (((place - figure.begin) / figure.span) * 300).toFixed(1);
  const y = (value) => (100 - ((value / 2 - least / 2) / (most / 2 - least / 2 || 1)) * 92).toFixed(1);
  let line = "", area = "", last = null, start = null;
  const close = () => { if (last !== null) area += `L${x(last)} 100L${x(start)} 100Z`; };
  for (const [place, value] of figure.points) {
    // A longer pause is a gap, because surveys failed or take longer.
    const isGap = last === null || (isRate && place - last > Math.max(5, 2.5 * width));
    const point = `${x(place)} ${y(value)}`;
    if (isGap) {
      close();
      start = place;
    }
    line += `${isGap ? `M${point}` : ""}L${point}`; // a single point is a dot
    area += `${isGap ? "M" : "L"}${point}`;
    last = place;
  }
  close();
  const [grid, fill, path] = figure.querySelectorAll("svg > *"), [left, right] = figure.querySelectorAll(".axis span");
  for (const [key, value] of [["x1", 0], ["x2", 300], ["y1", 100], ["y2", 100]]) grid.setAttribute(key, value);
  path.setAttribute("d", line);
  fill.setAttribute("d", isRate ? area : "");
  const over = isOverTime ? duration(figure.span) : `${figure.span.toLocaleString("en")} steps`;
  const range = isRate ? `max ${short(most)}` : `${short(least)} to ${short(most)}`;
  setText(left, !places.length ? "" : isOverTime ? `${over} ago` : figure.nameOfPlace(figure.begin));
  setText(right, found.length ? range : "");
  choose(figure, figure.chosen ?? null);
  figure.querySelector("svg").setAttribute("aria-label", `${title} over ${over}: now ${short(found.at(-1))}, ${range}`);
}

// ---------------------------------------------------------------------- stages

function buildPeer() {
  const lines = ["name", "rates", "machine faint", "problem"].map((kind) => make("div", kind));
  const details = make("details", "", make("summary", "", ...lines, make("div", "bar", make("i"))), make("dl"));
  const item = make("li", "peer", details);
  details.addEventListener("toggle", () => fillDetails(item));
  return item;
}

const nameOf = (peer) => clean(peer.peer_id.slice(-6));
const rateOf = (peer) => peer.samples_per_s ?? peer.tokens_per_s;

function tagsOf(peer) {
  const { lead, coordinator, is_leaving: leaving, has_files } = peer;
  const flags = { lead, coordinator, leaving, "has the files": has_files };
  return [clean(peer.role), ...Object.keys(flags).filter((name) => flags[name])].filter(Boolean);
}

function updatePeer(item, { peer, isMeasured, most }) {
  const isRun = "queued" in peer;
  item.classList.toggle("bad", peer.problem != null);
  const [name, rates, machine, problem] = item.querySelectorAll("summary > div");
  sync(name, [nameOf(peer), ...tagsOf(peer)], (_, place) => place,
    (_, place) => (place ? make("span", "tag") : make("b")), setText);
  const load = isRun ? `${peer.queued} queued` : plural(peer.num_texts, "text");
  const gb = isRun ? peer.peak_gb : peer.weight_bytes / 1e9;
  const memory = gb == null ? "" : `${number(gb, 2)} GB`;
  const rate = isMeasured ? `${number(rateOf(peer))}/s` : "";
  const shown = peer.problem == null ? [rate, load, memory].filter(Boolean) : [];
  sync(rates, shown, (_, place) => place, () => make("span"), setText);
  setText(machine, clean(peer.arithmetic?.replace(/(?<=\bcpu )[0-9a-f]{8}, /, ""))); // without the processor's digest
  setText(problem, peer.problem == null ? "" : `does not answer: ${clean(peer.problem)}`);
  item.querySelector(".bar i").style.width = `${peer.problem == null && isMeasured ? (100 * rateOf(peer)) / most : 0}%`;
  item.peer = peer;
  fillDetails(item);
}

// Details that are closed stay empty, because a page has a thousand of them.
function fillDetails({ peer, firstChild: details }) {
  if (!details.open) return;
  const rows = [["peer", peer.peer_id], ["at", peer.place]];
  if ("queued" in peer) {
    rows.push(["machine", peer.arithmetic || "unknown"], ["step", peer.step ?? "waits"], ["up", duration(peer.age_s)],
      ["GB/h", `${number(peer.sent_gb_per_hour, 2)} out, ${number(peer.received_gb_per_hour, 2)} in`],
      ["refused", plural(peer.refused, "request")]);
  } else {
    rows.push(["for texts", `${number(peer.free_text_bytes / 1e9, 2)} GB`],
      ["a stage", peer.stage_ms ? `${number(peer.stage_ms)} ms` : "not measured"]);
  }
  sync(details.lastChild, rows.flat(), (_, place) => place,
    (_, place) => make(place % 2 ? "dd" : "dt"), (node, text) => setText(node, clean(text)));
}

function noteOf(stage) {
  if (!stage.num_peers) return "no answering peer holds it";
  const kinds = stage.num_kinds > 1 ? `${stage.num_kinds} kinds of machines` : "";
  return [kinds, stage.is_portable ? "portable arithmetic" : ""].filter(Boolean).join(", ");
}

function updateStage(node, { title, stage, peers, isRun }) {
  const [heading, facts, note] = node.children, isMeasured = stage.rate != null;
  setText(heading, title);
  const rate = isMeasured ? `, ${number(stage.rate)} ${isRun ? "samples" : "tokens"}/s` : "";
  setText(facts, plural(stage.num_peers, isRun ? "peer" : "server") + rate);
  setText(note, noteOf(stage));
  node.classList.toggle("empty", !stage.num_peers);
  const most = Math.max(...peers.map(rateOf), 1e-9);
  const items = peers.map((peer) => ({ peer, isMeasured, most }));
  sync(node.querySelector("ul"), items, ({ peer }) => peer.peer_id, buildPeer, updatePeer);
  const more = stage.num_peers - peers.filter((peer) => peer.problem == null).length;
  setText(node.lastChild, more > 0 ? `and ${more.toLocaleString("en")} more` : "");
}

function stagesOf({ kind, stages, report }) {
  const isRun = kind === "run", listed = report.peers ?? report.servers, trainers = report.trainers_stage;
  const isWhole = stages.length === 1 && trainers === 0;
  const found = stages.map((stage, index) => ({
    title: isWhole ? "The model" : `Stage ${index}${index === trainers ? ", trainers'" : ""}`,
    stage, isRun, peers: listed.filter((peer) => peer.stages.includes(index)),
  }));
  const peers = listed.filter((peer) => !peer.stages.length);
  const num_peers = peers.filter((peer) => peer.problem == null).length;
  if (peers.length) found.push({ title: "Without a stage", stage: { num_peers, rate: null }, isRun, peers });
  return found;
}

function buildStage() {
  const [facts, note, more] = ["faint", "note", "more faint"].map((kind) => make("p", kind));
  return make("section", "stage", make("h3"), facts, note, make("ul"), more);
}

// ---------------------------------------------------------------------- the page

function copyLine(text) {
  const code = make("code", "", text), button = make("button", "", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy: ${text}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch { // pages without TLS have no clipboard
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return make("div", "", code, button);
}

// The numbers that the page shows, with their titles.
const FACTS = {
  run: [["step", "step"], ["steps_per_minute", "steps/min"], ["samples_per_second", "samples/s"], ["peers", "peers"]],
  model: [["texts", "texts"], ["tokens_per_second", "tokens/s"], ["peers", "servers"]],
};
const CURVES = {
  run: [["samples_per_second", "samples/s"], ["steps_per_minute", "steps/min"],
    ["answering_peers", "peers that answer"], ["sent_gigabytes_per_hour", "GB/h, all peers"]],
  model: [["tokens_per_second", "tokens/s"], ["answering_peers", "servers"]],
};

function showLogged({ logged, logged_at_s: times }) {
  const places = isOverTime ? times : logged.begins, names = Object.keys(logged.series);
  const figures = names.map((name) => ({
    name, title: clean(name), places, values: logged.series[name], width: isOverTime ? 1 : logged.width, isOverTime,
  }));
  $("logging").hidden = !names.length;
  sync($("logged"), figures, ({ name }) => name, buildCurve, updateCurve);
}

$("by-time").addEventListener("click", () => {
  isOverTime = !isOverTime;
  $("by-time").setAttribute("aria-pressed", isOverTime);
  for (const figure of $("logged").children) figure.chosen = null;
  showLogged(newest);
});

function show(state) {
  newest = state;
  newest_s = state.at_s;
  const { numbers } = state;
  document.title = `${clean(state.name)} – lightning-swarm`;
  setText($("kind"), state.kind);
  setText($("name"), clean(state.name));
  $("problem").hidden = state.problem == null;
  setText($("problem"), clean(state.problem));
  setText($("live"), `${state.problem == null ? "updated" : "last survey"} ${clock(state.at_s)}`);
  $("live").classList.toggle("bad", state.problem != null);
  const silent = numbers.silent_peers ? `, ${numbers.silent_peers} silent` : "";
  const facts = FACTS[state.kind].map(([name, title]) =>
    [title, name === "peers" ? numbers.peers.toLocaleString("en") + silent : number(numbers[name])]);
  sync($("facts"), facts, ([name]) => name, ([name]) => make("div", "", make("dt", "", name), make("dd")),
    (node, [, value]) => setText(node.lastChild, value));
  const { begins, width, series } = state.curves;
  const figures = CURVES[state.kind].map(([name, title]) =>
    ({ name, title, places: begins, values: series[name] ?? [], width, isRate: true, isOverTime: true }));
  sync($("curves"), figures, ({ name }) => name, buildCurve, updateCurve);
  showLogged(state);
  sync($("stages"), stagesOf(state), ({ title }) => title, buildStage, updateStage);
  const events = state.events.toReversed();
  const after = ({ resumed_s: s }) => (s == null ? "" : `; a new step within ${number(s)} s`);
  sync($("events"), events, (event) => `${event.at_s} ${event.text}`,
    (event) => make("li", event.kind, make("time", "", clock(event.at_s)), make("span")),
    (node, event) => setText(node.lastChild, clean(event.text) + after(event)));
  sync($("join"), state.join, (line) => line, copyLine);
}

const source = new EventSource("api/events");
source.addEventListener("message", (event) => show(JSON.parse(event.data)));
source.addEventListener("error", () => {
  const isClosed = source.readyState === EventSource.CLOSED;
  setText($("problem"), `The dashboard does not answer${isClosed ? ". Reload the page" : ""}. This is its last state.`);
  $("problem").hidden = false;
  $("live").classList.add("bad");
});
