// What a person says of an episode and its scene: a row of large buttons, where a person resets the scene.

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
