"""What `k3 models` and `k3 quantize` show: tables of checkpoints, and the cards of a preset and of a quantized model.

Each comes as plain data (for `--json`) and as text for a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.weights.quantize import Outcome

# Contexts at which a card gives the arithmetic of one token; a model shows those that it reaches, and its own limit.
_CONTEXTS = (4096, 131072)


def preset_card(name: str) -> dict[str, Any]:
    """The figures of a preset. Sizes are counts and bytes (16-bit keys and values), arithmetic is in FLOPs per token.

    Raises:
        ValueError: no such preset.
    """
    from openk3.config import FULL, preset
    from openk3.model.cost import active_parameters, flops_per_token, kv_bytes, kv_bytes_per_token, total_parameters

    config = preset(name)
    limit = config.max_position_embeddings
    total, active = total_parameters(config), active_parameters(config)
    windows = [window for window in config.layer_windows if window is not None]
    return {
        "preset": name,
        "total_parameters": total,
        "active_parameters": active,
        "active_share": active / total,
        "context": limit,
        "layers": config.num_hidden_layers,
        "full_attention_layers": config.layer_types.count(FULL),
        "sliding_attention_layers": len(windows),
        "widest_window": max(windows, default=None),
        "narrowest_window": min(windows, default=None),
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sparse_layers": config.mlp_layer_types.count("sparse"),
        "experts": config.num_experts,
        "experts_per_token": config.num_experts_per_tok,
        "shared_experts": config.n_shared_experts,
        "vocab_size": config.vocab_size,
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "kv_bytes_at_full_context": kv_bytes(config, limit),
        "flops_per_token": {
            str(context): flops_per_token(config, context) for context in (*_CONTEXTS, limit) if context <= limit
        },
    }


def preset_text(card: dict[str, Any]) -> str:
    """`preset_card`'s figures as lines, in units that people read."""
    sliding, full = card["sliding_attention_layers"], card["full_attention_layers"]
    attention = (
        f"{sliding} sliding (windows {card['widest_window']:,} down to {card['narrowest_window']:,}), {full} full"
    )
    rows = [
        ("parameters", _short(card["total_parameters"], "", " k", " M", " B", " T")),
        (
            "active per token",
            f"{_short(card['active_parameters'], '', ' k', ' M', ' B', ' T')} ({card['active_share']:.1%})",
        ),
        ("context", f"{card['context']:,} tokens"),
        ("layers", f"{card['layers']}, {card['hidden_size']:,} wide"),
        ("attention", attention if sliding else f"{full} full"),
        (
            "heads",
            f"{card['attention_heads']} for queries, {card['key_value_heads']} for keys and values, "
            f"{card['head_dim']} wide",
        ),
        (
            "experts",
            f"{card['experts']:,} in each of {card['sparse_layers']} layers, "
            f"{card['experts_per_token']} and {card['shared_experts']} shared per token",
        ),
        ("vocabulary", f"{card['vocab_size']:,} tokens"),
        (
            "KV cache, 16 bit",
            f"{size(card['kv_bytes_per_token'])} per token, {size(card['kv_bytes_at_full_context'])} at full context",
        ),
        *(
            (
                "work per token",
                f"{_short(flops, ' FLOPs', ' kFLOPs', ' MFLOPs', ' GFLOPs', ' TFLOPs')} at {int(context):,} tokens",
            )
            for context, flops in card["flops_per_token"].items()
        ),
    ]
    return "\n".join([card["preset"], *(f"  {name:<18}{value}" for name, value in rows)])


def known_rows() -> list[dict[str, Any]]:
    """The known checkpoints, and where each lies on this machine (None: not here yet). Sizes are in bytes."""
    from openk3.weights import known_models, local_directory

    return [
        {
            "name": model.alias,
            "default": model.default,
            "model": model.name,
            "description": model.description,
            "license": model.license,
            "languages": list(model.languages),
            "parameters": model.parameters,
            "context": model.context_length,
            "download_bytes": model.size,
            "disk_bytes": model.unpacked_size,
            "sha256": model.sha256,
            "path": None if (path := local_directory(model)) is None else str(path),
        }
        for model in known_models()
    ]


def known_text(rows: Sequence[dict[str, Any]]) -> str:
    """`known_rows` as a table."""
    return table(
        ("NAME", "MODEL", "LICENCE", "DOWNLOAD", "CONTEXT", "HERE", "WHAT FOR"),
        [
            (
                row["name"],
                row["model"],
                row["license"],
                size(row["download_bytes"]),
                f"{row['context']:,}",
                "yes" if row["path"] else "no",
                row["description"],
            )
            for row in rows
        ],
    )


def quantized_card(outcome: Outcome) -> dict[str, Any]:
    """What `k3 quantize` made. Sizes are in bytes; an error is that of a matrix's products, as a part of them."""
    forms = Counter[str]()
    for part in outcome.parts:
        forms[part.form] += part.nbytes
    matrices = sorted((part for part in outcome.parts if part.form != "float32"), key=lambda part: -part.error)
    return {
        "path": str(outcome.directory),
        "format": outcome.format,
        "parameters": outcome.parameters,
        "bytes": outcome.nbytes,
        "times_smaller_than_float32": 4 * outcome.parameters / outcome.nbytes,
        "times_smaller_than_bfloat16": 2 * outcome.parameters / outcome.nbytes,
        "bits_per_parameter": 8 * outcome.nbytes / outcome.parameters,
        "bytes_by_form": dict(forms.most_common()),
        "errors": {part.name: part.error for part in matrices},
    }


def quantized_text(card: dict[str, Any], worst: int = 5) -> str:
    """`quantized_card`'s figures as lines, with the `worst` matrices."""
    rows = [
        ("parameters", _short(card["parameters"], "", " k", " M", " B", " T")),
        ("size", f"{size(card['bytes'])}, {card['bits_per_parameter']:.2f} bits per parameter"),
        ("float32 is", f"{card['times_smaller_than_float32']:.2f} times larger"),
        ("bfloat16 is", f"{card['times_smaller_than_bfloat16']:.2f} times larger"),
        *((form, size(count)) for form, count in card["bytes_by_form"].items()),
    ]
    lines = [card["path"], *(f"  {name:<22}{value}" for name, value in rows)]
    if card["format"] == "exact":
        return "\n".join([*lines, "  every number is the GGUF file's own"])
    errors = [(name, f"{error:.2%}") for name, error in list(card["errors"].items())[:worst]]
    return "\n".join([*lines, "", table(("LARGEST ERRORS OF PRODUCTS", ""), errors)])


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def size(count: float) -> str:
    """Bytes in decimal units."""
    return _short(count, " bytes", " kB", " MB", " GB", " TB")


def _short(count: float, *units: str) -> str:
    """Three digits and a unit, each unit a thousand times the one before: 1.23 GB."""
    step = 0
    while abs(count) >= 999.5 and step < len(units) - 1:
        count, step = count / 1000, step + 1
    return f"{count:#.3g}".rstrip(".") + units[step] if step else f"{count:.0f}{units[0]}"
