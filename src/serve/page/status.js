// Polls /status and draws it. Everything is set as text, never as markup.
"use strict";

const PERIOD_MS = 1000;
const KEPT = 180;  // points of a chart
const MOST_ROWS = 50;  // of the table of requests
const points = [];
let before = null;
let apiKey = "";  // only in memory: a reload asks again

const at = (id) => document.getElementById(id);
const show = (id, text) => { at(id).textContent = text; };

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 999.5 && unit + 1 < units.length) { n /= 1000; unit += 1; }
  return `${unit === 0 ? n : n.toPrecision(3)} ${units[unit]}`;
}

function duration(s) {
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h > 0 ? `${h} h ${m} min` : m > 0 ? `${m} min` : `${Math.floor(s)} s`;
}

function chart(id, series) {
  const svg = at(id);
  const most = Math.max(1, ...series.flatMap((s) => s.values));
  show(`${id}-top`, `up to ${most.toFixed(0)}`);
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 100`);
  svg.replaceChildren(...series.map((s) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const first = KEPT - s.values.length;
    path.setAttribute("d", s.values.map((v, i) =>
      `${i === 0 ? "M" : "L"}${first + i} ${(97 - 94 * v / most).toFixed(2)}`).join(""));
    path.setAttribute("class", s.name);
    return path;
  }));
}

function element(name, text, className) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (className) e.className = className;
  return e;
}

function drawSlots(slots) {
  at("slots").replaceChildren(...slots.map((slot) => {
    const box = element("i", undefined, `slot ${slot.state}`);
    box.title = `slot ${slot.id}: ${slot.state}, position ${slot.position}`;
    return box;
  }));
  const busy = slots.filter((slot) => slot.is_processing).slice(0, MOST_ROWS);
  at("requests-table").hidden = busy.length === 0;
  at("requests-table").tBodies[0].replaceChildren(...busy.map((slot) => {
    const row = element("tr");
    row.append(...[slot.id, slot.state, `${slot.n_prompt_read} / ${slot.n_prompt}`,
      slot.n_prompt_cached, slot.n_decoded, slot.position].map((v) => element("td", v)));
    return row;
  }));
}

function prefixText(node) {
  const state = node.state_bytes === 0 ? "no state" :
    `state of ${bytes(node.state_bytes)}, used ${duration(node.age_s)} ago`;
  const pins = node.pins > 0 ? `, in use by ${node.pins}` : "";
  return `${node.tokens} tokens (+${node.own_tokens}), ${state}${pins}`;
}

// Nodes come parents first: a list for each level that is open, the last item of each.
function drawTree(cache) {
  at("tree-section").hidden = cache.tree.length === 0;
  show("tree-size", cache.nodes > cache.tree.length ?
    `the first ${cache.tree.length} of ${cache.nodes}` : `${cache.nodes}`);
  const lists = [element("ul")];
  const items = [];
  for (const node of cache.tree) {
    lists.length = Math.min(lists.length, node.level + 1);
    if (lists.length === node.level) {
      lists.push(items[node.level - 1].appendChild(element("ul")));
    }
    items[node.level] = lists[node.level].appendChild(element("li", prefixText(node)));
  }
  at("tree").replaceChildren(lists[0]);
}

function facts(status) {
  const state = status.state, cache = status.prefix_cache, kv = status.kv;
  const limit = kv.limit_bytes ? bytes(kv.limit_bytes) : "no limit";
  const list = [
    ["scheme", state.scheme],
    ["bits a value", `${state.payload_bits.toFixed(2)} kept, ` +
      `${state.resident_bits.toFixed(2)} while running`],
    ["a slot", bytes(state.bytes_per_slot)],
    ["attention cache", `${bytes(kv.reserved_bytes)} of ${limit}`],
    ["windows rounded", state.flushes],
    ["states not finite", state.nonfinite],
    ...(state.guarded_roundings > 0
      ? [["over the guard", `${state.over_guard} of ${state.guarded_roundings} roundings`]] : []),
    ["prefix cache", cache.mode === "off" ? "off" :
      `${cache.mode}: ${cache.snapshots} states in ${cache.nodes} nodes, ` +
      `${bytes(cache.bytes)} of ${bytes(cache.max_bytes)}`],
    ["of it", `${bytes(cache.state_bytes)} states, ${bytes(cache.row_bytes)} attention rows`],
    ["lookups", `${cache.queries}, ${cache.hits} hits, ${cache.evictions} evictions`],
    ["requests", `${status.requests.finished} ended, ${status.requests.failed} failed`],
    ["connections", status.requests.connections],
  ];
  at("facts").replaceChildren(...list.flatMap(([name, value]) =>
    [element("dt", name), element("dd", value)]));
}

function draw(status) {
  const now = performance.now();
  let reply = 0, prompt = 0;
  if (before && status.tokens.reply >= before.status.tokens.reply) {
    const s = (now - before.now) / 1000;
    reply = (status.tokens.reply - before.status.tokens.reply) / s;
    prompt = (status.tokens.prompt - before.status.tokens.prompt) / s;
  }
  before = { now, status };
  points.push({ reply, running: status.requests.running, waiting: status.requests.waiting });
  if (points.length > KEPT) points.shift();

  show("version", status.version);
  show("summary",
    `${status.model}, state ${status.state.scheme}, up ${duration(status.uptime_s)}`);
  at("summary").className = "";
  show("reply-rate", reply.toFixed(0));
  show("prompt-rate", prompt.toFixed(0));
  show("running", status.requests.running);
  show("waiting", status.requests.waiting);
  show("used", `${status.state.used} / ${status.state.slots}`);
  show("bits", status.state.resident_bits.toFixed(2));
  show("hits", status.prefix_cache.queries === 0 ? "-" :
    `${Math.round(100 * status.prefix_cache.hits / status.prefix_cache.queries)} %`);
  chart("chart-reply", [{ name: "a", values: points.map((p) => p.reply) }]);
  chart("chart-requests", [{ name: "a", values: points.map((p) => p.running) },
    { name: "b", values: points.map((p) => p.waiting) }]);
  drawSlots(status.slots);
  drawTree(status.prefix_cache);
  facts(status);
}

async function poll() {
  try {
    const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
    const response = await fetch("/status", { headers, cache: "no-store" });
    at("key-form").hidden = response.status !== 401;
    const body = await response.json();
    if (!response.ok) throw new Error(body.error.message);
    draw(body);
  } catch (error) {
    show("summary", error.message);
    at("summary").className = "bad";
  }
  setTimeout(poll, PERIOD_MS);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey = at("key").value;
});
poll();
