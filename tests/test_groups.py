"""Groups of layers, and which pages of a prefix they need, against the definitions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.config import FULL, PRESETS, SLIDING, ModelConfig, preset
from openk3.engine.groups import (
    GIVEN_BACK,
    first_page,
    layer_groups,
    match_prefix,
    most_pages,
    page_key,
    prefix_keys,
    readable,
)
from openk3.engine.pages import PagePool

windows_of_groups = st.lists(st.one_of(st.none(), st.integers(1, 40)), min_size=1, max_size=4)


def config(windows: list[int | None], **fields: Any) -> ModelConfig:
    kinds = [FULL if window is None else SLIDING for window in windows]
    return ModelConfig(num_hidden_layers=len(windows), layer_types=kinds, layer_windows=windows, **fields)


def test_a_model_without_windows_is_one_group() -> None:
    (group,) = layer_groups(config([None] * 5), 1000)
    assert (group.layers, group.window) == ((0, 1, 2, 3, 4), None)
    (group,) = layer_groups(config([5000, None, 1000]), 1000)  # windows that no sequence reaches
    assert (group.layers, group.window) == ((0, 1, 2), None)


def test_layers_of_like_windows_share_a_group() -> None:
    groups = layer_groups(config([64, 128, None, 32, 16, None]), 1000)
    assert [(group.layers, group.window) for group in groups] == [((2, 5), None), ((1, 0), 128), ((3, 4), 32)]
    (group,) = layer_groups(config([64, 32]), 1000)
    assert (group.layers, group.window) == ((0, 1), 64)


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.sampled_from([8, 16, 32])), min_size=1, max_size=70))
def test_groups_hold_every_layer_once_and_waste_little(windows: list[int | None]) -> None:
    groups = layer_groups(config(windows), 1000)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    size = len(groups[0].layers)
    assert all(0 < len(group.layers) <= size for group in groups)
    assert size * len(groups) <= 1.1 * len(windows)
    for group in groups:
        own = [windows[layer] for layer in group.layers]
        assert own == [None] * len(own) if group.window is None else group.window == max(w or 0 for w in own)


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_have_few_groups(name: str) -> None:
    model = preset(name)
    groups = layer_groups(model, model.max_position_embeddings)
    assert len(groups) <= 4
    assert sum(group.window is None for group in groups) == 1


@given(st.integers(1, 60), st.integers(1, 16), st.integers(0, 200), st.integers(1, 30))
def test_the_first_page_covers_what_is_read(window: int, page_size: int, num_tokens: int, chunk: int) -> None:
    first = first_page(window, num_tokens, page_size)
    whole = num_tokens // page_size * page_size
    for position in (num_tokens, whole):
        seen = max(0, position - window + 1)
        assert first * page_size <= seen or seen >= position
    assert first == 0 or (first + 1) * page_size <= num_tokens, "the first one kept is whole"
    end = num_tokens + chunk
    assert -(-end // page_size) - first <= most_pages([window], end, page_size, chunk)


def naive_match(pool: PagePool, windows: list[int | None], hashes: list[bytes]) -> int:
    """The longest prefix, tried from the longest on, of which all pages are known that hold what may be read."""
    size = pool.page_size
    for count in range(len(hashes), 0, -1):
        needed = [
            (group, page)
            for group, window in enumerate(windows)
            for page in range(count)
            if window is None or (page + 1) * size > count * size - max(window - 1, size)
        ]
        if all(pool.find(page_key(hashes[page], group)) is not None for group, page in needed):
            return count
    return 0


@settings(max_examples=300, deadline=None)
@given(windows_of_groups, st.integers(1, 5), st.integers(0, 12), st.data())
def test_the_longest_prefix_of_which_every_group_has_what_it_needs(
    windows: list[int | None], page_size: int, length: int, data: st.DataObject
) -> None:
    pool, hashes = PagePool(100, page_size), [bytes([i]) * 16 for i in range(length)]
    for group in range(len(windows)):
        for page_hash in hashes:
            if data.draw(st.integers(0, 7)):
                (page,) = pool.allocate(1)
                pool.register(page, page_key(page_hash, group))
    count = naive_match(pool, windows, hashes)
    tables = match_prefix(pool, windows, hashes)
    assert {len(table) for table in tables} == {count}
    keys = [pool.find(key) for key in prefix_keys(windows, hashes[:count], page_size)]
    assert keys == [page for table in tables for page in table if page != GIVEN_BACK]
    for group, (window, table) in enumerate(zip(windows, tables, strict=True)):
        first = first_page(window, count * page_size, page_size)
        assert table[:first] == [GIVEN_BACK] * first
        assert table[first:] == [pool.find(page_key(page_hash, group)) for page_hash in hashes[first:count]]


def test_pages_given_back_are_not_read() -> None:
    assert readable([GIVEN_BACK, GIVEN_BACK, 7, 3]) == [7, 7, 7, 3]
    assert readable([4, 2]) == [4, 2]
    assert readable([]) == []
