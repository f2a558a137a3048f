from dataclasses import replace

from megatron.wlb.patches import catalogue


def test_prints_a_row_a_patch_and_is_green_for_the_installed_version(run, capsys):
    assert run("check_patches") == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["target", "distribution", "versions", "installed", "wanted", "found", "state"]
    patches = catalogue.every_patch()
    for row, patch in zip(rows, patches, strict=True):
        target, _, _, installed, wanted, found, state = row.split(maxsplit=6)
        assert (target, wanted) == (patch.target, patch.wanted)
        if installed == "-":
            assert patch.optional
            assert (found, state) == ("-", "not installed")
        else:
            assert state == "fits"
            assert patch.contract or found == wanted
    assert sum(patch.optional for patch in patches) == 1


def test_exits_with_1_on_drift(run, capsys, monkeypatch):
    drifted, *others = catalogue.every_patch()
    drifted = replace(drifted, source_digest="0" * 16)
    monkeypatch.setattr(catalogue, "every_patch", lambda: (drifted, *others))
    assert run("check_patches") == 1
    printed = capsys.readouterr()
    states = {row.split()[0]: row.split(maxsplit=6)[-1] for row in printed.out.splitlines()[1:]}
    assert states.pop(drifted.target) == "DRIFTED"
    assert len(states) == len(others)
    assert "DRIFTED" not in states.values()
    sentence = (
        f"error: 1 of {len(others) + 1} patches do not fit: {drifted.target}: wanted source 0000000000000000, found "
    )
    assert printed.err.startswith(sentence)
