// The jobs and one job, read again every two seconds, and what their operators ask. What records say goes into the page as
// text, never as markup.
"use strict";

const PAUSE_MS = 2000;
const MOST_JOBS = 1000;

/** An element with classes, a text or children. */
function el(name, classes, ...children) {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
  return element;
}

/** A table of columns ({head, cell, classes}) over rows. */
function table(columns, rows) {
  const head = el("tr", "", ...columns.map((column) => el("th", column.classes, column.head)));
  const body = rows.map((row) => el("tr", "", ...columns.map((column) => el("td", column.classes, column.cell(row) ?? "–"))));
  return el("div", "wide", el("table", "", el("thead", "", head), el("tbody", "", ...body)));
}

const state = (word) => el("span", `state ${word}`, word);
const address = (at) => at && `${at.host.includes(":") ? `[${at.host}]` : at.host}:${at.port}`;
const time = (ms) => new Date(ms).toISOString().replace("T", " ").slice(0, 19);

function duration(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600) % 24} h`;
}

function leads(leader) {
  if (!leader) return null;
  return leader.coordinator ? `coordinator ${address(leader.peer)}` : leader.node.replace(/:[^:]*$/, "");
}

const TOKEN = "elastic-token";

/** Thrown where the coordinator wants a token, or another one. */
class TokenNeeded extends Error {}

/** Calls the API. The token goes into this header alone: what a browser sends by itself opens nothing. */
async function call(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { ...options, headers });
  const value = await answer.json();
  if (answer.status === 401) throw new TokenNeeded(token === null ? "" : value.error);
  if (!answer.ok) throw new Error(value.error);
  return value;
}

const read = (path) => call(path);

/** Asks something of a job, shows the result, and shows the job again. */
async function ask(job, what, body) {
  try {
    const { advice } = await call(`v1/jobs/${encodeURIComponent(job)}/${what}`, { method: "POST", body: JSON.stringify(body) });
    notice(advice ?? `Asked of ${job}: ${[what, ...Object.values(body)].join(" ")}`);
  } catch (error) {
    notice(error instanceof TypeError ? "The coordinator does not answer: nothing is known of what was asked." : error.message);
  }
  await turn(true);
}

function button(text, action, classes = "") {
  const element = el("button", classes, text);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

/** A field with its name. */
function field(name, kind, value, attributes = {}) {
  const input = document.createElement("input");
  Object.assign(input, { type: kind, value, ...attributes });
  return [el("label", "", `${name} `, input), input];
}

/** A form that the page itself handles when it is submitted. */
function form(action, ...children) {
  const element = el("form", "", ...children);
  element.addEventListener("submit", (event) => {
    event.preventDefault();
    action();
  });
  return element;
}

/** Asks for a token. Other tabs have their own, and closing this one forgets it. */
function askForToken(why) {
  const [label, input] = field("Token", "password", "", { autocomplete: "off", required: true });
  const submit = el("button", "", "Show jobs");
  return [form(() => {
    sessionStorage.setItem(TOKEN, input.value.trim());
    turn(true);
  }, el("p", "", "This coordinator shows jobs to its users alone."), why ? el("p", "failed", why) : null, label, submit)];
}

/** What an operator can ask of a job as a whole. */
function controls(id, job) {
  const [least, min] = field("Min nodes", "number", job.min_nodes ?? 1, { min: 1, required: true });
  const [most, max] = field("Max nodes", "number", job.max_nodes ?? 1, { min: 1, required: true });
  const close = () => {
    if (confirm(`Close job ${id}? Its workers are stopped, and its agents leave.`)) ask(id, "close", {});
  };
  const pause = () => {
    if (confirm(`Pause job ${id}? Its workers are stopped, and its agents wait until it is resumed.`)) ask(id, "pause", {});
  };
  const paused = job.desired?.paused;
  return el("div", "controls",
    form(() => ask(id, "set", { min: min.valueAsNumber, max: max.valueAsNumber }), least, most, el("button", "", "Set")),
    paused ? button("Resume job", () => ask(id, "resume", {})) : button("Pause job…", pause),
    button("Close job…", close, "danger"));
}

/** Whether a node gets no place until it is included: an operator's wish, or for its failures. */
function isExcluded(job, name) {
  const faults = job.round.faults?.find((faults) => faults.node === name);
  const back = job.desired?.include?.some((back) => back.node === name && back.round === faults?.excluded?.round);
  return job.desired?.exclude?.includes(name) || Boolean(faults?.excluded && !back);
}

/** What an operator can ask of a node that is here. */
function nodeControls(id, job, { id: node, record: { name } }) {
  const evict = () => {
    if (confirm(`Evict ${name}? Its workers are killed at once, and its agent ends.`)) ask(id, "evict", { node });
  };
  return el("div", "asks", drains(id, job.desired, name), excludes(id, job, name), button("Evict…", evict, "danger"));
}

/** Leaves a node out, or takes it back. */
function excludes(id, job, name) {
  const [text, what] = isExcluded(job, name) ? ["Include", "include"] : ["Exclude", "exclude"];
  return button(text, () => ask(id, what, { node: name }));
}

/** Drains a node, or lets it take part again. */
function drains(id, desired, name) {
  const drained = desired?.drain?.includes(name);
  return drained ? button("Undrain", () => ask(id, "undrain", { node: name })) : button("Drain", () => ask(id, "drain", { node: name }));
}

const percent = (part) => `${Math.round(part * 100)} %`;
const digits = (value) => value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);

/** One column of a job's progress, empty where its workers report none. */
function progressColumn(head, field, show) {
  return { head, cell: ({ progress }) => progress?.[field] === null || progress?.[field] === undefined ? null : show(progress[field], progress), classes: "number" };
}

const progressColumns = [
  progressColumn("Step", "step", (step, { total_steps: total }) => total ? `${step} / ${total}` : step),
  progressColumn("Loss", "loss", (loss) => loss.toFixed(4)),
  progressColumn("Steps/s", "steps_per_second", digits),
  progressColumn("Goodput", "goodput", percent),
];

/** A job's progress in a line, and a bar where its end is known. */
function progressOf(progress) {
  const { step, total_steps: total, epoch } = progress;
  const words = [total ? `step ${step} of ${total} (${percent(step / total)})` : `step ${step}`];
  if (epoch !== undefined) words.push(`epoch ${epoch}`);
  for (const { head, cell } of progressColumns.slice(1)) {
    const value = cell({ progress });
    if (value !== null) words.push(`${head.toLowerCase()} ${value}`);
  }
  const line = el("span", "", words.join(", "), el("span", "quiet", ` at ${time(progress.at_ms)} UTC`));
  if (!total) return line;
  const bar = document.createElement("progress");
  [bar.max, bar.value] = [total, step];
  return el("span", "", bar, line);
}

function nodesOf(job) {
  const here = job.state === "running" ? job.round.group_world_size : job.nodes;
  return job.state === "running" && job.spares > 0 ? `${here} (+${job.spares})` : here;
}

async function showJobs() {
  const { jobs, next } = await read(`v1/jobs?limit=${MOST_JOBS}`);
  if (jobs.length === 0) return [el("p", "quiet", "No jobs. A job appears here once its first agent has joined.")];
  const link = (job) => {
    const a = el("a", "", job.job);
    a.href = `#${encodeURIComponent(job.job)}`;
    return a;
  };
  const list = table([
    { head: "Job", cell: link, classes: "short" },
    { head: "State", cell: (job) => state(job.state), classes: "short" },
    { head: "Round", cell: (job) => job.round.number, classes: "number" },
    { head: "Nodes", cell: nodesOf, classes: "number" },
    { head: "Min–max", cell: (job) => job.min_nodes === null ? null : `${job.min_nodes}–${job.max_nodes}`, classes: "number" },
    { head: "Workers", cell: (job) => job.state === "running" ? job.round.world_size : null, classes: "number" },
    ...progressColumns,
    { head: "Restarts", cell: (job) => job.round.restarts, classes: "number" },
    { head: "Reason of the round", cell: (job) => job.round.reason },
  ], jobs);
  return next === null ? [list] : [list, el("p", "quiet", `The first ${MOST_JOBS} jobs. elasticctl jobs lists all.`)];
}

function facts(pairs) {
  const list = el("dl", "");
  for (const [name, value] of pairs) {
    if (value !== null && value !== undefined) list.append(el("dt", "", name), el("dd", "", value));
  }
  return list;
}

/** The last lines of what failed. */
function failure(cause) {
  const lines = cause.traceback ?? (cause.stderr ?? []).join("\n");
  const where = [cause.rank === undefined ? null : `rank ${cause.rank}`, cause.host && `on ${cause.host}`];
  return [
    el("h2", "", "What failed"),
    el("p", "", cause.message, el("span", "quiet", ` ${where.filter(Boolean).join(" ")}`)),
    lines ? el("pre", "", lines) : null,
  ];
}

/** The states in the history that is kept. A state's width is its duration. */
function timeline(events, ended) {
  const end = ended ? events.at(-1).at_ms : Date.now();
  const bar = el("div", "timeline");
  events.forEach((event, at) => {
    const length = Math.max(0, (events[at + 1]?.at_ms ?? end) - event.at_ms);
    const part = el("span", event.state);
    part.style.flexGrow = Math.max(length, 1);
    part.title = `round ${event.round}, ${event.state} for ${duration(length)}: ${event.reason}`;
    bar.append(part);
  });
  return [
    el("h2", "", "Rounds"),
    bar,
    el("div", "ends", el("span", "", `${time(events[0].at_ms)} UTC`), el("span", "", ended ? `${time(end)} UTC` : "now")),
  ];
}

function ranks(node) {
  if (!node.rank) return null;
  const { first_rank: first, slots } = node.rank;
  return slots > 1 ? `${first}–${first + slots - 1}` : first;
}

function nodes(id, job, operates) {
  const order = (node) => node.rank ? node.rank.group_rank : Infinity;
  const sorted = [...job.nodes].sort((a, b) => order(a) - order(b) || a.record.name.localeCompare(b.record.name));
  return table([
    { head: "Node", cell: (node) => node.record.name, classes: "short" },
    { head: "State", cell: (node) => state(node.record.phase), classes: "short" },
    { head: "Round", cell: (node) => node.record.round, classes: "number" },
    { head: "Group rank", cell: (node) => node.rank?.group_rank, classes: "number" },
    { head: "Ranks", cell: ranks, classes: "number" },
    { head: "Host", cell: (node) => node.record.host },
    { head: "Address", cell: (node) => address(node.record.peer), classes: "short" },
    { head: "Failure, or why it waits", cell: (node) => node.record.failure?.message ?? node.waits },
    ...operates ? [{ head: "Ask", cell: (node) => nodeControls(id, job, node), classes: "short" }] : [],
  ], sorted);
}

async function showJob(id) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  const [me, job, { events }] = await Promise.all([read("v1/me"), read(path), read(`${path}/events`)]);
  const { round, checkpoint, desired } = job;
  const ended = ["succeeded", "failed", "closed"].includes(job.state);
  const operates = me.role === "operate" && !ended;
  const isGone = (name) => !job.nodes.some((node) => node.record.name === name);
  const excluded = [...new Set([...(desired?.exclude ?? []), ...(round.faults ?? []).map((faults) => faults.node)])].filter((name) => isExcluded(job, name));
  const gone = [
    ["Drained", (desired?.drain ?? []).filter(isGone), (name) => drains(id, desired, name)],
    ["Excluded", excluded.filter(isGone), (name) => excludes(id, job, name)],
  ];
  const shown = [facts([
    ["State", state(job.state)],
    ["Reason", round.reason],
    ["Progress", job.progress && progressOf(job.progress)],
    ["Round", `${round.number} (generation ${round.generation})`],
    ["Workers", round.world_size || null],
    ["Nodes", job.min_nodes === null ? job.nodes.length : `${job.nodes.length} here, ${job.min_nodes} to ${job.max_nodes} wanted`],
    ["Restarts", job.spec ? `${round.restarts} of ${job.spec.max_restarts}` : round.restarts],
    ["Leader", leads(job.leader)],
    ["Checkpoint", checkpoint && `step ${checkpoint.step} of round ${checkpoint.round}, at ${checkpoint.path}`],
    ["Drained", desired?.drain?.length ? desired.drain.join(", ") : null],
    ["Excluded", excluded.length ? excluded.join(", ") : null],
    ["Closing", desired?.closed && !ended ? "asked for" : null],
    ["Asked last", desired?.asked && `by ${desired.asked.by.name} at ${time(desired.asked.at_ms)} UTC`],
    ["You", me.name && `${me.name}, who may ${me.role}`],
  ])];
  if (operates) shown.push(controls(id, job));
  for (const [what, names, control] of gone) {
    if (operates && names.length > 0) shown.push(el("p", "", `${what} and gone: `, ...names.flatMap((name) => [`${name} `, control(name), " "])));
  }
  const cause = round.cause ?? job.nodes.map((node) => node.record.failure).find(Boolean);
  if (cause) shown.push(...failure(cause));
  if (events.length > 0) shown.push(...timeline(events, ended));
  if (job.nodes.length > 0) shown.push(el("h2", "", "Nodes"), nodes(id, job, operates));
  if (job.evicted.length > 0) {
    shown.push(el("h2", "", "Evicted in this generation"), table([
      { head: "Node", cell: (gone) => gone.node.replace(/:[^:]*$/, ""), classes: "short" },
      { head: "From round", cell: (gone) => gone.record.round, classes: "number" },
      { head: "Reason", cell: (gone) => gone.record.reason },
    ], job.evicted));
  }
  shown.push(el("h2", "", "History"), table([
    { head: "Time (UTC)", cell: (event) => time(event.at_ms), classes: "short" },
    { head: "Round", cell: (event) => event.round, classes: "number" },
    { head: "State", cell: (event) => state(event.state), classes: "short" },
    { head: "Asked by", cell: (event) => event.asked_by?.name, classes: "short" },
    { head: "Reason", cell: (event) => event.reason },
  ], [...events].reverse()));
  return shown;
}

/** Says that something is wrong, or takes that back. */
function trouble(text) {
  const line = document.getElementById("trouble");
  line.hidden = text === null;
  line.textContent = text ?? "";
}

/** Shows the result of a request. */
function notice(text) {
  document.getElementById("notice").textContent = text;
}

let shown = 0;

/** Shows what the address asks for. What is there stays while the coordinator does not answer. */
async function show() {
  const turn = ++shown;
  try {
    const id = decodeURIComponent(location.hash.slice(1));
    const [ready, content] = await Promise.all([fetch("ready"), id === "" ? showJobs() : showJob(id)]);
    const stale = ready.ok ? null : `This may be old: ${(await ready.text()).trim()}`;
    // Another page was asked for meanwhile.
    if (turn !== shown) return;
    document.getElementById("where").textContent = id;
    document.title = id === "" ? "elastic jobs" : `${id} – elastic jobs`;
    document.getElementById("main").replaceChildren(...content.filter((part) => part !== null));
    trouble(stale);
  } catch (error) {
    if (turn !== shown) return;
    if (error instanceof TokenNeeded) {
      document.getElementById("main").replaceChildren(...askForToken(error.message));
      return trouble(null);
    }
    trouble(error instanceof TypeError ? "The coordinator does not answer. Trying again." : error.message);
  }
}

let timer;

/** Shows everything, and again after a pause; nothing while somebody fills in a field, unless that is done. */
async function turn(done = false) {
  clearTimeout(timer);
  const typing = !done && document.activeElement?.tagName === "INPUT";
  if (!document.hidden && !typing) await show();
  clearTimeout(timer);
  timer = setTimeout(turn, PAUSE_MS);
}

addEventListener("hashchange", () => {
  notice("");
  turn(true);
});
document.addEventListener("visibilitychange", () => turn());
turn();
