// Follows a run: every message is a whole picture of it, so that nothing is lost by a gap.
"use strict";

const find = (id) => document.getElementById(id);
const LOOKS = {
  computing: "computing", waiting: "waiting", lost: "lost", done: "computing",
  "in its link": "link",
};
const KINDS = new Set(["lost"]);
const QUIET = 5000; // milliseconds without news that are worth a word

let picture = null;
let heard = 0;
let connected = false;
let told = -1; // number of the last event that was read aloud
let planned = false;

const put = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
const whole = (value) => value.toLocaleString("en-GB");
const figure = (value) => (value === null ? "–" : Chart.number(value));
const percent = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const say = (text) => put(find("spoken"), text);

// ------------------------------------------------------------ the connection

const connect = () => {
  const source = new EventSource("events");
  source.onmessage = (message) => {
    picture = JSON.parse(message.data);
    heard = performance.now();
    if (!connected) say(connected === null ? "Connected again." : "");
    connected = true;
    if (picture.over) source.close();
    aloud();
    plan();
  };
  source.onerror = () => {
    if (picture && picture.over) return;
    if (connected) say("The connection to the run is lost; trying again.");
    connected = null;
    plan();
    // A stream that the browser gives up on is opened anew.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
};

const status = () => {
  const badge = find("status");
  const [words, kind] =
    picture && picture.over ? [picture.over, "over"]
    : connected === null ? ["connection lost, trying again", "gone"]
    : picture ? ["running", "live"]
    : ["connecting", "quiet"];
  put(badge, words);
  badge.className = `badge ${kind}`;
  const silent = performance.now() - heard;
  const late = picture && !picture.over && (connected === null || silent > QUIET);
  put(find("news"), late ? `no news for ${Math.round(silent / 1000)} s` : "");
};

// ------------------------------------------------------------ the picture

// At most one drawing for each frame, and none where nobody looks.
const plan = () => {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    draw();
  });
};

const draw = () => {
  status();
  if (!picture) return;
  const p = picture;
  const unit = p.virtual ? "virtual s" : "s";
  document.title = `${p.over || percent(p.done)} · ${p.title || "run"} · offbeat`;
  put(find("title"), p.title || "run");
  find("done").value = p.done;
  put(find("done-words"), `${percent(p.done)} of ${whole(p.samples)} samples, ` +
    `${whole(p.epochs)} ${p.epochs === 1 ? "epoch" : "epochs"} done`);
  put(find("rate-name"), `samples/${unit}`);
  put(find("rate-caption"), `Samples/${unit}`);
  put(find("rate"), figure(p.rate));
  put(find("loss"), figure(p.loss));
  put(find("accuracy"), percent(p.accuracy));
  put(find("staleness"), figure(p.staleness));
  put(find("version"), whole(p.version));
  put(find("time"), `${figure(p.time)} ${unit}`);
  for (const [name, count] of Object.entries(p.counts)) {
    const node = find(name);
    if (node) put(node, whole(count));
  }
  const states = Object.entries(p.states).map(([state, count]) => `${whole(count)} ${state}`);
  const shown = p.rows.length < p.workers ? `; ${whole(p.rows.length)} are shown` : "";
  put(find("states"), `${whole(p.workers)} in all: ${states.join(", ")}${shown}`);
  rows(p.rows, p.linked);
  events(p.events);
  charts(p);
};

const cell = (row, kind, name) => {
  const node = document.createElement(kind);
  if (name) node.className = name;
  row.append(node);
  return node;
};

const rows = (list, linked) => {
  const body = find("rows");
  find("link-name").hidden = !linked;
  while (body.rows.length > list.length) body.deleteRow(-1);
  while (body.rows.length < list.length) {
    const row = body.insertRow();
    cell(row, "th").scope = "row";
    const state = cell(row, "td");
    cell(state, "span", "state");
    state.append(" ");
    cell(state, "span", "about");
    for (let i = 0; i < 4; i++) cell(row, "td", "number");
  }
  list.forEach((worker, index) => {
    const row = body.rows[index];
    const [name, state, clock, staleness, sent, link] = row.cells;
    const look = LOOKS[worker.state] || "quiet";
    row.className = look;
    row.dataset.worker = worker.number;
    put(name, String(worker.number));
    state.firstChild.className = `state ${look}`;
    put(state.firstChild, worker.state);
    put(state.lastChild, worker.about);
    put(clock, whole(worker.clock));
    put(staleness, whole(worker.staleness));
    put(sent, whole(worker.contributions));
    put(link, worker.link);
    link.hidden = !linked;
  });
};

const events = (list) => {
  const box = find("events");
  box.hidden = !list.length;
  find("no-events").hidden = Boolean(list.length);
  const newest = list.length ? list[list.length - 1].number : 0;
  if (box.dataset.newest === String(newest) && box.childElementCount === list.length) return;
  box.dataset.newest = newest;
  box.replaceChildren(...list.toReversed().map((event) => {
    const item = document.createElement("li");
    if (KINDS.has(event.kind)) item.className = event.kind;
    put(cell(item, "span", "when"), `${Chart.number(event.time)} s`);
    put(cell(item, "span", "what"), event.text);
    return item;
  }));
  box.tabIndex = box.scrollHeight > box.clientHeight ? 0 : -1;
};

const charts = (p) => {
  const { loss, test_loss: test, accuracy, rate } = p.curves;
  const time = p.time;
  Chart.lines(find("loss-chart"), "Loss", [loss, test], { time, names: ["training", "test"] });
  Chart.lines(find("accuracy-chart"), "Test accuracy", [accuracy], { time });
  Chart.lines(find("rate-chart"), "Samples/s", [rate], { time, low: 0 });
  Chart.bars(find("staleness-chart"), "Staleness of recent contributions", p.bars);
};

// What has happened since the last picture, for those who listen; the first is told in short.
const aloud = () => {
  const newest = picture.events.filter((event) => event.number > told);
  const first = told < 0;
  told = picture.events.length ? picture.events[picture.events.length - 1].number : 0;
  if (picture.over) say(`The run is ${picture.over}.`);
  else if (!first && newest.length) say(newest.map((event) => event.text).join(". "));
};

document.addEventListener("visibilitychange", plan);
window.addEventListener("resize", plan);
setInterval(status, 1000);
connect();
