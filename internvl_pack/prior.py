"""What every lane of a run begins with: figures of the epoch's first samples, the same on all ranks and in all workers.

    positions 0 .. PRIOR_SAMPLES - 1 of epoch 0 -> fragments, as lanes cut them -> `prior_figures` -> each lane's packer

The order of an epoch is shuffled, so its first samples are a fair draw of the data; in a local order they lie in the
first shards, which are read next anyway. It is one rule for training, for planning and for what is told before a run:
each gives only its own way to the fragments at a position. Samples that cannot be used are left out here and told of by
the lane they belong to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from .config import PackingConfig
from .encode.conversation import image_names_of
from .encode.video import video_of
from .errors import FarAwayError, SampleError, costs_one_sample, without_traces
from .packing.balance import PRIOR_SAMPLES, prior_figures
from .packing.cost import CostModel
from .packing.policies import BALANCED
from .records import Fragment
from .sources import DatasetSpec, Source
from .sources.addresses import is_remote, only_near
from .sources.mixture import Mixture, MixturePart

logger = logging.getLogger(__name__)


def shares_a_prior(config: PackingConfig, num_lanes: int, specs: Sequence[DatasetSpec]) -> bool:
    """Whether the lanes of a run begin with figures in common.

    Not a lane that is alone, nor a policy that looks at none. Not in the order of the files, whose first samples stand
    for themselves only. And not over data far away, where each lane finds out for itself: thousands of requests before
    the first step would be dearer than packs that differ a little more. (Of images that only records name,
    `lanes_prior` finds that out.)
    """
    return (
        num_lanes > 1
        and config.packing
        and config.packing_policy in BALANCED
        and config.shuffle
        and not any(is_remote(address) for spec in specs for address in _addresses(spec))
    )


def _addresses(spec: DatasetSpec) -> Iterable[str]:
    given = [spec.root, spec.annotation, *(spec.shards or ())[:1]]
    for value in spec.options.values():  # a registered source may be given addresses by any name
        given += value[:1] if isinstance(value, list) else [value]
    return [address for address in given if isinstance(address, str)]


def lanes_prior(
    config: PackingConfig, cost: CostModel, num_positions: int, fragments_at: Callable[[int], Sequence[Fragment]]
) -> dict[str, int] | None:
    """The figures, or None where no sample can be used, or an image of one is an address: no server is asked.

    Args:
        num_positions: of epoch 0.
        fragments_at: of a position of epoch 0, cut as by its lane; may raise SampleError.
    """
    budget = config.budget()

    def sizes() -> Iterator[tuple[int, int]]:
        for position in range(min(PRIOR_SAMPLES, num_positions)):
            try:
                fragments = fragments_at(position)
            except SampleError:
                continue
            for fragment in fragments:
                yield fragment.num_tokens, fragment.num_tiles

    try:
        with without_traces(), only_near():
            return prior_figures(budget, cost, sizes())
    except FarAwayError as error:
        logger.info("lanes begin each for itself: %s is one of the epoch's first %d samples'", error, PRIOR_SAMPLES)
        return None


def plans_share_a_prior(
    config: PackingConfig, specs: Sequence[DatasetSpec], sources: Sequence[Source], parts: Sequence[MixturePart]
) -> bool:
    """Whether lanes that are planned beforehand begin with figures in common, as those of training would."""
    return shares_a_prior(config, config.num_lanes or 1, specs) and not has_images_by_address(
        sources, config.mixture(parts, 0)
    )


def has_images_by_address(sources: Sequence[Source], mixture: Mixture) -> bool:
    """Whether `lanes_prior` gives None for images far away, as told from the records alone.

    For planning, which has measured all samples, whatever it took, and begins as training does.
    """
    for position in range(min(PRIOR_SAMPLES, len(mixture))):
        which, row = mixture.locate(position)
        try:
            with without_traces(), costs_one_sample():
                raw = sources[which].read(row)
                video = video_of(raw.data)
                names = [video[0]] if video is not None else image_names_of(raw.data)
                if any(is_remote(raw.resolve(name).name) for name in names):
                    return True
        except SampleError:
            continue
    return False
