"""`rlreplay.errors`: the message, its parts, location, pickling, and what a caller can catch."""

import pickle

import pytest

from rlreplay.errors import BackendError, MissingMaskError, MissingTokenError, ReplayError

CLASSES = [ReplayError, MissingMaskError, MissingTokenError, BackendError]
PARTS = {
    "problem": "empty support",
    "expected": "at least one id",
    "got": "none",
    "consequence": "no token can be drawn",
}


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({}, ""),
        ({"sample": 3}, "sample 3: "),
        ({"row": 17}, "row 17: "),
        ({"sample": 0, "row": 0}, "sample 0, row 0: "),
    ],
)
def test_message_has_every_part(place, text):
    error = ReplayError(**PARTS, **place)
    assert str(error) == (
        f"{text}empty support: expected at least one id, got none; no token can be drawn"
    )
    for name, value in {**PARTS, "sample": None, "row": None, **place}.items():
        assert getattr(error, name) == value


@pytest.mark.parametrize("cls", CLASSES)
def test_located_fills_in_what_is_given_and_keeps_the_rest(cls):
    error = cls(**PARTS, row=2)
    located = error.located(sample=5)
    assert type(located) is cls
    assert (located.sample, located.row) == (5, 2)
    assert (error.sample, error.row) == (None, 2), "the original stays as it was"
    assert (located.located(row=9).sample, located.located(row=9).row) == (5, 9)
    assert located.located(sample=0, row=0).sample == 0, "0 is a place, not an absent one"
    assert all(getattr(located, name) == value for name, value in PARTS.items())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_class_and_parts(cls, protocol):
    error = cls(**PARTS, sample=1, row=4)
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.sample, again.row, again.got) == (1, 4, "none")


@pytest.mark.parametrize("cls", CLASSES)
def test_one_base_for_callers_who_catch_all(cls):
    assert issubclass(cls, ReplayError)
    assert issubclass(cls, ValueError)


def test_subclasses_can_be_caught_apart():
    apart = CLASSES[1:]
    assert all(not issubclass(a, b) for a in apart for b in apart if a is not b)
