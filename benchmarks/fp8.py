"""What do products in 8 bit (--fp8) give, and what do they cost? Speed, exactness and a training run, on one GPU.

    python benchmarks/fp8.py --speed                    # 8B widths with 8 layers: bfloat16 and fp8 in turns
    python benchmarks/fp8.py --gate --meta META.json    # 300 steps of finetune.py, three seeds each way
    python benchmarks/fp8.py --speed --device cpu       # the script itself, in small

--speed: forward and backward of the same rows and weights, compiled, without an optimizer; ways take turns in each
repetition, the table has the median. Rows are of samples drawn from real_mix_a.csv, once as they are and once without
images. Then

    errors        of each kind of layer's three products, as relative norms against float32 products of the same
                  factors, which a row gave in bfloat16; mean of the first, a middle and the last layer
    isolation     tokens and tiles of one sample of a pack are changed: of how many others any bit of the hidden
                  states moves. Ends with exit code 1 where it is one.

--gate: a model of width 2,048 from random weights, every tenth sample of the data held out. Seeds are of weights and
order, the same for all ways. A recipe passes where the mean of its runs is no farther from that of bfloat16's than
these are from each other: in the loss of the last tenth of the steps, and in that of the samples held out. Runs that
--out has already are not made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # rows differ in size
import torch
import torch._dynamo.config
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.finetune_runs import ROOT, in_own_process, run_logged, save_random_model, training_options
from benchmarks.measuring import (
    Table,
    in_turns,
    print_kernels,
    relative,
    relative_of_all,
    seconds_of,
    take_gradients,
    versions,
)
from benchmarks.train_step import (
    SHAPES,
    VISION,
    Sample,
    draw_samples,
    internvl_config,
    make_batches,
    make_model,
    make_packs,
    packed_step,
    to_device,
)
from internvl_pack.model.attention import select_kernel
from internvl_pack.model.compiled import compile_blocks
from internvl_pack.model.flops import flop_counts, peak_flops
from internvl_pack.model.fp8 import RECIPES, use_fp8
from internvl_pack.model.packed import PackedModel
from internvl_pack.model.parts import decoder_layers
from internvl_pack.model.vision import use_tile_attention

BFLOAT16 = "bfloat16"

GATE_SHAPE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16}
GATE_SHAPE |= {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1e6}
GATE_SEEDS = (0, 1, 2)
GATE_VOCABULARY = 8192
HELD_OUT = 10  # every so many samples one


# --- models that share weights --------------------------------------------------------------------


def twin(packed: PackedModel) -> PackedModel:
    """Another model of the same weights."""
    shared = {id(tensor): tensor for tensor in (*packed.parameters(), *packed.buffers())}
    return PackedModel(copy.deepcopy(packed.model, shared)).train()


def make_ways(packed: PackedModel, names: Sequence[str], device: torch.device, backend: str) -> dict[str, PackedModel]:
    ways = {}
    for name in names:
        ways[name] = twin(packed)
        if name in RECIPES:
            use_fp8(ways[name], name, device)
        compile_blocks(ways[name], backend=backend)
    return ways


def without_images(sample: Sample, max_tokens: int) -> Sample:
    """As many tokens, all of text."""
    return replace(sample, num_tiles=0, num_tokens=min(sample.num_tokens, max_tokens))


# --- speed ----------------------------------------------------------------------------------------


def compare_speed(
    ways: dict[str, PackedModel], batches: list[dict], repeats: int, device: torch.device, peak: float | None
) -> None:
    """Table of the ways on the same rows."""
    passes = {name: partial(one_pass, packed, batches, device) for name, packed in ways.items()}
    times = in_turns(passes, repeats, device)
    tokens = sum(b["num_real_tokens"] for b in batches)
    flops = sum(flop_counts(next(iter(ways.values())).config).of(b) for b in batches)
    base = next(iter(times.values())).median
    table = Table(
        ("way", 18), ("useful tokens/s", 16), ("of the first", 13), ("spread", 7), ("peak GB", 8), ("MFU in bf16", 11)
    )
    for name, found in times.items():
        mfu = f"{flops / found.median / peak:.1%}" if peak else "-"
        speed = f"{tokens / found.median:,.0f}"
        table.row(name, speed, f"{base / found.median:.3f}", found.spread, f"{found.peak_gb:.1f}", mfu)


def one_pass(packed: PackedModel, batches: list[dict], device: torch.device) -> float:
    def run() -> None:
        for batch in batches:
            packed_step(packed, to_device(batch, device)).backward()
            packed.zero_grad(set_to_none=True)

    return seconds_of(run, device)


def compare_losses(ways: dict[str, PackedModel], batch: dict, device: torch.device) -> None:
    """Loss and gradients of a row, each way against the first."""
    first: dict[str, Tensor] = {}
    for name, packed in ways.items():
        loss = packed_step(packed, to_device(batch, device))
        loss.backward()
        gradients = take_gradients(packed)
        first = first or gradients
        apart = relative_of_all(gradients, first)
        print(f"    {name}: loss {loss.item():.6f}, gradients {apart:.2e} from the first's", flush=True)


def profile_way(name: str, packed: PackedModel, batch: dict, device: torch.device) -> None:
    """Where the device's time goes in one row."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        one_pass(packed, [batch], device)
    print(f"\nOne row of '{name}', {batch['num_real_tokens']} tokens, {batch['num_tiles']} tiles")
    print_kernels(recorded, rows=25)


def speed(args: argparse.Namespace, device: torch.device) -> int:
    small = device.type != "cuda"
    shape = args.shape or ("tiny" if small else "8b8")
    tokens, tiles = (512, 40) if small else (16384, 48)
    packed = make_model(shape, device, args.kernel, args.dtype)
    use_tile_attention(packed.model, select_kernel(args.kernel, device, args.dtype))
    samples = draw_samples(args.tokens // (16 if small else 1), 8192, 40, args.seed, 16 if small else 1)
    size = packed.config.vision_config.image_size[0]
    pixels = torch.randint(256, (96, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    peak = None if small else peak_flops(torch.cuda.get_device_name(device))
    print(f"\n{shape}: {packed.num_parameters() / 1e6:,.0f} M parameters; median of {args.repeats}")
    ways = make_ways(packed, args.ways, device, "aot_eager" if small else "inductor")
    texts = [without_images(s, tokens) for s in samples]
    rows = {}
    for kind, chosen in (("as they are", samples), ("without images", texts)):
        packs = make_packs(chosen, tokens, tiles)
        rows[kind] = make_batches(packs, packed, pixels, padded=False)
        num_tiles = sum(b["num_tiles"] for b in rows[kind])
        print(f"\nRows of {tokens}/{tiles}, samples {kind}: {len(packs)} rows, {num_tiles} tiles")
        compare_speed(ways, rows[kind], args.repeats, device, peak)
    fullest = max(rows["as they are"], key=lambda b: b["num_real_tokens"])
    print("\nA row of them")
    compare_losses(ways, fullest, device)
    if args.profile and not small:
        for name, way in ways.items():
            profile_way(name, way, fullest, device)
    layer_errors(packed, args.ways, device)
    moved = [isolation(name, way, fullest, device) for name, way in ways.items() if name in RECIPES]
    return 1 if any(moved) else 0


# --- errors ---------------------------------------------------------------------------------------


def layer_errors(packed: PackedModel, names: Sequence[str], device: torch.device) -> None:
    """Table of the three products of each kind of linear layer, against float32."""
    layers = decoder_layers(packed.language_model)
    chosen = sorted({0, len(layers) // 2, len(layers) - 1})
    fp8 = {name: twin(packed) for name in names if name in RECIPES}
    for name, other in fp8.items():
        use_fp8(other, name, device)
    vocabulary = packed.config.get_text_config().vocab_size
    tokens = 64 if device.type == "cpu" else 4096
    lengths = [tokens // 2, tokens // 4, tokens // 4]
    ids = torch.randint(vocabulary - 8, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    ids[ids == packed.config.image_token_id] = 0
    row = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
        "max_seqlen": max(lengths),
    }
    factors = factors_of(packed, {f"layers.{i}." for i in chosen}, row)
    errors: dict[tuple[str, str, str], list[float]] = {}
    torch.set_float32_matmul_precision("highest")
    for path, (states, upstream) in factors.items():
        layer = packed.language_model.get_submodule(path)
        expected = products(copy.deepcopy(layer).float(), states.float(), upstream.float())
        found = {BFLOAT16: products(layer, states, upstream)}
        found |= {n: products(o.language_model.get_submodule(path), states, upstream) for n, o in fp8.items()}
        for way, values in found.items():
            for what, value in values.items():
                errors.setdefault((path.rpartition(".")[2], what, way), []).append(relative(value, expected[what]))
    ways = [BFLOAT16, *fp8]
    print(f"\nErrors of products against float32, a row of {tokens} tokens, mean of layers {chosen}")
    table = Table(("layer", 10), ("product", 18), *((way, 18) for way in ways))
    for kind in dict.fromkeys(path.rpartition(".")[2] for path in factors):
        for what in ("output", "gradient of input", "gradient of weight"):
            table.row(kind, what, *(f"{statistics.mean(errors[kind, what, way]):.2e}" for way in ways))


def factors_of(packed: PackedModel, prefixes: set[str], row: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of the linear layers under these prefixes: what comes in (N, in), and the gradient of what goes out (N, out)."""
    seen: dict[str, list[Tensor]] = {}
    handles = []
    for path, module in packed.language_model.named_modules():
        if isinstance(module, nn.Linear) and any(path.startswith(prefix) for prefix in prefixes):
            seen[path] = []
            handles.append(
                module.register_forward_hook(lambda _m, inputs, _o, p=path: seen[p].append(inputs[0].detach()[0]))
            )
            handles.append(
                module.register_full_backward_hook(lambda _m, _i, outputs, p=path: seen[p].append(outputs[0][0]))
            )
    with torch.compiler.set_stance("force_eager"):
        packed(**row).loss.backward()
    packed.zero_grad(set_to_none=True)
    for handle in handles:
        handle.remove()
    return {path: (states, upstream) for path, (states, upstream) in seen.items()}


def products(layer: nn.Module, states: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    states = states.clone().requires_grad_()
    weight = layer.weight
    output = layer(states)
    of_input, of_weight = torch.autograd.grad(output, (states, weight), upstream)
    return {"output": output.detach(), "gradient of input": of_input, "gradient of weight": of_weight}


# --- isolation ------------------------------------------------------------------------------------


def isolation(name: str, packed: PackedModel, batch: dict, device: torch.device) -> int:
    """How many samples moved when another one was changed; prints it."""
    packed.eval()
    seen: list[Tensor] = []
    handle = packed.language_model.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state))
    lengths = batch["cu_seqlens"].diff().tolist()
    tiles = batch["segment_tile_offsets"].tolist()

    def states(changed: int | None) -> list[Tensor]:
        row = dict(batch)
        if changed is not None:
            part = slice(*batch["cu_seqlens"][changed : changed + 2].tolist())
            ids, image = batch["input_ids"].clone(), packed.config.image_token_id
            ids[0, part] = torch.where(ids[0, part] == image, image, (ids[0, part] + 1) % image)
            pixels = batch["pixel_values"].clone()
            pixels[tiles[changed] : tiles[changed + 1]] = 255 - pixels[tiles[changed] : tiles[changed + 1]]
            row |= {"input_ids": ids, "pixel_values": pixels}
        seen.clear()
        with torch.no_grad():
            packed(**to_device(row, device))
        return list(seen[0][0, : sum(lengths)].split(lengths))

    moved = unmoved = 0
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            before = states(None)
            for changed in {0, len(lengths) // 2, len(lengths) - 1}:
                after = states(changed)
                equal = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
                unmoved += equal[changed]
                moved += sum(not e for i, e in enumerate(equal) if i != changed)
    handle.remove()
    packed.train()
    verdict = "ok" if not moved and not unmoved else "FAILED"
    print(
        f"\nisolation of {name}: {len(lengths)} samples, one changed at a time, compiled and not: {moved} others moved "
        f"by any bit, {unmoved} of those changed did not move: {verdict}",
        flush=True,
    )
    return moved + unmoved


# --- the gate -------------------------------------------------------------------------------------


def gate(args: argparse.Namespace) -> int:
    if not args.meta:
        print("--gate needs --meta")
        return 1
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(args.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        train_meta, held_out = split_data(Path(args.meta), work)
        runs = [(f"{way} {seed}", seed, None if way == BFLOAT16 else way) for way in args.ways for seed in GATE_SEEDS]
        earlier = json.loads(args.out.read_text(encoding="utf-8"))["runs"] if args.out.is_file() else {}
        seen = {name: earlier[name] for name, *_ in runs if name in earlier}
        left = [run for run in runs if run[0] not in seen]
        for seed in sorted({seed for _, seed, _ in left}):
            folder, device = work / f"seed{seed}", torch.device(args.device)
            made = (folder / "config.json").is_file()
            if not made and not in_own_process(write_gate_checkpoint, folder, args.meta, seed, device):
                return 1
        with ThreadPoolExecutor(args.at_once) as pool:
            results = pool.map(lambda run: one_run(args, work, train_meta, held_out, *run), left)
            for (name, *_), result in zip(left, results, strict=True):
                if result is None:
                    return 1
                seen[name] = result
                took = time.perf_counter() - started
                print(f"    {name}: {result['last']:.4f}, held out {result['held_out']:.4f}; {took:.0f} s", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"steps": args.steps, "meta": Path(args.meta).name, "runs": seen}, indent=1))
    middle = max(1, args.steps // 6)

    def losses(way: str, figure: Callable[[dict[str, Any]], float]) -> list[float]:
        return [figure(seen[f"{way} {seed}"]) for seed in GATE_SEEDS]

    print(f"\nMean loss of {middle} steps up to each, mean of {len(GATE_SEEDS)} seeds; curves are in {args.out}")
    table = Table(("steps", 6), *((way, 18) for way in args.ways))
    for end in range(middle, args.steps + 1, middle):
        means = [losses(way, lambda run: statistics.mean(run["losses"][end - middle : end])) for way in args.ways]  # noqa: B023
        table.row(end, *(f"{statistics.mean(values):.4f}" for values in means))
    failed = 0
    for figure, what in (("last", f"the last {len_last(args.steps)} steps"), ("held_out", "the samples held out")):
        own = losses(BFLOAT16, lambda run: run[figure])  # noqa: B023
        spread = max(own) - min(own)
        print(f"{what}: {BFLOAT16} {min(own):.4f} to {max(own):.4f}, mean {statistics.mean(own):.4f}")
        for recipe in args.ways[1:]:
            fp8 = losses(recipe, lambda run: run[figure])  # noqa: B023
            apart = statistics.mean(fp8) - statistics.mean(own)
            passes = abs(apart) <= spread
            failed += not passes
            print(
                f"    {recipe}: {min(fp8):.4f} to {max(fp8):.4f}, mean {apart:+.4f}, {abs(apart) / spread:.2f} of the "
                f"seeds' spread: {'passes' if passes else 'FAILED'}"
            )
    return 1 if failed else 0


def len_last(steps: int) -> int:
    return max(1, steps // 10)


def split_data(meta: Path, work: Path) -> tuple[Path, Path]:
    """Meta files of the data, and of every tenth sample of it, which the first leaves out."""
    content = json.loads(meta.read_text(encoding="utf-8"))
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name, spec in content.items():
        lines = (meta.parent / spec["annotation"]).read_text(encoding="utf-8").splitlines()
        halves = ([x for i, x in enumerate(lines) if i % HELD_OUT], lines[::HELD_OUT])
        for part, chosen, kind in zip(parts, halves, ("train", "held_out"), strict=True):
            path = work / f"{name}_{kind}.jsonl"
            path.write_text("\n".join(chosen) + "\n", encoding="utf-8")
            root = (meta.parent / spec["root"]).resolve()
            part[name] = {"root": str(root), "annotation": str(path), "repeat_time": 1, "length": len(chosen)}
    paths = (work / "train.json", work / "held_out.json")
    for path, part in zip(paths, parts, strict=True):
        path.write_text(json.dumps(part), encoding="utf-8")
    return paths


def write_gate_checkpoint(folder: Path, meta: str, seed: int, device: torch.device) -> None:
    """Random weights, and a tokenizer of the data's texts."""
    from internvl_pack.checkpoints.tokenizers import image_token_id
    from internvl_pack.sources import load_meta, open_source
    from internvl_pack.testing.tiny import source_texts, tiny_tokenizer

    small = device.type == "cpu"
    texts = source_texts([open_source(spec) for spec in load_meta(meta)], limit=10_000)
    tokenizer = tiny_tokenizer(texts, 1024 if small else GATE_VOCABULARY)
    text = (SHAPES["tiny"] if small else GATE_SHAPE) | {"vocab_size": len(tokenizer), "tie_word_embeddings": False}
    vision = VISION | {"num_hidden_layers": 4}
    if small:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": [56, 56]}
    config = internvl_config(vision, text, image_token_id(tokenizer))
    save_random_model(folder, config, tokenizer, device, f"seed {seed}", seed)


def one_run(
    args: argparse.Namespace, work: Path, meta: Path, held_out: Path, name: str, seed: int, recipe: str | None
) -> dict[str, Any] | None:
    """Losses of each step, their mean at the end, and that of the samples held out."""
    checkpoint, small = work / f"seed{seed}", args.device == "cpu"
    out = work / name.replace(" ", "_")
    shared = argparse.Namespace(
        device=args.device, meta=meta, workers=args.workers, budget=(512, 16) if small else (4096, 16)
    )
    options: dict[str, Any] = {
        "max_steps": args.steps,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, args.steps // 10),
        "seed": seed,
        "dynamic_image_size": False,
        "eval_meta_path": held_out,
        "do_eval": True,
        "deepspeed": "zero_stage1",
        "log_freq": 0,
        "overwrite_output_dir": True,
    }
    if small:
        options |= {"force_image_size": 56, "dataloader_num_workers": 0}
    if recipe:
        options["fp8"] = recipe
    command = [
        sys.executable,
        str(ROOT / "train" / "finetune.py"),
        *training_options(shared, checkpoint, out, **options),
    ]
    if run_logged(command, work / f"{out.name}.log", args.device):
        return None
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return {
        "last": statistics.mean(losses[-len_last(args.steps) :]),
        "held_out": evaluated[-1],
        "losses": [round(loss, 5) for loss in losses],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--speed", action="store_true", help="speed, memory, errors, isolation")
    parser.add_argument("--gate", action="store_true", help="training runs in bfloat16 and with each recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="of --speed; default 8b8, on a CPU tiny")
    parser.add_argument("--ways", nargs="+", choices=(BFLOAT16, *RECIPES), default=[BFLOAT16, *RECIPES])
    parser.add_argument("--kernel", default="auto", help="of attention")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the samples drawn for --speed, about")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the samples drawn")
    parser.add_argument("--profile", action="store_true", help="with --speed: the kernels of a row")
    parser.add_argument("--meta", help="of --gate: meta file of the data")
    parser.add_argument("--steps", type=int, default=300, help="of --gate")
    parser.add_argument("--learning_rate", type=float, default=3e-4, help="of --gate")
    parser.add_argument("--workers", type=int, default=8, help="of --gate: loader processes")
    parser.add_argument("--at_once", type=int, default=1, help="of --gate: runs that share the GPU")
    parser.add_argument("--work", help="folder of --gate's runs, which stay there; default: thrown away")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/fp8_gate.json"), help="curves of --gate")
    args = parser.parse_args()
    if not (args.speed or args.gate):
        parser.error("give --speed or --gate")
    device = torch.device(args.device)
    args.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    args.kernel = select_kernel(args.kernel, device, args.dtype).name
    torch._dynamo.config.recompile_limit = 64  # ways share what is compiled of a layer
    torch.set_float32_matmul_precision("high")
    print(f"{versions(device)}, {args.kernel}")
    code = 0
    if args.speed:
        code = speed(args, device)
    if args.gate:
        code = gate(args) or code
    return code


if __name__ == "__main__":
    sys.exit(main())
