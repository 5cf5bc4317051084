// What a person says of an episode, of its scene, and of what they do in it themselves: rows of large buttons.

import { element, setText } from "./dom.js";

const SCENE = "it waits until a person says that the scene is ready"; // the reason of that hold
const WORDS = [
  // what is said, what stands on the button, its class
  ["success", "Success", "good"],
  ["failure", "Failure", "bad"],
  ["end", "End", ""],
  ["rerecord", "Re-record", ""],
  ["discard", "Discard", ""],
  ["scene_ready", "Scene ready", "primary"],
];

export class Verdict {
  /** `say(kind)` takes it to the gateway; `name`: the robot's. */
  constructor(name, say) {
    this.question = element("p", { class: "question" });
    this.buttons = Object.fromEntries(WORDS.map(([kind, text, style]) => {
      const node = element("button", { type: "button", class: style }, text);
      node.addEventListener("click", () => say(kind));
      return [kind, node];
    }));
    this.node = element(
      "div", { class: "verdict", role: "group", "aria-label": `Episode of ${name}` },
      this.question, ...Object.values(this.buttons),
    );
  }

  /** `allowed`: this page may speak for the robot. */
  update({ by_person, episode, open_outcome, reason, mode }, allowed) {
    const waits = reason === SCENE || (mode === "human" && !episode);
    this.node.hidden = !by_person || !(episode || open_outcome || waits);
    const judged = open_outcome && open_outcome !== "unjudged";
    const asked = judged ? `It ended: ${open_outcome}. Reset the scene.` : "How did it end? Then reset the scene.";
    setText(this.question, open_outcome ? asked : waits ? "Reset the scene." : "");
    this.question.hidden = !this.question.textContent;
    for (const [kind, node] of Object.entries(this.buttons)) {
      node.hidden = kind === "scene_ready" ? !waits : kind === "end" ? !episode : !(episode || open_outcome);
      node.disabled = !allowed;
      if (kind === "success" || kind === "failure") node.setAttribute("aria-pressed", String(kind === open_outcome));
    }
  }
}

const PARTS = [
  // what is said, what stands on the button, its key, the part it begins
  ["recover", "I recover", "R", "recovery"],
  ["correct", "I correct from here", "C", "correction"],
];

/** What whoever drives in an episode does: a recovery first, then a correction. */
export class Parts {
  /** As of `Verdict`. */
  constructor(name, say) {
    this.say = say;
    this.buttons = PARTS.map(([kind, text, hint, part]) => {
      const node = element("button", { type: "button" }, element("span", {}, text), " ", element("kbd", {}, hint));
      node.addEventListener("click", () => say(kind));
      return [part, node];
    });
    this.node = element(
      "div", { class: "parts", role: "group", "aria-label": `Your part at ${name}` }, ...this.buttons.map(([, node]) => node),
    );
  }

  /** `mine`: this page drives it. */
  update({ part }, mine) {
    this.node.hidden = !(mine && part);
    for (const [each, node] of this.buttons) node.setAttribute("aria-pressed", String(each === part));
  }

  /** A key of the keyboard; true when it says something. */
  key(code, down) {
    const word = this.node.hidden ? undefined : PARTS.find(([, , hint]) => code === `Key${hint}`);
    if (word && down && code !== this.held) this.say(word[0]); // a key that is held repeats
    if (word) this.held = down ? code : "";
    return Boolean(word);
  }
}
