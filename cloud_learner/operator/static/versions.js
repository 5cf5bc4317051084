// Policy versions: how far each is, and what people may do with it.

import { count, element, percent, setText } from "./dom.js";

const ALL = "all"; // among pins: the fleet
const QUESTIONS = {
  // what stands on the button, what it does
  promote: [(n) => `Promote ${n}`, (n) => `All robots that are not pinned run version ${n} from now on.`],
  rollback: [
    (n) => `Roll back to ${n}`,
    (n) => `All robots that are not pinned go back to version ${n}. What is newer is rolled back, and versions are frozen.`,
  ],
  pin: [(n) => `Pin all to ${n}`, (n) => `All robots without a pin of their own run version ${n}, whatever comes.`],
};

function robotsText(names) {
  return names.length > 3 ? `${names.length} robots` : names.join(", ");
}

/** What came of a version that robots compute without acting by it; null when none ever did. */
function shadowText(shadow) {
  if (!shadow) return "";
  const on = shadow.robots.length ? `shadow on ${robotsText(shadow.robots)}` : "was a shadow";
  const widest = Object.entries(shadow.largest).sort(([, one], [, other]) => other - one)[0];
  const apart = shadow.chunks
    ? ` · ${count(shadow.chunks)} chunks differ by ${share(shadow.mean)} of the range on average, p95 ${share(shadow.p95)}, most ${share(shadow.most)} (${widest[0]})`
    : " · nothing compared yet";
  const faults = shadow.faults ? ` · ${count(shadow.faults)} chunks failed` : "";
  const [problem] = Object.entries(shadow.problems);
  return `${on}${apart}${faults}${problem ? ` · ${problem[0]}: ${problem[1]}` : ""}`;
}

/** Small shares of a range, which `percent` would round to nothing. */
function share(value) {
  return `${(100 * value).toPrecision(2)}%`;
}

function button(text, kind, run) {
  const node = element("button", { type: "button", class: kind }, text);
  node.addEventListener("click", run);
  return node;
}

class VersionEntry {
  /** `change(change, more)` takes a wish to the gateway; `opened(row)` is called when this row opens. */
  constructor(number, change, opened) {
    this.number = number;
    this.wanted = null; // what is asked about: promote, rollback, or pin (of all robots)
    this.tags = element("span", { class: "tags" });
    this.state = element("span", { class: "phase" });
    this.record = element("span", { class: "muted" });
    this.pins = element("span", { class: "muted" });
    this.note = element("span", { class: "muted note" });
    this.shadow = element("span", { class: "muted note shadow" });
    this.head = button("", "version-head", () => {
      this.open(this.actions.hidden);
      if (this.actions.hidden) return;
      opened(this);
      this.node.scrollIntoView({ block: "nearest" });
    });
    this.head.setAttribute("aria-expanded", "false");
    this.head.append(element("b", {}, String(number)), this.tags, this.state);
    this.promote = button("Promote", "", () => this.ask("promote"));
    this.rollback = button("Roll back", "", () => this.ask("rollback"));
    this.robot = element("select", { "aria-label": `Robot to pin to version ${number}, or to compute it` });
    this.pin = button("Pin", "", () => {
      if (this.robot.value) change("pin", { number, robot: this.robot.value });
      else this.ask("pin");
    });
    this.shade = button("Shadow", "", () => {
      if (this.shadowed) change("shadow", { number: 0 });
      else change("shadow", { number, robot: this.robot.value });
    });
    this.unpins = element("div", { class: "unpins" });
    this.question = element("p", { class: "question" });
    this.yes = button("", "primary", () => {
      change(this.wanted, { number });
      this.ask(null);
    });
    this.no = button("Cancel", "", () => this.ask(null));
    this.confirm = element("div", { class: "confirm", role: "group", "aria-label": "Are you sure?" },
      this.question, this.yes, this.no);
    this.choice = element("div", { class: "choice" }, this.promote, this.rollback, this.robot, this.pin, this.shade, this.unpins);
    this.actions = element("div", {}, this.choice, this.confirm);
    this.change = change;
    this.node = element("li", { class: "version", "data-version": String(number) },
      this.head, this.record, this.pins, this.shadow, this.note, this.actions);
    this.ask(null);
    this.open(false);
  }

  open(wanted) {
    this.actions.hidden = !wanted;
    this.node.classList.toggle("open", wanted);
    this.head.setAttribute("aria-expanded", String(wanted));
    if (!wanted && this.wanted) this.ask(null);
  }

  /** Ask before all robots run something else; not by a dialog, which would stop what else this page sends. */
  ask(wanted) {
    this.wanted = wanted;
    this.confirm.hidden = !wanted;
    this.choice.hidden = Boolean(wanted);
    if (!wanted) return;
    const [yes, question] = QUESTIONS[wanted];
    setText(this.yes, yes(this.number));
    setText(this.question, question(this.number));
    this.no.focus({ preventScroll: true });
  }

  update(version, current, robots) {
    const { state, robots: running, pinned, episodes, successes, unjudged, note } = version;
    this.node.dataset.state = state;
    const tags = [version.current && "current", version.reference && "reference", version.shadow?.robots.length && "shadow"].filter(Boolean);
    if (this.tags.childElementCount !== tags.length || this.tags.textContent !== tags.join("")) {
      this.tags.replaceChildren(...tags.map((tag) => element("span", { class: "tag" }, tag)));
    }
    setText(this.state, state.replaceAll("_", " "));
    const success = episodes ? ` · ${percent(successes / episodes)} success` : "";
    const silent = unjudged ? ` · ${count(unjudged)} unjudged` : "";
    setText(this.record, `${count(episodes)} episodes${success}${silent}${running.length ? ` · runs on ${robotsText(running)}` : ""}`);
    this.record.title = running.join(", ");
    setText(this.pins, pinned.length ? `pinned: ${pinned.includes(ALL) ? "all robots" : robotsText(pinned)}` : "");
    this.pins.hidden = !pinned.length;
    this.pins.title = pinned.join(", ");
    setText(this.note, note);
    this.note.title = note;
    this.note.hidden = !note;
    this.shadowed = Boolean(version.shadow?.robots.length);
    setText(this.shadow, shadowText(version.shadow));
    this.shadow.title = Object.entries(version.shadow?.problems ?? {}).map(([robot, text]) => `${robot}: ${text}`).join("\n");
    this.shadow.hidden = !version.shadow;
    setText(this.shade, this.shadowed ? "End shadow" : "Shadow");
    this.shade.title = this.shadowed
      ? "No robot computes it any more"
      : "The chosen robot, or a few, compute what it would do, and never act by it";
    this.promote.hidden = version.current;
    this.rollback.hidden = this.number > current; // forward is no way back
    if (this.wanted && this[this.wanted].hidden) this.ask(null);
    this.drawRobots(robots);
    this.drawPins(pinned);
  }

  drawRobots(robots) {
    const key = robots.join("\n");
    if (this.robotsKey === key) return;
    this.robotsKey = key;
    const chosen = this.robot.value;
    this.robot.replaceChildren(...["", ...robots].map((name) => element("option", { value: name }, name || "all robots")));
    this.robot.value = robots.includes(chosen) ? chosen : "";
  }

  drawPins(pinned) {
    const key = pinned.join("\n");
    if (this.pinsKey === key) return;
    this.pinsKey = key;
    this.unpins.replaceChildren(...pinned.map((name) => button(
      `Unpin ${name === ALL ? "all robots" : name}`, "", () => this.change("pin", { number: 0, robot: name === ALL ? "" : name }),
    )));
  }
}

export class Versions {
  /** `list`, `empty`, `freeze`: nodes of the page; `send(message)` takes a message to the gateway. */
  constructor(list, empty, freeze, send) {
    this.list = list;
    this.empty = empty;
    this.freeze = freeze;
    this.frozen = false;
    this.rows = new Map();
    this.change = (change, more = {}) => send({ type: "versions", change, ...more });
    freeze.addEventListener("click", () => this.change(this.frozen ? "thaw" : "freeze"));
  }

  /** `versions` newest first; `robots`: names of all there are. */
  update(versions, robots) {
    this.frozen = versions.some((version) => version.frozen);
    setText(this.freeze, this.frozen ? "Unfreeze" : "Freeze");
    this.freeze.title = this.frozen
      ? "Versions are tried and promoted again"
      : "Nothing is tried or promoted by itself until somebody unfreezes versions";
    this.freeze.hidden = !versions.length;
    this.empty.hidden = versions.length > 0;
    const shown = new Set(versions.map((version) => version.number));
    for (const [number, row] of this.rows) {
      if (shown.has(number)) continue;
      row.node.remove();
      this.rows.delete(number);
    }
    const current = versions.find((version) => version.current)?.number ?? 0;
    for (const [place, version] of versions.entries()) {
      let row = this.rows.get(version.number);
      if (!row) {
        row = new VersionEntry(version.number, this.change, (opened) => this.closeOthers(opened));
        this.rows.set(version.number, row);
      }
      row.update(version, current, robots);
      // only what is new moves: a row that somebody uses keeps its focus
      if (this.list.children[place] !== row.node) this.list.insertBefore(row.node, this.list.children[place] ?? null);
    }
  }

  closeOthers(opened) {
    for (const row of this.rows.values()) if (row !== opened) row.open(false);
  }
}
