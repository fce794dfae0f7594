"""What the tables of `stats` say, in the terminal and on its page: values by heading, from the result's JSON."""

from __future__ import annotations

from typing import Any


def datasets_of(r: dict[str, Any]) -> list[dict[str, Any]]:
    """The datasets' figures; where there are several, those of all of them come last."""
    datasets = list(r["datasets"])
    if len(datasets) > 1:
        every = {
            "name": "all",
            "rows": sum(d["rows"] for d in datasets),
            "samples_an_epoch": sum(d["samples_an_epoch"] for d in datasets),
            "share_of_tokens": 1.0,
        }
        datasets.append(every | {key: r[key] for key in ("reasons", "tokens", "tiles", "supervised_share")})
    return datasets


def of_dataset(d: dict[str, Any]) -> dict[str, str]:
    return {
        "samples": f"{d['rows']:,}",
        "bad": f"{sum(d['reasons'].values()):,}",
        "an epoch": f"{d['samples_an_epoch']:,}",
        "trained tokens": f"{d['supervised_share']:.1%}",
        "of all tokens": f"{d['share_of_tokens']:.1%}",
    }


def of_policy(name: str, p: dict[str, Any], about: str) -> dict[str, str]:
    """`about` stands before what is extrapolated."""
    about = "" if p["exact"] else about
    return {
        "policy": "one a row" if name == "single" else name,
        "packs": f"{about}{p['packs']:,}",
        "lower bound": f"{p['lower_bound']:,}",
        "over bound": f"{p['packs_over_bound']:.4f}",
        "tokens full": f"{p['token_fill']:.1%}",
        "tiles full": f"{p['tile_fill']:.1%}",
        "a pack": f"{p['segments_a_pack']:.1f}",
        "split": f"{about}{p['split']:,}",
        "refused": ", ".join(f"{count:,} {reason}" for reason, count in p["refused"].items()) or "0",
        "steps": f"{about}{p['steps']:,}",
    }
