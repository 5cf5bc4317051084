// Small helpers for the page: elements, numbers, times.

/** An element `<tag class=...>` with attributes and children; a child may be a string. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** Change a text only when it differs, so that selections and screen readers stay calm. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/** 1234567 -> "1,234,567". */
export function count(number) {
  return number == null ? "–" : Math.round(number).toLocaleString("en-US");
}

/** 0.914 -> "91%". */
export function percent(fraction) {
  return fraction == null ? "–" : `${Math.round(100 * fraction)}%`;
}

/** Seconds -> "m:ss" or "h:mm:ss". */
export function minutes(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** A short duration in seconds -> "85 ms" or "1.2 s". */
export function duration(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
}

/** "drawer-open" -> "drawer open". */
export function words(task) {
  return task.replaceAll("-", " ");
}
