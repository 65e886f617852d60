from __future__ import annotations

import pytest

from app.moves_settings import MovesSettings
from app.settings import SettingsError, load_settings
from migrate.controller_settings import ControllerSettings


def test_names_and_defaults_are_those_of_the_controller() -> None:
    settings, flat = MovesSettings(), ControllerSettings().flat()
    assert {name: getattr(settings, name) for name in flat} == flat
    assert MovesSettings().controller() == ControllerSettings()


def test_what_is_given_reaches_the_controller() -> None:
    settings = load_settings({"mode": "balanced", "moves": {"rho": 3, "automatic": False, "cool_down_s": 0}})
    controller = settings.moves.controller()
    assert (controller.planner.rho, controller.automatic, controller.planner.cool_down_s) == (3, False, 0)
    assert settings.roles == ("prefill", "decode")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"rho": 0.5}, "moves.rho: given float 0.5"),
        ({"compute_weight": 0.5}, "must add up to 1"),
        ({"delta_heads": 0.5}, "allowed is delta_home < delta_heads <= delta_layers"),
        ({"period": 2}, "Did you mean 'period_s'?"),
        ({"automatic": "no"}, "moves.automatic"),
        ({"abandon_after_s": float("inf")}, "moves.abandon_after_s: given float inf"),
    ],
)
def test_values_without_sense_are_refused(given: dict[str, object], part: str) -> None:
    with pytest.raises(SettingsError) as error:
        load_settings({"moves": given})
    assert part in str(error.value)
