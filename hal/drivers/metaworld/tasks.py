"""MetaWorld's tasks by their fleet names (MetaWorld's own without the `-v3`), and what a person would call them.

Imports no simulator, so a command line can list tasks anywhere.
"""

from __future__ import annotations

from hal.interfaces.robot import check_task

KNOWN_TASKS = (
    "assembly",
    "basketball",
    "bin-picking",
    "box-close",
    "button-press",
    "button-press-topdown",
    "button-press-topdown-wall",
    "button-press-wall",
    "coffee-button",
    "coffee-pull",
    "coffee-push",
    "dial-turn",
    "disassemble",
    "door-close",
    "door-lock",
    "door-open",
    "door-unlock",
    "drawer-close",
    "drawer-open",
    "faucet-close",
    "faucet-open",
    "hammer",
    "hand-insert",
    "handle-press",
    "handle-press-side",
    "handle-pull",
    "handle-pull-side",
    "lever-pull",
    "peg-insert-side",
    "peg-unplug-side",
    "pick-out-of-hole",
    "pick-place",
    "pick-place-wall",
    "plate-slide",
    "plate-slide-back",
    "plate-slide-back-side",
    "plate-slide-side",
    "push",
    "push-back",
    "push-wall",
    "reach",
    "reach-wall",
    "shelf-place",
    "soccer",
    "stick-pull",
    "stick-push",
    "sweep",
    "sweep-into",
    "window-close",
    "window-open",
)
"""All 50, sorted."""

PIXEL_TASKS = ("drawer-open", "button-press-topdown", "window-open", "door-open")
"""Their goals can be seen in a 64x64 picture."""

STATE_TASKS = ("push", "pick-place")

_INSTRUCTIONS = {
    "drawer-open": "open the drawer",
    "button-press-topdown": "press the button",
    "button-press": "press the button from the front",
    "window-open": "open the window",
    "door-open": "open the door",
    "push": "push the puck to the goal",
    "pick-place": "pick up the puck and bring it to the goal",
}
_VERBS_LAST = ("open", "close", "lock", "unlock", "turn", "push", "pull", "press", "insert", "slide", "place")


def instruction(task: str) -> str:
    """What a person would tell the robot, such as `"open the drawer"` for `drawer-open`.

    A task without a sentence of its own gets one from its name. Raises `ConfigError` for a name that is not known.
    """
    check_task("MetaWorld", task, KNOWN_TASKS)
    if task in _INSTRUCTIONS:
        return _INSTRUCTIONS[task]
    words = task.split("-")
    verb = next((word for word in words if word in _VERBS_LAST), "")
    if not verb or words[0] == verb:
        return " ".join(words)
    at = words.index(verb)
    return " ".join([verb, "the", *words[:at], *words[at + 1 :]])
