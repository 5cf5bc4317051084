// The operator page: one websocket in, cards, curve and events out, commands back.

import { Card } from "./card.js";
import { Chart } from "./chart.js";
import { RunView } from "./run.js";
import { GatewayClock } from "./clock.js";
import { byId, count, duration, element, minutes, percent, setText } from "./dom.js";
import { SEND_PERIOD_MS } from "./drive.js";
import { Versions } from "./versions.js";

const SILENT_AFTER_MS = 3000; // the server speaks five times a second
const MAX_WAITING_BYTES = 2048;
const state = { curve: [], events: [] };
const cards = new Map();
const clock = new GatewayClock();
const run = new RunView(byId("run"), byId("run-button"), byId("run-charts"), byId("run-note"));
const chart = new Chart(byId("chart"), byId("legend"));
const versions = new Versions(byId("versions"), byId("no-versions"), byId("freeze"), send);
let socket = null;
let heard_ms = 0;
let retry_ms = 250;
let sequence = 0; // of what was sent
let active = null; // the card the keyboard drives

// --- the link ------------------------------------------------------------------------------------------------------

function connect() {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  socket = new WebSocket(`${scheme}://${location.host}/ws`);
  socket.binaryType = "arraybuffer";
  heard_ms = performance.now();
  clock.forget();
  socket.onmessage = ({ data }) => {
    heard_ms = performance.now();
    if (data instanceof ArrayBuffer) showPicture(data);
    else receive(JSON.parse(data));
  };
  socket.onclose = () => {
    showLink("lost");
    for (const card of cards.values()) if (card.robot) card.letGo("free");
    active = null;
    setTimeout(connect, retry_ms);
    retry_ms = Math.min(2 * retry_ms, 3000);
  };
}

function send(message) {
  if (socket?.readyState !== WebSocket.OPEN) {
    if (message.type !== "command") toast("error", "Not sent: there is no connection to the gateway.");
    return;
  }
  // Commands that wait in a slow line would move the robot later than the person meant.
  if (message.type === "command" && socket.bufferedAmount > MAX_WAITING_BYTES) return;
  // The robot refuses what was made too long ago, or has been there before.
  socket.send(JSON.stringify({ ...message, sequence: ++sequence, captured_ms: clock.at(performance.now()) }));
}

function showLink(link) {
  const badge = byId("link");
  badge.dataset.state = link;
  setText(badge, link === "live" ? "live" : link === "lost" ? "connection lost" : "connecting");
  byId("lost").hidden = link !== "lost";
  document.body.classList.toggle("offline", link === "lost");
}

function receive(message) {
  if (message.type === "not_held") return; // a command that crossed with a hand-back; the next snapshot shows it
  if (message.type !== "fleet") {
    for (const robot of message.robots ?? []) cards.get(robot)?.letGo("dropped");
    toast(message.type, message.text);
    return;
  }
  clock.measure(message.gateway_ms, heard_ms);
  retry_ms = 250;
  showLink("live");
  Object.assign(state, message); // curve and events come only when they changed
  draw();
}

async function showPicture(buffer) {
  const bytes = new Uint8Array(buffer);
  const text = new TextDecoder();
  const robotEnd = 1 + bytes[0];
  const cameraEnd = robotEnd + 1 + bytes[robotEnd];
  const card = cards.get(text.decode(bytes.subarray(1, robotEnd)));
  if (!card || document.hidden) return;
  const blob = new Blob([bytes.subarray(cameraEnd)], { type: "image/jpeg" });
  try {
    card.show(text.decode(bytes.subarray(robotEnd + 1, cameraEnd)), await createImageBitmap(blob));
  } catch (error) {
    console.warn(`a picture of ${card.name} cannot be shown`, error);
  }
}

// --- what is shown -------------------------------------------------------------------------------------------------

function draw() {
  const { robots, trainer, version, totals, curve, t_s } = state;
  const last = curve.at(-1);
  setText(byId("total-success"), percent(last?.mean));
  setText(byId("total-version"), version ? String(version.number) : "–");
  setText(byId("total-gradient"), count(trainer?.gradient_steps ?? version?.gradient_steps));
  setText(byId("total-stored"), count(totals.steps_stored));
  setText(byId("total-ingest"), duration(totals.ingest_p50_s));
  setText(byId("total-applied"), duration(totals.applied_p50_s));
  drawStorage(state.storage);
  drawTrainer(trainer);
  chart.update(curve, t_s);
  run.measured(curve);
  chart.showMeasured(byId("measured"), state.measured, state.unaided);
  drawRobots(robots);
  versions.update(state.versions ?? [], robots.map((robot) => robot.name));
  drawJobs(state.jobs ?? []);
  drawEvents();
}

function drawStorage({ fault, away_s }) {
  byId("storage").hidden = !fault;
  const since = `Nothing is stored for ${Math.round(away_s ?? 0)} s; robots keep what they record.`;
  if (fault) setText(byId("storage"), `${since} ${fault}`);
}

function drawTrainer(trainer) {
  const phase = byId("trainer-phase");
  const silent = trainer && trainer.age_s > 10;
  phase.dataset.mode = !trainer || silent || trainer.phase === "waiting" ? "hold" : "policy";
  setText(phase, !trainer ? "no trainer" : silent ? `no word for ${Math.round(trainer.age_s)} s` : trainer.phase);
  setText(byId("trainer-loss"), trainer?.loss == null ? "–" : trainer.loss.toPrecision(3));
  setText(byId("trainer-speed"), trainer?.steps_per_s == null ? "–" : `${trainer.steps_per_s.toFixed(1)} steps/s`);
  const stale = trainer?.stale_steps ? `, ${Math.round((100 * trainer.stale_steps) / trainer.rollout_steps)}% of rollouts stale` : "";
  setText(byId("trainer-imitated"), count(trainer?.imitated_steps) + stale);
  const echo = trainer?.echo > 1 ? `, echo ${trainer.echo.toPrecision(2)}` : "";
  setText(byId("trainer-cached"), count(trainer?.cached_segments) + echo);
  const refusal = byId("trainer-refusal");
  const all = trainer?.refused > 1 ? ` (${count(trainer.refused)} versions so far)` : "";
  setText(refusal, trainer?.refusal ? `Not published${all}: ${trainer.refusal}` : "");
  refusal.hidden = !refusal.textContent;
}

function drawRobots(robots) {
  const grid = byId("robots");
  for (const robot of robots) {
    let card = cards.get(robot.name);
    if (!card) {
      card = new Card(robot.name, send, (chosen) => { active = chosen; markActive(); });
      cards.set(robot.name, card);
      const after = [...grid.children].find((node) => node.dataset.robot > robot.name);
      grid.insertBefore(card.node, after ?? null);
    }
    const control = state.control[robot.name] ?? "free";
    if (control === "you" && card.control !== "you") active = card;
    card.update(robot, control);
  }
  if (active?.control !== "you") active = [...cards.values()].find((card) => card.control === "you") ?? null;
  markActive();
  byId("no-robots").hidden = robots.length > 0;
  const connected = robots.filter((robot) => robot.link === "ok").length;
  setText(byId("fleet-count"), robots.length ? `${connected} of ${robots.length} connected` : "");
}

function markActive() {
  for (const card of cards.values()) card.node.classList.toggle("active", card === active);
}

let drawnJobs = "";
function drawJobs(jobs) {
  const key = JSON.stringify(jobs);
  if (drawnJobs === key) return;
  drawnJobs = key;
  byId("jobs").replaceChildren(...jobs.toReversed().map((job) => {
    const done = job.wanted ? `${count(job.episodes)} of ${count(job.wanted)}` : count(job.episodes);
    const success = job.judged ? ` · ${percent(job.successes / job.judged)}` : "";
    const robots = job.robots.length ? ` · ${job.robots.length === 1 ? job.robots[0] : `${job.robots.length} robots`}` : "";
    return element(
      "li", { class: "job", "data-phase": job.phase, title: job.tasks.join(", ") },
      element("span", { class: "job-head" },
        element("b", {}, job.id), ` ${job.kind}${job.version ? ` of version ${job.version}` : ""}`,
        element("span", { class: "phase" }, job.phase)),
      element("span", { class: "muted" }, `${done} episodes${success}${robots}`),
      ...(job.note ? [element("span", { class: "muted" }, job.note)] : []),
    );
  }));
}

let drawnEvents = -1;
function drawEvents() {
  if (drawnEvents === state.events_revision) return;
  drawnEvents = state.events_revision;
  byId("events").replaceChildren(...state.events.toReversed().map(({ t_s, kind, robot, text }) => element(
    "li", { class: "event", "data-kind": kind },
    element("time", {}, minutes(t_s)),
    element("span", {}, ...(robot ? [element("b", {}, robot), " "] : []), text),
  )));
}

function toast(kind, text) {
  const box = byId("toasts");
  if ([...box.children].some((node) => node.textContent === text)) return;
  const node = element("p", { class: "toast", "data-kind": kind }, text);
  box.append(node);
  while (box.children.length > 3) box.firstChild.remove();
  setTimeout(() => node.remove(), 7000);
}

// --- driving -------------------------------------------------------------------------------------------------------

function usesKeys(target, code) {
  if (!(target instanceof Element)) return false;
  if (target.closest("input, select, textarea")) return true;
  return code === "Space" && target.closest("button, a") !== null; // Space presses the focused button
}

function onKey(event) {
  const down = event.type === "keydown";
  if (down && (event.ctrlKey || event.metaKey || event.altKey || usesKeys(event.target, event.code))) return;
  if (!active) return;
  if (down && event.repeat && event.code === "Space") event.preventDefault();
  else if (active.key(event.code, down) && !usesKeys(event.target, event.code)) event.preventDefault();
}

function holdAll() {
  for (const card of cards.values()) if (card.control === "you") card.hold();
}

addEventListener("keydown", onKey);
addEventListener("keyup", (event) => {
  if (event.key === "Meta") holdAll(); // some systems swallow the keyup of keys held together with it
  onKey(event);
});
addEventListener("blur", holdAll);
document.addEventListener("visibilitychange", holdAll);
addEventListener("pagehide", () => socket?.close());

// Repeated even when nothing changes: the gateway notices a lost page within a few of these.
setInterval(() => {
  for (const card of cards.values()) if (card.control === "you") card.command();
}, SEND_PERIOD_MS);

setInterval(() => {
  if (socket?.readyState === WebSocket.OPEN && performance.now() - heard_ms > SILENT_AFTER_MS) socket.close();
}, 500);

byId("stop-all").addEventListener("click", () => {
  for (const robot of cards.keys()) send({ type: "estop", robot });
});

const speed = byId("speed");
speed.addEventListener("input", () => setText(byId("speed-value"), `${speed.value}%`));
speed.addEventListener("change", () => active?.node.focus({ preventScroll: true })); // keys drive again

connect();
