from dataclasses import replace

from megatron.wlb.patches import catalogue


def test_prints_a_row_a_patch_and_is_green_for_the_installed_version(run, capsys):
    assert run("check_patches") == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["target", "distribution", "versions", "installed", "wanted", "found", "state"]
    assert [row.split()[0] for row in rows] == [patch.target for patch in catalogue.every_patch()]
    for row in rows:
        *_, wanted, found, state = row.split()
        assert (found, state) == (wanted, "fits")


def test_exits_with_1_on_drift(run, capsys, monkeypatch):
    drifted, *others = catalogue.every_patch()
    drifted = replace(drifted, source_digest="0" * 16)
    monkeypatch.setattr(catalogue, "every_patch", lambda: (drifted, *others))
    assert run("check_patches") == 1
    printed = capsys.readouterr()
    states = [row.split()[-1] for row in printed.out.splitlines()[1:]]
    assert states == ["DRIFTED"] + ["fits"] * len(others)
    sentence = (
        f"error: 1 of {len(others) + 1} patches do not fit: {drifted.target}: wanted source 0000000000000000, found "
    )
    assert printed.err.startswith(sentence)
