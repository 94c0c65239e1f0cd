// The status page: asks /metrics every second and /v1/info once it is ready; draws both.
// Text reaches the page as text nodes only, so nothing the service names can become markup.

const POLL_MS = 1000, PATIENCE_MS = 5000, KEPT = 120, MINUTE = 60;
const NS = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

let key = "";           // of scope admin; kept in this variable and nowhere else
let info = null;
let isPaused = false;
let lastAnswer = null;  // Date
const samples = [];     // {seconds, metrics}, oldest first
const lastSeen = new Map();  // code -> Date
const plots = new Map();     // name -> numbers, oldest first

// ---- what the service says

/** Read Prometheus text: name -> [{labels, value}]. */
function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    }
    if (!metrics.has(found[1])) metrics.set(found[1], []);
    metrics.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return metrics;
}

async function ask(path) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const signal = AbortSignal.timeout(PATIENCE_MS);
  return fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
}

/** Sum a metric over its series; `wanted` picks by labels. */
function total(metrics, name, wanted = () => true) {
  let sum = 0;
  for (const { labels, value } of metrics.get(name) ?? []) if (wanted(labels)) sum += value;
  return sum;
}

const newest = () => samples[samples.length - 1];

/** The newest sample that is at least so many seconds older than the newest one, or the oldest. */
function before(seconds) {
  const limit = newest().seconds - seconds;
  return samples.findLast((sample) => sample.seconds <= limit) ?? samples[0];
}

/** By how much a counter grew in so many seconds (a restart begins anew at zero). */
function grown(seconds, name, wanted) {
  const now = total(newest().metrics, name, wanted), then = total(before(seconds).metrics, name, wanted);
  return now >= then ? now - then : now;
}

function perSecond(name, wanted) {
  const seconds = newest().seconds - before(1).seconds;
  return seconds > 0 ? grown(1, name, wanted) / seconds : 0;
}

/** The bucket's upper bound that holds the q-th part of the last minute's observations. */
function quantile(q, name, stage) {
  const bounds = (newest().metrics.get(`${name}_bucket`) ?? [])
    .filter(({ labels }) => labels.stage === stage)
    .map(({ labels }) => labels.le)
    .sort((a, b) => bound(a) - bound(b));
  const counts = bounds.map((le) => grown(MINUTE, `${name}_bucket`, (l) => l.stage === stage && l.le === le));
  const all = counts[counts.length - 1] ?? 0;
  if (!all) return null;
  return bound(bounds[counts.findIndex((count) => count >= q * all)]);
}

const bound = (le) => (le === "+Inf" ? Infinity : Number(le));

// ---- how it is written

const grouped = (value, digits = 0) =>
  value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
const sized = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${grouped(bytes, bytes < 10 && unit ? 2 : bytes < 100 && unit ? 1 : 0)} ${units[unit]}`;
};
const timed = (seconds) => {
  if (seconds === null) return "–";
  if (seconds === Infinity) return "> 5 s";
  return seconds < 1e-3 ? `${grouped(seconds * 1e6)} µs` : seconds < 1 ? `${grouped(seconds * 1e3, 1)} ms` : `${grouped(seconds, 1)} s`;
};
const clock = (date) => date.toLocaleTimeString("en-GB");

function make(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A line over the last two minutes. */
function plot(name, value, label) {
  const values = plots.get(name) ?? [];
  plots.set(name, values);
  values.push(value);
  if (values.length > KEPT) values.shift();
  const high = Math.max(...values, Number.MIN_VALUE);
  const x = (i) => (100 * (KEPT - values.length + i)) / (KEPT - 1);
  const y = (v) => 98 - (94 * v) / high;
  const line = values.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(2)} ${y(v).toFixed(2)}`).join("");
  const svg = document.createElementNS(NS, "svg");
  for (const [n, v] of [["class", "plot"], ["viewBox", "0 0 100 100"], ["preserveAspectRatio", "none"],
    ["role", "img"], ["aria-label", label]]) svg.setAttribute(n, v);
  for (const [kind, d] of [["area", `${line}L100 98L${x(0).toFixed(2)} 98Z`], ["stroke", line]]) {
    const path = document.createElementNS(NS, "path");
    path.setAttribute("class", kind);
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

function tile(id, name, value, more, number) {
  at(id).replaceChildren(
    make("div", name, { class: "name" }), make("div", value, { class: "value" }),
    make("div", more, { class: "more" }), plot(id, number, `${name}, last two minutes; now ${value}`));
}

function terms(id, pairs) {
  at(id).replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

// ---- what is drawn

function drawTiles(metrics) {
  const tokens = perSecond("engram_tokens_pushed_total");
  tile("tile-tokens", "tokens a second", grouped(tokens, tokens < 10 ? 1 : 0),
    `${grouped(total(metrics, "engram_tokens_pushed_total"))} since start`, tokens);
  const requests = perSecond("engram_requests_total", (l) => !["metrics", "ready", "live", "health", "info"].includes(l.operation));
  tile("tile-requests", "requests a second", grouped(requests, requests < 10 ? 1 : 0),
    `${sized(total(metrics, "engram_in_flight_bytes"))} in flight`, requests);
  const sessions = total(metrics, "engram_sessions");
  const most = info ? ` of ${grouped(info.limits.max_sessions)}` : "";
  tile("tile-sessions", "sessions", grouped(sessions),
    `open${most}, ${grouped(total(metrics, "engram_held_tokens"))} ids held`, sessions);
  const found = grown(MINUTE, "engram_store_hits_total") + grown(MINUTE, "engram_store_duplicates_total");
  const asked = found + grown(MINUTE, "engram_store_misses_total");
  const share = asked ? (100 * found) / asked : 0;
  tile("tile-store", "kv found, last minute", asked ? `${grouped(share)} %` : "–",
    `${grouped(found)} of ${grouped(asked)} windows`, share);
}

/** In the order of a request; which of them exist depends on the device and on what is asked. */
const STAGES = ["receive", "check", "queue", "store", "hash_gather", "wkv", "h2d", "gate", "read_kv",
  "d2h", "hash_ids", "rows", "send"];

function drawStages(metrics) {
  const name = "engram_stage_seconds";
  const stages = (metrics.get(`${name}_count`) ?? []).map(({ labels }) => labels.stage)
    .sort((a, b) => STAGES.indexOf(a) - STAGES.indexOf(b));
  at("stages").tBodies[0].replaceChildren(...stages.map((stage) => {
    const is = (l) => l.stage === stage;
    const count = grown(1, `${name}_count`, is);
    const mean = count ? grown(1, `${name}_sum`, is) / count : 0;
    const row = make("tr");
    const drawn = make("td");
    drawn.append(plot(`stage ${stage}`, mean, `mean time of ${stage}, last two minutes; now ${timed(mean)}`));
    row.append(make("th", stage, { scope: "row" }), make("td", timed(quantile(0.5, name, stage))),
      make("td", timed(quantile(0.99, name, stage))), make("td", grouped(perSecond(`${name}_count`, is), 1)), drawn);
    return row;
  }));
}

function drawErrors(metrics) {
  const counts = new Map();
  for (const { labels, value } of metrics.get("engram_requests_total") ?? []) {
    if (labels.code !== "ok" && value) counts.set(labels.code, (counts.get(labels.code) ?? 0) + value);
  }
  const rows = [...counts].sort((a, b) => b[1] - a[1]).map(([code, count]) => {
    const is = (l) => l.code === code;
    if (samples.length > 1 && grown(1, "engram_requests_total", is)) lastSeen.set(code, lastAnswer);
    const seen = lastSeen.get(code);
    const row = make("tr");
    row.append(make("th", code, { scope: "row" }), make("td", grouped(grown(MINUTE, "engram_requests_total", is))),
      make("td", grouped(count)), make("td", seen ? clock(seen) : "before"));
    return row;
  });
  at("errors").tBodies[0].replaceChildren(...rows);
  at("errors").hidden = !rows.length;
  at("no-errors").hidden = rows.length > 0;
}

function drawStore(metrics) {
  const told = (label, name) => [label, grouped(total(metrics, name))];
  terms("store", [
    told("entries", "engram_store_entries"), told("hits", "engram_store_hits_total"),
    told("misses", "engram_store_misses_total"), told("duplicates", "engram_store_duplicates_total"),
    told("evictions", "engram_store_evictions_total"), told("worked ahead", "engram_ahead_tokens_total"),
    told("ahead, dropped", "engram_ahead_dropped_total"), told("rows gathered", "engram_rows_gathered_total"),
  ]);
}

function drawMemory() {
  const pools = new Map();
  for (const line of info.memory) pools.set(line.pool, [...(pools.get(line.pool) ?? []), line]);
  const names = [...new Set(info.memory.map((line) => line.name))];
  const colour = (name) => `var(--p${(names.indexOf(name) % 7) + 1})`;
  at("pools").replaceChildren(...[...pools].map(([pool, lines]) => {
    const sum = lines.reduce((all, line) => all + line.num_bytes, 0);
    const head = make("div", "", { class: "name" });
    head.append(make("span", pool), make("span", sized(sum)));
    const bar = make("div", "", { class: "bar", "aria-hidden": "true" });
    for (const line of lines) {
      const part = make("i");
      part.style.flex = `${line.num_bytes / sum} 0 0`;
      part.style.background = colour(line.name);
      bar.append(part);
    }
    const drawn = make("div", "", { class: "pool" });
    drawn.append(head, bar);
    return drawn;
  }));
  at("ledger").tBodies[0].replaceChildren(...info.memory.map((line) => {
    const row = make("tr"), name = make("th", "", { scope: "row" }), mark = make("span", "", { class: "key", "aria-hidden": "true" });
    mark.style.background = colour(line.name);
    name.append(mark, line.name);
    row.append(name, make("td", line.pool), make("td", sized(line.num_bytes)));
    return row;
  }));
}

function drawInfo() {
  const { geometry, table, versions, numerics } = info;
  at("identity").textContent = `${info.backend}, tables on ${info.placement}, table ${table.identity.slice(0, 16)}`;
  terms("geometry", [
    ["layers", geometry.layer_ids.join(", ")],
    ["table rows", geometry.table_rows.map((rows) => grouped(rows)).join(", ")],
    ["stored as", [...new Set(Object.values(table.encodings))].join(", ")],
    ["n-grams", `2 to ${geometry.max_ngram_size}, ${geometry.num_heads} heads, ${geometry.n_hash_cols} columns`],
    ["row, dim", `${geometry.head_dim}, ${grouped(geometry.dim)} x ${geometry.hc_mult} streams`],
    ...Object.entries(numerics), ...Object.entries(versions),
  ]);
  drawMemory();
}

// ---- the state, and the round

function show(state, text) {
  if (document.body.dataset.state !== state) document.body.dataset.state = state;
  if (at("state-text").textContent !== text) at("state-text").textContent = text;
}

/** Ask for what only keys of this service may read; show the form while it is refused. */
async function readInfo() {
  const answer = await ask("v1/info");
  if (answer.ok) info = await answer.json();
  const isRefused = answer.status === 401 || answer.status === 403;
  if (isRefused && key) at("key-refusal").textContent = (await answer.json()).detail;
  at("key-form").hidden = !isRefused;
  at("facts").hidden = isRefused;
  if (info) drawInfo();
  return !isRefused;
}

async function showUnready() {
  const answer = await ask("readyz");
  if (answer.ok) return;
  const { code, detail, done, total: all } = await answer.json();
  const share = all ? `, ${grouped((100 * done) / all)} %` : "";
  show(code === "loading" || code === "draining" ? code : "failed", detail + share);
}

async function round() {
  const answer = await ask("metrics");
  if (!answer.ok) throw new Error(`/metrics answers ${answer.status}`);
  const metrics = parseMetrics(await answer.text());
  lastAnswer = new Date();
  samples.push({ seconds: performance.now() / 1000, metrics });
  if (samples.length > KEPT) samples.shift();
  if (!total(metrics, "engram_ready")) {
    if (document.body.dataset.state === "ready") info = null;
    await showUnready();
  } else if (info || (await readInfo())) {
    show("ready", "ready");
  } else {
    show("locked", "ready; what it serves is told to keys of scope admin");
    return;
  }
  drawTiles(metrics);
  drawStages(metrics);
  drawErrors(metrics);
  drawStore(metrics);
  at("facts").hidden = !at("key-form").hidden || !info;
}

async function poll() {
  if (!isPaused && !document.hidden) {
    try {
      await round();
    } catch {
      info = null;  // another service may be the next to answer
      show("down", lastAnswer ? `no answer since ${clock(lastAnswer)}; asking again` : "no answer; asking again");
    }
  }
  setTimeout(poll, POLL_MS);
}

at("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  at("pause").setAttribute("aria-pressed", String(isPaused));
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  at("key-refusal").textContent = "";
  readInfo().catch(() => {});
});
poll();
