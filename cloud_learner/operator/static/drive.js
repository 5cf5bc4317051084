// From pressed keys to an action. Pure: no page, no network.

// What each direction key means on the robot's first three motion dimensions (x, y, z).
// Written for MetaWorld's `corner2` camera, upright: the robot's base stands at the left of the picture, +y leads away
// from the base (to the right), +x leads to the robot's right (towards the viewer), +z is up. So a key moves the hand
// the way the picture shows it. For another camera turn or flip these rows.
export const AXES = {
  right: [0, 1, 0],
  left: [0, -1, 0],
  away: [-1, 0, 0],
  near: [1, 0, 0],
  up: [0, 0, 1],
  down: [0, 0, -1],
};

// By `KeyboardEvent.code`: the place on the keyboard, whatever the layout.
export const KEYS = {
  ArrowRight: "right", KeyD: "right",
  ArrowLeft: "left", KeyA: "left",
  ArrowUp: "away", KeyW: "away",
  ArrowDown: "near", KeyS: "near",
  KeyE: "up", PageUp: "up",
  KeyQ: "down", PageDown: "down",
};
export const GRIP_KEY = "Space";
export const SEND_PERIOD_MS = 50;

const GRIPPER = /grip|effort|finger/i;
const OPEN_ABOVE = 0.8; // a measured opening (0 to 1) above this counts as open: a held thing keeps fingers apart

/** Whether the gripper looks closed in a snapshot of the robot: taking over must not drop what it holds. */
export function gripClosed(robot) {
  const index = robot.spec.state.findIndex((name) => GRIPPER.test(name));
  const opening = robot.state[index];
  return opening != null && opening < OPEN_ABOVE;
}

export function hasGripper(spec) {
  return spec.action.some((dimension) => dimension.meaning === "absolute" && GRIPPER.test(dimension.name));
}

/**
 * The action for a set of directions: deltas and velocities rest at 0, a gripper keeps its target.
 * `speed` is 0 to 1 of each dimension's limit.
 */
export function action(spec, directions, closed, speed) {
  const move = [0, 0, 0];
  for (const direction of directions) {
    AXES[direction].forEach((value, axis) => { move[axis] += value; });
  }
  let axis = 0;
  return spec.action.map(({ low, high, meaning }) => {
    if (meaning === "absolute") return closed ? high : low;
    const wanted = Math.max(-1, Math.min(1, move[axis++] ?? 0)) * speed;
    return wanted > 0 ? wanted * high : wanted < 0 ? -wanted * low : 0;
  });
}
