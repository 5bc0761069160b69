"""What is taken over from a `torch.utils.data.DataLoader`: options of a run, and how it reads."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from offbeat.data.order import Reading, SamplerOrder
from offbeat.data.random_state import undisturbed
from offbeat.data.reader import Collate, Reader
from offbeat.data.stream import open_reader
from offbeat.errors import ConfigError

OPTIONS = ("batch_size", "shuffle", "collate", "drop_last")  # of a run that a loader says


def unpacked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which a DataLoader may stand for data, with what it says as options.

    None is what is not said. What is said twice has to agree.
    """
    said = {k: v for k, v in given.items() if v is not None or k not in OPTIONS}
    loader: Any = said.get("data")
    if isinstance(loader, IterableDataset):
        if said.get("shuffle"):
            raise ConfigError(
                "a stream comes in its own order: leave shuffle out, and shuffle in the dataset"
            )
        return said | {"shuffle": False}
    if not isinstance(loader, DataLoader):
        return said
    found = taken(loader)
    for name in OPTIONS:
        if name in said and said[name] != found[name]:
            here, there = _text(said[name]), _text(found[name])
            raise ConfigError(
                f"{name} is {here}, and {there} in the DataLoader: say it in one of the two places"
            )
    return said | found


def in_order(data: Dataset[Any] | DataLoader[Any], collate: Collate | None = None) -> Reader:
    """Reads a test set: a loader's own sampler is asked, but nothing is shuffled for us."""
    said: dict[str, Any] = {"data": data, "collate": collate, "reading": Reading()}
    if isinstance(data, DataLoader):
        said = taken(data)
    reader = open_reader(said["data"], 0, False, said["collate"], said["reading"])
    reader.check()
    return reader


def _text(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def taken(loader: DataLoader[Any]) -> dict[str, Any]:
    """What `loader` says, by the names that options have."""
    dataset: Any = loader.dataset
    found: dict[str, Any] = {"data": dataset, "shuffle": False, "drop_last": loader.drop_last}
    found["collate"] = None if loader.collate_fn is default_collate else loader.collate_fn
    sampler: Any = loader.sampler
    size, order = loader.batch_size, None
    if isinstance(dataset, IterableDataset):
        pass
    elif size is None and loader.batch_sampler is not None:
        batches: Any = loader.batch_sampler
        if type(batches) is BatchSampler:
            size, sampler = batches.batch_size, batches.sampler
            found["drop_last"] = batches.drop_last
        else:
            with undisturbed():
                size = len(next(iter(batches), ())) or 1
            order = SamplerOrder(batches, dataset, size)
    if size is None:  # the dataset makes batches itself: what a lease counts are batches
        size, found["collate"] = 1, partial(_only, loader.collate_fn)
    if order is None and not isinstance(dataset, IterableDataset):
        found["shuffle"], order = _order(sampler, dataset)
    found["batch_size"] = size
    found["reading"] = Reading(
        order,
        loader.num_workers,
        loader.prefetch_factor or 2,
        loader.worker_init_fn,
    )
    return found


def makes_batches(reader: Reader) -> bool:
    """Whether a lease has to be one batch as the data has it, and cannot be another part of it."""
    own = isinstance(reader.collate, partial) and reader.collate.func is _only
    return own or (reader.reading.order is not None and reader.reading.order.size is not None)


def _only(convert: Any, items: list[Any]) -> Any:
    return convert(items[0])


def _order(sampler: Any, dataset: Any) -> tuple[bool, SamplerOrder | None]:
    """Whether samples are shuffled, and if that does not say it all, their order."""
    if type(sampler) is SequentialSampler:
        return False, None
    if type(sampler) is RandomSampler and not sampler.replacement and _whole(sampler, dataset):
        return True, None
    if type(sampler) is DistributedSampler:
        warnings.warn(
            "the DataLoader's DistributedSampler is left out: leases share the samples of the "
            "whole dataset out among the workers, each once in an epoch; use shuffle=True instead",
            stacklevel=2,
        )
        return sampler.shuffle, None
    if getattr(sampler, "num_replicas", 1) != 1:
        raise ConfigError(
            f"{type(sampler).__name__} yields one of {sampler.num_replicas} shares, and leases "
            "share out the samples here: make it with num_replicas=1, rank=0"
        )
    return False, SamplerOrder(sampler, dataset)


def _whole(sampler: Any, dataset: Any) -> bool:
    return sampler.data_source is dataset and len(sampler) == len(dataset)
