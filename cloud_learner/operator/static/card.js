// One robot's card: picture, state, numbers, buttons and the driving pad.

import { count, element, setText } from "./dom.js";
import { GRIP_KEY, KEYS, action, gripClosed, hasGripper } from "./drive.js";
import { Parts, Verdict } from "./verdict.js";

const PAD = [
  // direction, what it shows, keyboard hint, accessible name, place in the grid
  ["away", "↑", "W", "Away", "away"],
  ["left", "←", "A", "Left", "left"],
  ["near", "↓", "S", "Near", "near"],
  ["right", "→", "D", "Right", "right"],
  ["up", "⤒", "E", "Up", "up"],
  ["down", "⤓", "Q", "Down", "down"],
];

const OPERATOR = 80; // priority of those who drive
const JOBS = ["rollout", "evaluation"]; // purposes of leases that jobs have

function sentence(text) {
  return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function holderText(lease) {
  if (!lease) return "free";
  const { holder, purpose } = lease;
  if (JOBS.includes(purpose)) return `job ${holder}`;
  if (purpose === "estop") return `stopped by ${holder}`;
  if (holder.startsWith("dropped:")) return `waits for a person (${holder.slice(8)} is gone)`;
  return purpose === "operator" ? `driven by ${holder}` : `held by ${holder} for ${purpose}`;
}

export class Card {
  /** `send(message)` takes a command to the gateway; `activate(card)` makes the keyboard drive this card. */
  constructor(name, send, activate) {
    this.name = name;
    this.send = send;
    this.robot = null;
    this.control = "free";
    this.closed = false;
    this.pressed = new Set(); // directions, from keys and pad alike
    this.camera = null;
    this.pictures = 0;
    this.notMineUntil_ms = 0; // a snapshot made before the hand-back may still call the robot ours
    this.build(activate);
  }

  build(activate) {
    this.picture = element("canvas", { width: 192, height: 192, role: "img", "aria-label": `Camera of ${this.name}` });
    this.noPicture = element("span", { class: "no-picture" }, "no picture yet");
    this.chip = element("span", { class: "chip" });
    this.cameras = element("div", { class: "cameras", role: "group", "aria-label": "Camera" });
    this.driving = element("span", { class: "driving" }, "You drive");
    this.reason = element("p", { class: "reason" });
    this.health = element("span", { class: "health" });
    this.holder = element("span", { class: "holder" });
    this.embodiment = element("span", { class: "embodiment" });
    this.ailment = element("p", { class: "ailment" });
    this.task = element("p", { class: "task" });
    this.recent = element("ol", { class: "recent", "aria-label": "Newest episodes" });
    this.facts = Object.fromEntries(["version", "episodes", "interventions", "missed"].map((key) => [key, element("dd")]));
    const fact = (label, key) => element("div", {}, element("dt", {}, label), this.facts[key]);
    const button = (text, kind, run) => {
      const node = element("button", { type: "button", class: kind }, text);
      node.addEventListener("click", run);
      return node;
    };
    this.takeOver = button("Take over", "primary", () => {
      this.notMineUntil_ms = 0;
      this.send({ type: "take_over", robot: this.name });
    });
    this.handBack = button("Hand back", "primary", () => {
      this.hold();
      this.send({ type: "hand_back", robot: this.name });
      this.letGo("free");
    });
    this.stop = button("E-stop", "danger", () => this.send({ type: "estop", robot: this.name }));
    this.start = button("Start", "primary", () => this.send({ type: "start", robot: this.name }));
    const say = (type) => this.send({ type, robot: this.name });
    this.verdict = new Verdict(this.name, say);
    this.parts = new Parts(this.name, say);
    this.stops = element("div", { class: "stops", role: "group", "aria-label": `Stops of ${this.name}` });
    this.node = element(
      "article", { class: "card", "aria-label": `Robot ${this.name}`, tabindex: "-1", "data-robot": this.name },
      element("div", { class: "view" }, this.picture, this.noPicture, this.chip, this.driving, this.cameras),
      element(
        "div", { class: "body" },
        element("div", { class: "title" }, element("h3", {}, this.name), this.embodiment, this.recent),
        element("p", { class: "work" }, this.health, this.holder), this.ailment,
        this.task, this.reason,
        element("dl", { class: "facts" }, fact("Version", "version"), fact("Episodes", "episodes"),
          fact("Interventions", "interventions"), fact("Missed ticks", "missed")),
        element("div", { class: "buttons" }, this.takeOver, this.handBack, this.stop, this.start),
        this.stops,
        this.parts.node,
        this.verdict.node,
        this.buildPad(),
      ),
    );
    this.node.addEventListener("pointerdown", () => { if (this.control === "you") activate(this); });
  }

  buildPad() {
    this.padKeys = {};
    const keys = PAD.map(([direction, sign, hint, label, area]) => {
      const node = element("button", { type: "button", class: "key", "aria-label": label, "data-area": area },
        element("span", {}, sign), element("kbd", {}, hint));
      const release = () => this.press(direction, false);
      node.addEventListener("pointerdown", (event) => {
        event.preventDefault();
        node.setPointerCapture(event.pointerId); // the release is heard even when the finger slid off
        this.press(direction, true);
      });
      for (const end of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) node.addEventListener(end, release);
      node.addEventListener("contextmenu", (event) => event.preventDefault());
      this.padKeys[direction] = node;
      return node;
    });
    this.gripText = element("span");
    this.grip = element("button", { type: "button", class: "key grip", "data-area": "grip" },
      this.gripText, element("kbd", {}, "Space"));
    this.grip.addEventListener("click", () => this.toggleGrip());
    return element("div", { class: "pad", role: "group", "aria-label": `Drive ${this.name}` }, ...keys, this.grip);
  }

  /** What the newest snapshot says: `robot` of it, and who controls it (free, you, other, dropped). */
  update(robot, control) {
    if (control === "you" && performance.now() < this.notMineUntil_ms) control = "free";
    const mine = control === "you";
    if (mine && this.control !== "you") {
      this.closed = gripClosed(robot);
      this.pressed.clear();
      this.node.focus({ preventScroll: true });
      this.node.scrollIntoView({ block: "nearest" });
    }
    if (!mine) this.pressed.clear();
    this.robot = robot;
    this.control = control;
    const lost = robot.link === "lost";
    const mode = lost ? "lost" : robot.mode;
    this.chip.dataset.mode = mode;
    this.node.dataset.mode = mode;
    this.node.dataset.control = control;
    const does = robot.part === "recovery" ? "recovers" : robot.part === "correction" ? "corrects" : "drives";
    setText(this.chip, mode === "human" || mode === "script" ? `${mode} ${does}` : mode);
    setText(this.embodiment, robot.embodiment);
    setText(this.task, robot.instruction || robot.task || "no task yet");
    setText(this.reason, this.explain(robot, control, lost));
    this.reason.hidden = !this.reason.textContent;
    this.drawWork(robot);
    setText(this.facts.version, robot.version ? String(robot.version) : "–");
    setText(this.facts.episodes, count(robot.episodes));
    setText(this.facts.interventions, count(robot.interventions));
    setText(this.facts.missed, `${robot.missed_percent.toFixed(robot.missed_percent < 1 ? 2 : 1)}%`);
    const stopped = robot.stops.length > 0;
    this.takeOver.hidden = mine;
    this.takeOver.disabled = control === "other" || lost || stopped || robot.ready || Boolean(robot.not_drivable);
    this.takeOver.title = robot.not_drivable ? `Cannot be driven from here: ${robot.not_drivable}.` : "";
    this.handBack.hidden = !(mine || control === "dropped");
    this.stop.hidden = robot.mode === "estop"; // as the robot shows it: one that moves on can be stopped again
    this.start.hidden = !robot.ready;
    this.start.disabled = control === "other" || lost;
    this.drawStops(robot.stops);
    this.verdict.update(robot, control !== "other" && !lost);
    this.parts.update(robot, mine && !lost);
    this.drawRecent(robot.recent);
    this.drawCameras(robot.spec?.cameras ?? []);
    this.drawPad();
  }

  explain(robot, control, lost) {
    if (lost) return `No word for ${Math.round(robot.age_s)} s.`;
    const who = [...new Set(robot.stops.map((stop) => stop.who))].join(", ");
    if (who) return `Stopped by ${who}. It stays stopped until each stop is released, and then started.`;
    if (robot.ready) return "All stops are released. It stands still until somebody starts it.";
    if (control === "dropped") return "The page that drove it is gone. It holds until someone takes over or hands back.";
    if (control === "other") {
      const { lease } = robot;
      const elsewhere = lease?.priority >= OPERATOR && lease.purpose !== "estop" && !lease.holder.startsWith("web-");
      return elsewhere ? `Held by ${lease.holder} for ${lease.purpose}.` : "Driven from another page.";
    }
    const reason = robot.reason ? sentence(robot.detail ? `${robot.reason}: ${robot.detail}` : robot.reason) : "";
    return [this.explainSpeed(robot.speed_limits), reason].filter(Boolean).join(" ");
  }

  /** Who is beside a robot slows it, and takes that back there. */
  explainSpeed(limits) {
    const shares = Object.entries(limits);
    if (!shares.length) return "";
    const share = Math.min(...shares.map(([, each]) => each));
    return `Slowed to ${Number((100 * share).toPrecision(3))}% by ${shares.map(([who]) => who).join(", ")}.`;
  }

  /** One button for each stop: a release takes back only the one that it names. */
  drawStops(stops) {
    const key = stops.map((stop) => stop.id).join();
    if (this.stopsKey === key) return;
    this.stopsKey = key;
    this.stops.hidden = stops.length === 0;
    this.stops.replaceChildren(...stops.map(({ id, who }) => {
      const node = element("button", { type: "button", class: "danger", title: id }, `Release stop of ${who}`);
      node.addEventListener("click", () => this.send({ type: "release_estop", robot: this.name, stop: id }));
      return node;
    }));
  }

  /** How the robot is as a resource of the fleet, and who has it. */
  drawWork({ health, health_reason, fault, site, lease }) {
    this.health.dataset.health = health;
    setText(this.health, health);
    setText(this.holder, `${holderText(lease)}${site ? ` · ${site}` : ""}`);
    const ailment = health === "ready" || health === "starting" ? fault : health_reason || fault;
    setText(this.ailment, ailment && health !== "lost" ? sentence(ailment) : "");
    this.ailment.hidden = !this.ailment.textContent;
  }

  drawRecent(recent) {
    const key = recent.map((episode) => `${episode.outcome}${episode.human_steps > 0}`).join();
    if (this.recentKey === key) return;
    this.recentKey = key;
    this.recent.replaceChildren(...recent.map(({ task, outcome, human_steps }) => {
      const text = `${task}: ${outcome}${human_steps ? ` (${human_steps} steps by a person)` : ""}`;
      return element("li", {
        "data-outcome": outcome, "data-helped": String(human_steps > 0), title: text, "aria-label": text,
      });
    }));
  }

  drawCameras(cameras) {
    if (!cameras.includes(this.camera) && cameras.length) [this.camera] = cameras;
    const key = `${cameras.join()}|${this.camera}`;
    if (this.camerasKey === key) return;
    this.camerasKey = key;
    this.cameras.hidden = cameras.length < 2;
    this.cameras.replaceChildren(...cameras.map((camera) => {
      const node = element("button", { type: "button", "aria-pressed": String(camera === this.camera) }, camera);
      node.addEventListener("click", () => { this.camera = camera; this.drawCameras(cameras); });
      return node;
    }));
  }

  drawPad() {
    const mine = this.control === "you";
    for (const [direction, node] of Object.entries(this.padKeys)) {
      node.classList.toggle("down", this.pressed.has(direction));
    }
    const gripper = mine && hasGripper(this.robot.spec);
    this.grip.hidden = !gripper;
    setText(this.gripText, this.closed ? "Open gripper" : "Close gripper");
  }

  /** A decoded picture of one of the robot's cameras. */
  show(camera, bitmap) {
    this.camera ??= camera;
    if (camera === this.camera) {
      if (this.picture.width !== bitmap.width || this.picture.height !== bitmap.height) {
        [this.picture.width, this.picture.height] = [bitmap.width, bitmap.height];
      }
      this.picture.getContext("2d").drawImage(bitmap, 0, 0);
      this.noPicture.hidden = true;
      this.pictures += 1;
    }
    bitmap.close();
  }

  /** A key of the keyboard; true when it drives, or says something. */
  key(code, down) {
    if (this.parts.key(code, down)) return true;
    if (code === GRIP_KEY) {
      if (down) this.toggleGrip();
      return true;
    }
    const direction = KEYS[code];
    if (direction) this.press(direction, down);
    return Boolean(direction);
  }

  press(direction, down) {
    if (this.control !== "you" || this.pressed.has(direction) === down) return;
    if (down) this.pressed.add(direction);
    else this.pressed.delete(direction);
    this.drawPad();
    this.command(); // at once: the next regular one may be 50 ms away
  }

  toggleGrip() {
    if (this.control !== "you" || !hasGripper(this.robot.spec)) return;
    this.closed = !this.closed;
    this.drawPad();
    this.command();
  }

  /** This page holds the robot no more, whatever a late snapshot says. */
  letGo(control) {
    this.notMineUntil_ms = performance.now() + 500;
    if (this.robot) this.update(this.robot, control);
  }

  /** Let go of all directions. */
  hold() {
    this.pressed.clear();
    if (this.control !== "you") return;
    this.drawPad();
    this.command();
  }

  /** Send what is held now. */
  command() {
    const speed = Number(document.getElementById("speed").value) / 100;
    this.send({
      type: "command", robot: this.name,
      action: action(this.robot.spec, this.pressed, this.closed, speed),
    });
  }
}
