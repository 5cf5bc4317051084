"""What `vla-fleet up` prints where there is no terminal."""

import pytest

from fleet.config.recipes import get_recipe
from fleet.launch.dashboard import Dashboard


def test_without_a_terminal_a_status_is_one_line_whatever_the_width(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    screen = Dashboard("http://127.0.0.1:1", get_recipe("fake", 0), tmp_path, headless=True)
    screen.say(" · ".join(["a long status"] * 20))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("curve", "unaided"), [([], None), ([{"mean": 0.5, "version": 3}], {"success": 0.25, "episodes": 8})]
)
def test_a_status_says_what_is_known_so_far(tmp_path, capsys, curve, unaided):
    screen = Dashboard("http://127.0.0.1:1", get_recipe("fake", 0), tmp_path, headless=True)
    nothing = {"t_s": 6.0, "robots": [], "trainer": None, "version": None, "totals": {"steps_stored": 0}}
    screen.show(nothing | {"curve": curve, "unaided": unaided}, {}, [])
    shown = capsys.readouterr().err
    assert "0.1 min" in shown
    assert ("success 0.50 (v3) · on their own 0.25 of 8 episodes" in shown) == bool(curve)
