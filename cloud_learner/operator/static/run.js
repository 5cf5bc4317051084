// How the training run goes: a small chart for each figure of the trainer, and success by task with its intervals.

import { element, minutes, percent, setText, words } from "./dom.js";
import { svg } from "./chart.js";

const PERIOD_MS = 3000;
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [300, 110, 46, 16, 6];
const COLOURS = 8; // --task-0 ... --task-7 in style.css
const SHARES = "drawn/";
/** What people look at first; the rest follows by name. */
const FIRST = [
  ["loss", "Loss"],
  ["algorithm/gradient_norm", "Gradient norm"],
  ["throughput/gradient_steps_per_second", "Gradient steps a second"],
  ["fleet/versions_behind", "Versions that a robot is behind, at most"],
  ["time/share_waiting_for_batches", "Share of time waiting for batches"],
  ["time/seconds_to_publish", "Seconds to publish a version"],
];

/** Wilson's 95 % interval of a rate over so many episodes. */
export function wilson(rate, episodes) {
  if (!episodes) return [0, 1];
  const z = 1.96;
  const middle = rate + (z * z) / (2 * episodes);
  const half = z * Math.sqrt((rate * (1 - rate)) / episodes + (z * z) / (4 * episodes * episodes));
  const scale = 1 + (z * z) / episodes;
  return [Math.max(0, (middle - half) / scale), Math.min(1, (middle + half) / scale)];
}

/** Of a task's [rate, episodes] in time: the best one, if its 95 % interval is above that of the last one; else null. */
export function lostFrom(points) {
  const best = points.reduce((most, point) => (point[0] > most[0] ? point : most));
  return wilson(...points.at(-1))[1] < wilson(...best)[0] ? best[0] : null;
}

/** 0.00123 -> "0.00123", 12345 -> "12345". */
function short(value) {
  if (value == null) return "–";
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(3)));
}

export class RunView {
  constructor(panel, button, charts, note) {
    [this.panel, this.button, this.charts, this.note] = [panel, button, charts, note];
    this.curve = [];
    this.timer = null;
    button.addEventListener("click", () => this.toggle());
  }

  /** Held-out success, as it comes with the fleet's state. */
  measured(curve) {
    this.curve = curve;
  }

  toggle() {
    const opens = this.panel.hidden;
    this.panel.hidden = !opens;
    this.button.setAttribute("aria-expanded", String(opens));
    setText(this.button, opens ? "Hide the run" : "Show the run");
    clearInterval(this.timer);
    if (!opens) return;
    this.timer = setInterval(() => this.load(), PERIOD_MS);
    this.load().then(() => this.panel.scrollIntoView({ behavior: "smooth", block: "start" }));
  }

  async load() {
    try {
      const answer = await fetch("/api/run");
      if (!answer.ok) throw new Error(`the gateway answered ${answer.status}`);
      this.draw(await answer.json());
    } catch (error) {
      setText(this.note, `not up to date: ${error.message}`);
    }
  }

  draw({ t_s, gradient_steps, curves }) {
    const steps = gradient_steps.at(-1);
    setText(this.note, steps == null ? "No trainer has reported yet." : `${short(steps)} gradient steps`);
    const line = (name, values, colour) => ({ name, colour, points: t_s.map((t, i) => [t, values[i]]) });
    const plain = (name, title) => figure(title, [line(title, curves[name], "var(--mean)")], short);
    const first = FIRST.filter(([name]) => curves[name]);
    const shares = Object.keys(curves).filter((name) => name.startsWith(SHARES)).sort();
    const known = new Set([...FIRST.map(([name]) => name), ...shares]);
    const rest = Object.keys(curves).filter((name) => !known.has(name)).sort();
    const colour = (i) => `var(--task-${i % COLOURS})`;
    this.charts.replaceChildren(
      ...(this.curve.length ? [this.success(colour)] : []),
      ...first.map(([name, title]) => plain(name, title)),
      ...(shares.length ? [figure(
        "Shares drawn",
        shares.map((name, i) => line(words(name.slice(SHARES.length)), curves[name], colour(i))),
        percent, [0, 1],
      )] : []),
      ...rest.map((name) => plain(name, words(name.split("/").at(-1).replaceAll("_", " ")))),
    );
  }

  success(colour) {
    const tasks = [...new Set(this.curve.flatMap((point) => Object.keys(point.tasks)))].sort();
    return figure("Held-out success, 95 % intervals", tasks.map((task, i) => {
      const there = this.curve.filter((point) => task in point.tasks);
      const was = lostFrom(there.map((point) => [point.tasks[task], point.episodes]));
      return {
        name: was == null ? words(task) : `${words(task)}, was ${percent(was)}, now`,
        colour: colour(i),
        points: there.map((point) => [point.t_s, point.tasks[task]]),
        band: there.map((point) => [point.t_s, ...wilson(point.tasks[task], point.episodes)]),
      };
    }), percent, [0, 1]);
  }
}

/** One chart: `lines` of {name, colour, points: [[t_s, value or null]], band?: [[t_s, low, high]]}. */
function figure(title, lines, format, range = null) {
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value != null);
  const times = lines.flatMap(({ points }) => points.map(([t]) => t));
  let [low, high] = range ?? [Math.min(...values), Math.max(...values)];
  if (!range && values.length && low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const end = Math.max(1, ...times);
  const x = (t) => (LEFT + (t / end) * (WIDTH - LEFT - 4)).toFixed(1);
  const y = (value) => (HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP)).toFixed(1);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const text = (at, height, said, anchor) => {
    const node = svg("text", { x: at, y: height, "text-anchor": anchor });
    node.textContent = said;
    drawing.append(node);
  };
  if (values.length) {
    for (const level of [low, high]) {
      drawing.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - 4, y1: y(level), y2: y(level) }));
      text(LEFT - 5, Number(y(level)) + 4, format(level), "end");
    }
    text(LEFT, HEIGHT - 3, "0:00", "start");
    text(WIDTH - 4, HEIGHT - 3, minutes(end), "end");
  }
  for (const { colour, points, band = [] } of lines) {
    if (band.length > 1) {
      const there = band.map(([t, , top]) => `${x(t)} ${y(top)}`);
      const back = band.toReversed().map(([t, bottom]) => `${x(t)} ${y(bottom)}`);
      const area = svg("path", { class: "band", d: `M${[...there, ...back].join("L")}Z` });
      area.style.fill = colour;
      drawing.append(area);
    }
    let path = "";
    let pen = "M"; // a gap where nothing was said
    for (const [t, value] of points) {
      if (value == null) pen = "M";
      else [path, pen] = [`${path}${pen}${x(t)} ${y(value)}`, "L"];
    }
    const node = svg("path", { class: "line", d: path });
    node.style.stroke = colour;
    drawing.append(node);
  }
  const last = ({ points }) => points.findLast(([, value]) => value != null)?.[1];
  drawing.setAttribute("aria-label", `${title}: ${lines.map((one) => `${one.name} ${format(last(one))}`).join(", ")}`);
  const legend = lines.length > 1 && element("ul", { class: "legend" }, ...lines.map((one) => {
    const swatch = element("i", { class: "swatch", "aria-hidden": "true" });
    swatch.style.setProperty("--colour", one.colour);
    return element("li", {}, swatch, `${one.name} `, element("b", {}, format(last(one))));
  }));
  const head = element("h3", {}, title, ...(lines.length === 1 ? [element("span", {}, format(last(lines[0])))] : []));
  return element("div", { class: "figure" }, head, drawing, ...(legend ? [legend] : []));
}
