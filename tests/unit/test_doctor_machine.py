"""What the doctor collects on a host."""

import json

from hvdtrain.tools.doctor.machine import machine_info, parse_cards


def test_cards_are_read():
    text = "0, NVIDIA H200, 143771, 570.86.15\n1, NVIDIA H200, 143771, 570.86.15\n"
    card = {"name": "NVIDIA H200", "memory_mib": "143771", "driver": "570.86.15"}
    assert parse_cards(text) == [card, card]


def test_machine_info_is_json_and_holds_no_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    text = json.dumps(machine_info(tmp_path / "runs" / "deep"))
    assert "hunter2" not in text
    assert not (tmp_path / "runs").exists()
