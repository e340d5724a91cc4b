"""The demo's model, data and journal: deterministic, learning, and resumable to the byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from hotswarm.demo.data import Batches, library_text
from hotswarm.demo.journal import Journal, digest, digests, process_age_s
from hotswarm.demo.model import ByteTransformer, ModelConfig
from hotswarm.errors import ConfigError


def small(seed: int = 0) -> ByteTransformer:
    torch.manual_seed(seed)
    return ByteTransformer(ModelConfig(width=16, layers=1, heads=2, context=16))


def test_the_model_has_between_one_and_two_million_parameters_and_one_tied_matrix() -> None:
    model = ByteTransformer()
    assert 1_000_000 <= sum(param.numel() for param in model.parameters()) <= 2_000_000
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())


def test_the_prediction_of_a_byte_does_not_see_what_follows() -> None:
    model = small().eval()
    text = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = text.clone()
    changed[0, 9:] = 0
    one, other = model(text), model(changed)
    assert torch.equal(one[0, :9], other[0, :9])
    assert not torch.equal(one[0, 9], other[0, 9])


def test_it_learns_the_library_text() -> None:
    model = small()
    batches = iter(Batches(library_text(0, 3, 50_000), batch=16, context=16, seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model.loss(next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.2)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_shards_are_whole_different_and_the_same_each_time() -> None:
    shards = [library_text(i, 3, 30_000) for i in range(3)]
    assert [len(text) for text in shards] == [30_000] * 3
    assert len({hashlib.sha256(text).digest() for text in shards}) == 3
    assert library_text(1, 3, 30_000) == shards[1]
    with pytest.raises(ConfigError, match="count from 0"):
        library_text(3, 3)


def test_the_data_position_resumes_to_the_byte_across_epochs() -> None:
    text = bytes(range(256)) * 4  # 60 windows of 17: 15 batches of 4 in an epoch
    through = iter(Batches(text, batch=4, context=16, seed=5))
    seen = [next(through).clone() for _ in range(40)]
    for stop in (0, 1, 14, 15, 16, 31):
        first, again = Batches(text, batch=4, context=16, seed=5), Batches(text, batch=4, context=16, seed=5)
        stream, resumed = iter(first), iter(again)
        for _ in range(stop):
            next(stream)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert all(torch.equal(next(resumed), batch) for batch in seen[stop:])


def test_an_epoch_shows_each_window_once_and_the_next_in_another_order() -> None:
    text = bytes(i % 251 for i in range(17 * 12))
    batches = iter(Batches(text, batch=4, context=16, seed=2))
    epochs = [torch.cat([next(batches) for _ in range(3)]) for _ in range(2)]
    rows = [sorted(map(tuple, epoch.tolist())) for epoch in epochs]
    assert rows[0] == rows[1] == sorted(tuple(text[i * 17 : (i + 1) * 17]) for i in range(12))
    assert not torch.equal(epochs[0], epochs[1])


def test_too_little_text_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="fewer than one batch"):
        Batches(b"x" * 50, batch=4, context=16, seed=0)


def test_digests_follow_their_definition_and_see_every_bit(tmp_path: Path) -> None:
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([[3]], dtype=torch.int64)
    by_hand = hashlib.sha256(
        b"a\0" + bytes.fromhex("0000803f000000c0") + b"b\0" + (3).to_bytes(8, "little")
    ).hexdigest()
    assert digest({"b": b, "a": a}) == by_hand
    assert digest({"a": -a, "b": b}) != by_hand
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    before = digests(model, optimizer, None)
    assert before["exp_avg"] == digest({})
    model.loss(torch.zeros(1, 17, dtype=torch.int64)).backward()
    optimizer.step()
    after = digests(model, optimizer, {"params": {"a": a}, "momentum": {}})
    assert after["params"] != before["params"]
    assert after["outer"] == digest({"a": a})
    assert len(set(after.values())) == 5


def test_the_journal_is_a_line_of_json_each_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.jsonl"
    for kind, fields in (("start", {"pid": 1}), ("step", {"loss": (0.1).hex()})):
        journal = Journal(path)
        journal.write(kind, **fields)
        journal.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["ev"] for line in lines] == ["start", "step"]
    assert float.fromhex(lines[1]["loss"]) == 0.1
    assert lines[0]["t"] <= lines[1]["t"]


def test_the_age_of_this_process_grows() -> None:
    age = process_age_s()
    assert 0 < age < 3600
    assert process_age_s() >= age
