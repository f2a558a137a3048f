"""Measured tables: interpolation, files, refusals."""

import json

import pytest

from wlb.cost import ProfiledCost
from wlb.errors import ConfigError, DataError

TABLE = {"version": 1, "attention": [[10, 1.0], [20, 5.0]], "linear_token_s": 0.5, "fixed_s": 2.0}


def test_interpolation_by_hand():
    cost = ProfiledCost.from_json(TABLE)
    assert [cost.attention_s(n, n) for n in (0, 5, 10, 15, 20)] == [0.0, 0.5, 1.0, 3.0, 5.0]
    assert cost.attention_s(40, 40) == 20.0  # twice the last length: four times its seconds
    assert cost.linear_s(4) == 2.0
    assert cost.forward_s([10, 15]) == 1.0 + 3.0 + 12.5 + 2.0
    assert cost.backward_s([10]) == 2.5 * 1.0 + 2 * (5.0 + 2.0)


def test_a_part_costs_as_much_as_the_document_with_as_many_pairs():
    cost = ProfiledCost.from_json(TABLE)
    # the last 8 rows of 20: 8 * (20 - 4) = 128 pairs, as many as a whole document of 16
    assert cost.attention_s(8, 20) == pytest.approx(cost.attention_s(16, 16), rel=1e-12)


def test_monotone_in_both_arguments():
    cost = ProfiledCost.from_json(TABLE)
    for kv in range(1, 45):
        row = [cost.attention_s(q, kv) for q in range(kv + 1)]
        assert row == sorted(row)
    for q in (1, 4, 9):
        column = [cost.attention_s(q, kv) for kv in range(q, 45)]
        assert column == sorted(column)


def test_a_file_gives_back_what_was_saved(tmp_path):
    cost = ProfiledCost.from_json({**TABLE, "attention_backward_ratio": 3.0, "bytes_per_s": 1e9})
    cost.save(tmp_path / "cost.json")
    assert ProfiledCost.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"attention": []}, "attention must hold at least one"),
        ({"attention": [[10, 1.0], [10, 2.0]]}, "attention lengths must be > 0 and increase, got 10 after 10"),
        ({"attention": [[0, 1.0]]}, "attention lengths must be > 0 and increase, got 0"),
        (
            {"attention": [[10, 2.0], [20, 1.0]]},
            r"attention seconds must not decrease .*got 1\.0 at 20 after 2\.0",
        ),
        ({"attention": [[10]]}, r"attention must be a list of \[whole tokens, seconds\] pairs"),
        ({"attention": [[10, float("nan")]]}, "attention seconds must be finite and >= 0, got nan"),
        ({"linear_token_s": "fast"}, "linear_token_s must be a number, got 'fast'"),
        ({"linear_token_s": -1}, "linear_token_s must be finite and >= 0, got -1"),
        ({"fixed_s": -1}, "fixed_s must be finite and >= 0, got -1"),
        ({"colour": 1}, "unknown field 'colour'"),
    ],
)
def test_broken_tables_say_what_is_wrong(tmp_path, change, message):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({**TABLE, **change}))
    with pytest.raises(DataError, match=f"cost.json: {message}"):
        ProfiledCost.load(path)


def test_broken_files_say_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match=r"absent\.json: cannot be read: No such file"):
        ProfiledCost.load(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(DataError, match=r"text\.json: must be JSON"):
        ProfiledCost.load(tmp_path / "text.json")
    with pytest.raises(DataError, match="must be a JSON object, got list"):
        ProfiledCost.from_json([])
    with pytest.raises(DataError, match="must have the field 'linear_token_s'"):
        ProfiledCost.from_json({"version": 1, "attention": [[1, 1.0]]})
    with pytest.raises(ConfigError, match="attention must hold at least one"):
        ProfiledCost(attention=(), linear_token_s=1.0)
