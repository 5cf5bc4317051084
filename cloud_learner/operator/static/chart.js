// The success curve: mean as a bold line, each task as a thin one, over minutes of the run.

import { element, minutes, percent, setText, words } from "./dom.js";

const COLOURS = 8; // --task-0 ... --task-7 in style.css
const MARGIN = { top: 12, right: 16, bottom: 26, left: 44 };
const TIME_STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

export function svg(tag, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

export class Chart {
  constructor(box, legend) {
    this.box = box;
    this.legend = legend;
    this.points = [];
    this.now_s = 0;
    this.drawnUntil_s = -1;
    this.svg = svg("svg", { role: "img" });
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    this.empty = element("p", { class: "empty" }, "The curve starts with the first evaluation.");
    box.append(this.svg, this.empty, this.tooltip);
    new ResizeObserver(() => this.draw()).observe(box);
    box.addEventListener("pointermove", (event) => this.hover(event));
    box.addEventListener("pointerdown", (event) => this.hover(event));
    box.addEventListener("pointerleave", () => this.unhover());
  }

  /** New points, or only a later "now" for the time axis. */
  update(points, now_s) {
    const changed = points !== this.points;
    this.points = points;
    this.now_s = now_s;
    // The axis grows a little at a time: the curve does not need a new drawing five times a second.
    if (changed || now_s - this.drawnUntil_s > Math.max(1, now_s / 200)) this.draw();
    if (changed) this.drawLegend();
  }

  tasks() {
    return [...new Set(this.points.flatMap((point) => Object.keys(point.tasks)))].sort();
  }

  colour(index) {
    return `var(--task-${index % COLOURS})`;
  }

  drawLegend() {
    const last = this.points.at(-1);
    if (!last) return;
    const entry = (name, value, colour, mean = false) => {
      const swatch = element("i", { class: mean ? "swatch mean" : "swatch", "aria-hidden": "true" });
      swatch.style.setProperty("--colour", colour);
      return element("li", {}, swatch, `${name} `, element("b", {}, percent(value)));
    };
    this.legend.replaceChildren(
      entry("mean", last.mean, "var(--mean)", true),
      ...this.tasks().map((task, i) => entry(words(task), last.tasks[task], this.colour(i))),
    );
  }

  draw() {
    const { width, height } = this.box.getBoundingClientRect();
    this.empty.hidden = this.points.length > 0;
    if (width < 50 || height < 50) return;
    this.drawnUntil_s = this.now_s;
    const end_s = Math.max(30, this.now_s, ...this.points.map((point) => point.t_s));
    this.x = (t_s) => MARGIN.left + (t_s / end_s) * (width - MARGIN.left - MARGIN.right);
    this.y = (rate) => height - MARGIN.bottom - rate * (height - MARGIN.top - MARGIN.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    this.drawAxes(width, end_s);
    const tasks = this.tasks();
    for (const [i, task] of tasks.entries()) {
      const points = this.points.filter((point) => task in point.tasks);
      this.line("line", this.colour(i), points, (point) => point.tasks[task]);
    }
    this.line("line mean", "var(--mean)", this.points, (point) => point.mean);
    const last = this.points.at(-1);
    if (last) {
      this.svg.append(svg("circle", { class: "last", cx: this.x(last.t_s), cy: this.y(last.mean), r: 4.5 }));
    }
    this.cursor = svg("line", { class: "cursor", y1: this.y(1), y2: this.y(0), visibility: "hidden" });
    this.svg.append(this.cursor);
    this.svg.setAttribute("aria-label", last
      ? `Mean held-out success is ${percent(last.mean)} with version ${last.version} at ${minutes(last.t_s)}.`
      : "No evaluation yet.");
  }

  drawAxes(width, end_s) {
    for (const rate of [0, 0.25, 0.5, 0.75, 1]) {
      const y = this.y(rate);
      this.svg.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y }));
      this.label(MARGIN.left - 8, y + 4, percent(rate), "end");
    }
    const wanted = Math.max(2, Math.floor(width / 110));
    const step_s = TIME_STEPS_S.find((step) => end_s / step <= wanted) ?? TIME_STEPS_S.at(-1);
    for (let t_s = 0; t_s <= end_s; t_s += step_s) {
      this.label(this.x(t_s), this.y(0) + 18, minutes(t_s), "middle");
    }
  }

  label(x, y, text, anchor) {
    const node = svg("text", { x, y, "text-anchor": anchor });
    node.textContent = text;
    this.svg.append(node);
  }

  line(kind, colour, points, value) {
    if (!points.length) return;
    const path = points.map((p, i) => `${i ? "L" : "M"}${this.x(p.t_s).toFixed(1)} ${this.y(value(p)).toFixed(1)}`);
    const node = svg("path", { class: kind, d: path.join("") });
    node.style.stroke = colour;
    this.svg.append(node);
  }

  hover(event) {
    if (!this.points.length || !this.x) return;
    const box = this.box.getBoundingClientRect();
    const x = event.clientX - box.left;
    const distance = (point) => Math.abs(this.x(point.t_s) - x);
    const near = this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
    const at = this.x(near.t_s);
    this.cursor.setAttribute("x1", at);
    this.cursor.setAttribute("x2", at);
    this.cursor.setAttribute("visibility", "visible");
    const row = (name, value, colour) => {
      const swatch = element("i", { class: "swatch" });
      swatch.style.setProperty("--colour", colour);
      return element("li", {}, swatch, element("span", {}, name), element("b", {}, percent(value)));
    };
    const rows = this.tasks().map((task, i) => [words(task), near.tasks[task], this.colour(i)]);
    this.tooltip.replaceChildren(
      element("strong", {}, `version ${near.version}`),
      element("span", { class: "muted" }, ` at ${minutes(near.t_s)}`),
      element("ul", {}, row("mean", near.mean, "var(--mean)"), ...rows.map((r) => row(...r))),
    );
    this.tooltip.hidden = false;
    const wide = this.tooltip.offsetWidth;
    const left = at + 14 + wide < box.width ? at + 14 : at - 14 - wide;
    this.tooltip.style.left = `${Math.max(0, left)}px`;
  }

  unhover() {
    this.tooltip.hidden = true;
    this.cursor?.setAttribute("visibility", "hidden");
  }

  /** "before 12% → after 91%", measured on other seeds than the curve, and how robots do with nobody's help. */
  showMeasured(node, measured, unaided) {
    const parts = ["before", "after"].filter((label) => measured[label]);
    const trained = parts.map((label) => `${label} training ${percent(measured[label].mean)}`).join(" → ");
    const { canary } = measured;
    const tried = canary ? `version ${canary.version} on the robots ${percent(canary.mean)}` : "";
    const alone = unaided ? `on their own ${percent(unaided.success)} of the last ${unaided.episodes} episodes` : "";
    setText(node, [trained, tried, alone].filter(Boolean).join(" · "));
  }
}
