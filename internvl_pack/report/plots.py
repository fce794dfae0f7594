"""Plots of `Stats` as PNG files, and one page that holds them."""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..estimate.figures import PackingEstimate
from ..estimate.stats import PADDED_BATCHES, Stats
from ..options import count
from ..packing.tally import FILL_BINS, quantile
from . import page
from .page import short
from .rows import datasets_of, of_dataset, of_policy

# Datasets with a colour of their own: the largest; the rest share one.
MAX_DATASETS = 6

# Okabe and Ito's colours, which colour-blind readers can distinguish; shapes differ as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A8F98")
_ON_DARK = ("#56B4E9", "#E69F00", "#2BB88F", "#E39AC6", "#8FA6FF", "#F0813A", "#A8AFB8")
_MARKERS = ("o", "s", "^", "D", "v", "P", "x")


class Theme(NamedTuple):
    """Colours of a scheme."""

    paper: str
    ink: str
    soft: str
    line: str
    free: str
    colours: tuple[str, ...]  # of datasets


_THEMES = {
    "light": Theme("#ffffff", "#1b2430", "#5a6675", "#dde2e8", "#eef1f4", _COLOURS),
    "dark": Theme("#1a212b", "#e4e9ef", "#9aa7b6", "#36424f", "#2a3442", _ON_DARK),
}
_OTHER_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei")
_SIZE = (5.6, 3.6)  # inches: what a phone shows in full and still can be read
_DPI = 200
PAGE = "stats.html"

_CAPTIONS = {
    "lengths": "Length of samples, every good row once.",
    "tokens_tiles": "Tokens against tiles of some of the samples; lines are the budgets of a row, where in range.",
    "fill": "Fill of packs by policy: bars are means; the line spans the middle 90 % of packs by the fuller budget, "
    "the dot is their median.",
    "padding": "What padding would cost: the share of computed tokens that is padding.",
}


def matplotlib() -> Any:
    """The library, set to draw without a screen.

    Raises:
        UserError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'internvl-pack[report]', or leave out --out") from None
    matplotlib.use("agg")
    return matplotlib


def write_report(stats: Stats, result: dict[str, Any], folder: Path, *, options: Sequence[tuple[str, str]]) -> Path:
    """Write the plots as PNG files and one page that holds them in both schemes of colours.

    Args:
        result: of `Stats.as_json`, with `meta` and `tokenizer`.
        options: shown on the page, (name, value).

    Returns:
        the page's path.

    Raises:
        UserError: matplotlib is not installed.
    """
    matplotlib()
    pictures = {}
    fonts = logging.getLogger("matplotlib.font_manager")
    level = fonts.level
    fonts.setLevel(logging.ERROR)  # it logs every font of _OTHER_FONTS that has one weight only
    try:
        for name, draw in PLOTS.items():
            pictures[name] = {theme: _png(draw, stats, theme) for theme in _THEMES}
            (folder / f"{name}.png").write_bytes(pictures[name]["light"])
    finally:
        fonts.setLevel(level)
    target = folder / PAGE
    target.write_text(_page(result, pictures, options), encoding="utf-8")
    return target


def _png(draw: Callable[[Stats, Any, Theme], None], stats: Stats, theme: str) -> bytes:
    import matplotlib.pyplot as plt

    t = _THEMES[theme]
    settings: dict[Any, Any] = {
        "font.family": _fonts(),
        "font.size": 9,
        "text.parse_math": False,  # names of datasets are text, whatever is in them
        "axes.edgecolor": t.soft,
        "axes.labelcolor": t.ink,
        "axes.facecolor": t.paper,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": t.line,
        "grid.linewidth": 0.7,
        "figure.facecolor": t.paper,
        "text.color": t.ink,
        "xtick.color": t.soft,
        "ytick.color": t.soft,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "hatch.linewidth": 0.6,
    }
    with plt.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name in letters that no font here has: the tables show it
        figure, axes = plt.subplots(figsize=_SIZE, dpi=_DPI, layout="constrained")
        try:
            draw(stats, axes, t)
            out = io.BytesIO()
            figure.savefig(out, format="png", metadata={"Software": None})
        finally:
            plt.close(figure)
    return _smaller(out.getvalue())


def _smaller(png: bytes) -> bytes:
    """With a palette: a third of the size, and no difference that can be seen in flat colours."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as image:
        image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _named(stats: Stats) -> list[tuple[str, list[int]]]:
    """(label, datasets' places): the largest by themselves, the rest together."""
    order = sorted(range(len(stats.datasets)), key=lambda n: -stats.datasets[n].good)
    named = [(_label(stats.datasets[n].name), [n]) for n in order[:MAX_DATASETS]]
    rest = order[MAX_DATASETS:]
    return [*named, (f"{len(rest)} others", rest)] if rest else named


def _label(name: str) -> str:
    """A name in a legend, which leaves out those that begin with an underscore."""
    return f" {short(name)}" if name.startswith("_") else short(name)


def _fonts() -> list[str]:
    """One for Latin letters, and those for others that this machine has."""
    from matplotlib.font_manager import fontManager

    return ["DejaVu Sans", *(name for name in _OTHER_FONTS if name in set(fontManager.get_font_names()))]


def _thousands(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))  # labels have no decimals: a tick at 2.5 would say 2
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _lengths(stats: Stats, axes: Any, t: Theme) -> None:
    counts = [d.tokens for d in stats.datasets]
    values = sorted(set().union(*counts))
    axes.set_xlabel("tokens of a sample")
    axes.set_ylabel("samples")
    if not values:
        return _nothing(axes)
    low, high = max(1, values[0]), max(values[-1], 2)
    logarithmic = high > 20 * low
    edges = np.geomspace(low, high + 1, 37) if logarithmic else np.linspace(low, high + 1, 37)
    edges = np.unique(np.concatenate([np.ceil(edges[:-1]), [high + 1]]))  # whole tokens, none in two bins
    base = np.zeros(len(edges) - 1)
    for number, (label, places) in enumerate(_named(stats)):
        joined: Counter[int] = sum((counts[n] for n in places), Counter())
        heights, _ = np.histogram(list(joined), edges, weights=list(joined.values()))
        axes.bar(
            edges[:-1],
            heights,
            np.diff(edges),
            bottom=base,
            align="edge",
            color=t.colours[number],
            edgecolor=t.paper,
            linewidth=0.5,
            label=label,
        )
        base += heights
    budget = stats.config.max_packed_tokens
    if budget <= 4 * high:
        axes.axvline(budget, color=t.ink, linestyle="--", linewidth=1.1, label=f"token budget, {budget:,}")
    if logarithmic:
        axes.set_xscale("log")
    _thousands(axes.xaxis)
    if logarithmic:
        _log_ticks(axes.xaxis, low, max(high, budget if budget <= 4 * high else 0))
    _thousands(axes.yaxis)
    axes.set_ylim(0, base.max() * 1.06)
    axes.grid(axis="x", visible=False)
    _legend(axes)


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """Powers of two on a logarithmic axis, a few of them."""
    from matplotlib.ticker import FixedLocator, NullLocator

    powers = [2**n for n in range(0, 40) if low / 1.2 <= 2**n <= high * 1.2]
    axis.set_major_locator(FixedLocator(powers[:: -(-len(powers) // 7)]))
    axis.set_minor_locator(NullLocator())


def _tokens_tiles(stats: Stats, axes: Any, t: Theme) -> None:
    axes.set_xlabel("tiles of a sample")
    axes.set_ylabel("tokens of a sample")
    top = right = 0
    for number, (label, places) in enumerate(_named(stats)):
        rows = np.concatenate([stats.scatter[n] for n in places]).astype(float)
        if not len(rows):
            continue
        top, right = max(top, rows[:, 0].max()), max(right, rows[:, 1].max())
        # Tiles are few whole numbers: moved a little, so that points do not hide each other.
        aside = np.random.default_rng(number).uniform(-0.22, 0.22, len(rows))
        axes.scatter(
            rows[:, 1] + aside,
            rows[:, 0],
            s=14 if len(rows) < 600 else 6,
            alpha=0.65 if len(rows) < 600 else 0.4,
            color=t.colours[number],
            marker=_MARKERS[number],
            linewidths=0.6 if _MARKERS[number] == "x" else 0,
            label=label,
        )
    if not top:
        return _nothing(axes)
    budget = stats.config.budget()
    if budget.max_tokens <= 1.6 * top:
        axes.axhline(budget.max_tokens, color=t.ink, linestyle="--", linewidth=1.1)
        top = max(top, budget.max_tokens)
    if budget.max_tiles <= 1.6 * max(right, 1):
        axes.axvline(budget.max_tiles, color=t.ink, linestyle="--", linewidth=1.1)
        right = max(right, budget.max_tiles)
    axes.set_ylim(0, top * 1.06)
    axes.set_xlim(-0.6, max(right, 1) * 1.04 + 0.4)
    _thousands(axes.xaxis)
    _thousands(axes.yaxis)
    _legend(axes, always=False)


def _fill(stats: Stats, axes: Any, t: Theme) -> None:
    predictions = list(stats.predictions.values())
    height = 0.36
    for place, p in enumerate(predictions):
        tokens, tiles = p.token_fill, p.tile_fill
        first = place == 0
        axes.barh(place - height / 2, tokens, height, color=t.colours[0], label="tokens" if first else None)
        axes.barh(
            place + height / 2,
            tiles,
            height,
            color=t.colours[1],
            hatch="///",
            edgecolor=t.paper,
            linewidth=0,
            label="tiles" if first else None,
        )
        low, middle, high = (quantile(dict(enumerate(p.fills)), share) / FILL_BINS for share in (0.05, 0.5, 0.95))
        name = "fuller budget, 90 % of packs" if first else None
        axes.plot([low, high], [place, place], color=t.ink, linewidth=1.6, solid_capstyle="butt", label=name)
        axes.plot([middle], [place], "o", color=t.ink, markersize=4.5)
        about = "" if p.exact else "about "
        axes.annotate(
            f"{about}{count(round(p.packs), 'packs')}",
            (1.02, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )
    _bars(axes, t, [_policy_label(p, stats) for p in predictions], "share of the budget of a row")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.42, 1.0), ncols=3, handlelength=1.4, columnspacing=1.2)


def _policy_label(p: PackingEstimate, stats: Stats) -> str:
    name = "one a row" if p.policy == "single" else p.policy
    return f"{name}\n(chosen)" if p is stats.chosen else name


def _padding(stats: Stats, axes: Any, t: Theme) -> None:
    padding = stats.padding()
    names = {f"batch_{size}": f"batches of {size},\npadded to longest" for size in PADDED_BATCHES}
    names |= {"packed_strict": "packed, rows padded\nto the budget", "packed": "packed"}
    for place, (key, label) in enumerate(names.items()):
        share = padding[key]
        colour = t.colours[2] if key.startswith("packed") else t.colours[5]
        axes.barh(place, 1, 0.62, color=t.free, edgecolor=t.line, linewidth=0.6)
        axes.barh(
            place,
            share,
            0.62,
            color=colour,
            hatch=None if key.startswith("packed") else "\\\\\\",
            edgecolor=t.paper,
            linewidth=0,
        )
        names[key] = label
        inside = share > 0.85
        axes.text(
            share - 0.015 if inside else share + 0.015,
            place,
            f"{share:.1%}",
            va="center",
            ha="right" if inside else "left",
            fontsize=8.5,
            color="#ffffff" if inside else t.ink,
        )
    _bars(axes, t, list(names.values()), "padding, of all tokens that are computed", fontsize=8.5)
    axes.grid(visible=False)


def _bars(axes: Any, t: Theme, labels: list[str], xlabel: str, **text: Any) -> None:
    """The axes of horizontal bars of shares, the first on top."""
    from matplotlib.ticker import PercentFormatter

    axes.set_yticks(range(len(labels)), labels, **text)
    axes.tick_params(axis="y", colors=t.ink, length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(xlabel)


def _legend(axes: Any, *, always: bool = True) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1 or (always and handles):
        axes.legend(
            handles,
            labels,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            ncols=2 if len(handles) > 1 else 1,
            handlelength=1.4,
            columnspacing=1.2,
            borderaxespad=0.2,
        )


def _nothing(axes: Any) -> None:
    axes.text(0.5, 0.5, "no sample that can be used", transform=axes.transAxes, ha="center", va="center")


PLOTS = {"lengths": _lengths, "tokens_tiles": _tokens_tiles, "fill": _fill, "padding": _padding}


# -- the page ------------------------------------------------------------------------------------------


def _page(r: dict[str, Any], pictures: dict[str, dict[str, bytes]], options: Sequence[tuple[str, str]]) -> str:
    return page.render(
        "stats.html",
        f"Data of {r['meta']}",
        styles=["stats.css"],
        **r,
        chosen=r["packing"][r["budget"]["packing_policy"]],
        options=options,
        plots=[{"caption": _CAPTIONS[name], **themes} for name, themes in pictures.items()],
        tables=[_datasets(r), _shares(r), _policies(r)],
    )


def _datasets(r: dict[str, Any]) -> dict[str, Any]:
    columns = ["dataset", "samples", "bad", "an epoch", "mean tokens", "p50", "p95", "max"]
    columns += ["mean tiles", "p95", "max", "trained", "of all tokens"]
    rows = [_dataset_row(d) for d in datasets_of(r)]
    strong = [len(rows) - 1] if len(rows) > 1 else []
    return {"title": "Datasets", "label": "datasets", "columns": columns, "rows": rows, "strong": strong}


def _dataset_row(d: dict[str, Any]) -> list[str]:
    tokens, tiles = d["tokens"], d["tiles"]
    samples, bad, an_epoch, *shares = of_dataset(d).values()
    return [
        short(d["name"], 60),
        *(samples, bad, an_epoch),
        f"{tokens['mean']:,.0f}",
        *(f"{tokens[name]:,}" for name in ("p50", "p95", "max")),
        f"{tiles['mean']:,.1f}",
        *(f"{tiles[name]:,}" for name in ("p95", "max")),
        *shares,
    ]


def _shares(r: dict[str, Any]) -> dict[str, Any]:
    names = list(r["share_of_budget"]["tokens"])
    rows = []
    for unit in ("tokens", "tiles"):
        rows.append([unit, *(f"{r[unit][name]:,.0f}" for name in names)])
        rows.append([f"of the {unit} of a row", *(f"{r['share_of_budget'][unit][name]:.1%}" for name in names)])
    title = "A sample's share of a row"
    return {"title": title, "label": "shares of the budget", "columns": ["", *names], "rows": rows, "strong": []}


def _policies(r: dict[str, Any]) -> dict[str, Any]:
    fields = [of_policy(name, p, "about ") for name, p in r["packing"].items()]
    columns = ["samples a pack" if heading == "a pack" else heading for heading in fields[0]]
    rows = [list(each.values()) for each in fields]
    strong = [list(r["packing"]).index(r["budget"]["packing_policy"])]
    return {"title": "Packing an epoch", "label": "policies", "columns": columns, "rows": rows, "strong": strong}
