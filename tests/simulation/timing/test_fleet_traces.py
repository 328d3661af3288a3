"""Laws of a fleet's behaviour: the same seed gives the same fleet, and its shares are those that were asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, pairwise, takewhile
from pathlib import Path
from statistics import median, stdev

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.options import read_settings
from fleetdistill_lab.simulation.timing.behaviour import DAY_SECONDS, FleetBehaviour, FleetTraces, Span
from fleetdistill_lab.simulation.timing.traces import read_traces

DEVICES = [f"device-{number:02d}" for number in range(40)]
seeds = st.integers(0, 2**32)
behaviours = st.builds(
    lambda share, sigma, churn, join_late: FleetBehaviour(
        availability=f"diurnal:{share}", compute=f"lognormal:{sigma}", churn=churn, join_late=join_late
    ),
    st.floats(0.01, 1.0),
    st.floats(0.01, 3.0),
    st.floats(0.0, 50.0),
    st.floats(0.0, 1.0),
)


def until(spans: Iterator[Span], end: float) -> list[Span]:
    return list(takewhile(lambda span: span.start < end, spans))


def available_seconds(spans: Iterator[Span], begin: float, end: float) -> float:
    return sum(min(span.end, end) - max(span.start, begin) for span in until(spans, end) if span.end > begin)


@given(behaviour=behaviours, seed=seeds)
@example(behaviour=FleetBehaviour(availability="diurnal:0.9999999999999999"), seed=0)
@example(behaviour=FleetBehaviour(availability="diurnal:0.9999999999999999"), seed=6)
@settings(max_examples=20, deadline=None)
def test_same_seed_gives_same_fleet_and_intervals_never_overlap(behaviour: FleetBehaviour, seed: int) -> None:
    one, same = FleetTraces(behaviour, DEVICES, seed), FleetTraces(behaviour, DEVICES, seed)
    assert (one.slowness, one.joins) == (same.slowness, same.joins)
    for device in DEVICES[:5]:
        spans = list(islice(one.spans(device), 50))
        assert spans == list(islice(same.spans(device), 50))
        assert all(span.start < span.end for span in spans)
        assert all(before.end <= after.start for before, after in pairwise(spans))
        assert spans[0].start >= one.joins[device]


@given(seed=seeds)
@settings(max_examples=5, deadline=None)
def test_another_seed_gives_another_fleet(seed: int) -> None:
    behaviour = FleetBehaviour(availability="diurnal", compute="lognormal:0.5")
    one, other = FleetTraces(behaviour, DEVICES, seed), FleetTraces(behaviour, DEVICES, seed + 1)
    assert one.slowness != other.slowness
    assert next(one.spans("device-00")) != next(other.spans("device-00"))


@given(share=st.floats(0.05, 1.0), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_every_device_is_available_for_its_share_of_each_day(share: float, seed: int) -> None:
    """One window per day, of equal length; at the two ends of 20 days, at most one day's window is cut or shifted."""
    traces = FleetTraces(FleetBehaviour(availability=f"diurnal:{share}"), DEVICES, seed)
    for device in DEVICES[:5]:
        seconds = available_seconds(traces.spans(device), 5 * DAY_SECONDS, 25 * DAY_SECONDS)
        assert abs(seconds - 20 * share * DAY_SECONDS) <= share * DAY_SECONDS + 1


def test_most_devices_are_available_at_night() -> None:
    """A window of 7.2 h covers 03:00 if its centre is within 3.6 h, or 1.2 standard deviations: 77 % of the devices."""
    traces = FleetTraces(FleetBehaviour(availability="diurnal:0.3"), DEVICES, 1)

    def present(at: float) -> int:
        return sum(any(span.start <= at < span.end for span in until(traces.spans(item), at + 1)) for item in DEVICES)

    day = 10 * DAY_SECONDS
    assert present(day + 3 * 3600) > 0.7 * len(DEVICES)
    assert present(day + 15 * 3600) < 0.05 * len(DEVICES)


@given(sigma=st.floats(0.01, 3.0), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_the_speeds_are_quantiles_of_the_lognormal_distribution(sigma: float, seed: int) -> None:
    """So median and spread of a fleet are those that were asked for, whatever the seed."""
    slowness = FleetTraces(FleetBehaviour(compute=f"lognormal:{sigma}"), DEVICES, seed).slowness.values()
    assert median(map(math.log, slowness)) == pytest.approx(0, abs=1e-9)
    assert stdev(map(math.log, slowness)) == pytest.approx(sigma, rel=0.01)


@given(churn=st.floats(1.0, 48.0), away=st.floats(600.0, 20_000.0), seed=seeds)
@settings(max_examples=10, deadline=None)
def test_contact_is_lost_as_often_as_wanted(churn: float, away: float, seed: int) -> None:
    """Poisson losses in available time: their number is within six standard deviations of its mean."""
    traces = FleetTraces(FleetBehaviour(churn=churn, away_seconds=away), DEVICES, seed)
    spans = [span for device in DEVICES for span in until(traces.spans(device), 10 * DAY_SECONDS)]
    losses, seconds = len(spans), sum(span.end - span.start for span in spans)
    assert all(span.lost for span in spans)
    mean = churn * seconds / DAY_SECONDS
    assert abs(losses - mean) <= 6 * math.sqrt(mean)
    share = 1 / (1 + churn * away / DAY_SECONDS)
    expected = share * len(DEVICES) * 10
    noise = 6 * math.sqrt(2 * mean) * max(away, DAY_SECONDS / churn) / DAY_SECONDS
    edge = len(DEVICES) * 2 * DAY_SECONDS / churn / DAY_SECONDS
    assert abs(seconds / DAY_SECONDS - expected) <= noise + edge


@given(share=st.floats(0.0, 1.0), seconds=st.floats(1.0, 1e6), seed=seeds)
@settings(max_examples=15, deadline=None)
def test_late_joiners_are_as_many_as_wanted_and_spread_evenly(share: float, seconds: float, seed: int) -> None:
    joins = sorted(FleetTraces(FleetBehaviour(join_late=share, join_seconds=seconds), DEVICES, seed).joins.values())
    late = round(share * len(DEVICES))
    assert joins[: len(DEVICES) - late] == [0.0] * (len(DEVICES) - late)
    expected = [seconds * (number + 1) / late for number in range(late)]
    assert joins[len(DEVICES) - late :] == pytest.approx(expected)


def test_traces_are_assigned_in_turn_and_repeat() -> None:
    """Two traces for three devices, with a period of 100 s."""
    given = (((0.0, 40.0, 1.0),), ((50.0, 60.0, 2.0), (70.0, 80.0, 1.0)))
    traces = FleetTraces(FleetBehaviour(traces=given, repeat_seconds=100.0), ["a", "b", "c"], 7)
    assert list(islice(traces.spans("a"), 2)) == [(0.0, 40.0, 1.0, False), (100.0, 140.0, 1.0, False)]
    assert list(islice(traces.spans("b"), 3)) == [
        (50.0, 60.0, 2.0, False),
        (70.0, 80.0, 1.0, False),
        (150.0, 160.0, 2.0, False),
    ]
    assert next(traces.spans("c")) == next(traces.spans("a"))
    once = FleetTraces(FleetBehaviour(traces=given), ["a"], 7)
    assert list(once.spans("a")) == [(0.0, 40.0, 1.0, False)]


# --- files


def test_traces_are_read_from_csv_and_json(tmp_path: Path) -> None:
    csv_file, json_file = tmp_path / "phones.csv", tmp_path / "phones.json"
    csv_file.write_text("device,start,end,speed\nb,50,60,2\na,0,40,\nb,10,20,0.5\n")
    json_file.write_text(
        '[{"device": "b", "start": 50, "end": 60, "speed": 2}, {"device": "a", "start": 0, "end": 40},'
        '{"device": "b", "start": 10, "end": 20, "speed": 0.5}]'
    )
    expected = (((10.0, 20.0, 0.5), (50.0, 60.0, 2.0)), ((0.0, 40.0, 1.0),))
    assert read_traces(csv_file) == read_traces(json_file) == expected
    fleet = tmp_path / "fleet.toml"
    fleet.write_text('[fleet]\ntraces = "phones.csv"\nrepeat_seconds = 100\nchurn = 2\n')
    assert read_settings(fleet, [])["fleet"] == {"traces": expected, "repeat_seconds": 100, "churn": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("device,start\na,1\n", "row 1 has no 'end'"),
        ("device,start,end\n", "has no rows; expected columns device, start, end"),
        ("device,start,end\na,x,2\n", "row 1: start, end and speed must be numbers"),
        ("device,start,end\na,2,2\n", "has the interval 2 to 2; expected 0 <= start < end"),
        ("device,start,end\na,-1,2\n", "has the interval -1 to 2"),
        ("device,start,end\na,nan,2\n", "has the interval nan to 2"),
        ("device,start,end\na,0,9\na,5,12\n", "intervals that overlap or are out of order at 5"),
        ("device,start,end,speed\na,0,9,0\n", "has speed 0, must be above 0"),
    ],
)
def test_a_faulty_trace_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "phones.csv"
    file.write_text(text)
    with pytest.raises((DataError, ConfigurationError)) as refused:
        read_traces(file)
    assert expected in str(refused.value)


def test_a_file_that_is_missing_or_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "phones.json").write_text("{")
    for name in ("phones.json", "nothing.csv"):
        with pytest.raises(DataError, match="cannot be read"):
            read_traces(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"availability": "weekly"}, "availability is 'weekly', expected always or diurnal:NUMBER"),
        ({"availability": "diurnal:0"}, "its share must be in (0, 1]"),
        ({"availability": "diurnal:nan"}, "its share must be in (0, 1]"),
        ({"availability": "always:0.5"}, "expected always or diurnal:NUMBER"),
        ({"compute": "lognormal"}, "compute is 'lognormal', expected constant or lognormal:NUMBER"),
        ({"compute": "lognormal:9"}, "its sigma must be in (0, 5]"),
        ({"seconds_per_sample": -1}, "seconds_per_sample is -1, must be a number from 0"),
        ({"seconds_per_ask": math.inf}, "seconds_per_ask is inf"),
        ({"churn": "often"}, "churn is 'often', must be a number"),
        ({"churn": True}, "churn is True"),
        ({"away_seconds": 0}, "away_seconds is 0, must be above 0"),
        ({"join_late": 1.5}, "join_late is 1.5, must be a number from 0 to 1"),
        ({"repeat_seconds": 5}, "repeat_seconds has no effect without traces"),
        ({"traces": (((0.0, 9.0, 1.0),),), "repeat_seconds": 5}, "ends at 9, after repeat_seconds (5)"),
        ({"traces": (((0.0, 9.0, 1.0),),), "availability": "diurnal"}, "traces state when devices are available"),
    ],
)
def test_a_faulty_behaviour_is_refused(given: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        FleetBehaviour(**given)  # type: ignore[arg-type]
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[fleet]\nspeed = 1\n", "[fleet] unknown setting 'speed'"),
        ("[run]\nname = 'a'\n", "unknown section 'run'"),
        ("devices = 2\n", "devices is outside a section; put it below [simulation]"),
        ("[simulation]\ndevices = 'two'\n", "[simulation] devices is 'two': Input should be a valid integer"),
        ("[fleet\n", "fleet.toml"),
    ],
)
def test_a_faulty_file_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_settings(file, [])
    assert expected in str(refused.value)
    with pytest.raises(ConfigurationError, match=r"there is no file .*none\.toml"):
        read_settings(tmp_path / "none.toml", [])
